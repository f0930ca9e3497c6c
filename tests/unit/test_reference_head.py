"""The reference heads against transformers' own layers, and their acceptance runs against scripted heads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from tests.helpers.reference_head import (
    ReferenceHead,
    acceptance_length,
    greedy_tokens,
    target_features,
    target_model,
)
from tests.helpers.tiny_heads import head_layout, head_tensors
from tests.helpers.tiny_models import make_head, make_target

KINDS = ("eagle1", "eagle3")
TOKENS = [5, 17, 300, 17, 42, 511, 0, 9, 88, 120]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), num_layers=7)


@pytest.fixture(scope="module")
def plain_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token depends on the last one almost alone."""
    return make_target(tmp_path_factory.mktemp("plain_target"), num_layers=7, layer_scale=0.01)


def features_like(head: ReferenceHead, rows: int) -> Tensor:
    width = 64 * (1 if head.taps is None else len(head.taps))
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(3))


# ---- one pass


def llama_layer(kind: str, tensors: dict[str, Tensor], layer: str) -> tuple[Any, LlamaConfig]:
    """transformers' decoder layer with the head's weights and, for EAGLE-3, projections of twice the width."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    )
    module: Any = LlamaDecoderLayer(config, 0)
    module.input_layernorm = nn.Identity()
    for name in ("q_proj", "k_proj", "v_proj"):
        out = getattr(module.self_attn, name).out_features
        setattr(module.self_attn, name, nn.Linear(64 if kind == "eagle1" else 128, out))
    module.self_attn.o_proj.bias = None
    own = {name.removeprefix(f"{layer}."): value for name, value in tensors.items() if name.startswith(layer)}
    extra = {name: own.pop(name) for name in ("hidden_norm.weight", "input_layernorm.weight") if name in own}
    module.load_state_dict(own, strict=True)
    assert len(extra) == (0 if kind == "eagle1" else 2)
    return module, config


def causal(rows: int) -> Tensor:
    return torch.full((rows, rows), -torch.inf).triu(1)[None, None]


def rms_norm(weight: Tensor, x: Tensor) -> Tensor:
    norm = LlamaRMSNorm(len(weight), eps=1e-5)
    norm.weight.data = weight
    normed: Tensor = norm(x)
    return normed


@torch.no_grad()
@pytest.mark.parametrize("fc_bias", [False, True])
def test_eagle1_is_a_llama_layer_behind_fc(tmp_path: Path, target: Path, fc_bias: bool) -> None:
    options: dict[str, Any] = {"fc_bias": fc_bias, "attention_bias": True}
    head = ReferenceHead(make_head(tmp_path, "eagle1", target, **options), target)
    tensors = head_tensors(head_layout("eagle1", target, **options))
    features = features_like(head, len(TOKENS))
    module, config = llama_layer("eagle1", tensors, "layers.0")
    model = target_model(target)
    embedding = model.get_input_embeddings()(torch.tensor(TOKENS))
    fused = nn.functional.linear(
        torch.cat((embedding, features), -1), tensors["fc.weight"], tensors.get("fc.bias")
    )
    rotary = LlamaRotaryEmbedding(config)(fused, torch.arange(len(TOKENS))[None])
    expected = module(fused[None], attention_mask=causal(len(TOKENS)), position_embeddings=rotary)
    outputs, logits = head.forward(TOKENS, features)
    torch.testing.assert_close(outputs, expected.reshape(outputs.shape), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, model.lm_head(outputs), atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("norm_before_residual", [False, True])
@pytest.mark.parametrize("layer_name", ["midlayer", "layers.0"])
def test_eagle3_is_a_llama_layer_on_two_normed_halves(
    tmp_path: Path, target: Path, layer_name: str, norm_before_residual: bool
) -> None:
    options: dict[str, Any] = {"attention_bias": True, "layer_name": layer_name, "draft_vocab": 64}
    config = {"norm_before_residual": norm_before_residual}
    head = ReferenceHead(make_head(tmp_path, "eagle3", target, config=config, **options), target)
    tensors = head_tensors(head_layout("eagle3", target, **options))
    features = features_like(head, len(TOKENS))
    module, llama = llama_layer("eagle3", tensors, layer_name)
    embedding = target_model(target).get_input_embeddings()(torch.tensor(TOKENS))
    hidden = features @ tensors["fc.weight"].T
    normed = rms_norm(tensors[f"{layer_name}.hidden_norm.weight"], hidden)
    halves = (rms_norm(tensors[f"{layer_name}.input_layernorm.weight"], embedding), normed)
    rotary = LlamaRotaryEmbedding(llama)(hidden, torch.arange(len(TOKENS))[None])
    attended, _ = module.self_attn(
        torch.cat(halves, -1)[None], position_embeddings=rotary, attention_mask=causal(len(TOKENS))
    )
    middle = (normed if norm_before_residual else hidden) + attended[0]
    expected = middle + module.mlp(module.post_attention_layernorm(middle))
    outputs, logits = head.forward(TOKENS, features)
    torch.testing.assert_close(outputs, expected, atol=1e-4, rtol=1e-4)
    expected_logits = rms_norm(tensors["norm.weight"], expected) @ tensors["lm_head.weight"].T
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", [{"bin": True}, {"sharded": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_every_file_layout_gives_the_same_head(
    tmp_path: Path, target: Path, kind: Any, layout: dict[str, Any]
) -> None:
    plain = ReferenceHead(make_head(tmp_path / "plain", kind, target), target)
    other = ReferenceHead(make_head(tmp_path / "other", kind, target, **layout), target)
    features = features_like(plain, len(TOKENS))
    assert torch.equal(plain.forward(TOKENS, features)[1], other.forward(TOKENS, features)[1])


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, None),
        ({"rope_theta": 500.0}, None),
        ({"rope_theta": 7.0}, 500.0),
    ],
)
def test_every_place_of_rope_theta_gives_the_same_head(
    tmp_path: Path, target: Path, config: dict[str, Any], theta: float | None
) -> None:
    plain = ReferenceHead(make_head(tmp_path / "plain", "eagle3", target), target)
    flat = ReferenceHead(make_head(tmp_path / "flat", "eagle3", target, config={"rope_theta": 500.0}), target)
    other = ReferenceHead(make_head(tmp_path / "other", "eagle3", target, config=config), target, theta)
    features = features_like(plain, len(TOKENS))
    assert torch.equal(flat.forward(TOKENS, features)[1], other.forward(TOKENS, features)[1])
    assert not torch.allclose(plain.forward(TOKENS, features)[1], other.forward(TOKENS, features)[1])


# ---- drafting


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_sees_only_its_past(tmp_path: Path, target: Path, kind: Any) -> None:
    head = ReferenceHead(make_head(tmp_path, kind, target), target)
    features = features_like(head, len(TOKENS))
    outputs, _ = head.forward(TOKENS, features)
    changed, _ = head.forward([*TOKENS[:6], *TOKENS[6:][::-1]], torch.cat((features[:6], -features[6:])))
    torch.testing.assert_close(changed[:6], outputs[:6])
    assert not torch.allclose(changed[6:], outputs[6:])


def test_eagle1_feeds_its_own_outputs_back_as_features(tmp_path: Path, target: Path) -> None:
    head = ReferenceHead(make_head(tmp_path, "eagle1", target), target)
    features, tokens = features_like(head, len(TOKENS)), list(TOKENS)
    expected = []
    for _ in range(4):
        outputs, logits = head.forward(tokens, features)
        expected.append(int(logits[-1].argmax()))
        tokens.append(expected[-1])
        features = torch.cat((features, outputs[-1:]))
    assert head.propose(TOKENS, features_like(head, len(TOKENS)), 4) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_more_drafts_do_not_change_the_first(tmp_path: Path, target: Path, kind: Any) -> None:
    layout: dict[str, Any] = {} if kind == "eagle1" else {"draft_vocab": 64}
    head = ReferenceHead(make_head(tmp_path, kind, target, **layout), target)
    features = features_like(head, len(TOKENS))
    first = int(head.target_ids[head.forward(TOKENS, features)[1][-1].argmax()])
    drafts = head.propose(TOKENS, features, 6)
    assert drafts[0] == first
    assert len(set(drafts)) > 1
    assert all(head.propose(TOKENS, features, k) == drafts[:k] for k in range(6))
    assert kind == "eagle1" or all(draft % 2 == 1 and draft < 128 for draft in drafts)


# ---- rounds


class Scripted(ReferenceHead):
    """Proposes what the script says for the tokens from x_{n+1} on."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script
        self.asked: list[tuple[int, int]] = []

    def propose(self, tokens: Sequence[int], features: Tensor, k: int) -> list[int]:
        newest = len(tokens)
        assert len(features) == newest
        self.asked.append((newest, k))
        return list(self.script[newest + 1 : newest + 1 + k])


