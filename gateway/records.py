"""What is noted of a round, for metrics and traces."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.exchange import Exchange
from gateway.request import RoundTimes
from gateway.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """One sequence's block in a round: `num_fed` committed tokens from position `start` on and `num_drafts` drafts
    went in; `num_accepted` drafts were accepted and `num_committed` tokens committed. All that follows from the
    last three is 0 for a prompt chunk, and for a block that found no pages."""

    sequence: Sequence
    start: int
    num_fed: int
    num_drafts: int
    num_accepted: int = 0
    num_committed: int = 0


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of the engine; `began` is on the clock of time.perf_counter, in seconds."""

    number: int
    began: float
    times: RoundTimes
    draft: Exchange
    target: Exchange
    blocks: tuple[SequenceRecord, ...]
