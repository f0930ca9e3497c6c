"""The decoder against transformers, and the independence of what shares a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from eyas_kernels.attention import BlockRows, plan_rows
from eyas_kernels.kv_cache import PageAllocator
from eyas_kernels.norm import rms_norm
from target_service.model import Decoder, Hidden
from tests.helpers.cpu import skip_where_rows_interact
from tests.helpers.default_model import default_target
from tests.helpers.reference_head import greedy_tokens, target_model
from tests.helpers.tiny_models import Family, make_target

FAMILIES: tuple[Family, ...] = get_args(Family)


class Runner:
    """A decoder with a cache; sequences are named by numbers."""

    def __init__(self, model: Decoder, num_pages: int = 100, page_size: int = 16) -> None:
        self.model = model
        self._allocator = PageAllocator(num_pages, page_size)
        self._cache = model.new_cache(num_pages, page_size)
        self._pages: dict[int, list[int]] = {}

    @torch.inference_mode()
    def hidden(self, *blocks: tuple[int, int, Sequence[int]], taps: Sequence[int] = ()) -> Hidden:
        """One step over blocks of (sequence, start, tokens)."""
        rows = []
        for sequence, start, tokens in blocks:
            pages = self._pages.setdefault(sequence, [])
            self._allocator.extend(pages, start + len(tokens))
            rows.append(BlockRows(start, len(tokens), pages))
        step = plan_rows(rows, self._allocator.page_size, "cpu", self.model.spec.sliding_window)
        every = [token for _, _, tokens in blocks for token in tokens]
        return self.model.forward(every, step, self._cache, frozenset(taps))

    def logits(self, *blocks: tuple[int, int, Sequence[int]]) -> torch.Tensor:
        return self.model.logits(self.hidden(*blocks).final)


def prompt(length: int, seed: int = 0, vocab: int = 512) -> list[int]:
    return list(torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def theirs(folder: Path, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = target_model(folder)(torch.tensor([list(tokens)])).logits[0]
    return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Decoder:
    return Decoder(folder)


# ---- transformers


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path: Path, family: Family, sharded: bool) -> None:
    """Beyond llama3's original context of 64 tokens, and over many pages."""
    folder, tokens = make_target(tmp_path, family, sharded=sharded), prompt(120)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or not sharded
    found = Runner(Decoder(folder)).logits((1, 0, tokens))
    torch.testing.assert_close(found, theirs(folder, tokens), atol=1e-4, rtol=0)


VARIANTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "tied embeddings": ("llama3", {"tied": True}),
    "tied and sharded": ("qwen3", {"tied": True, "sharded": True}),
    "biases in attention": ("llama", {"attention_bias": True}),
    "a head of its own width": ("llama", {"head_dim": 24}),
    "no grouped queries": ("qwen2", {"kv_heads": 4}),
    "a sliding window": ("mistral", {"sliding_window": 24}),
    "a window longer than the text": ("mistral", {"sliding_window": 400}),
    "linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4}}),
    "another epsilon": ("llama", {"rms_norm_eps": 0.3}),
}


@pytest.mark.parametrize(("family", "options"), VARIANTS.values(), ids=VARIANTS)
def test_variants_are_those_of_transformers(tmp_path: Path, family: Family, options: dict[str, Any]) -> None:
    folder, tokens = make_target(tmp_path, family, **options), prompt(120)
    runner = Runner(Decoder(folder))
    whole = theirs(folder, tokens)
    torch.testing.assert_close(runner.logits((1, 0, tokens)), whole, atol=1e-4, rtol=0)
    again = torch.cat([runner.logits((2, i, tokens[i : i + 7])) for i in range(0, 120, 7)])
    torch.testing.assert_close(again, whole, atol=1e-4, rtol=0)


