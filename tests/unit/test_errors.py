"""Errors as gRPC statuses with details, and as a line for a person."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from eyas.errors import (
    StatusError,
    describe,
    failed_precondition,
    internal,
    invalid_argument,
    not_found,
    resource_exhausted,
    unavailable,
)

CASES = [
    (invalid_argument("blocks[2].start", "is past the end"), "INVALID_ARGUMENT", "INVALID_FIELD"),
    (not_found("model", "there is no model x"), "NOT_FOUND", "MODEL_NOT_FOUND"),
    (not_found("draft head", "there is no head x"), "NOT_FOUND", "DRAFT_HEAD_NOT_FOUND"),
    (failed_precondition("WIDTH_MISMATCH", "576 and 4096"), "FAILED_PRECONDITION", "WIDTH_MISMATCH"),
    (unavailable("draining"), "UNAVAILABLE", "UNAVAILABLE"),
    (resource_exhausted("the queue is full", 0.25), "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"),
    (internal("42"), "INTERNAL", "INTERNAL"),
]


def as_rpc_error(status: grpc.Status) -> grpc.aio.AioRpcError:
    """What a client gets of it."""
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, details=status.details)


def details_of(error: StatusError) -> list[Any]:
    packed: Any = dict(error.to_status().trailing_metadata)["grpc-status-details-bin"]
    kinds = {"ErrorInfo", "BadRequest", "RetryInfo"}
    unpacked = []
    for detail in status_pb2.Status.FromString(packed).details:
        message = getattr(error_details_pb2, (kinds & {detail.type_url.rpartition(".")[2]}).pop())()
        assert detail.Unpack(message)
        unpacked.append(message)
    return unpacked


@pytest.mark.parametrize(("error", "code", "reason"), CASES)
def test_every_status_has_code_reason_and_domain(error: StatusError, code: str, reason: str) -> None:
    status = error.to_status()
    assert (status.code.name, status.details) == (code, str(error))
    info = details_of(error)[0]
    assert (info.domain, info.reason) == ("eyas", reason)


def test_invalid_argument_names_the_field() -> None:
    error = invalid_argument("blocks[2].start", "is past the end")
    (violation,) = details_of(error)[1].field_violations
    assert (violation.field, violation.description) == ("blocks[2].start", "is past the end")
    assert describe(as_rpc_error(error.to_status())) == "blocks[2].start: is past the end"


def test_resource_exhausted_says_when_to_come_back() -> None:
    error = resource_exhausted("the queue is full", 2.25)
    assert details_of(error)[1].retry_delay.ToTimedelta().total_seconds() == 2.25
    assert describe(as_rpc_error(error.to_status())) == "the queue is full (try again in 2.25 s)"


def plain(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


@pytest.mark.parametrize(
    ("code", "details", "line"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused",
            "no connection: Connection refused",
        ),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "no connection: Socket closed"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "no answer in time"),
        (grpc.StatusCode.UNKNOWN, "two\nlines", "two lines (UNKNOWN)"),
        (grpc.StatusCode.UNKNOWN, "", "no details (UNKNOWN)"),
    ],
)
def test_statuses_without_details_are_one_line_too(code: grpc.StatusCode, details: str, line: str) -> None:
    assert describe(plain(code, details)) == line
