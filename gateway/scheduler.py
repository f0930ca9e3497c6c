"""Who steps in the next round: admission, the prompt budget, preemption. Pure bookkeeping; no sockets here."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from gateway.sequence import Sequence


class Share(NamedTuple):
    """A sequence's part in a round: `num_fed` of its uncomputed tokens go in."""

    sequence: Sequence
    num_fed: int

    @property
    def is_last_chunk(self) -> bool:
        """Whether nothing is left uncomputed, so that the last row is scored."""
        return self.num_fed == self.sequence.num_uncomputed


class Close(NamedTuple):
    """Tells the services to free what they hold for a sequence; `attachment` is that of its slots, or 0."""

    sequence_id: int
    attachment: int


class Scheduler:
    """Waiting and running sequences, and those whose state the services still have to free."""

    def __init__(self, max_sequences: int, prompt_rows: int) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._closes: list[Close] = []
        self._max_sequences = max_sequences
        self._prompt_rows = prompt_rows

    @property
    def has_work(self) -> bool:
        """Whether a round has anything to do."""
        return bool(self.running or self.waiting or self._closes)

    def plan(self, free_pages: int, page_size: int, max_rows: int) -> list[Share]:
        """Drops what was cancelled, admits what fits, and shares the `max_rows` of the round out: every sequence
        that decodes, then prompts up to their budget; oldest first."""
        self._drop_cancelled()
        self._admit(free_pages, page_size)
        decoding = [Share(s, 1) for s in self.running if s.num_uncomputed == 1][:max_rows]
        prompts = []
        budget = min(self._prompt_rows, max_rows - len(decoding))
        for sequence in self.running:
            if sequence.num_uncomputed > 1 and budget:
                prompts.append(Share(sequence, min(sequence.num_uncomputed, budget)))
                budget -= prompts[-1].num_fed
        return decoding + prompts

    def retire(self, sequence: Sequence) -> None:
        """The sequence steps no more; the next messages free what the services hold for it."""
        self.running.remove(sequence)
        self._closes.append(Close(sequence.id, sequence.attachment))

    def take_closes(self) -> list[Close]:
        """What the next messages have to free."""
        closes, self._closes = self._closes, []
        return closes

    def preempt_youngest(self) -> Sequence:
        """Gives up the pages of the sequence that was admitted last, and puts it back in front of the queue: it is
        computed again when there is room, and its text does not change."""
        sequence = self.running[-1]
        self.retire(sequence)
        sequence.reopen()
        self.waiting.appendleft(sequence)
        return sequence

    def drop_all(self) -> list[Sequence]:
        """Takes every sequence out, and returns them."""
        sequences = [*self.running, *self.waiting]
        for sequence in list(self.running):
            self.retire(sequence)
        self.waiting.clear()
        return sequences

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in self.running if s.cancelled]:
            self.retire(sequence)
        self.waiting = deque(s for s in self.waiting if not s.cancelled)

    def _admit(self, free_pages: int, page_size: int) -> None:
        """First come, first served, as long as the pages of the whole prompt are free."""
        # Admitted prompts that are still going in will take their pages in coming rounds.
        free_pages -= sum(s.num_uncomputed // page_size for s in self.running)
        while self.waiting and len(self.running) < self._max_sequences:
            needed = len(self.waiting[0].tokens) // page_size + 1
            if needed > free_pages:
                return
            free_pages -= needed
            self.running.append(self.waiting.popleft())
