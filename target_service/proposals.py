"""Proposals that drafts hand in at the target, for blocks that run ahead. Event loop only."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from eyas.v1 import target_pb2

MAX_PROPOSALS = 4096
"""A draft's proposals that nobody has taken yet; behind that the oldest goes."""


class Awaited(NamedTuple):
    """The proposal for the block of a sequence that follows round `after_round`."""

    sequence_id: int
    epoch: int
    after_round: int


class ProposalInbox:
    """What one draft has handed in, the last proposal of each sequence."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, target_pb2.DraftProposal] = OrderedDict()
        self._waiting: list[tuple[Sequence[Awaited], asyncio.Future[None]]] = []
        self._is_closed = False

    def add(self, message: target_pb2.DraftProposals) -> None:
        """Takes a message in."""
        for proposal in message.proposals:
            self._last[proposal.sequence_id] = proposal
            self._last.move_to_end(proposal.sequence_id)
        while len(self._last) > MAX_PROPOSALS:
            self._last.popitem(last=False)
        self._wake()

    def close(self) -> None:
        """The draft is gone: what has not come will not come."""
        self._is_closed = True
        self._wake()

    async def wait(self, awaited: Sequence[Awaited], seconds: float) -> bool:
        """Returns once all of them are there, or will not come any more: True; or after `seconds`: False."""
        if self._is_settled(awaited):
            return True
        waiting = awaited, asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await waiting[1]
            return self._is_settled(awaited)
        finally:
            self._waiting.remove(waiting)

    def take(self, awaited: Iterable[Awaited]) -> dict[int, Sequence[int]]:
        """The draft tokens by sequence id, of those that are there; they are not kept."""
        return {
            each.sequence_id: self._last.pop(each.sequence_id).draft_tokens
            for each in awaited
            if self._has(each)
        }

    def _wake(self) -> None:
        for awaited, settled in self._waiting:
            if not settled.done() and self._is_settled(awaited):
                settled.set_result(None)

    def _is_settled(self, awaited: Iterable[Awaited]) -> bool:
        return self._is_closed or all(map(self._has, awaited))

    def _has(self, awaited: Awaited) -> bool:
        found = self._last.get(awaited.sequence_id)
        return found is not None and (found.epoch, found.after_round) == (awaited.epoch, awaited.after_round)
