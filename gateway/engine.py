"""The round engine: plan, draft, verify, accept, commit. One loop drives every sequence of the gateway."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from eyas.config import GatewayConfig
from eyas.errors import EyasError
from eyas.v1 import target_pb2
from gateway.acceptance import accept
from gateway.commit import Committed, commit
from gateway.drafting import Drafting
from gateway.exchange import Exchange
from gateway.observer import Observer
from gateway.records import RoundRecord, SequenceRecord
from gateway.request import (
    Delta,
    GenerationError,
    GenerationRequest,
    ModelCard,
    QueueFull,
    RoundTimes,
    TargetUnavailable,
    TokenSource,
)
from gateway.scheduler import Close, Scheduler, Share
from gateway.sequence import Sequence, new_sequence
from gateway.target_client import TargetClient
from gateway.text import Tokenizer

log = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.2
FULL_SECONDS = 0.02
"""Pause before asking again when nothing can run because other gateways hold the target's pages."""


@dataclass
class Served:
    """What the connected target is, and what is known of its memory."""

    info: target_pb2.GetTargetInfoResponse
    tokenizer: Tokenizer
    connected_at: int  # Unix seconds
    free_pages: int


class Engine:
    """Serves `generate` (see gateway.request.Generator) from a loop of rounds over one target and one draft."""

    def __init__(
        self, config: GatewayConfig, target: TargetClient, drafting: Drafting, observer: Observer
    ) -> None:
        self._config = config
        self._target = target
        self._drafting = drafting
        self._observer = observer
        self._scheduler = Scheduler(config.max_sequences, config.prefill_rows)
        self._served: Served | None = None
        self.fault: EyasError | None = None  # why the target that is there cannot be served
        self._wake = asyncio.Event()
        drafting.on_answer(self._wake.set)
        self._round = 0
        self._round_ended = 0.0

    # ---- the front doors' side ------------------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        """What is served. Raises TargetUnavailable while the target is away."""
        served = self._connected()
        max_draft_tokens = self._drafting.max_draft_tokens
        return ModelCard(
            model=served.info.model,
            context_length=min(served.info.context_length, served.info.num_pages * served.info.page_size),
            vocab_size=served.info.vocab_size,
            eos_token_ids=frozenset(served.info.eos_token_ids),
            head=self._drafting.head,
            default_draft_tokens=min(self._config.num_draft_tokens, max_draft_tokens),
            max_draft_tokens=max_draft_tokens,
            created=served.connected_at,
        )

    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer. Raises TargetUnavailable while the target is away."""
        return self._connected().tokenizer

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yields a delta a round. Raises QueueFull, TargetUnavailable."""
        card = self.card
        if self.num_running + self.num_waiting >= self._config.max_sequences + self._config.max_queue:
            raise QueueFull(f"{self.num_running} requests are running and {self.num_waiting} waiting already")
        sequence = new_sequence(request, self.tokenizer(), card.eos_token_ids)
        self._observer.request_began(sequence, card.model)
        self._scheduler.waiting.append(sequence)
        self._wake.set()
        try:
            while True:
                delta = await sequence.deltas.get()
                if isinstance(delta, GenerationError):
                    raise delta
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            sequence.cancelled = True
            self._wake.set()
            self._observer.request_ended(sequence)

    @property
    def is_connected(self) -> bool:
        """Whether the target is there."""
        return self._served is not None

    @property
    def num_running(self) -> int:
        """Requests that step."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._scheduler.waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the target's pages in use after the last round; 0 while the target is away."""
        return 1 - self._served.free_pages / self._served.info.num_pages if self._served else 0.0

    @property
    def is_degraded(self) -> bool:
        """Whether a draft is configured but away."""
        return self._drafting.max_draft_tokens > 0 and not self._drafting.head

    def _connected(self) -> Served:
        if self._served is None:
            raise TargetUnavailable(f"the target at {self._target.address} is not connected")
        return self._served

    # ---- the loop -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connects to the target and makes rounds, for ever; connects again when the target went away."""
        while True:
            try:
                served = await self._connect()
                while True:
                    await self._wait_for_work()
                    await self._make_round(served)
            except TargetUnavailable as error:
                log.error("%s", error)
                self._fail_all(error)
            except EyasError as error:
                if self.fault is None:
                    log.error("the target at %s cannot be served: %s", self._target.address, error)
                self.fault = error
            except Exception:
                # A fault of ours must not leave every client waiting: these requests fail, and a new stream frees
                # what the services hold for them.
                log.exception("round %d failed", self._round)
                self._fail_all(GenerationError("internal error: the round failed"))
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _connect(self) -> Served:
        info, files = await self._target.connect()
        self._served = Served(info, Tokenizer(files), int(time.time()), info.num_pages)
        self.fault = None
        log.info("connected to target %s at %s", info.model, self._target.address)
        return self._served

    async def _wait_for_work(self) -> None:
        while not (self._scheduler.has_work or self._drafting.has_work):
            self._wake.clear()
            self._observer.flush()
            await self._wake.wait()
            self._round_ended = time.perf_counter()

    async def _make_round(self, served: Served) -> None:
        """plan -> draft -> verify -> accept and commit."""
        began = self._round_ended
        self._round += 1
        info = served.info
        shares = self._scheduler.plan(served.free_pages, info.page_size, info.max_rows)
        closes = self._scheduler.take_closes()
        if not shares and not closes:
            await asyncio.sleep(FULL_SECONDS)
        drafted = await self._drafting.propose(
            self._round,
            [share.sequence for share in shares],
            closes,
            room=info.max_rows - sum(share.num_fed for share in shares),
            vocab_size=info.vocab_size,
        )
        request = self._step_request(shares, closes)

        def while_waiting() -> None:
            self._drafting.send_ahead(self._round, shares)
            self._observer.flush()

        response, verified = await self._target.step(request, while_waiting)
        self._round_ended = time.perf_counter()
        served.free_pages = response.free_pages
        times = _times(self._round_ended - began, drafted, verified)
        blocks = tuple(
            self._commit(share, result, times) for share, result in zip(shares, response.results, strict=True)
        )
        if any(result.status == target_pb2.BLOCK_STATUS_NO_PAGES for result in response.results):
            preempted = self._scheduler.preempt_youngest()
            log.info("no pages are left: a sequence of %d tokens goes back to the queue", len(preempted.tokens))
        self._observer.round_ended(RoundRecord(self._round, began, times, drafted, verified, blocks))

    def _step_request(self, shares: Seq[Share], closes: Seq[Close]) -> target_pb2.StepRequest:
        request = target_pb2.StepRequest(round=self._round)
        for close in closes:
            request.closes.add(sequence_id=close.sequence_id)
        for share in shares:
            sequence, begin = share.sequence, share.sequence.num_computed
            if not sequence.opened:
                request.opens.add(
                    sequence_id=sequence.id,
                    epoch=sequence.epoch,
                    sampling=sequence.sampling(),
                    subscription_id=self._drafting.subscription_of(sequence),
                    traceparent=sequence.traceparent,
                )
                sequence.opened = True
            request.blocks.add(
                sequence_id=sequence.id,
                epoch=sequence.epoch,
                start=begin,
                tokens=sequence.tokens[begin : begin + share.num_fed] + sequence.drafts,
                num_scored=1 + len(sequence.drafts) if share.is_last_chunk else 0,
            )
        return request

    def _commit(self, share: Share, result: target_pb2.BlockResult, times: RoundTimes) -> SequenceRecord:
        """Accepts and commits what the target says of one block, and gives it to the client."""
        sequence, start, num_drafts = share.sequence, share.sequence.num_computed, len(share.sequence.drafts)
        if result.status == target_pb2.BLOCK_STATUS_NO_PAGES:
            return SequenceRecord(sequence, start, 0, 0)
        if result.status != target_pb2.BLOCK_STATUS_OK:
            raise TargetUnavailable(f"the target has lost a sequence (status {result.status})")
        sequence.started_at = sequence.started_at or self._round_ended - times.total
        sequence.times += times
        sequence.num_computed += share.num_fed
        sequence.feature_round = self._round
        if not result.sampled_tokens:
            return SequenceRecord(sequence, start, share.num_fed, 0)
        block = accept(sequence.drafts, result.sampled_tokens)
        committed = commit(sequence.commit, block, sequence.num_rounds)
        num_accepted = sum(token.source is TokenSource.DRAFT for token in committed.tokens)
        sequence.tokens += (token.id for token in committed.tokens)
        sequence.num_computed += num_accepted
        if sequence.num_rounds == 0:
            self._observer.first_token(sequence)
        sequence.num_rounds += 1
        sequence.num_drafts += num_drafts > 0
        sequence.num_draft_tokens += num_drafts
        self._deliver(sequence, committed)
        return SequenceRecord(sequence, start, share.num_fed, num_drafts, num_accepted, len(committed.tokens))

    def _deliver(self, sequence: Sequence, committed: Committed) -> None:
        finished = committed.finish_reason is not None
        if finished:
            self._scheduler.retire(sequence)
        stats = sequence.stats() if finished else None
        sequence.deltas.put_nowait(Delta(committed.tokens, committed.text, committed.finish_reason, stats))

    def _fail_all(self, error: GenerationError) -> None:
        self._served = None
        self._drafting.step_failed()
        for sequence in self._scheduler.drop_all():
            sequence.deltas.put_nowait(error)


def _times(total: float, drafted: Exchange, verified: Exchange) -> RoundTimes:
    return RoundTimes(
        draft=drafted.compute,
        target=verified.compute,
        wire=drafted.wire + verified.wire,
        gateway=total - drafted.round_trip - verified.round_trip,
    )
