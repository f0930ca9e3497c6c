"""The one gRPC server bootstrap: limits, health, reflection, errors as statuses, signals and drain."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from eyas.channel import KEEPALIVE_MS, transport_options
from eyas.interceptor import CallInterceptor
from eyas.listen import Bound
from eyas.runtime import run_until, stop_signals

log = logging.getLogger(__name__)

# How long open calls may go on after SIGTERM, and how long their handlers then have to clean up.
GRACE_SECONDS = 10.0
CLEANUP_SECONDS = 5.0

# Rounds of one stream that a service works on at the same time; a client that sends more is held back.
MAX_IN_FLIGHT = 4

Request = TypeVar("Request")
Response = TypeVar("Response")

AddServices = Callable[[grpc.aio.Server], Awaitable[Sequence[str]]]
SetServing = Callable[[bool], Awaitable[None]]


class Server:
    """A gRPC server on one address. As a context manager it drains on leaving.

    Made inside the running loop, it binds at once: an address in use shows before a model is loaded. It answers
    from `start` on; health says NOT_SERVING until `set_serving(True)`.
    """

    def __init__(self, name: str, listen: str) -> None:
        """`name` is for logs and errors ("target"). Raises ListenError."""
        self._name = name
        self._interceptor = CallInterceptor(name)
        self._health = health.aio.HealthServicer()
        self._services: tuple[str, ...] = ()
        self._stopped = False
        options = [
            *transport_options(listen),
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ]
        self.grpc = grpc.aio.server(interceptors=[self._interceptor], options=options)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        self._bound = Bound(self.grpc, listen)

    @property
    def address(self) -> str:
        """Where the server listens; a port of 0 is replaced with the one in use."""
        return self._bound.address

    async def start(self, services: Sequence[str]) -> None:
        """Begins to answer. `services` are the full names of what has been added to `self.grpc`."""
        self._services = tuple(services)
        reflection.enable_server_reflection(
            (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc
        )
        await self.set_serving(False)
        await self.grpc.start()

    async def set_serving(self, serving: bool) -> None:
        """Tells health checks whether the services can be used."""
        status = health_pb2.HealthCheckResponse
        for service in ("", *self._services):
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def begin_drain(self) -> None:
        """Health says NOT_SERVING for good, new calls are refused, and streams of requests end."""
        self._interceptor.drain()
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Drains: waits up to `grace` seconds for what the open calls work on, ends the rest, and gives the address
        back."""
        if self._stopped:
            return
        self._stopped = True
        await self.begin_drain()
        if not await self._interceptor.wait_idle(grace):
            log.warning("ending calls that are still open after %g s", grace)
        # A server that never started gives its port back only this way.
        await self.grpc.start()
        await self.grpc.stop(None)
        await self._interceptor.wait_idle(CLEANUP_SECONDS)
        self.release()

    def release(self) -> None:
        """Removes the socket file."""
        self._bound.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(GRACE_SECONDS if error is None else 0)


async def serve(
    name: str,
    listen: str,
    add_services: AddServices,
    *,
    background: Callable[[SetServing], Awaitable[None]] | None = None,
    grace: float = GRACE_SECONDS,
) -> None:
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends the process at once.

    `add_services` loads what the services need (in a thread, so that signals are heard), registers them and
    returns their full names. `background` runs beside them, to the end of the drain, and tells with `set_serving`
    when they are ready; left out, they are ready at once. Raises ListenError, or what a callback raises; afterwards
    the address is free again in every case.
    """
    server = Server(name, listen)

    def leave_now(number: int) -> None:
        server.release()
        os._exit(128 + number)

    async def start() -> None:
        await server.start(await add_services(server.grpc))
        log.info("listening on %s", server.address)

    async def work() -> None:
        await (background or _ready_at_once)(server.set_serving)
        await stop.wait()

    with stop_signals(leave_now) as stop:
        try:
            if not await run_until(stop, asyncio.ensure_future(start())):
                # Nothing to drain, and a load in a thread cannot be cancelled.
                leave_now(signal.SIGTERM)
            working, stopped = asyncio.ensure_future(work()), asyncio.ensure_future(stop.wait())
            try:
                await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
                if not stop.is_set():
                    await working
                log.info("draining")
                await server.stop(grace)
            finally:
                await _cancel(working, stopped)
        except BaseException:
            grace = 0
            raise
        finally:
            await server.stop(grace)


async def _ready_at_once(set_serving: SetServing) -> None:
    await set_serving(True)


async def pipelined(
    requests: AsyncIterable[Request],
    submit: Callable[[Request], Awaitable[Response]],
    max_in_flight: int = MAX_IN_FLIGHT,
) -> AsyncGenerator[Response, None]:
    """Answers a stream of requests in order, without waiting for one answer before the next request is taken.

    `submit` is called for every request as it comes, `max_in_flight` of them at a time. What it raises, or its
    awaitable does, comes out after the answers before it. When the generator ends, however it ends, nothing
    that `submit` returned is left running: unfinished futures are cancelled, so whoever resolves one looks at
    `done()` first. Used under `contextlib.aclosing`, this has happened before the code behind it runs.
    """
    answers: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()
    room = asyncio.Semaphore(max_in_flight)

    async def read() -> None:
        async for request in requests:
            await room.acquire()
            answers.put_nowait(asyncio.ensure_future(submit(request)))

    reader = asyncio.ensure_future(read())
    # The reader itself marks the end of the queue: awaiting it raises what reading raised.
    reader.add_done_callback(answers.put_nowait)
    try:
        while (answer := await answers.get()) is not reader:
            yield await answer
            room.release()
        await reader
    finally:
        await _cancel(reader)
        await _cancel(*(answers.get_nowait() for _ in range(answers.qsize())))


async def _cancel(*work: asyncio.Future[Any]) -> None:
    for future in work:
        future.cancel()
    await asyncio.gather(*work, return_exceptions=True)
