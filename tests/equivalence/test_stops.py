"""Where an answer ends does not show where its blocks began: stop ids, stop strings and limits, at every place of a
block whose drafts are all accepted."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from gateway.request import FinishReason, GenerationRequest
from tests.helpers.engine import Answer, Gateway, ask, running_gateway
from tests.helpers.equivalence import speculating
from tests.helpers.services import running_target
from tests.helpers.tiny_models import make_target
from tests.helpers.tiny_tokenizer import VOCAB_SIZE

K = 4
PROMPT = (1, 2, 3)
NUM_TOKENS = 24  # the prompt's round gives one, every round after it K + 1
LETTERS = "abcdefghijklmnopqrst"


def tokenizer_json() -> bytes:
    """Every token is two letters."""
    vocab = {"".join(pair): i for i, pair in enumerate(product(LETTERS, LETTERS)) if i < VOCAB_SIZE}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return backend.to_str().encode()


def set_eos(folder: Path, ids: Sequence[int]) -> None:
    """One id goes to config.json, the others to generation_config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": ids[0] if ids else None}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ids[1:]) or None}))


@pytest.fixture(scope="module")
def endless_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that never stops by itself, and whose text is letters."""
    folder = make_target(
        tmp_path_factory.mktemp("endless"),
        vocab_size=VOCAB_SIZE,
        tokenizer_files={"tokenizer.json": tokenizer_json()},
    )
    set_eos(folder, [])
    return folder


@pytest.fixture(params=["oracle", "oracle head"])
def draft(request: pytest.FixtureRequest) -> str:
    """One that is asked behind every step, and one that is told of it ahead."""
    return str(request.param)


@asynccontextmanager
async def oracle_gateway(model: Path, folder: Path, draft: str, text: Sequence[int]) -> AsyncIterator[Gateway]:
    """A gateway whose draft knows the text."""
    async with (
        running_target(model, folder) as target,
        speculating(draft, model, target, folder, [text]) as gateway,
    ):
        yield gateway


async def whole_answer(model: Path, folder: Path) -> Answer:
    """A text that goes on behind all the ends that are put into it."""
    async with running_target(model, folder) as target, running_gateway(target.address) as gateway:
        return await gateway.answer(ask(PROMPT, 2 * NUM_TOKENS))


async def check(gateway: Gateway, request: GenerationRequest) -> Answer:
    """The answer, which is the same with and without drafts, to the last count."""
    plain, drafted = await gateway.answers([request, replace(request, num_draft_tokens=K)])
    assert drafted.visible == plain.visible
    assert plain.stats is not None
    assert drafted.stats is not None
    assert drafted.stats.completion_tokens == plain.stats.completion_tokens == len(plain.ids)
    assert drafted.stats.num_accepted_tokens == sum(drafted.accepted)
    assert drafted.stats.num_rounds == 1 + -(-(len(plain.ids) - 1) // (K + 1))
    return drafted


def first_occurrences(ids: Sequence[int]) -> Iterator[int]:
    """Places of ids that did not come before."""
    return (i for i, token in enumerate(ids) if token not in ids[:i])


async def test_max_tokens_at_every_place(endless_target: Path, tmp_path: Path, draft: str) -> None:
    whole = await whole_answer(endless_target, tmp_path)
    async with oracle_gateway(endless_target, tmp_path, draft, [*PROMPT, *whole.ids]) as gateway:
        for max_tokens in range(1, NUM_TOKENS):
            answer = await check(gateway, ask(PROMPT, max_tokens))
            cut = whole.ids[:max_tokens], whole.text[: 2 * max_tokens]
            assert answer.visible == (*cut, FinishReason.LENGTH)


async def test_eos_at_every_place(endless_target: Path, tmp_path: Path, draft: str) -> None:
    """Nothing behind it is committed, though the target accepts it; at the limit it still counts as a stop, and one
    behind the limit is not seen."""
    whole = await whole_answer(endless_target, tmp_path)
    for place in list(first_occurrences(whole.ids[: 2 * (K + 1)])):
        model = shutil.copytree(endless_target, tmp_path / f"eos{place}")
        unused = next(i for i in range(VOCAB_SIZE) if i not in whole.ids)
        set_eos(model, [unused, whole.ids[place]])
        async with oracle_gateway(model, tmp_path, draft, [*PROMPT, *whole.ids]) as gateway:
            for max_tokens in (max(1, place), place + 1, place + 2, NUM_TOKENS):
                answer = await check(gateway, ask(PROMPT, max_tokens))
                stopped = max_tokens > place
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                assert answer.visible == (whole.ids[: place + stopped], whole.text[: 2 * place], reason)


async def test_stop_strings_inside_and_across_blocks(endless_target: Path, tmp_path: Path, draft: str) -> None:
    whole = await whole_answer(endless_target, tmp_path)
    seen = set()
    async with oracle_gateway(endless_target, tmp_path, draft, [*PROMPT, *whole.ids]) as gateway:
        for begin, length in product(range(4 * (K + 1)), (1, 2, 3, 5, 12)):
            stop = whole.text[begin : begin + length]
            if whole.text.index(stop) != begin:
                continue
            answer = await check(gateway, ask(PROMPT, NUM_TOKENS, stop=("never", stop)))
            num_tokens = -(-(begin + length) // 2)
            assert answer.visible == (whole.ids[:num_tokens], whole.text[:begin], FinishReason.STOP)
            blocks = {1 + (i - 1) // (K + 1) if i else 0 for i in range(begin // 2, num_tokens)}
            seen.add(len(blocks))
    assert seen == {1, 2, 3}


async def test_a_stop_string_behind_the_limit_is_not_seen(
    endless_target: Path, tmp_path: Path, draft: str
) -> None:
    whole = await whole_answer(endless_target, tmp_path)
    async with oracle_gateway(endless_target, tmp_path, draft, [*PROMPT, *whole.ids]) as gateway:
        for max_tokens in range(2, 2 * (K + 1)):
            stop = whole.text[2 * max_tokens - 3 : 2 * max_tokens + 1]
            answer = await check(gateway, ask(PROMPT, max_tokens, stop=(stop,)))
            cut = whole.ids[:max_tokens], whole.text[: 2 * max_tokens]
            assert answer.visible == (*cut, FinishReason.LENGTH)
