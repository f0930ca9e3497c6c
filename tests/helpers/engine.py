"""The gateway's engine over real services, and what a test asks of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import Tracer
from prometheus_client.parser import text_string_to_metric_families

from eyas.config import GatewayConfig
from gateway.engine import Engine
from gateway.metrics import Metrics
from gateway.request import (
    CommittedToken,
    Delta,
    FinishReason,
    GenerationRequest,
    GenerationStats,
    Sampling,
    TokenSource,
)
from gateway.service import running_engine

GREEDY = Sampling(temperature=0, top_p=1, top_k=0, seed=0)


def ask(prompt: Sequence[int] | str, max_tokens: int = 32, k: int = 0, **fields: Any) -> GenerationRequest:
    """A greedy request for at most `max_tokens` with k drafts a round; a str is its bytes."""
    ids = tuple(prompt.encode() if isinstance(prompt, str) else prompt)
    settings = {"request_id": "test", "sampling": GREEDY, "stop": (), **fields}
    return GenerationRequest(prompt_ids=ids, max_tokens=max_tokens, num_draft_tokens=k, **settings)


@dataclass
class Answer:
    """What has come of a generation; complete once `finish_reason` is set."""

    tokens: list[CommittedToken] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stats: GenerationStats | None = None
    blocks: list[tuple[CommittedToken, ...]] = field(default_factory=list)  # by round

    def take(self, delta: Delta) -> None:
        """Adds what a round gave."""
        self.tokens += delta.tokens
        self.text += delta.text
        self.blocks.append(delta.tokens)
        self.finish_reason, self.stats = delta.finish_reason, delta.stats

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def accepted(self) -> list[int]:
        """Draft tokens that each round committed."""
        return [sum(token.source is TokenSource.DRAFT for token in block) for block in self.blocks]

    @property
    def visible(self) -> tuple[list[int], str, FinishReason | None]:
        """What a client sees, however it came about."""
        return self.ids, self.text, self.finish_reason


@dataclass(frozen=True)
class Gateway:
    """A gateway's engine at work."""

    engine: Engine
    metrics: Metrics

    async def answer(self, request: GenerationRequest, cancel_after: int | None = None) -> Answer:
        """Runs a generation to its end, or drops it after that many rounds."""
        answer = Answer()
        async with aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                answer.take(delta)
                if len(answer.blocks) == cancel_after:
                    break
        return answer

    async def answers(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        """Runs generations side by side."""
        return list(await asyncio.gather(*map(self.answer, requests)))

    def counter(self, name: str, **labels: str) -> float:
        """A sample of the Prometheus metrics; 0 where there is none yet."""
        families = text_string_to_metric_families(self.metrics.render().decode())
        samples = (sample for family in families for sample in family.samples)
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@asynccontextmanager
async def running_gateway(
    target: str, draft: str | None = None, *, tracer: Tracer | None = None, wait: bool = True, **config: Any
) -> AsyncIterator[Gateway]:
    """A gateway between the services at these addresses; `config` sets further fields of GatewayConfig. With
    `wait` the services are there before the block is entered."""
    metrics = Metrics()
    async with running_engine(GatewayConfig(target=target, draft=draft, **config), metrics, tracer) as engine:
        if wait:
            await until(lambda: engine.is_connected and not engine.is_degraded)
        yield Gateway(engine, metrics)


async def until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; the test's own limit ends a wait for what never comes."""
    while not condition():
        await asyncio.sleep(0.005)
