"""The gateway's side of the draft: attached while it is there, and never waited for longer than a guard allows."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc

from eyas.channel import open_channel
from eyas.errors import describe
from eyas.v1 import draft_pb2, draft_pb2_grpc
from gateway.exchange import Exchange

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
INFO_SECONDS = 5.0
GIVE_UP_SECONDS = 90.0
"""How long an answer may take, the step at the target included: behind that the stream is ended, and the draft
attached anew."""

Answer = tuple[draft_pb2.ProposeResponse, Exchange]


class DraftClient:
    """The connection to a draft service, which `keep_attached` tends in the background. `info` is None while the
    draft is away. One message is under way at most: while it is late, rounds go on without drafts."""

    def __init__(self, address: str, timeout: float) -> None:
        self.address = address
        self.info: draft_pb2.GetDraftInfoResponse | None = None
        self.attachment = 0  # number of the stream; what an earlier one held is gone
        self.on_answer: Callable[[], None] = lambda: None  # called when one has come
        self._timeout = timeout
        self._channel = open_channel(address)
        self._stub: Any = draft_pb2_grpc.DraftServiceStub(self._channel)
        self._stream: Any = None
        self._pending: asyncio.Task[Answer | None] | None = None
        self._is_late = False

    @property
    def is_ready(self) -> bool:
        """Whether a message may be sent, once the answer to the last one is taken."""
        return self.info is not None and (self._pending is None or self._pending.done())

    async def keep_attached(self) -> None:
        """Attaches, and attaches again whenever the draft comes back; says so in the log."""
        said = ""
        while True:
            try:
                info = await self._attach()
                log.info("draft %s attached at %s", info.head, self.address)
                # Known once the stream has ended.
                said = await self._stream.details() or "it ended the stream"
                self.detach()
                log.warning("draft at %s is away: %s; rounds go on without it", self.address, said)
            except grpc.aio.AioRpcError as error:
                if (reason := describe(error)) != said:
                    log.warning("draft at %s is away: %s", self.address, reason)
                said = reason
            await asyncio.sleep(RETRY_SECONDS)

    @property
    def is_waiting(self) -> bool:
        """Whether a message is under way, or its answer has not been taken."""
        return self._pending is not None

    def send(self, request: draft_pb2.ProposeRequest) -> None:
        """Sends a message; its answer is for `answer` or `take_answer`."""
        self._is_late = False
        self._pending = asyncio.create_task(self._exchange(request))
        self._pending.add_done_callback(lambda _: self.on_answer())

    async def answer(self) -> Answer | None:
        """Waits for the answer to the message under way; None when the draft is late, for good, or gone."""
        if self._pending is not None and not self._is_late:
            await asyncio.wait((self._pending,), timeout=self._timeout)
            if self._pending is not None and not self._pending.done():
                self._is_late = True
                log.warning("draft at %s is late: rounds go on without it", self.address)
        return self.take_answer()

    def take_answer(self) -> Answer | None:
        """The answer to the message that is under way, if it is there by now."""
        if self._pending is None or not self._pending.done():
            return None
        task, self._pending = self._pending, None
        answer = None if task.cancelled() else task.result()
        if answer is None:
            self.detach()
        return answer

    def reject(self, fault: str) -> None:
        """Ends the stream of a draft that breaks the contract."""
        log.error("draft at %s breaks the contract: %s", self.address, fault)
        self.detach()

    def detach(self) -> None:
        """Ends the stream; the draft is attached anew after a pause."""
        self.info = None
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if self._stream is not None:
            self._stream.cancel()

    async def close(self) -> None:
        """Ends the stream, and with it every sequence at the draft."""
        self.detach()
        await self._channel.close()

    async def _attach(self) -> draft_pb2.GetDraftInfoResponse:
        info: draft_pb2.GetDraftInfoResponse = await self._stub.GetDraftInfo(
            draft_pb2.GetDraftInfoRequest(), timeout=INFO_SECONDS
        )
        self._stream = self._stub.Propose()
        self.attachment += 1
        self.info = info
        return info

    async def _exchange(self, request: draft_pb2.ProposeRequest) -> Answer | None:
        """None when the stream has ended, or nothing has come for too long."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS):
                await self._stream.write(request)
                response = await self._stream.read()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            return None
        if response is grpc.aio.EOF:
            return None
        return response, Exchange(began, time.perf_counter() - began, response.timing.compute_us * 1e-6)
