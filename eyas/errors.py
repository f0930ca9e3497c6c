"""Errors fit for a person, and gRPC statuses with rich details (AIP-193)."""

from __future__ import annotations

from typing import cast

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as rpc_details
from google.rpc import status_pb2
from grpc_status import rpc_status

DOMAIN = "eyas"


class EyasError(Exception):
    """An error whose text is one clear line for the user; the command line prints it without a traceback."""


class StatusError(EyasError):
    """Ends a call with `code` and google.rpc details: always an ErrorInfo with `reason` (UPPER_SNAKE)."""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, *details: Message) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.details = (rpc_details.ErrorInfo(reason=reason, domain=DOMAIN), *details)

    def to_status(self) -> grpc.Status:
        """The status as gRPC sends it, details in its trailing metadata."""
        packed = []
        for detail in self.details:
            packed.append(Any())
            packed[-1].Pack(detail)
        status = status_pb2.Status(code=self.code.value[0], message=str(self), details=packed)
        return cast("grpc.Status", rpc_status.to_status(status))


def invalid_argument(field: str, message: str) -> StatusError:
    """A request whose `field` (dotted path) breaks the contract."""
    violation = rpc_details.BadRequest.FieldViolation(field=field, description=message)
    details = rpc_details.BadRequest(field_violations=[violation])
    return StatusError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", f"{field}: {message}", details)


def not_found(what: str, message: str) -> StatusError:
    """Something named in the request, a `what` such as "model", does not exist."""
    return StatusError(grpc.StatusCode.NOT_FOUND, f"{what.upper().replace(' ', '_')}_NOT_FOUND", message)


def failed_precondition(reason: str, message: str) -> StatusError:
    """The two sides do not fit together; `reason` is UPPER_SNAKE."""
    return StatusError(grpc.StatusCode.FAILED_PRECONDITION, reason, message)


def unavailable(message: str) -> StatusError:
    """Not now: loading, draining, or a service behind this one is away."""
    return StatusError(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", message)


def resource_exhausted(message: str, retry_after_s: float) -> StatusError:
    """Full; worth trying again after `retry_after_s` seconds."""
    seconds, nanos = divmod(round(retry_after_s * 1e9), 10**9)
    details = rpc_details.RetryInfo(retry_delay=Duration(seconds=seconds, nanos=nanos))
    return StatusError(grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED", message, details)


def internal(request_id: str) -> StatusError:
    """A fault of ours; what happened stands in the server's log under `request_id`, not in the reply."""
    message = f"internal error; the server's log has the details under request id {request_id}"
    return StatusError(grpc.StatusCode.INTERNAL, "INTERNAL", message)


def describe(error: grpc.RpcError) -> str:
    """One readable line about a failed call."""
    call = cast("grpc.Call", error)
    code, text = call.code(), " ".join((call.details() or "").split())
    status = rpc_status.from_call(call)
    if status is not None:
        return f"{text}{_retry_hint(status)}"
    if code is grpc.StatusCode.UNAVAILABLE:
        # The last part of what gRPC says is the system's own reason.
        return f"no connection: {text.rpartition(': ')[2]}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return f"{text or 'no details'} ({code.name})"


def _retry_hint(status: status_pb2.Status) -> str:
    retry = rpc_details.RetryInfo()
    for detail in status.details:
        if detail.Unpack(retry):
            return f" (try again in {retry.retry_delay.ToTimedelta().total_seconds():g} s)"
    return ""
