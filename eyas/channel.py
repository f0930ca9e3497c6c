"""Channels to other services, the wait until one is up, and the limits and keepalive of both ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.config import socket_path
from eyas.errors import EyasError, describe

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
KEEPALIVE_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000

_CHECK_SECONDS = 2.0
_POLL_SECONDS = 0.1

Options = list[tuple[str, int]]


class NotServing(EyasError):
    """A service that did not come up in time, or an address at which another one listens."""


def transport_options(address: str) -> Options:
    """Options that both ends of a connection share: message limits and, across hosts, keepalive.

    A Unix socket closes with its peer, so only TCP needs pings: a silent peer is noticed after the sum of the
    two times.
    """
    limits = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
    if socket_path(address) is not None:
        return limits
    return [
        *limits,
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def open_channel(address: str) -> grpc.aio.Channel:
    """Channel to `unix:/path` or `host:port`; connects lazily, and again within a second after a loss."""
    options = [
        *transport_options(address),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Services talk directly; a proxy of the environment is for the outside world.
        ("grpc.enable_http_proxy", 0),
    ]
    return grpc.aio.insecure_channel(address, options=options)


async def wait_until_serving(
    channel: grpc.aio.Channel,
    service: str,
    seconds: float,
    say: Callable[[str], None],
    *,
    peer: str,
) -> None:
    """Returns once `service` (full name) reports SERVING.

    `say` gets a line when the wait begins and whenever its reason changes; `peer` names the other side in
    them, for instance "the target at unix:/run/eyas/target.sock". Raises NotServing after `seconds`, or at once
    where something else answers at that address.
    """
    deadline = time.monotonic() + seconds
    health = health_pb2_grpc.HealthStub(channel)
    said = ""
    while (reason := await _not_serving(health, service, peer)) is not None:
        if time.monotonic() >= deadline:
            raise NotServing(f"{peer} did not come up within {seconds:g} s: {reason}")
        if reason != said:
            say(f"waiting for {peer}: {reason}")
            said = reason
        await asyncio.sleep(_POLL_SECONDS)


async def _not_serving(health: health_pb2_grpc.HealthStub, service: str, peer: str) -> str | None:
    """Why the service cannot be used yet; None once it can."""
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        reply = await health.Check(request, timeout=_CHECK_SECONDS)
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
            raise NotServing(f"{peer} answers, but does not offer {service}") from None
        return describe(error)
    return None if reply.status == health_pb2.HealthCheckResponse.SERVING else "it is not ready yet"
