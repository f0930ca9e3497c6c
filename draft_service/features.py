"""Features that have arrived from the target and wait for the slots they belong to. Event loop only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from eyas.transport import decode_tensor
from eyas.v1 import target_pb2


class Need(NamedTuple):
    """Features h_begin .. h_{end - 1} of a sequence, the last of them computed by step `round` of the target."""

    sequence_id: int
    epoch: int
    begin: int
    end: int
    round: int


@dataclass
class _Held:
    """Consecutive features of one sequence, from position `start`; the last ones came with step `round`."""

    epoch: int
    start: int = 0
    round: int = 0
    rows: list[torch.Tensor] = field(default_factory=list)  # one [width] each

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Position-addressed: what is held from `start` on is overwritten; behind a gap, everything is."""
        if not self.start <= start <= self.end:
            self.start, self.rows = start, []
        del self.rows[start - self.start :]
        self.rows.extend(rows)

    def drop_before(self, position: int) -> None:
        del self.rows[: max(0, position - self.start)]
        self.start = max(self.start, position)


class FeatureStore:
    """Features by sequence. Rows of sequences that are not open, or of another epoch, are dropped on arrival."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._arrival = asyncio.Condition()

    def open(self, sequence_id: int, epoch: int) -> None:
        """Begins to hold features for a sequence."""
        self._held[sequence_id] = _Held(epoch)

    def close(self, sequence_id: int, epoch: int) -> None:
        """Drops what is held for a sequence, unless it is open under another epoch by now."""
        held = self._held.get(sequence_id)
        if held is not None and held.epoch == epoch:
            del self._held[sequence_id]

    async def add(self, batch: target_pb2.FeatureBatch) -> None:
        """Takes a message in. Raises TransportError when it contradicts itself."""
        rows = decode_tensor(batch.rows)
        for span in batch.spans:
            held = self._held.get(span.sequence_id)
            if held is not None and held.epoch == span.epoch:
                held.write(span.start, rows[span.row : span.row + span.count])
                held.round = batch.round
        async with self._arrival:
            self._arrival.notify_all()

    async def wait(self, needs: Iterable[Need], seconds: float) -> None:
        """Returns once all that is needed has arrived, or after `seconds`."""
        waiting = [need for need in needs if not self._has(need)]
        if not waiting:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._arrival:
                await self._arrival.wait_for(lambda: all(map(self._has, waiting)))

    def take(self, need: Need) -> torch.Tensor | None:
        """[end - begin, width], or None where some are missing; what is taken is not kept."""
        if not self._has(need):
            return None
        held = self._held[need.sequence_id]
        rows = torch.stack(held.rows[need.begin - held.start : need.end - held.start])
        held.drop_before(need.end)
        return rows

    def _has(self, need: Need) -> bool:
        held = self._held.get(need.sequence_id)
        return (
            held is not None
            and held.epoch == need.epoch
            and held.round >= need.round
            and held.start <= need.begin
            and held.end >= need.end
        )
