"""Requests at random, in random company and under random pressure: each says what it says alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.request import GenerationRequest
from tests.helpers.engine import Answer, Gateway, ask, running_gateway
from tests.helpers.equivalence import HEADS, LAWS, speculating
from tests.helpers.services import RunningTarget, running_target

pytest_plugins = ("tests.helpers.tiny_fixtures",)

DRAFTS = (*HEADS, "scripted", "scripted head", "liar head")
WORDS = ("a", "an eyas", "hunts at dawn", "and returns to its nest")
STOPS = ("a", "X", "\ufffd\ufffd", "f\ufffd", "0")


@dataclass(frozen=True)
class Client:
    """A request, when it comes, and after how many rounds its client loses interest."""

    request: GenerationRequest
    k: int
    delay_ms: int
    cancel_after: int | None


@dataclass(frozen=True)
class Schedule:
    draft: str
    clients: tuple[Client, ...]
    num_pages: int
    prefill_rows: int
    max_sequences: int


requests = st.builds(
    lambda prompt, max_tokens, law, seed, stop: ask(
        prompt, max_tokens, sampling=replace(LAWS[law], seed=seed), stop=stop
    ),
    st.sampled_from(WORDS),
    st.integers(1, 24),
    st.sampled_from(sorted(LAWS)),
    st.integers(0, 2),
    st.lists(st.sampled_from(STOPS), max_size=2, unique=True).map(tuple),
)
clients = st.builds(Client, requests, st.integers(0, 6), st.integers(0, 20), st.none() | st.integers(1, 8))
schedules = st.builds(
    Schedule,
    st.sampled_from(DRAFTS),
    st.lists(clients, min_size=1, max_size=7).map(tuple),
    st.sampled_from([12, 30, 100]),
    st.sampled_from([1, 7, 256]),
    st.sampled_from([1, 3, 16]),
)


async def alone(target: RunningTarget, schedule: Schedule) -> list[Answer]:
    async with running_gateway(target.address) as gateway:
        return [await gateway.answer(client.request) for client in schedule.clients]


async def visit(gateway: Gateway, client: Client) -> Answer:
    await asyncio.sleep(client.delay_ms / 1000)
    return await gateway.answer(replace(client.request, num_draft_tokens=client.k), client.cancel_after)


@given(schedule=schedules)
@settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
async def test_random_schedule(
    schedule: Schedule, mild_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("schedule")
    async with running_target(mild_target, folder, num_pages=schedule.num_pages, page_size=4) as target:
        plain = await alone(target, schedule)
        known = [[*c.request.prompt_ids, *a.ids] for c, a in zip(schedule.clients, plain, strict=True)]
        async with speculating(
            schedule.draft,
            mild_target,
            target,
            folder,
            known,
            prefill_rows=schedule.prefill_rows,
            max_sequences=schedule.max_sequences,
        ) as gateway:
            answers = await asyncio.gather(*(visit(gateway, client) for client in schedule.clients))
        await target.until_free()
    for client, expected, answer in zip(schedule.clients, plain, answers, strict=True):
        if answer.finish_reason is None:
            assert len(answer.blocks) == client.cancel_after
            assert answer.ids == expected.ids[: len(answer.ids)]
            assert expected.text.startswith(answer.text)
        else:
            assert answer.visible == expected.visible
