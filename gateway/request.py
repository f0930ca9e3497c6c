"""The nouns that the gateway's front doors (REST, gRPC) and its round engine share."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol


class TokenSource(enum.Enum):
    """Who first proposed a committed token."""

    TARGET = "target"
    DRAFT = "draft"


class FinishReason(enum.Enum):
    """Why a generation ended; values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; every value resolved and checked at the front door.

    `temperature` in [0, 100] (0 is greedy), `top_p` in (0, 1] (1 keeps all), `top_k` >= 0 (0 keeps all),
    `seed` in [0, 2**64).
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice_index: int = 0


@dataclass(frozen=True)
class GenerationRequest:
    """One choice of one request, ready for the engine."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    num_draft_tokens: int  # k asked for; 0 decodes plainly
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class CommittedToken:
    """One token of the answer. `round` counts this request's rounds from 0 (the one that scored the prompt)."""

    id: int
    source: TokenSource
    round: int


@dataclass(frozen=True)
class RoundTimes:
    """Seconds that a request's rounds spent in each place; they add up to the time from first to last round."""

    draft: float = 0.0
    target: float = 0.0
    wire: float = 0.0
    gateway: float = 0.0

    @property
    def total(self) -> float:
        """All four together."""
        return self.draft + self.target + self.wire + self.gateway

    def __add__(self, other: RoundTimes) -> RoundTimes:
        return RoundTimes(
            self.draft + other.draft,
            self.target + other.target,
            self.wire + other.wire,
            self.gateway + other.gateway,
        )


@dataclass(frozen=True)
class GenerationStats:
    """What a finished generation did. Speculation figures follow vLLM's definitions: only rounds that verified
    at least one draft token count as drafts, and acceptance length = 1 + num_accepted_tokens / num_drafts."""

    prompt_tokens: int
    completion_tokens: int
    num_rounds: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    queue_seconds: float
    times: RoundTimes


@dataclass(frozen=True)
class Delta:
    """What one round gave a request. `text` may lag behind `tokens` (see commit.py); the last delta has
    `finish_reason` and `stats`, and all text."""

    tokens: tuple[CommittedToken, ...]
    text: str
    finish_reason: FinishReason | None = None
    stats: GenerationStats | None = None


@dataclass(frozen=True)
class ModelCard:
    """What the gateway serves, as learnt from the target and the draft."""

    model: str
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    head: str  # empty while no draft is attached
    default_draft_tokens: int
    max_draft_tokens: int
    created: int = field(default=0)  # Unix seconds


class Generator(Protocol):
    """The round engine as the front doors see it."""

    @property
    def card(self) -> ModelCard:
        """What is served. Raises TargetUnavailable while the target has not been reached."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yields a delta a round. Closing the iterator (aclose, or cancelling its task) frees pages and slots
        within a round. Raises QueueFull before the first delta, TargetUnavailable at any time."""


class GenerationError(Exception):
    """A generation that could not go on; `str(error)` is fit for the client."""


class QueueFull(GenerationError):
    """Too many requests wait already."""


class TargetUnavailable(GenerationError):
    """The target service cannot be reached, or went away."""
