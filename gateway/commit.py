"""The one place that looks inside an accepted block: it commits it token by token.

Stop ids, stop strings, the token limit, counters and text are decided for each token as if it had come alone,
so where a block begins or ends cannot be seen in an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.request import CommittedToken, FinishReason, TokenSource
from gateway.stop_strings import StopStrings
from gateway.text import TextStream


@dataclass
class CommitState:
    """What is known of one answer; only `commit` changes it.

    `eos_token_ids` end it and are not shown; `stop` strings end it and are cut off; `max_tokens` >= 1 counts
    every token. The counters are those of committed tokens only.
    """

    max_tokens: int
    eos_token_ids: frozenset[int]
    stop: StopStrings
    text: TextStream
    completion_tokens: int = field(default=0, init=False)
    num_accepted_tokens: int = field(default=0, init=False)  # committed tokens that the draft proposed
    finish_reason: FinishReason | None = field(default=None, init=False)


@dataclass(frozen=True, slots=True)
class Committed:
    """What a block gave. `tokens` is how far the block went: the rest of it, behind a finish, never was. `text`
    lacks what may still become a stop string or a character; with a `finish_reason` nothing is held back."""

    tokens: tuple[CommittedToken, ...]
    text: str
    finish_reason: FinishReason | None


def commit(state: CommitState, block: Sequence[tuple[int, TokenSource]], round: int) -> Committed:
    """Commits an accepted block (ids with their sources, in order) of round number `round`.

    A finished answer takes no more tokens: a block for it is refused with ValueError.
    """
    if state.finish_reason is not None:
        raise ValueError("the answer is finished already")
    tokens: list[CommittedToken] = []
    parts: list[str] = []
    for token_id, source in block:
        tokens.append(CommittedToken(token_id, source, round))
        parts.append(_commit_token(state, token_id, source))
        if state.finish_reason is not None:
            break
    return Committed(tuple(tokens), "".join(parts), state.finish_reason)


def _commit_token(state: CommitState, token_id: int, source: TokenSource) -> str:
    """Text that became final. A stop counts before the limit where one token is both."""
    state.completion_tokens += 1
    state.num_accepted_tokens += source is TokenSource.DRAFT
    if token_id in state.eos_token_ids:
        state.finish_reason = FinishReason.STOP
        return _flush(state)
    text = state.stop.push(state.text.push(token_id))
    if state.stop.hit:
        state.finish_reason = FinishReason.STOP
    elif state.completion_tokens >= state.max_tokens:
        state.finish_reason = FinishReason.LENGTH
        return text + _flush(state)
    return text


def _flush(state: CommitState) -> str:
    return state.stop.push(state.text.flush()) + state.stop.flush()
