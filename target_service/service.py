"""The target service: the contract of target.proto over the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import torch

from eyas.compute import Timer
from eyas.config import TargetConfig
from eyas.errors import EyasError, StatusError, invalid_argument
from eyas.names import TARGET_SERVICE
from eyas.observe import SequenceSpans, observed
from eyas.server import pipelined, serve
from eyas.transport import LAYOUT_VERSION, scalar_type_of
from eyas.v1 import common_pb2, target_pb2, target_pb2_grpc
from eyas_kernels.device import pages_that_fit, pick_device, set_up_compute_thread
from target_service.engine import Engine, Lease
from target_service.features import Subscription, Subscriptions
from target_service.metrics import Metrics
from target_service.model import Decoder
from target_service.proposals import Awaited

log = logging.getLogger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
FILE_PART_BYTES = 2**20


async def run(config: TargetConfig) -> None:
    """Loads the model and serves until a signal says stop. Raises EyasError for what the user can mend."""
    metrics = Metrics()
    with observed("eyas-target", config, metrics.registry) as tracer:
        compute = ThreadPoolExecutor(1, "compute", set_up_compute_thread, (config.threads,))

        async def add_services(server: grpc.aio.Server) -> list[str]:
            loop = asyncio.get_running_loop()
            engine = await loop.run_in_executor(compute, load_engine, config)
            service = TargetService(engine, compute, config, metrics, SequenceSpans(tracer, "target.sequence"))
            target_pb2_grpc.add_TargetServiceServicer_to_server(service, server)
            return [TARGET_SERVICE]

        try:
            await serve("target", config.listen, add_services)
        finally:
            compute.shutdown()


def load_engine(config: TargetConfig) -> Engine:
    """Loads the checkpoint, makes the cache and runs one warm-up pass. Raises EyasError."""
    device = pick_device(config.device)
    began = time.monotonic()
    with torch.inference_mode():
        model = Decoder(config.model, None if config.dtype == "auto" else getattr(torch, config.dtype), device)
    if config.context_length > model.spec.context_length:
        raise EyasError(
            f"context_length: {config.context_length} is beyond the model's {model.spec.context_length}"
        )
    if config.context_length:
        model.spec = dataclasses.replace(model.spec, context_length=config.context_length)
    num_pages = config.num_pages or pages_that_fit(model.bytes_per_token * config.page_size, device)
    engine = Engine(model, Subscriptions(model.spec), num_pages, config.page_size, config.max_rows)
    warm_up(engine)
    log.info(
        "loaded %s (%s, %s on %s, %d pages of %d tokens) in %.1f s",
        config.model, model.spec.architecture, model.dtype, device, num_pages, config.page_size,
        time.monotonic() - began,
    )  # fmt: skip
    return engine


def warm_up(engine: Engine) -> None:
    """One pass of each kind, so that the first request does not pay for what is built on first use."""
    lease = Lease()
    allocator = engine.allocator
    room = min(engine.max_rows, engine.model.spec.context_length, allocator.num_pages * allocator.page_size)
    sampling = common_pb2.SamplingParams(temperature=1, top_p=1)
    opening = target_pb2.OpenSequence(sequence_id=1, sampling=sampling)
    engine.step(lease, target_pb2.StepRequest(opens=[opening]))
    for rows in (32, 1, 4):
        block = target_pb2.Block(sequence_id=1, start=0, tokens=[0] * min(rows, room), num_scored=1)
        engine.step(lease, target_pb2.StepRequest(blocks=[block]))
    engine.release(lease)


@dataclasses.dataclass(frozen=True)
class _Done:
    """A step of `num_rows` rows that has been computed, in `seconds`."""

    request: target_pb2.StepRequest
    response: target_pb2.StepResponse
    num_rows: int
    seconds: float


class TargetService(target_pb2_grpc.TargetServiceServicer):
    """Answers calls on the event loop; everything that computes runs on the one thread of `compute`, in order."""

    def __init__(
        self,
        engine: Engine,
        compute: ThreadPoolExecutor,
        config: TargetConfig,
        metrics: Metrics,
        spans: SequenceSpans,
    ) -> None:
        self._engine = engine
        self._compute = compute
        self._config = config
        self._metrics = metrics
        self._spans = spans
        self._subscriptions = engine.subscriptions
        metrics.watch(engine)
        self._info = describe(engine, config)

    async def GetTargetInfo(
        self, request: target_pb2.GetTargetInfoRequest, context: Any
    ) -> target_pb2.GetTargetInfoResponse:
        return self._info

    async def GetTokenizer(
        self, request: target_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[target_pb2.GetTokenizerResponse]:
        for name in TOKENIZER_FILES:
            path = self._config.model / name
            data = path.read_bytes() if path.is_file() else b""
            for begin in range(0, len(data), FILE_PART_BYTES):
                yield target_pb2.GetTokenizerResponse(name=name, data=data[begin : begin + FILE_PART_BYTES])

    async def Step(
        self, request_iterator: AsyncIterable[target_pb2.StepRequest], context: Any
    ) -> AsyncIterator[target_pb2.StepResponse]:
        lease, in_order = Lease(), asyncio.Lock()
        held: set[int] = set()  # sequences of this stream that have a span

        async def submit(request: target_pb2.StepRequest) -> _Done:
            async with in_order:
                return await self._step(lease, request)

        try:
            async with aclosing(pipelined(request_iterator, submit)) as steps:
                async for done in steps:
                    yield done.response
                    self._note(done, held)
        finally:
            self._spans.end(held)
            # Behind whatever still computes for this stream, so that no page is freed under it.
            self._compute.submit(self._engine.release, lease)

    async def _step(self, lease: Lease, request: target_pb2.StepRequest) -> _Done:
        timer = Timer()
        proposed = await self._take_proposals(lease, request)
        outcome = await timer.run(self._compute, lambda: self._engine.step(lease, request, proposed))
        # First of all the features: the draft waits for them.
        for subscription_id, batches in outcome.batches.items():
            if (subscription := self._subscriptions.get(subscription_id)) is not None:
                subscription.offer(batches)
        response = target_pb2.StepResponse(
            round=request.round,
            results=outcome.results,
            free_pages=self._engine.allocator.num_free,
            timing=timer.timing(),
        )
        return _Done(request, response, outcome.num_rows, timer.seconds)

    async def _take_proposals(self, lease: Lease, request: target_pb2.StepRequest) -> dict[int, Sequence[int]]:
        """Waits for the drafts of the blocks that run ahead, by sequence id; those of a draft that is gone, or too
        late, are not in it."""
        awaited: dict[int, list[Awaited]] = {}
        for block in request.blocks:
            sequence = lease.sequences.get(block.sequence_id)
            # Behind a block that did not run there is nothing to wait for.
            if block.num_draft_tokens and sequence is not None and sequence.last_round == block.after_round:
                awaited.setdefault(sequence.subscription_id, []).append(
                    Awaited(block.sequence_id, block.epoch, block.after_round)
                )
        proposed: dict[int, Sequence[int]] = {}
        for subscription_id, each in awaited.items():
            if (subscription := self._subscriptions.get(subscription_id)) is not None:
                if not await subscription.proposals.wait(each, request.draft_wait_ms / 1000):
                    self._metrics.proposals_late()
                proposed |= subscription.proposals.take(each)
        return proposed

    def _note(self, done: _Done, held: set[int]) -> None:
        """Counts a step, and traces what it opened and closed."""
        closed = [close.sequence_id for close in done.request.closes]
        self._spans.update(done.request.opens, closed)
        held.difference_update(closed)
        held.update(opening.sequence_id for opening in done.request.opens)
        self._metrics.observe_step(done.num_rows, done.seconds)

    async def Features(
        self, request_iterator: AsyncIterable[target_pb2.FeaturesRequest], context: Any
    ) -> AsyncIterator[target_pb2.FeaturesResponse]:
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("kind") != "subscribe":
            raise invalid_argument("kind", "the first message must be `subscribe`")
        subscription = self._subscriptions.subscribe(first.subscribe)
        spec = self._engine.model.spec
        try:
            yield target_pb2.FeaturesResponse(
                subscribed=target_pb2.FeatureSubscribed(
                    subscription_id=subscription.id,
                    transport=common_pb2.FEATURE_TRANSPORT_BYTES,
                    feature_width=spec.hidden_size * (len(subscription.taps) or 1),
                    scalar_type=scalar_type_of(self._engine.model.dtype),
                )
            )
            reading = asyncio.ensure_future(_read_proposals(subscription, request_iterator))
            try:
                async for batch in subscription.batches():
                    yield target_pb2.FeaturesResponse(batch=batch)
            finally:
                reading.cancel()
        finally:
            self._subscriptions.unsubscribe(subscription)


async def _read_proposals(
    subscription: Subscription, requests: AsyncIterable[target_pb2.FeaturesRequest]
) -> None:
    """Until the draft ends its side of the stream; a drain ends the subscription."""
    try:
        async for request in requests:
            if request.WhichOneof("kind") == "proposals":
                subscription.proposals.add(request.proposals)
    except StatusError as error:
        subscription.end(error)


def describe(engine: Engine, config: TargetConfig) -> target_pb2.GetTargetInfoResponse:
    """The loaded target, as told to gateways and drafts."""
    spec = engine.model.spec
    return target_pb2.GetTargetInfoResponse(
        model=config.served_name,
        architecture=spec.architecture,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        context_length=spec.context_length,
        scalar_type=scalar_type_of(engine.model.dtype),
        page_size=engine.allocator.page_size,
        num_pages=engine.allocator.num_pages,
        max_rows=engine.max_rows,
        eos_token_ids=spec.eos_token_ids,
        tokenizer_sha256=_sha256(config.model / "tokenizer.json"),
        checkpoint_path=str(config.model.resolve()),
        layout_version=LAYOUT_VERSION,
        device=str(engine.model.device),
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
