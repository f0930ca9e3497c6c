"""In bfloat16 too a token does not depend on what was verified beside it: rows are computed alike in any number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.cpu import skip_where_rows_interact
from tests.helpers.engine import Answer
from tests.helpers.equivalence import (
    HEADS,
    LAWS,
    LED_HEADS,
    PROMPTS,
    check_acceptance,
    plain_answers,
    requests,
    speculating,
    texts,
)
from tests.helpers.services import running_target
from tests.helpers.tiny_models import make_target
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer_files

MAX_TOKENS = 48


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    skip_where_rows_interact(torch.bfloat16)
    return make_target(
        tmp_path_factory.mktemp("bfloat16"),
        vocab_size=VOCAB_SIZE,
        layer_scale=0.05,
        dtype=torch.bfloat16,
        tokenizer_files=tiny_tokenizer_files(),
    )


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", [*HEADS, *LED_HEADS])
async def test_any_k(name: str, law: str, target_folder: Path, tmp_path: Path) -> None:
    asked = requests(law, MAX_TOKENS)
    async with running_target(target_folder, tmp_path) as target:
        plain = await plain_answers(target, asked)
        seen: list[Answer] = []
        async with speculating(name, target_folder, target, tmp_path, texts(asked, plain)) as gateway:
            for k in range(1, 7):
                request = replace(asked[k % len(PROMPTS)], num_draft_tokens=k)
                answer = await gateway.answer(request)
                assert answer.visible == plain[k % len(PROMPTS)].visible, k
                seen.append(answer)
            answers = await gateway.answers([replace(request, num_draft_tokens=3) for request in asked])
            assert [a.visible for a in answers] == [a.visible for a in plain]
        check_acceptance(name, [*seen, *answers])
