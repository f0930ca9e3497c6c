"""One token stream being generated, as the round engine sees it."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field

from eyas.v1 import common_pb2
from gateway.commit import CommitState
from gateway.request import Delta, GenerationError, GenerationRequest, GenerationStats, RoundTimes
from gateway.stop_strings import StopStrings
from gateway.text import TextStream, Tokenizer


@dataclass(eq=False)
class Sequence:
    """A request under way. The target holds KV of `tokens[:num_computed]`, the draft the slots before `num_slots`;
    the last token is never computed: it begins the next block."""

    request: GenerationRequest
    commit: CommitState
    tokens: list[int]
    id: int = field(default_factory=lambda: secrets.randbits(64))
    epoch: int = 0
    opened: bool = False  # at the target
    num_computed: int = 0
    feature_round: int = 0  # the last step that computed tokens of it
    attachment: int = 0  # number of the draft's stream that holds its slots; 0: none does
    num_slots: int = 0
    drafts: list[int] = field(default_factory=list)  # proposals for the next block
    cancelled: bool = False
    deltas: asyncio.Queue[Delta | GenerationError] = field(default_factory=asyncio.Queue)
    queued_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    traceparent: str = ""
    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    times: RoundTimes = field(default_factory=RoundTimes)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that the target has not seen yet: 1 while decoding, more while the prompt goes in."""
        return len(self.tokens) - self.num_computed

    @property
    def draft_budget(self) -> int:
        """Drafts that can be of use in the next block: none while the prompt goes in, and never as many as there
        are tokens left to generate, since every block brings one of its own."""
        return 0 if self.num_uncomputed > 1 else min(self.request.num_draft_tokens, self._num_left - 1)

    @property
    def next_draft_budget(self) -> int:
        """The same for the block behind the one on its way, which commits a token at least."""
        return max(0, min(self.request.num_draft_tokens, self._num_left - 2))

    @property
    def _num_left(self) -> int:
        return self.request.max_tokens - self.commit.completion_tokens

    def sampling(self) -> common_pb2.SamplingParams:
        """The law of its tokens, as the services read it."""
        law = self.request.sampling
        return common_pb2.SamplingParams(
            temperature=law.temperature,
            top_p=law.top_p,
            top_k=law.top_k,
            seed=law.seed,
            choice_index=law.choice_index,
        )

    def reopen(self) -> None:
        """After a preemption: everything is computed again, under a new epoch."""
        self.epoch += 1
        self.opened = False
        self.num_computed = self.feature_round = self.attachment = self.num_slots = 0
        self.drafts = []

    def stats(self) -> GenerationStats:
        """What it did so far."""
        return GenerationStats(
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=self.commit.completion_tokens,
            num_rounds=self.num_rounds,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.commit.num_accepted_tokens,
            queue_seconds=(self.started_at or time.perf_counter()) - self.queued_at,
            times=self.times,
        )


def new_sequence(request: GenerationRequest, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> Sequence:
    """A sequence that waits for its first round."""
    commit = CommitState(request.max_tokens, eos_token_ids, StopStrings(request.stop), TextStream(tokenizer))
    return Sequence(request, commit, list(request.prompt_ids))