PROMPT, TEXT = [1, 2, 3], list(range(10, 22))


@pytest.mark.parametrize(
    ("k", "counts"),
    [
        (0, []),
        (1, [1, 1, 1, 1, 1]),
        (3, [3, 3, 2]),
        (5, [5, 4]),
        (20, [10]),
    ],
)
def test_an_oracle_has_every_draft_accepted_up_to_the_limit(k: int, counts: list[int]) -> None:
    oracle = Scripted([*PROMPT, *TEXT])
    assert oracle.acceptance_run(PROMPT, TEXT, torch.zeros(15, 1), k) == counts
    assert oracle.asked[0] == (3, min(k, 10))


def test_a_liar_has_none_accepted() -> None:
    liar = Scripted([-1] * 40)
    # 11 tokens behind the first, one a round; the last round has room for no draft.
    assert liar.acceptance_run(PROMPT, TEXT, torch.zeros(15, 1), 3) == [0] * 10
    assert [k for _, k in liar.asked] == [3] * 8 + [2, 1, 0]


def test_a_mismatch_ends_the_round_and_the_next_starts_behind_it() -> None:
    script = [*PROMPT, *TEXT]
    script[3 + 2] = script[3 + 7] = -1
    head = Scripted(script)
    assert head.acceptance_run(PROMPT, TEXT, torch.zeros(15, 1), 4) == [1, 4, 3]
    assert [newest for newest, _ in head.asked] == [3, 5, 10]


