"""Work for a client that may hang up, several generations at once, and server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up before its answer was complete."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Cancels it, and raises ClientGone, as soon as the client hangs up.

    To be used once the request's body has been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, gone)


async def merged(streams: Sequence[AsyncIterator[T]]) -> AsyncGenerator[tuple[int, T], None]:
    """What all streams yield, as it comes, with the stream's index. When it ends, however it ends, none of them
    is left running."""
    ready: asyncio.Queue[tuple[int, T] | asyncio.Task[None]] = asyncio.Queue()

    async def read(index: int, stream: AsyncIterator[T]) -> None:
        async for item in stream:
            ready.put_nowait((index, item))

    readers = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    for reader in readers:
        reader.add_done_callback(ready.put_nowait)
    num_open = len(readers)
    try:
        while num_open:
            item = await ready.get()
            if isinstance(item, asyncio.Task):
                await item  # raises what the stream raised
                num_open -= 1
            else:
                yield item
    finally:
        await _cancel(*readers)


class EventStream(Response):
    """Sends server-sent events, whole ones, as they come: `first`, which was waited for so that the status is
    known, and the rest of `events`, which it closes if the client hangs up."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        async with aclosing(self._events):
            with suppress(ClientGone):
                await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
