"""Round by round the services accept exactly what a slow, cache-free reference of the same head accepts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.models import DEFAULT_HEAD, resolve_head
from gateway.text import Tokenizer
from tests.helpers.default_model import default_target
from tests.helpers.engine import Answer, ask, running_gateway
from tests.helpers.equivalence import HEADS, requests
from tests.helpers.reference_head import ReferenceHead, acceptance_length, target_features
from tests.helpers.services import running_draft, running_target
from tests.helpers.tiny_heads import HeadKind
from tests.helpers.tiny_models import make_head

pytest_plugins = ("tests.helpers.tiny_fixtures",)

MT_BENCH = Path(__file__).parents[2] / "benchmarks" / "prompts" / "mt_bench.jsonl"
NUM_QUESTIONS = 4
K = 3
MAX_TOKENS = 256


def counts(answer: Answer) -> list[int]:
    """Accepted drafts of every round that drafted: not the prompt's, and not one with a single token left."""
    assert answer.stats is not None
    assert len(answer.blocks) - 1 - answer.stats.num_drafts in (0, 1)
    drafted = answer.accepted[1 : 1 + answer.stats.num_drafts]
    assert sum(drafted) == sum(answer.accepted) == answer.stats.num_accepted_tokens
    return drafted


def reference_counts(
    head: ReferenceHead, model: Path, prompt: Sequence[int], answer: Answer, k: int, max_tokens: int
) -> list[int]:
    """The same by the reference, for the text that the services wrote."""
    features = target_features(model, [*prompt, *answer.ids], head.taps)
    return head.acceptance_run(prompt, answer.ids, features, k, max_tokens)


@pytest.mark.parametrize("kind", HEADS)
async def test_tiny_heads(kind: HeadKind, mild_target: Path, tmp_path: Path) -> None:
    """Four sequences in one batch, for several k, their prompts in chunks: none that leaves a single token, which
    would be drafted behind at once."""
    folder = make_head(tmp_path / kind, kind, mild_target, imitate=True)
    asked = requests("greedy", 40)
    head = ReferenceHead(folder, mild_target)
    num_accepted = 0
    async with (
        running_target(mild_target, tmp_path) as target,
        running_draft(folder, tmp_path, target.address) as draft,
        running_gateway(target.address, draft.address, prefill_rows=5) as gateway,
    ):
        for k in (1, 2, 4):
            answers = await gateway.answers([replace(request, num_draft_tokens=k) for request in asked])
            for request, answer in zip(asked, answers, strict=True):
                expected = reference_counts(head, mild_target, request.prompt_ids, answer, k, 40)
                assert counts(answer) == expected
                num_accepted += sum(expected)
    assert num_accepted > 0


@pytest.mark.slow
async def test_default_head_on_mt_bench(tmp_path: Path) -> None:
    model, folder = default_target(), resolve_head(DEFAULT_HEAD, tmp_path)
    tokenizer = Tokenizer({path.name: path.read_bytes() for path in model.glob("*.json")})
    questions = [json.loads(line)["prompt"] for line in MT_BENCH.read_text().splitlines()[:NUM_QUESTIONS]]
    prompts = [
        tokenizer.encode(
            tokenizer.render_chat([{"role": "user", "content": question}]), add_special_tokens=False
        )
        for question in questions
    ]
    async with (
        running_target(model, tmp_path, dtype="float32", num_pages=256) as target,
        running_draft(folder, tmp_path, target.address, num_pages=256) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        answers = await gateway.answers([ask(prompt, MAX_TOKENS, k=K) for prompt in prompts])
    head = ReferenceHead(folder, model)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = reference_counts(head, model, prompt, answer, K, MAX_TOKENS)
        assert counts(answer) == expected
        assert acceptance_length(expected) > 1.5
