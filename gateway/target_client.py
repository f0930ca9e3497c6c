"""The gateway's side of the target: its description, its tokenizer, and the stream of steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from eyas.channel import open_channel
from eyas.errors import describe
from eyas.v1 import target_pb2, target_pb2_grpc
from gateway.exchange import Exchange
from gateway.request import TargetUnavailable


class TargetClient:
    """One connection to the target. After TargetUnavailable it is to be connected anew."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = open_channel(address)
        self._stub: Any = target_pb2_grpc.TargetServiceStub(self._channel)
        self._steps: Any = None

    async def connect(self) -> tuple[target_pb2.GetTargetInfoResponse, dict[str, bytes]]:
        """Waits until the target answers, and opens a step stream. Returns the target's description and the files
        of its tokenizer by name. Raises TargetUnavailable when it goes away meanwhile."""
        files: dict[str, bytes] = {}
        self._end_stream()
        try:
            info = await self._stub.GetTargetInfo(target_pb2.GetTargetInfoRequest(), wait_for_ready=True)
            async for part in self._stub.GetTokenizer(target_pb2.GetTokenizerRequest()):
                files[part.name] = files.get(part.name, b"") + part.data
        except grpc.aio.AioRpcError as error:
            raise self._lost(describe(error)) from error
        self._steps = self._stub.Step()
        return info, files

    async def step(
        self, request: target_pb2.StepRequest, while_waiting: Callable[[], None]
    ) -> tuple[target_pb2.StepResponse, Exchange]:
        """Sends one step and reads its answer; `while_waiting` runs in between. Raises TargetUnavailable."""
        began = time.perf_counter()
        try:
            await self._steps.write(request)
            while_waiting()
            response = await self._steps.read()
        except grpc.aio.AioRpcError as error:
            raise self._lost(describe(error)) from error
        except asyncio.InvalidStateError as error:  # the call had ended before the write
            raise self._lost(await self._steps.details()) from error
        if response is grpc.aio.EOF:
            raise self._lost("it ended the stream")
        return response, Exchange(began, time.perf_counter() - began, response.timing.compute_us * 1e-6)

    async def close(self) -> None:
        """Ends the stream, and with it every sequence at the target."""
        self._end_stream()
        await self._channel.close()

    def _end_stream(self) -> None:
        if self._steps is not None:
            self._steps.cancel()

    def _lost(self, reason: str) -> TargetUnavailable:
        return TargetUnavailable(f"the target at {self.address} is not available: {reason}")
