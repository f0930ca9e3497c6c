"""One sequence at a target and at a draft, kept in step as a gateway does, with a text that the test chooses."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from eyas.v1 import draft_pb2, target_pb2
from tests.helpers.messages import DRAFTED, OK, block, extend, opening, propose, slots, step
from tests.helpers.services import RunningDraft, RunningTarget, draft_stub, exchange, target_stub


@dataclass
class Streams:
    """The round streams of one gateway."""

    steps: Any
    proposals: Any
    subscription: int
    round: int = 0

    async def step(self, *blocks: target_pb2.Block, **rest: Any) -> target_pb2.StepResponse:
        """Runs the next round at the target."""
        self.round += 1
        response: target_pb2.StepResponse = await exchange(self.steps, step(*blocks, round=self.round, **rest))
        assert response.round == self.round
        return response

    async def propose(self, *extends: draft_pb2.Extend, **rest: Any) -> draft_pb2.ProposeResponse:
        """Asks the draft, in the name of the last round."""
        response: draft_pb2.ProposeResponse = await exchange(
            self.proposals, propose(*extends, round=self.round, **rest)
        )
        assert response.round == self.round
        return response


@asynccontextmanager
async def streams(target: RunningTarget, draft: RunningDraft) -> AsyncIterator[Streams]:
    """A gateway's streams to both services."""
    async with target_stub(target.address) as to_target, draft_stub(draft.address) as to_draft:
        info = await to_draft.GetDraftInfo(draft_pb2.GetDraftInfoRequest())
        yield Streams(to_target.Step(), to_draft.Propose(), info.subscription_id)


@dataclass
class Pair:
    """`text` is committed; the first `num_computed` tokens have features, the first `num_slots` have slots."""

    streams: Streams
    sequence: int = 1
    epoch: int = 0
    law: dict[str, Any] = field(default_factory=dict)
    text: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_slots: int = 0
    feature_round: int = 0

    async def open(self) -> None:
        """Opens the sequence at the draft, then at the target, as a gateway does."""
        await self.streams.propose(opens=[slots(self.sequence, self.epoch, **self.law)])
        named = opening(self.sequence, self.epoch, self.streams.subscription, **self.law)
        await self.streams.step(opens=[named])

    async def feed(self, num_tokens: int) -> None:
        """The target computes that many more tokens of the text."""
        await self.verify(self.text[self.num_computed : self.num_computed + num_tokens])
        self.num_computed += num_tokens

    async def verify(self, tokens: Sequence[int], num_scored: int | None = None) -> list[int]:
        """The target runs these tokens behind the computed ones and scores the last, or all; commits nothing."""
        scored = len(tokens) if num_scored is None else num_scored
        response = await self.streams.step(block(self.sequence, self.num_computed, tokens, scored, self.epoch))
        self.feature_round = self.streams.round
        (result,) = response.results
        assert result.status == OK
        return list(result.sampled_tokens)

    async def settle(self, drafts: Sequence[int], num_accepted: int, bonus: int) -> None:
        """Verifies the drafts behind the newest token; commits `num_accepted` of them and then `bonus`."""
        await self.verify([self.text[self.num_computed], *drafts])
        self.text += [*drafts[:num_accepted], bonus]
        self.num_computed += num_accepted + 1

    def extend(self, k: int, num_slots: int | None = None) -> draft_pb2.Extend:
        """The message that writes slots up to `num_slots`, or all that have features, and asks for k drafts."""
        end = self.num_computed if num_slots is None else num_slots
        tokens = self.text[self.num_slots + 1 : end + 1]
        return extend(self.sequence, self.num_slots, tokens, k, self.feature_round, self.epoch)

    async def verify_ahead(self, drafts: Sequence[int], k: int) -> draft_pb2.Proposal:
        """Verifies the drafts behind the newest token, commits what the target commits, and gets the k drafts
        behind it, for which the draft was asked before the step was sent."""
        feature_round = self.streams.round + 1
        begin, known = self.num_slots, self.text[self.num_slots + 1 :]
        ahead = extend(self.sequence, begin, known, k, feature_round, self.epoch, then_committed=True)
        await self.streams.proposals.write(propose(ahead, round=feature_round))
        drawn = await self.verify([*self.text[self.num_computed :], *drafts], 1 + len(drafts))
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == drawn[num_accepted]:
            num_accepted += 1
        self.num_computed = len(self.text) + num_accepted
        self.text += drawn[: num_accepted + 1]
        self.num_slots = self.num_computed
        response: draft_pb2.ProposeResponse = await self.streams.proposals.read()
        (proposal,) = response.proposals
        return proposal

    async def draft(self, k: int, num_slots: int | None = None) -> list[int]:
        """Writes those slots and returns the drafts."""
        (proposal,) = (await self.streams.propose(self.extend(k, num_slots))).proposals
        assert (proposal.sequence_id, proposal.epoch) == (self.sequence, self.epoch)
        assert proposal.status == DRAFTED
        self.num_slots = self.num_computed if num_slots is None else num_slots
        return list(proposal.draft_tokens)


def words(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(512), k=length)


async def prompted(streams: Streams, length: int = 20, seed: int = 0, **fields: Any) -> Pair:
    """A sequence whose prompt is computed, with its next token known."""
    pair = Pair(streams, text=words(length + 1, seed), **fields)
    await pair.open()
    await pair.feed(length)
    return pair
