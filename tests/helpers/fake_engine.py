"""A Generator without a model: commits a fixed answer in blocks, and counts what is open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field

from gateway.commit import CommitState, commit
from gateway.request import (
    Delta,
    GenerationError,
    GenerationRequest,
    GenerationStats,
    ModelCard,
    RoundTimes,
    TokenSource,
)
from gateway.stop_strings import StopStrings
from gateway.text import TextStream, Tokenizer
from tests.helpers.tiny_tokenizer import END_OF_TEXT, IM_END, VOCAB_SIZE, tiny_tokenizer_files

CARD = ModelCard(
    model="org/tiny",
    context_length=128,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=frozenset({IM_END, END_OF_TEXT}),
    head="tiny-head",
    default_draft_tokens=3,
    max_draft_tokens=8,
    created=1700000000,
)
ANSWER = "Hello, 세계 😀!"


def numbered_answer(request: GenerationRequest) -> list[int]:
    """ANSWER, then the choice's index, then the end of the sequence."""
    return [*f"{ANSWER}{request.sampling.choice_index}".encode(), IM_END]


@dataclass
class FakeEngine:
    """Serves `answer(request)` in blocks of 1 + num_draft_tokens. With `fail_at` or `hang_at` a generation
    raises `error`, or waits for ever, in place of that delta (from 0)."""

    answer: Callable[[GenerationRequest], list[int]] = numbered_answer
    served: ModelCard = CARD
    error: Exception = field(default_factory=lambda: GenerationError("the round went wrong"))
    fail_at: int | None = None
    hang_at: int | None = None
    target_error: GenerationError | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    num_open: int = 0
    tokenizer_files: dict[str, bytes] = field(default_factory=tiny_tokenizer_files)

    def __post_init__(self) -> None:
        self._tokenizer = Tokenizer(self.tokenizer_files)
        self._changed = asyncio.Condition()

    @property
    def card(self) -> ModelCard:
        if self.target_error is not None:
            raise self.target_error
        return self.served

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    async def wait_for(self, num_open: int) -> None:
        """Returns once that many generations are open; hangs (until the test's limit) if they never are."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.num_open == num_open)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        await self._count(1)
        try:
            for i, delta in enumerate(self._deltas(request)):
                if i == self.fail_at:
                    raise self.error
                if i == self.hang_at:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                yield delta
        finally:
            await self._count(-1)

    async def _count(self, change: int) -> None:
        async with self._changed:
            self.num_open += change
            self._changed.notify_all()

    def _deltas(self, request: GenerationRequest) -> Iterator[Delta]:
        stop, text = StopStrings(request.stop), TextStream(self._tokenizer)
        state = CommitState(request.max_tokens, self.served.eos_token_ids, stop, text)
        ids, size = self.answer(request), 1 + request.num_draft_tokens
        for round, start in enumerate(range(0, len(ids), size)):
            block = [(token_id, TokenSource.DRAFT) for token_id in ids[start : start + size]]
            block[-1] = (block[-1][0], TokenSource.TARGET)
            done = commit(state, block, round)
            finished = done.finish_reason is not None
            stats = _stats(request, state, round + 1) if finished else None
            yield Delta(done.tokens, done.text, done.finish_reason, stats)
            if finished:
                return


def _stats(request: GenerationRequest, state: CommitState, num_rounds: int) -> GenerationStats:
    drafts = num_rounds if request.num_draft_tokens else 0
    return GenerationStats(
        prompt_tokens=len(request.prompt_ids),
        completion_tokens=state.completion_tokens,
        num_rounds=num_rounds,
        num_drafts=drafts,
        num_draft_tokens=drafts * request.num_draft_tokens,
        num_accepted_tokens=state.num_accepted_tokens,
        queue_seconds=0.001,
        times=RoundTimes(draft=0.002, target=0.003, wire=0.004, gateway=0.005),
    )
