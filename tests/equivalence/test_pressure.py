"""Prompts in chunks, preemption and cancellations leave no trace in any text."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.equivalence import (
    HEADS,
    LAWS,
    PROMPTS,
    check_acceptance,
    plain_answers,
    requests,
    speculating,
    texts,
)
from tests.helpers.services import running_target

pytest_plugins = ("tests.helpers.tiny_fixtures",)

DRAFTS = [*HEADS, "scripted", "scripted head"]
MAX_TOKENS = 24


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("prefill_rows", [1, 5, 16])
async def test_prompts_in_chunks(name: str, prefill_rows: int, mild_target: Path, tmp_path: Path) -> None:
    asked = requests("cool", MAX_TOKENS)
    async with running_target(mild_target, tmp_path) as target:
        plain = await plain_answers(target, asked)
        known = texts(asked, plain)
        async with speculating(
            name, mild_target, target, tmp_path, known, prefill_rows=prefill_rows
        ) as gateway:
            answers = await gateway.answers([replace(request, num_draft_tokens=3) for request in asked])
    assert [a.visible for a in answers] == [a.visible for a in plain]
    check_acceptance(name, answers)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", DRAFTS)
async def test_preemption(
    name: str, law: str, mild_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twenty pages of 4 tokens hold any one of the sequences, but not all four."""
    asked = requests(law, MAX_TOKENS)
    async with running_target(mild_target, tmp_path, num_pages=20, page_size=4) as target:
        plain = await plain_answers(target, asked)
        with caplog.at_level(logging.INFO, "gateway.engine"):
            async with speculating(name, mild_target, target, tmp_path, texts(asked, plain)) as gateway:
                for ks in (0, 0, 0, 0), (1, 1, 1, 1), (4, 4, 4, 4), (0, 3, 0, 5), (2, 0, 2, 0):
                    answers = await gateway.answers(
                        [replace(r, num_draft_tokens=k) for r, k in zip(asked, ks, strict=True)]
                    )
                    assert [a.visible for a in answers] == [a.visible for a in plain], ks
        await target.until_free()
    assert "goes back to the queue" in caplog.text


@pytest.mark.parametrize("name", DRAFTS)
async def test_answers_of_the_draft_late_now_and_then(name: str, mild_target: Path, tmp_path: Path) -> None:
    """A guard about as short as a proposal takes: any of them may be late, by any number of rounds."""
    asked = requests("cool", MAX_TOKENS)
    async with running_target(mild_target, tmp_path) as target:
        plain = await plain_answers(target, asked)
        known = texts(asked, plain)
        async with speculating(name, mild_target, target, tmp_path, known, draft_timeout_ms=1) as gateway:
            for k in (1, 3, 6):
                answers = await gateway.answers([replace(request, num_draft_tokens=k) for request in asked])
                assert [a.visible for a in answers] == [a.visible for a in plain], k
        await target.until_free()


@pytest.mark.parametrize("name", HEADS)
async def test_many_short_requests_leave_nothing_behind(name: str, mild_target: Path, tmp_path: Path) -> None:
    """Every one is answered alike, and all pages and slots come back (`speculating` waits for the draft's)."""
    asked = requests("cool", 4)
    async with running_target(mild_target, tmp_path) as target:
        plain = await plain_answers(target, asked)
        async with speculating(name, mild_target, target, tmp_path, []) as gateway:
            answers = await gateway.answers([replace(asked[i % 4], num_draft_tokens=i % 5) for i in range(200)])
        await target.until_free()
    assert all(answer.visible == plain[i % 4].visible for i, answer in enumerate(answers))


@pytest.mark.parametrize("name", DRAFTS)
async def test_cancellations_in_between(name: str, mild_target: Path, tmp_path: Path) -> None:
    asked = requests("hot", MAX_TOKENS)
    async with running_target(mild_target, tmp_path, num_pages=40, page_size=4) as target:
        plain = await plain_answers(target, asked)
        async with speculating(name, mild_target, target, tmp_path, texts(asked, plain)) as gateway:
            work = []
            for round_ in range(1, 9):
                for i in range(len(PROMPTS)):
                    request = replace(asked[i], num_draft_tokens=round_ % 4)
                    cancel_after = round_ if (round_ + i) % 2 else None
                    work.append(gateway.answer(request, cancel_after))
            answers = await asyncio.gather(*work)
        await target.until_free()
    for i, answer in enumerate(answers):
        whole = plain[i % len(PROMPTS)]
        assert answer.ids == whole.ids[: len(answer.ids)]
        if answer.finish_reason is not None:
            assert answer.visible == whole.visible
    assert any(answer.finish_reason is None for answer in answers)
