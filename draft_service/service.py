"""The draft service: the contract of draft.proto over the engine, attached to a target."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import grpc
import torch

from draft_service.engine import Engine, Lease
from draft_service.features import FeatureStore, Need
from draft_service.head_check import HeadCheck
from draft_service.metrics import Metrics
from draft_service.target_link import TargetLink, TargetLost, feature_source, read
from eyas.compute import Timer
from eyas.config import DraftConfig
from eyas.errors import EyasError, unavailable
from eyas.names import DRAFT_SERVICE
from eyas.observe import SequenceSpans, observed
from eyas.server import SetServing, pipelined, serve
from eyas.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2
from eyas_kernels.device import pages_that_fit, set_up_compute_thread

log = logging.getLogger(__name__)

FEATURE_SECONDS = 2.0
"""How long a proposal waits for features before it is given up: the sequence then goes on without drafts."""
STEP_SECONDS = 60.0
"""The same for one that was sent before the target's step: the wait includes that step."""


async def run(config: DraftConfig) -> None:
    """Waits for the target, loads the head and serves until a signal says stop. Raises EyasError for what the user
    can mend."""
    metrics = Metrics()
    with observed("eyas-draft", config, metrics.registry) as tracer:
        compute = ThreadPoolExecutor(1, "compute", set_up_compute_thread, (config.threads or 1,))
        service = DraftService(config, compute, metrics, SequenceSpans(tracer, "draft.sequence"))

        async def add_services(server: grpc.aio.Server) -> list[str]:
            draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server)
            return [DRAFT_SERVICE]

        try:
            await serve("draft", config.listen, add_services, background=service.keep_attached)
        finally:
            await service.close()
            compute.shutdown()


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Answers calls on the event loop; everything that computes runs on the one thread of `compute`, in order."""

    def __init__(
        self, config: DraftConfig, compute: ThreadPoolExecutor, metrics: Metrics, spans: SequenceSpans
    ) -> None:
        self._config = config
        self._compute = compute
        self._metrics = metrics
        self._spans = spans
        self._link = TargetLink(config)
        self._check = HeadCheck(config, self._link, compute, metrics)
        self._features = FeatureStore()
        self._engine: Engine | None = None
        self._info: draft_pb2.GetDraftInfoResponse | None = None  # None while detached
        self._streams: set[asyncio.Task[Any]] = set()  # open Propose calls

    # ---- the target's side ----------------------------------------------------------------------------------

    async def keep_attached(self, set_serving: SetServing) -> None:
        """Attaches to the target, and again whenever it comes back. Raises EyasError where head and target do not
        fit, or the target does not come up the first time."""
        target = await self._link.wait(self._config.wait_seconds)
        loop = asyncio.get_running_loop()
        self._engine = await loop.run_in_executor(self._compute, self._load, target)
        self._metrics.watch(self._engine)
        while True:
            try:
                await self._check.run(self._engine.head, target)
                await self._attach(self._engine, target, set_serving)
            except TargetLost as lost:
                log.warning("the target at %s went away: %s", self._config.target, lost)
                target = await self._wait_for_same(target)

    async def close(self) -> None:
        """Ends the connection to the target."""
        await self._link.close()

    def _load(self, target: target_pb2.GetTargetInfoResponse) -> Engine:
        began = time.monotonic()
        head = self._link.load_head(target)
        page_size = self._config.page_size
        num_pages = self._config.num_pages or pages_that_fit(head.bytes_per_slot * page_size, head.device)
        engine = Engine(head, num_pages, page_size, self._config.max_draft_tokens)
        warm_up(engine)
        log.info(
            "loaded %s (%s, %s on %s, taps %s, %d pages of %d slots) in %.1f s",
            self._config.head, head.spec.kind, head.dtype, head.device, head.spec.taps or "final norm", num_pages,
            page_size, time.monotonic() - began,
        )  # fmt: skip
        return engine

    async def _attach(
        self, engine: Engine, target: target_pb2.GetTargetInfoResponse, set_serving: SetServing
    ) -> None:
        """Reads features until the stream ends. Raises TargetLost then."""
        spec = engine.head.spec
        subscribing = self._link.subscribe(
            feature_source(engine.head), spec.target_hidden_size, spec.vocab_size
        )
        async with subscribing as (subscribed, stream):
            self._info = self._describe(engine, target, subscribed)
            self._metrics.attached(subscribed.transport)
            log.info("attached to %s at %s, features over bytes", target.model, self._config.target)
            await set_serving(True)
            try:
                while True:
                    self._features.add((await read(stream)).batch)
            finally:
                self._info = None
                self._metrics.attached(None)
                await set_serving(False)
                # Gateways attach again once there is a new subscription.
                for task in self._streams:
                    task.cancel(self._detached)

    @property
    def _detached(self) -> str:
        return f"the draft is not attached to its target at {self._config.target}"

    async def _wait_for_same(
        self, before: target_pb2.GetTargetInfoResponse
    ) -> target_pb2.GetTargetInfoResponse:
        """Waits as long as it takes. Raises EyasError when what comes back is another target."""
        target = await self._link.wait(float("inf"))
        if _identity(target) != _identity(before):
            raise EyasError(f"another target came back at {self._config.target}: the head must be loaded anew")
        return target

    def _describe(
        self,
        engine: Engine,
        target: target_pb2.GetTargetInfoResponse,
        subscribed: target_pb2.FeatureSubscribed,
    ) -> draft_pb2.GetDraftInfoResponse:
        head = engine.head
        return draft_pb2.GetDraftInfoResponse(
            head=self._config.head_name,
            kind=head.spec.kind,
            source=feature_source(head),
            draft_vocab_size=head.spec.draft_vocab_size,
            max_draft_tokens=engine.max_draft_tokens,
            subscription_id=subscribed.subscription_id,
            transport=subscribed.transport,
            target_model=target.model,
            page_size=engine.allocator.page_size,
            num_pages=engine.allocator.num_pages,
            device=str(head.device),
        )

    # ---- the gateways' side ---------------------------------------------------------------------------------

    async def GetDraftInfo(
        self, request: draft_pb2.GetDraftInfoRequest, context: Any
    ) -> draft_pb2.GetDraftInfoResponse:
        if self._info is None:
            raise unavailable(self._detached)
        return self._info

    async def Propose(
        self, request_iterator: AsyncIterable[draft_pb2.ProposeRequest], context: Any
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        if self._info is None or self._engine is None:
            raise unavailable(self._detached)
        engine, lease, in_order = self._engine, Lease(), asyncio.Lock()
        held: dict[int, int] = {}  # sequences whose features are held for this stream, and their epochs

        async def submit(request: draft_pb2.ProposeRequest) -> draft_pb2.ProposeResponse:
            async with in_order:
                return await self._propose(engine, lease, held, request)

        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            async with aclosing(pipelined(request_iterator, submit)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._streams.remove(task)
            for sequence_id, epoch in held.items():
                self._features.close(sequence_id, epoch)
            self._spans.end(held)
            # Behind whatever still computes for this stream, so that no page is freed under it.
            self._compute.submit(engine.release, lease)

    async def _propose(
        self, engine: Engine, lease: Lease, held: dict[int, int], request: draft_pb2.ProposeRequest
    ) -> draft_pb2.ProposeResponse:
        timer = Timer()
        self._hold_features(held, request)
        features = await self._take_features(held, request)
        proposals = await timer.run(self._compute, lambda: engine.propose(lease, request, features))
        if any(extend.to_target for extend in request.extends):
            await self._link.hand_in(_for_target(request, proposals))
        self._metrics.observe_proposals(proposals, timer.seconds)
        return draft_pb2.ProposeResponse(
            round=request.round,
            proposals=proposals,
            free_pages=engine.allocator.num_free,
            timing=timer.timing(),
        )

    def _hold_features(self, held: dict[int, int], request: draft_pb2.ProposeRequest) -> None:
        """Closes first, then opens: a sequence may be re-opened under a new epoch by one message."""
        closed = [close.sequence_id for close in request.closes if close.sequence_id in held]
        for sequence_id in closed:
            self._features.close(sequence_id, held.pop(sequence_id))
        for opening in request.opens:
            self._features.open(opening.sequence_id, opening.epoch)
            held[opening.sequence_id] = opening.epoch
        self._spans.update(request.opens, closed)

    async def _take_features(
        self, held: dict[int, int], request: draft_pb2.ProposeRequest
    ) -> list[torch.Tensor | None]:
        """For every extend its features, or None where they are missing. None is waited for on behalf of an extend
        that the engine will refuse."""
        needs = [
            Need(
                extend.sequence_id,
                extend.epoch,
                extend.slot,
                len(extend.tokens),
                extend.feature_round,
                extend.then_committed,
            )
            if held.get(extend.sequence_id) == extend.epoch and (extend.tokens or extend.then_committed)
            else None
            for extend in request.extends
        ]
        early = any(extend.then_committed for extend in request.extends)
        await self._features.wait(
            [need for need in needs if need is not None], STEP_SECONDS if early else FEATURE_SECONDS
        )
        taken = [need and self._features.take(need) for need in needs]
        for extend, part in zip(request.extends, taken, strict=True):
            extend.tokens.extend(part.committed if part else ())
        return [part and part.rows for part in taken]


def _for_target(
    request: draft_pb2.ProposeRequest, proposals: Sequence[draft_pb2.Proposal]
) -> target_pb2.DraftProposals:
    """The proposals that the target waits for: also the empty ones of extends that failed."""
    message = target_pb2.DraftProposals()
    for extend, proposal in zip(request.extends, proposals, strict=True):
        if extend.to_target:
            message.proposals.add(
                sequence_id=extend.sequence_id,
                epoch=extend.epoch,
                after_round=extend.feature_round,
                draft_tokens=proposal.draft_tokens,
            )
    return message


def _identity(target: target_pb2.GetTargetInfoResponse) -> tuple[object, ...]:
    """What must not change under a loaded head."""
    return (
        target.checkpoint_path,
        target.hidden_size,
        target.num_layers,
        target.vocab_size,
        target.scalar_type,
        target.tokenizer_sha256,
    )


def warm_up(engine: Engine) -> None:
    """One proposal at a temperature, so that the first request does not pay for what is built on first use."""
    lease = Lease()
    sampling = common_pb2.SamplingParams(temperature=1, top_p=1)
    request = draft_pb2.ProposeRequest(
        opens=[draft_pb2.OpenSlots(sequence_id=1, sampling=sampling)],
        extends=[
            draft_pb2.Extend(sequence_id=1, slot=0, tokens=[0] * 4, num_draft_tokens=engine.max_draft_tokens)
        ],
    )
    engine.propose(lease, request, [torch.zeros(4, engine.head.spec.feature_size)])
    engine.release(lease)