def test_the_default_model_is_that_of_transformers() -> None:
    folder = default_target()
    tokens = prompt(40, vocab=49152)
    found = Runner(Decoder(folder, torch.float32)).logits((1, 0, tokens))
    torch.testing.assert_close(found, theirs(folder, tokens), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(tmp_path: Path, family: Family) -> None:
    folder, text = make_target(tmp_path, family), prompt(20)
    expected = greedy_tokens(folder, text, 30)
    runner, tokens = Runner(Decoder(folder)), list(text)
    logits = runner.logits((1, 0, tokens))
    while len(tokens) < 50:
        tokens.append(int(logits[-1].argmax()))
        logits = runner.logits((1, len(tokens) - 1, tokens[-1:]))
    assert tokens[20:] == expected


def test_taps_are_hidden_states_by_blocks_applied(folder: Path, model: Decoder) -> None:
    tokens = prompt(30)
    hidden = Runner(model).hidden((1, 0, tokens), taps=range(7))
    with torch.inference_mode():
        reference = target_model(folder)(torch.tensor([tokens]), output_hidden_states=True)
        *states, final = [state[0] for state in reference.hidden_states]
    assert set(hidden.taps) == set(range(7))
    for tap, state in enumerate(states):
        torch.testing.assert_close(hidden.taps[tap], state, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden.final, final, atol=1e-4, rtol=1e-4)
    weight = target_model(folder).model.norm.weight.detach()
    assert torch.equal(rms_norm(hidden.taps[6], weight, model.spec.rms_norm_eps), hidden.final)


def test_only_the_taps_that_are_asked_for_are_kept(model: Decoder) -> None:
    assert set(Runner(model).hidden((1, 0, prompt(5)), taps=(2, 5)).taps) == {2, 5}
    assert not Runner(model).hidden((1, 0, prompt(5))).taps


# ---- what may not matter, to the bit


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def any_model(request: pytest.FixtureRequest, folder: Path) -> Decoder:
    skip_where_rows_interact(request.param)
    return Decoder(folder, request.param)


def test_a_prompt_in_chunks_is_the_whole_prompt(model: Decoder) -> None:
    tokens = prompt(90)
    whole = Runner(model).logits((1, 0, tokens))
    for sizes in ((90,), (1,) * 90, (16, 16, 58), (17, 1, 15, 57), (33, 40, 17)):
        runner, start, parts = Runner(model), 0, []
        for size in sizes:
            parts.append(runner.logits((1, start, tokens[start : start + size])))
            start += size
        assert torch.equal(torch.cat(parts), whole), sizes


@pytest.mark.parametrize("k", range(1, 9))
def test_verified_rows_are_plain_decode_rows(any_model: Decoder, k: int) -> None:
    """For any number of drafts, and across the border of a page."""
    tokens = prompt(44)
    plain, verifying = Runner(any_model), Runner(any_model)
    for runner in (plain, verifying):
        runner.hidden((1, 0, tokens[:28]))
    one_by_one = torch.cat([plain.logits((1, i, tokens[i : i + 1])) for i in range(28, 29 + k)])
    assert torch.equal(verifying.logits((1, 28, tokens[28 : 29 + k])), one_by_one)


def test_rejected_tokens_leave_no_trace(any_model: Decoder) -> None:
    tokens, rejected = prompt(60), prompt(60, seed=1)
    fresh, rolled_back = Runner(any_model), Runner(any_model)
    for runner in (fresh, rolled_back):
        runner.hidden((1, 0, tokens[:30]))
    for start in (30, 31, 33, 40):
        rolled_back.hidden((1, start, rejected[start : start + 9]))
        assert torch.equal(
            rolled_back.logits((1, 30, tokens[30 : start + 5])), fresh.logits((1, 30, tokens[30 : start + 5]))
        )
    rolled_back.hidden((1, 3, rejected[3:50]))
    rolled_back.hidden((1, 3, tokens[3:30]))
    assert torch.equal(rolled_back.logits((1, 30, tokens[30:36])), fresh.logits((1, 30, tokens[30:36])))


def test_sequences_that_step_together_are_each_alone(any_model: Decoder) -> None:
    texts = [prompt(80, seed) for seed in range(4)]
    starts, rows = (70, 1, 16, 33), (1, 4, 9, 2)
    together = Runner(any_model)
    alone = [Runner(any_model) for _ in texts]
    for i, text in enumerate(texts):
        together.hidden((i, 0, text[: starts[i]]))
        alone[i].hidden((0, 0, text[: starts[i]]))
    blocks = [(start, text[start : start + n]) for text, start, n in zip(texts, starts, rows, strict=True)]
    expected = torch.cat([runner.logits((0, *block)) for runner, block in zip(alone, blocks, strict=True)])
    assert torch.equal(together.logits(*((i, *block) for i, block in enumerate(blocks))), expected)


def test_a_prompt_beside_decoding_sequences(model: Decoder) -> None:
    text, other = prompt(60), prompt(60, seed=1)
    together, alone = Runner(model), Runner(model)
    for runner in (together, alone):
        runner.hidden((1, 0, text[:40]))
    both = together.logits((1, 40, text[40:43]), (2, 0, other))
    assert torch.equal(both[:3], alone.logits((1, 40, text[40:43])))
    assert torch.equal(both[3:], alone.logits((2, 0, other)))


# ---- what it takes


@pytest.mark.parametrize(("dtype", "size"), [(None, 4), (torch.bfloat16, 2)])
def test_the_element_type_can_be_chosen(folder: Path, dtype: torch.dtype | None, size: int) -> None:
    model = Decoder(folder, dtype)
    assert model.dtype == (dtype or torch.float32)
    assert model.bytes_per_token == 2 * 6 * 2 * 16 * size
    assert model.new_cache(3, 16).data.nbytes == 4 * 16 * model.bytes_per_token
    assert Runner(model).logits((1, 0, [1])).dtype == torch.float32


def test_bfloat16_is_close_to_transformers(tmp_path: Path) -> None:
    folder, tokens = make_target(tmp_path, dtype=torch.bfloat16), prompt(50)
    model = Decoder(folder)
    assert model.dtype == torch.bfloat16
    expected = theirs(folder, tokens)
    found = Runner(model).logits((1, 0, tokens))
    assert float((found - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_default_model_verifies_what_it_decodes(dtype: torch.dtype) -> None:
    """Its layers are wide enough that another order of sums would show."""
    skip_where_rows_interact(dtype)
    model = Decoder(default_target(), dtype)
    texts = [prompt(60, seed, vocab=49152) for seed in (0, 1)]
    plain, verifying = Runner(model), Runner(model)
    for runner in (plain, verifying):
        runner.hidden((0, 0, texts[0][:30]), (1, 0, texts[1][:45]))
    one_by_one = [
        torch.cat([plain.hidden((i, at, texts[i][at : at + 1])).final for at in range(start, start + 6)])
        for i, start in ((0, 30), (1, 45))
    ]
    both = verifying.hidden((0, 30, texts[0][30:34]), (1, 45, texts[1][45:51])).final
    assert torch.equal(both, torch.cat((one_by_one[0][:4], one_by_one[1])))
    assert torch.equal(verifying.logits((0, 34, texts[0][34:35])), model.logits(one_by_one[0][4:5]))
