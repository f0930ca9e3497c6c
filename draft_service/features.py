"""Features that have arrived from the target and wait for the slots they belong to. Event loop only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eyas.transport import decode_tensor
from eyas.v1 import target_pb2


class Need(NamedTuple):
    """Features of a sequence from h_begin on, the last of them computed by step `round` of the target: `num_known`
    of them, and with `then_committed` as many more as that step commits tokens."""

    sequence_id: int
    epoch: int
    begin: int
    num_known: int
    round: int
    then_committed: bool = False


class Taken(NamedTuple):
    """Features [rows, width], and what the step committed where that was asked for."""

    rows: torch.Tensor
    committed: Sequence[int]


@dataclass
class _Held:
    """Consecutive features of one sequence, from position `start`; the last ones came with step `round`."""

    epoch: int
    start: int = 0
    round: int = 0
    rows: torch.Tensor | None = None  # [features, width]
    committed: Sequence[int] = ()  # by step `round`
    not_run: bool = False  # step `round` has no features of it

    @property
    def end(self) -> int:
        return self.start + (0 if self.rows is None else len(self.rows))

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Position-addressed: what is held from `start` on is overwritten; behind a gap, everything is."""
        if self.rows is not None and self.start < start <= self.end:
            self.rows = torch.cat((self.rows[: start - self.start], rows))
        else:
            self.start, self.rows = start, rows

    def take(self, begin: int, end: int) -> torch.Tensor:
        """Features h_begin .. h_{end - 1}, which must be held; they are not kept."""
        assert self.rows is not None
        taken, self.rows = self.rows[begin - self.start : end - self.start], self.rows[end - self.start :]
        self.start = end
        return taken


class FeatureStore:
    """Features by sequence. Rows of sequences that are not open, or of another epoch, are dropped on arrival."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._waiting: list[tuple[Sequence[Need], asyncio.Future[None]]] = []

    def open(self, sequence_id: int, epoch: int) -> None:
        """Begins to hold features for a sequence."""
        self._held[sequence_id] = _Held(epoch)

    def close(self, sequence_id: int, epoch: int) -> None:
        """Drops what is held for a sequence, unless it is open under another epoch by now."""
        held = self._held.get(sequence_id)
        if held is not None and held.epoch == epoch:
            del self._held[sequence_id]

    def add(self, batch: target_pb2.FeatureBatch) -> None:
        """Takes a message in. Raises TransportError when it contradicts itself."""
        rows = decode_tensor(batch.rows)
        for span in batch.spans:
            held = self._held.get(span.sequence_id)
            if held is not None and held.epoch == span.epoch:
                held.write(span.start, rows[span.row : span.row + span.count])
                held.round = batch.round
                held.committed = span.committed_tokens
                held.not_run = span.not_run
        for needs, arrived in self._waiting:
            if not arrived.done() and all(map(self._is_settled, needs)):
                arrived.set_result(None)

    async def wait(self, needs: Sequence[Need], seconds: float) -> None:
        """Returns once all that is needed has arrived, or will not arrive any more, or after `seconds`."""
        if all(map(self._is_settled, needs)):
            return
        waiting = needs, asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await waiting[1]
        finally:
            self._waiting.remove(waiting)

    def take(self, need: Need) -> Taken | None:
        """What is needed, or None where some is missing; what is taken is not kept."""
        held = self._held.get(need.sequence_id)
        if held is None or not self._has(need):
            return None
        committed = held.committed if need.then_committed else ()
        return Taken(held.take(need.begin, need.begin + need.num_known + len(committed)), committed)

    def _is_settled(self, need: Need) -> bool:
        """Whether waiting longer is of no use."""
        held = self._held.get(need.sequence_id)
        if held is None or held.epoch != need.epoch:
            return True
        lost = held.round > need.round if need.then_committed else False
        return self._has(need) or lost or (held.not_run and held.round >= need.round)

    def _has(self, need: Need) -> bool:
        held = self._held.get(need.sequence_id)
        if held is None or held.epoch != need.epoch or held.round < need.round or held.start > need.begin:
            return False
        if need.then_committed and (held.round != need.round or not held.committed):
            return False
        num_committed = len(held.committed) if need.then_committed else 0
        return held.end >= need.begin + need.num_known + num_committed
