"""A stand-in for the target service that computes nothing: what the shared server does, shows through it.

`python -m tests.helpers.echo_service ADDRESS` serves it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import grpc
import uvloop

from eyas.errors import invalid_argument, resource_exhausted
from eyas.runtime import die_with_parent
from eyas.server import SetServing, pipelined, serve
from eyas.v1 import target_pb2, target_pb2_grpc

TARGET_SERVICE = "eyas.v1.TargetService"

# Rounds that a StepRequest asks for by number.
ROUND_REFUSED = 1001
ROUND_BROKEN = 1002
ROUND_STUCK = 1003
ROUND_BROKEN_LATER = 1004
ROUND_HELD = 1005
SECRET = "the text of an exception is not for clients"


class EchoServicer(target_pb2_grpc.TargetServiceServicer):
    """Answers every step with its round; the rounds above misbehave, or wait for `gate`."""

    def __init__(self) -> None:
        self.open_streams = 0
        self.stepping: asyncio.Task[None] | None = None  # the handler of the newest Step
        self.unfinished = 0
        self.gate = asyncio.Event()
        self.submitted: list[int] = []

    async def GetTargetInfo(
        self, request: target_pb2.GetTargetInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> target_pb2.GetTargetInfoResponse:
        return target_pb2.GetTargetInfoResponse(model="echo")

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[target_pb2.GetTokenizerResponse, None]:
        self.open_streams += 1
        try:
            yield target_pb2.GetTokenizerResponse(name="tokenizer.json", data=b"x" * 5_000_000)
            raise resource_exhausted("no more of it", retry_after_s=1.5)
        finally:
            await asyncio.sleep(0.05)
            self.open_streams -= 1

    async def Step(
        self, requests: AsyncIterator[target_pb2.StepRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[target_pb2.StepResponse, None]:
        self.open_streams += 1
        self.stepping = asyncio.current_task()
        try:
            async with aclosing(pipelined(requests, self.submit)) as responses:
                async for response in responses:
                    yield response
        finally:
            self.open_streams -= 1

    async def Features(
        self, requests: AsyncIterator[target_pb2.FeaturesRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[target_pb2.FeaturesResponse, None]:
        async for _ in requests:
            yield target_pb2.FeaturesResponse()

    def submit(self, request: target_pb2.StepRequest) -> asyncio.Future[target_pb2.StepResponse]:
        """Refuses ROUND_REFUSED in this call, as a check at the edge does."""
        self.submitted.append(request.round)
        if request.round == ROUND_REFUSED:
            raise invalid_argument("blocks[0].tokens", "must not be empty")
        return asyncio.ensure_future(self._compute(request.round))

    async def _compute(self, number: int) -> target_pb2.StepResponse:
        self.unfinished += 1
        try:
            # Later rounds are done earlier, and must still be answered in order.
            await asyncio.sleep(0.001 * (number % 3 == 0))
            if number == ROUND_HELD:
                await self.gate.wait()
            if number == ROUND_STUCK:
                logging.info("is stuck")
                await asyncio.Event().wait()
            if number in (ROUND_BROKEN, ROUND_BROKEN_LATER):
                raise RuntimeError(SECRET)
            return target_pb2.StepResponse(round=number)
        finally:
            self.unfinished -= 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--load", type=float, default=0.0)
    parser.add_argument("--grace", type=float, default=10.0)
    parser.add_argument("--name", default="target")
    parser.add_argument("--parent", type=int)
    parser.add_argument("--deaf", action="store_true")
    options = parser.parse_args()
    if options.parent is not None:
        die_with_parent(options.parent)
    logging.basicConfig(level=logging.INFO, format=f"{options.name} %(message)s")

    async def add_services(server: grpc.aio.Server) -> Sequence[str]:
        await asyncio.to_thread(time.sleep, options.load)
        target_pb2_grpc.add_TargetServiceServicer_to_server(EchoServicer(), server)
        return [TARGET_SERVICE]

    async def background(set_serving: SetServing) -> None:
        await set_serving(True)
        if options.deaf:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            logging.info("is deaf")
            await asyncio.Event().wait()

    uvloop.run(serve(options.name, options.address, add_services, background=background, grace=options.grace))


if __name__ == "__main__":
    main()
