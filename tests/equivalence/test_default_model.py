"""The default target with its default head: what speculation writes is what transformers generates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from eyas.models import DEFAULT_HEAD, resolve_head
from gateway.text import Tokenizer
from tests.helpers.default_model import default_target
from tests.helpers.engine import ask, running_gateway
from tests.helpers.reference_head import greedy_tokens
from tests.helpers.services import running_draft, running_target

QUESTIONS = ("Name three birds of prey.", "Why is the sky blue?")
MAX_TOKENS = 48


async def test_speculation_writes_what_transformers_generates(tmp_path: Path) -> None:
    model, head = default_target(), resolve_head(DEFAULT_HEAD, tmp_path)
    tokenizer = Tokenizer({path.name: path.read_bytes() for path in model.glob("*.json")})
    prompts = [
        tokenizer.encode(
            tokenizer.render_chat([{"role": "user", "content": question}]), add_special_tokens=False
        )
        for question in QUESTIONS
    ]
    asked = [ask(prompt, MAX_TOKENS, k=3) for prompt in prompts]
    async with (
        running_target(model, tmp_path, dtype="float32", num_pages=64) as target,
        running_draft(head, tmp_path, target.address) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        speculated = await gateway.answers(asked)
        plain = await gateway.answers([replace(request, num_draft_tokens=0) for request in asked])
    assert [a.visible for a in speculated] == [a.visible for a in plain]
    assert [a.ids for a in speculated] == [greedy_tokens(model, prompt, MAX_TOKENS) for prompt in prompts]
    assert all(sum(answer.accepted) > 10 for answer in speculated)
