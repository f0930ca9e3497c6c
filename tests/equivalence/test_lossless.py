"""The test that decides: with any draft, any k and any company, token ids equal those of a plain run alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from tests.helpers.engine import Answer
from tests.helpers.equivalence import (
    HEADS,
    LAWS,
    LED_HEADS,
    PROMPTS,
    STAND_INS,
    check_acceptance,
    plain_answers,
    requests,
    speculating,
    texts,
)
from tests.helpers.reference_head import greedy_tokens
from tests.helpers.services import running_target

pytest_plugins = ("tests.helpers.tiny_fixtures",)

MAX_TOKENS = 24
EVERY_SHAPE = [*product(range(9), range(1, 5))]
EVERY_K_AND_SIZE = [*((k, 1 + k % 4) for k in range(9)), *((3, size) for size in range(1, 4))]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", [*HEADS, *STAND_INS, *LED_HEADS])
async def test_any_k_in_any_batch(name: str, law: str, mild_target: Path, tmp_path: Path) -> None:
    asked = requests(law, MAX_TOKENS)
    async with running_target(mild_target, tmp_path) as target:
        plain = await plain_answers(target, asked)
        seen: list[Answer] = []
        async with speculating(name, mild_target, target, tmp_path, texts(asked, plain)) as gateway:
            for k, size in EVERY_SHAPE if law == "greedy" and name in HEADS else EVERY_K_AND_SIZE:
                batch = [(k + i) % len(PROMPTS) for i in range(size)]
                answers = await gateway.answers([replace(asked[i], num_draft_tokens=k) for i in batch])
                assert [a.visible for a in answers] == [plain[i].visible for i in batch], (k, size)
                seen += answers
        check_acceptance(name, seen)
        await target.until_free()


@pytest.mark.parametrize("model", ["tiny_target", "mild_target"])
async def test_greedy_is_what_transformers_generates(
    model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    async with running_target(folder, tmp_path) as target:
        answers = await plain_answers(target, requests("greedy", MAX_TOKENS))
    assert [answer.ids for answer in answers] == [
        greedy_tokens(folder, prompt.encode(), MAX_TOKENS) for prompt in PROMPTS
    ]


async def test_a_seed_decides_and_nothing_else(mild_target: Path, tmp_path: Path) -> None:
    """Other seeds and other choices give other texts; the company a request was in does not."""
    [first, *_] = requests("hot", MAX_TOKENS)
    seeds = [replace(first, sampling=replace(first.sampling, seed=seed)) for seed in (1, 2)]
    choices = [replace(first, sampling=replace(first.sampling, choice_index=index)) for index in (1, 2)]
    async with running_target(mild_target, tmp_path) as target:
        plain = await plain_answers(target, [*seeds, *choices])
        assert len({tuple(answer.ids) for answer in plain}) == 4
        async with speculating("eagle3", mild_target, target, tmp_path, []) as gateway:
            asked = [replace(request, num_draft_tokens=3) for request in (*choices, *seeds)]
            answers = await gateway.answers(asked)
    assert [a.ids for a in answers] == [a.ids for a in (*plain[2:], *plain[:2])]
