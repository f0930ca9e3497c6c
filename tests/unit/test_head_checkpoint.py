"""read_head: every published layout is read right, and what does not fit is refused by file and field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_service.checkpoint import HeadCheckpoint, read_borrowed, read_head
from draft_service.head_spec import Overrides, TargetShape
from eyas_kernels.checkpoint import CheckpointError
from tests.helpers.tiny_heads import head_layout, head_tensors, vocabulary_map
from tests.helpers.tiny_models import make_head, make_target, write_checkpoint

TARGET = TargetShape(hidden_size=64, num_layers=6, vocab_size=512)
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def configured(tmp_path: Path, target: Path, **config: Any) -> HeadCheckpoint:
    return read_head(make_head(tmp_path / "head", "eagle3", target, config=config), TARGET)


# ---- what is read


@pytest.mark.parametrize("layout", [{}, {"bin": True}, {"sharded": True}, {"bin": True, "sharded": True}])
def test_eagle1_is_read_from_every_file_layout(tmp_path: Path, target: Path, layout: dict[str, Any]) -> None:
    head = read_head(make_head(tmp_path, "eagle1", target, **layout), TARGET)
    tensors = head_tensors(head_layout("eagle1", target))
    assert head.spec.kind == "eagle1"
    assert head.spec.taps == ()
    assert head.spec.feature_size == 64
    assert head.spec.draft_vocab_size == 512
    assert torch.equal(head.weights.fc, tensors["fc.weight"])
    assert torch.equal(head.weights.qkv, torch.cat([tensors[f"layers.0.{p}.weight"] for p in PROJECTIONS]))
    mlp = [tensors[f"layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up", "down")]
    assert torch.equal(head.weights.gate_up, torch.cat(mlp[:2]))
    assert torch.equal(head.weights.down, mlp[2])
    assert torch.equal(head.weights.out, tensors["layers.0.self_attn.o_proj.weight"])
    assert torch.equal(
        head.weights.post_attention_layernorm, tensors["layers.0.post_attention_layernorm.weight"]
    )
    absent = (
        "fc_bias",
        "qkv_bias",
        "out_bias",
        "query_norm",
        "key_norm",
        "input_layernorm",
        "hidden_norm",
        "norm",
    )
    assert all(getattr(head.weights, name) is None for name in (*absent, "lm_head", "embed", "target_ids"))


@pytest.mark.parametrize("layer_name", ["midlayer", "layers.0"])
@pytest.mark.parametrize("layout", [{}, {"bin": True}, {"sharded": True}])
def test_eagle3_is_read_under_both_names(
    tmp_path: Path, target: Path, layer_name: str, layout: dict[str, Any]
) -> None:
    head = read_head(
        make_head(tmp_path, "eagle3", target, draft_vocab=64, layer_name=layer_name, **layout), TARGET
    )
    tensors = head_tensors(head_layout("eagle3", target, draft_vocab=64, layer_name=layer_name))
    assert head.spec.kind == "eagle3"
    assert head.spec.feature_size == 3 * 64
    assert head.spec.draft_vocab_size == 64
    assert not head.spec.norm_before_residual
    assert head.weights.qkv.shape == (4 * 16 + 2 * 2 * 16, 2 * 64)
    assert torch.equal(head.weights.qkv, torch.cat([tensors[f"{layer_name}.{p}.weight"] for p in PROJECTIONS]))
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        assert torch.equal(getattr(head.weights, name), tensors[f"{layer_name}.{name}.weight"])
    for name in ("fc", "norm", "lm_head"):
        assert torch.equal(getattr(head.weights, name), tensors[f"{name}.weight"])
    assert head.weights.target_ids is not None
    assert head.weights.target_ids.dtype == torch.int64
    assert head.weights.target_ids.tolist() == list(range(1, 128, 2))


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_weights_come_in_the_dtype_asked_for(tmp_path: Path, target: Path, kind: Any) -> None:
    folder = make_head(tmp_path, kind, target, attention_bias=True, fc_bias=True, dtype=torch.float16)
    weights = read_head(folder, TARGET, dtype=torch.bfloat16).weights
    assert {value.dtype for value in vars(weights).values() if isinstance(value, Tensor)} == {torch.bfloat16}


@pytest.mark.parametrize("says", [True, False, None])
@pytest.mark.parametrize("has", [True, False])
def test_the_file_decides_on_fc_bias(tmp_path: Path, target: Path, has: bool, says: bool | None) -> None:
    head = read_head(make_head(tmp_path, "eagle1", target, fc_bias=has, config={"bias": says}), TARGET)
    expected = head_tensors(head_layout("eagle1", target, fc_bias=has)).get("fc.bias")
    assert (head.weights.fc_bias is None) == (expected is None)
    assert expected is None or torch.equal(head.weights.fc_bias, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_the_file_decides_on_attention_bias(tmp_path: Path, target: Path, kind: Any) -> None:
    head = read_head(make_head(tmp_path, kind, target, attention_bias=True), TARGET)
    layout = head_layout(kind, target, attention_bias=True)
    tensors = head_tensors(layout)
    assert head.spec.attention_bias
    assert head.weights.qkv_bias is not None
    biases = [tensors[f"{layout.layer}.{p}.bias"] for p in PROJECTIONS]
    assert torch.equal(head.weights.qkv_bias, torch.cat(biases))


def test_heads_of_another_head_dim_are_read(tmp_path: Path, target: Path) -> None:
    head = read_head(make_head(tmp_path, "eagle3", target, heads=2, kv_heads=1, head_dim=48), TARGET)
    assert (head.spec.num_heads, head.spec.num_kv_heads, head.spec.head_dim) == (2, 1, 48)
    assert head.weights.out.shape == (64, 96)


def test_head_dim_and_kv_heads_have_their_usual_defaults(tmp_path: Path, target: Path) -> None:
    config = {"head_dim": None, "num_key_value_heads": None}
    head = read_head(make_head(tmp_path, "eagle1", target, kv_heads=4, config=config), TARGET)
    assert (head.spec.num_kv_heads, head.spec.head_dim) == (4, 16)


def test_a_full_vocabulary_needs_no_map(tmp_path: Path, target: Path) -> None:
    head = read_head(make_head(tmp_path, "eagle3", target), TARGET)
    assert head.spec.draft_vocab_size == 512
    assert head.weights.target_ids is None
    assert head.weights.lm_head is not None


def test_a_full_vocabulary_with_an_identity_map(tmp_path: Path, target: Path) -> None:
    identity = vocabulary_map(range(512), 512)
    folder = make_head(tmp_path, "eagle3", target, edit=lambda _, tensors: tensors.update(identity))
    assert read_head(folder, TARGET).weights.target_ids is None


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_an_embedding_as_wide_as_the_targets_is_left_aside(
    tmp_path: Path, target: Path, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        head = read_head(make_head(tmp_path, kind, target, embed=True), TARGET)
    assert head.weights.embed is None
    assert "embed_tokens.weight is left aside" in caplog.text


def test_a_full_vocabulary_may_borrow_the_lm_head(tmp_path: Path, target: Path) -> None:
    folder = make_head(tmp_path, "eagle3", target, edit=lambda _, tensors: tensors.pop("lm_head.weight"))
    assert read_head(folder, TARGET).weights.lm_head is None


def test_a_trained_embedding_is_the_heads_own(tmp_path: Path, target: Path) -> None:
    head = read_head(
        make_head(tmp_path, "eagle3", target, embed=True, config={"embed_requires_grad": True}), TARGET
    )
    assert head.weights.embed is not None


def test_norms_are_known_by_their_tensors(tmp_path: Path, target: Path) -> None:
    one = read_head(make_head(tmp_path / "one", "eagle3", target, input_norm=True), TARGET)
    assert [norm.shape for norm in one.weights.fc_norms] == [(192,)]
    three = read_head(make_head(tmp_path / "three", "eagle3", target, fc_norm=True), TARGET)
    assert [norm.shape for norm in three.weights.fc_norms] == [(64,)] * 3


def test_a_narrower_head_owns_its_embedding(tmp_path: Path, target: Path) -> None:
    head = read_head(make_head(tmp_path, "eagle3", target, hidden=32, embed=True), TARGET)
    assert (head.spec.hidden_size, head.spec.target_hidden_size) == (32, 64)
    assert head.weights.fc.shape == (32, 192)
    assert head.weights.embed is not None
    assert head.weights.embed.shape == (512, 32)


def test_the_wrapped_config_and_the_lm_head_of_a_converted_head(tmp_path: Path, target: Path) -> None:
    def convert(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        inner = {**config, "eagle_fc_bias": False}
        config.clear()
        config.update({"model_type": "eagle", "model": inner})
        tensors["lm_head.weight"] = torch.zeros(512, 64)

    head = read_head(make_head(tmp_path, "eagle1", target, edit=convert), TARGET)
    assert head.spec.num_heads == 4
    assert head.weights.lm_head is None


AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "num_layers", "taps"),
    [
        ({"eagle_config": None}, 32, (2, 16, 29)),
        ({"eagle_config": {"use_aux_hidden_state": True}}, 32, (2, 16, 29)),
        ({AUX: [1, 15, 28]}, 32, (2, 16, 29)),
        ({AUX: [2, 16, 29]}, 32, (2, 16, 29)),
        ({"eagle_config": {AUX: [1, 46, 90]}}, 94, (2, 47, 91)),
        ({"eagle_config": {AUX: [2, 15, 27]}}, 30, (2, 15, 27)),
        ({"eagle_config": {AUX: [3, 4, 6]}}, 6, (3, 4, 6)),
    ],
)
def test_taps_are_counted_in_blocks_applied(
    tmp_path: Path, target: Path, config: dict[str, Any], num_layers: int, taps: tuple[int, ...]
) -> None:
    folder = make_head(tmp_path, "eagle3", target, config=config)
    assert read_head(folder, TargetShape(64, num_layers, 512)).spec.taps == taps


def test_two_taps_make_a_narrower_fc(tmp_path: Path, target: Path) -> None:
    head = read_head(make_head(tmp_path, "eagle3", target, aux_ids=(2, 4)), TARGET)
    assert head.spec.feature_size == 128
    assert head.weights.fc.shape == (64, 128)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_theta": None}, 1e4, None),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, 5e5, LLAMA3),
        ({"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, 5e5, LLAMA3),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, 2e4, {"rope_type": "linear", "factor": 4}),
    ],
)
def test_rope_is_the_heads_own(
    tmp_path: Path, target: Path, config: dict[str, Any], theta: float, scaling: dict[str, Any] | None
) -> None:
    folder = make_head(tmp_path, "eagle3", target, config=config)
    spec = read_head(folder, TARGET).spec
    assert (spec.rope_theta, spec.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (Overrides(rope_theta=123.0), (123.0, LLAMA3, (2, 3, 5))),
        (Overrides(rope_scaling={}), (5e5, None, (2, 3, 5))),
        (
            Overrides(rope_scaling={"rope_type": "linear", "factor": 2}),
            (5e5, {"rope_type": "linear", "factor": 2}, (2, 3, 5)),
        ),
        (Overrides(taps=(1, 3, 6)), (5e5, LLAMA3, (1, 3, 6))),
    ],
)
def test_what_the_user_knows_better_counts(
    tmp_path: Path, target: Path, overrides: Overrides, expected: tuple[Any, ...]
) -> None:
    config = {"rope_theta": None, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}
    spec = read_head(make_head(tmp_path, "eagle3", target, config=config), TARGET, overrides).spec
    assert (spec.rope_theta, spec.rope_scaling, spec.taps) == expected


def test_num_hidden_layers_is_passed_over(tmp_path: Path, target: Path) -> None:
    assert configured(tmp_path, target, num_hidden_layers=40).spec.kind == "eagle3"


def test_norm_before_residual_is_read(tmp_path: Path, target: Path) -> None:
    assert configured(tmp_path, target, norm_before_residual=True).spec.norm_before_residual


def test_the_trained_length_is_read(tmp_path: Path, target: Path) -> None:
    assert configured(tmp_path, target, max_position_embeddings=77).spec.max_position_embeddings == 77


# ---- what is borrowed


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_borrowed_tensors(tmp_path: Path, tied: bool, sharded: bool) -> None:
    folder = make_target(tmp_path, tied=tied, sharded=sharded)
    embed, lm_head = read_borrowed(folder, need_lm_head=True, dtype=torch.bfloat16)
    assert embed.shape == (512, 64)
    assert embed.dtype == torch.bfloat16
    assert lm_head is not None
    assert torch.equal(embed, lm_head) == tied
    assert (lm_head is embed) == tied
    assert read_borrowed(folder, need_lm_head=False, dtype=torch.float32)[1] is None


def test_a_missing_borrowed_tensor_is_named(tmp_path: Path) -> None:
    config = {"vocab_size": 4, "hidden_size": 2}
    write_checkpoint(tmp_path, config, {"model.embed_tokens.weight": torch.zeros(4, 2)})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \[4, 2\] is missing"):
        read_borrowed(tmp_path, need_lm_head=True, dtype=torch.float32)
    assert read_borrowed(tmp_path, need_lm_head=False, dtype=torch.float32)[0].shape == (4, 2)


def test_a_borrowed_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    config = {"vocab_size": 5, "hidden_size": 2, "tie_word_embeddings": True}
    write_checkpoint(tmp_path, config, {"model.embed_tokens.weight": torch.zeros(4, 2)})
    with pytest.raises(CheckpointError, match=r"in model\.safetensors is \[4, 2\], but \[5, 2\] is needed"):
        read_borrowed(tmp_path, need_lm_head=True, dtype=torch.float32)