def test_an_end_token_before_the_limit_leaves_room_for_all_drafts() -> None:
    oracle = Scripted([*PROMPT, *TEXT, *range(50, 60)])
    assert oracle.acceptance_run(PROMPT, TEXT, torch.zeros(15, 1), 3, max_new_tokens=20) == [3, 3, 3]
    assert oracle.asked[-1] == (11, 3)


def test_acceptance_length_counts_the_bonus() -> None:
    assert acceptance_length([0, 3, 3, 2]) == 3.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_knows_the_target_is_accepted(tmp_path: Path, plain_target: Path, kind: Any) -> None:
    prompt = [3, 141, 59]
    text = greedy_tokens(plain_target, prompt, 40)
    assert len(set(text)) > 20
    lengths = {}
    for imitate in (False, True):
        folder = make_head(tmp_path / str(imitate), kind, plain_target, imitate=imitate, aux_ids=(2, 3, 4))
        head = ReferenceHead(folder, plain_target)
        features = target_features(plain_target, [*prompt, *text], head.taps)
        counts = head.acceptance_run(prompt, text, features, 3)
        lengths[imitate] = acceptance_length(counts)
    assert lengths[True] > 1.5 > lengths[False]


# ---- the target's side


def test_features_are_the_states_that_blocks_leave(target: Path) -> None:
    ids, model = [4, 8, 15, 16, 23, 42], target_model(target)
    seen: dict[int, Tensor] = {}
    hooks = [
        block.register_forward_hook(
            lambda _m, _i, out, b=b: seen.update({b + 1: out if isinstance(out, Tensor) else out[0]})
        )
        for b, block in enumerate(model.model.layers)
    ]
    features = target_features(target, ids, (2, 3, 4))
    for hook in hooks:
        hook.remove()
    assert torch.equal(features, torch.cat([seen[b].reshape(6, 64) for b in (2, 3, 4)], -1))


@torch.no_grad()
def test_the_final_feature_is_what_lm_head_reads(target: Path) -> None:
    ids, model = [4, 8, 15, 16, 23, 42], target_model(target)
    features = target_features(target, ids, None)
    torch.testing.assert_close(model.lm_head(features), model(torch.tensor([ids])).logits[0])
    assert greedy_tokens(target, ids, 1) == [int(model.lm_head(features)[-1].argmax())]


@torch.no_grad()
def test_a_tap_behind_the_last_block_is_what_the_final_norm_reads(target: Path) -> None:
    ids, model = [4, 8, 15, 16, 23, 42], target_model(target)
    features = target_features(target, ids, (7,))
    torch.testing.assert_close(model.model.norm(features), target_features(target, ids, None))
    assert not torch.allclose(features, target_features(target, ids, None))
