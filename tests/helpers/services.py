"""The real target and draft services in this process, behind the real server on Unix sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.trace import Tracer

from draft_service.engine import Engine as DraftEngine
from draft_service.metrics import Metrics as DraftMetrics
from draft_service.service import DraftService
from eyas.channel import open_channel, wait_until_serving
from eyas.config import DraftConfig, TargetConfig
from eyas.names import DRAFT_SERVICE, TARGET_SERVICE
from eyas.observe import SequenceSpans
from eyas.server import Server
from eyas.v1 import draft_pb2_grpc, target_pb2_grpc
from eyas_kernels.device import set_up_compute_thread
from target_service.engine import Engine as TargetEngine
from target_service.metrics import Metrics as TargetMetrics
from target_service.service import TargetService, load_engine


@dataclass(frozen=True)
class RunningTarget:
    """A target that serves."""

    address: str
    engine: TargetEngine
    metrics: TargetMetrics
    server: Server
    compute: ThreadPoolExecutor

    @property
    def used_pages(self) -> int:
        """Pages that sequences hold."""
        return self.engine.allocator.num_pages - self.engine.allocator.num_free

    async def until_free(self) -> None:
        """Returns once no sequence holds a page; the test's own limit ends a wait that never does."""
        while self.used_pages:
            await asyncio.sleep(0.005)


@dataclass(frozen=True)
class RunningDraft:
    """A draft that answers calls. `attached` is its connection to the target: it ends with an error when head
    and target do not fit."""

    address: str
    service: DraftService
    metrics: DraftMetrics
    server: Server
    compute: ThreadPoolExecutor
    attached: asyncio.Task[None]

    @property
    def engine(self) -> DraftEngine:
        """Its engine; there is one once it has been attached."""
        engine = self.service._engine
        assert engine is not None
        return engine

    @property
    def used_pages(self) -> int:
        """Pages of slots that sequences hold."""
        return self.engine.allocator.num_pages - self.engine.allocator.num_free

    @property
    def num_held(self) -> int:
        """Sequences for which features are held."""
        return len(self.service._features._held)

    async def until_free(self) -> None:
        """Returns once no sequence holds a page or features; the test's own limit ends a wait that never does."""
        while self.used_pages or self.num_held:
            await asyncio.sleep(0.005)

    async def until_held(self, sequence: int, num_features: int) -> None:
        """Returns once the features up to that position have arrived, as `until_free` does."""
        held = self.service._features._held
        while held[sequence].end < num_features:
            await asyncio.sleep(0.005)

    async def until_serving(self) -> None:
        """Returns once the draft is attached. Raises what `attached` ended with."""
        async with open_channel(self.address) as channel:
            serving = asyncio.ensure_future(
                wait_until_serving(channel, DRAFT_SERVICE, 60, lambda line: None, peer="the draft")
            )
            await asyncio.wait((serving, self.attached), return_when=asyncio.FIRST_COMPLETED)
            if self.attached.done():
                serving.cancel()
                await self.attached
            await serving


@asynccontextmanager
async def running_target(
    model: Path, folder: Path, *, tracer: Tracer | None = None, socket: str = "target.sock", **config: Any
) -> AsyncIterator[RunningTarget]:
    """Serves the checkpoint `model` on a socket in `folder`; `config` sets further fields of TargetConfig."""
    fields = {"served_name": "tiny", "listen": f"unix:{folder}/{socket}", "device": "cpu", "threads": 1}
    settings = TargetConfig(model=model, **{**fields, **config})
    metrics = TargetMetrics()
    with _compute_thread() as compute:
        async with Server("target", settings.listen) as server:
            try:
                engine = await asyncio.get_running_loop().run_in_executor(compute, load_engine, settings)
                spans = SequenceSpans(tracer, "target.sequence")
                service = TargetService(engine, compute, settings, metrics, spans)
                target_pb2_grpc.add_TargetServiceServicer_to_server(service, server.grpc)
                await server.start([TARGET_SERVICE])
                await server.set_serving(True)
                yield RunningTarget(server.address, engine, metrics, server, compute)
            finally:
                await server.stop(0)


@asynccontextmanager
async def running_draft(
    head: Path,
    folder: Path,
    target_address: str,
    *,
    tracer: Tracer | None = None,
    socket: str = "draft.sock",
    wait: bool = True,
    **config: Any,
) -> AsyncIterator[RunningDraft]:
    """Serves the head in `head` on a socket in `folder`, attached to the target at `target_address`.

    With `wait` it is attached before the block is entered, or what keeps it from that is raised. `config` sets
    further fields of DraftConfig.
    """
    fields = {
        "head_name": "tiny-head",
        "listen": f"unix:{folder}/{socket}",
        "target": target_address,
        "device": "cpu",
        "threads": 1,
        "num_pages": 64,
        "skip_self_test": True,
    }
    settings = DraftConfig(head=head, **{**fields, **config})
    metrics = DraftMetrics()
    with _compute_thread() as compute:
        async with Server("draft", settings.listen) as server:
            service = DraftService(settings, compute, metrics, SequenceSpans(tracer, "draft.sequence"))
            draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server.grpc)
            await server.start([DRAFT_SERVICE])
            attached = asyncio.ensure_future(service.keep_attached(server.set_serving))
            running = RunningDraft(server.address, service, metrics, server, compute, attached)
            try:
                if wait:
                    await running.until_serving()
                yield running
            finally:
                attached.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await attached
                await server.stop(0)
                await service.close()


@asynccontextmanager
async def target_stub(address: str) -> AsyncIterator[Any]:
    """A client of the target service."""
    async with open_channel(address) as channel:
        yield target_pb2_grpc.TargetServiceStub(channel)


@asynccontextmanager
async def draft_stub(address: str) -> AsyncIterator[Any]:
    """A client of the draft service."""
    async with open_channel(address) as channel:
        yield draft_pb2_grpc.DraftServiceStub(channel)


async def exchange(stream: Any, request: Any) -> Any:
    """Sends one message on a round stream and returns the answer. Raises AioRpcError when the call ended."""
    with suppress(asyncio.InvalidStateError):  # The read says why.
        await stream.write(request)
    response = await stream.read()
    if response is grpc.aio.EOF:
        raise ConnectionError("the service ended the stream")
    return response


@contextmanager
def _compute_thread() -> Iterator[ThreadPoolExecutor]:
    """As the services make theirs."""
    with ThreadPoolExecutor(1, "compute", set_up_compute_thread, (1,)) as compute:
        yield compute
