"""Features on their way to the drafts: who subscribed to what, and the batches of a step."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from eyas.errors import StatusError, failed_precondition, invalid_argument
from eyas.transport import LAYOUT_VERSION, MAX_PAYLOAD_BYTES, encode_tensor
from eyas.v1 import common_pb2, target_pb2
from target_service.model import Hidden
from target_service.proposals import ProposalInbox
from target_service.spec import DecoderSpec

log = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 256 * 2**20
"""A draft that leaves more than this unread loses batches: its sequences go plain, the target never waits."""


class RowSpan(NamedTuple):
    """Rows [first_row, first_row + num_rows) of a step: consecutive positions of one sequence. A block that did not
    run has none."""

    sequence_id: int
    epoch: int
    start: int
    num_rows: int
    first_row: int
    committed: tuple[int, ...] = ()  # what the block commits, where its last row is scored
    not_run: bool = False


@dataclass
class Subscription:
    """One draft's feature stream. `taps` empty means the hidden state after the final norm."""

    id: int
    head: str
    taps: tuple[int, ...]
    unread_bytes: int = 0
    dropped_batches: int = 0
    proposals: ProposalInbox = field(default_factory=ProposalInbox)
    _queue: asyncio.Queue[target_pb2.FeatureBatch | StatusError] = field(default_factory=asyncio.Queue)
    _num_batches: int = 0

    def offer(self, batches: Iterable[target_pb2.FeatureBatch]) -> None:
        """Queues the batches of a step, or drops them when the draft has too much unread."""
        for batch in batches:
            batch.batch = self._num_batches + 1  # before it is measured, or the count of unread bytes drifts
            size = batch.ByteSize()
            if self.unread_bytes + size > MAX_UNREAD_BYTES:
                self.dropped_batches += 1
                log.warning(
                    "draft %s does not read its features: %d batches dropped", self.head, self.dropped_batches
                )
                continue
            self._num_batches += 1
            self.unread_bytes += size
            self._queue.put_nowait(batch)

    def end(self, error: StatusError) -> None:
        """Ends the stream behind the batches that are queued."""
        self._queue.put_nowait(error)

    async def batches(self) -> AsyncIterator[target_pb2.FeatureBatch]:
        """The queued batches, for ever. Raises what the stream is ended with."""
        while not isinstance(batch := await self._queue.get(), StatusError):
            self.unread_bytes -= batch.ByteSize()
            yield batch
        raise batch


class Subscriptions:
    """All feature streams of the target."""

    def __init__(self, spec: DecoderSpec) -> None:
        self._spec = spec
        self._open: dict[int, Subscription] = {}

    def subscribe(self, request: target_pb2.FeatureSubscribe) -> Subscription:
        """Opens a stream. Raises StatusError when head and target do not fit."""
        self._check(request)
        subscription = Subscription(secrets.randbits(64) or 1, request.head, tuple(request.source.taps))
        self._open[subscription.id] = subscription
        log.info(
            "draft %s subscribed: features over bytes, taps %s", request.head, subscription.taps or "final norm"
        )
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Ends a stream: features for it are dropped from now on, and nobody waits for its proposals."""
        self._open.pop(subscription.id, None)
        subscription.proposals.close()
        log.info("draft %s is gone", subscription.head)

    def get(self, subscription_id: int) -> Subscription | None:
        """The open stream of that id."""
        return self._open.get(subscription_id)

    @property
    def num_dropped_batches(self) -> int:
        """Batches that open streams lost because their drafts do not read."""
        return sum(subscription.dropped_batches for subscription in self._open.values())

    def _check(self, request: target_pb2.FeatureSubscribe) -> None:
        spec, source = self._spec, request.source
        if request.layout_version != LAYOUT_VERSION:
            raise _mismatch(request, "layout_version", request.layout_version, LAYOUT_VERSION)
        if request.hidden_size != spec.hidden_size:
            raise _mismatch(request, "hidden_size", request.hidden_size, spec.hidden_size)
        if request.vocab_size != spec.vocab_size:
            raise _mismatch(request, "vocab_size", request.vocab_size, spec.vocab_size)
        if source.final_norm == bool(source.taps):
            raise invalid_argument("subscribe.source", "must name either taps or the final norm")
        if source.taps and max(source.taps) > spec.num_layers:
            raise failed_precondition(
                "HEAD_MISMATCH",
                f"head {request.head!r} reads tap {max(source.taps)}, but the target has {spec.num_layers} layers",
            )
        if common_pb2.FEATURE_TRANSPORT_BYTES not in request.transports:
            raise failed_precondition(
                "NO_COMMON_TRANSPORT", "subscribe.transports: the target offers bytes only"
            )


def _mismatch(request: target_pb2.FeatureSubscribe, name: str, theirs: int, ours: int) -> StatusError:
    return failed_precondition(
        "HEAD_MISMATCH", f"head {request.head!r} was made for {name} {theirs}, but the target's is {ours}"
    )


def gather_features(hidden: Hidden, taps: Sequence[int]) -> torch.Tensor:
    """[rows, hidden] after the final norm, or [rows, len(taps) * hidden] of the taps in their order."""
    return torch.cat([hidden.taps[tap] for tap in taps], dim=-1) if taps else hidden.final


def make_batches(round_: int, rows: torch.Tensor, spans: Sequence[RowSpan]) -> list[target_pb2.FeatureBatch]:
    """Cuts the spans of one step into messages of at most MAX_PAYLOAD_BYTES. rows: all rows of the step."""
    limit = max(1, MAX_PAYLOAD_BYTES // (rows.shape[-1] * rows.element_size()))
    pieces = [piece for span in spans for piece in _cut(span, limit)]
    batches: list[list[RowSpan]] = []
    room = 0
    for piece in pieces:
        if piece.num_rows > room or not batches:
            batches.append([])
            room = limit
        batches[-1].append(piece)
        room -= piece.num_rows
    return [_make_batch(round_, rows, batch) for batch in batches]


def _cut(span: RowSpan, limit: int) -> list[RowSpan]:
    """The span in parts of at most `limit` rows; what it commits goes with the last."""
    begins = range(0, max(1, span.num_rows), limit)
    parts = [
        span._replace(
            start=span.start + i,
            num_rows=min(limit, span.num_rows - i),
            first_row=span.first_row + i,
            committed=(),
        )
        for i in begins
    ]
    return [*parts[:-1], parts[-1]._replace(committed=span.committed)]


def _make_batch(round_: int, rows: torch.Tensor, spans: Sequence[RowSpan]) -> target_pb2.FeatureBatch:
    message = target_pb2.FeatureBatch(round=round_)
    row = 0
    for span in spans:
        message.spans.add(
            sequence_id=span.sequence_id,
            epoch=span.epoch,
            start=span.start,
            count=span.num_rows,
            row=row,
            committed_tokens=span.committed,
            not_run=span.not_run,
        )
        row += span.num_rows
    parts = [rows[span.first_row : span.first_row + span.num_rows] for span in spans]
    message.rows.CopyFrom(encode_tensor(parts[0] if len(parts) == 1 else torch.cat(parts)))
    return message
