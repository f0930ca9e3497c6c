"""read_head refuses what is damaged, unsupported or made for another target, by file and field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_service.checkpoint import read_head
from draft_service.head_spec import TargetShape
from eyas_kernels.checkpoint import CheckpointError
from tests.helpers.tiny_heads import head_config, head_layout, vocabulary_map
from tests.helpers.tiny_models import make_head, make_target, write_checkpoint

TARGET = TargetShape(hidden_size=64, num_layers=6, vocab_size=512)
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]


AUX = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


def refusal(folder: Path, shape: TargetShape = TARGET) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_head(folder, shape)
    return str(caught.value)


# ---- what is refused


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("eagle1", {"hidden_size": 32}, "hidden_size is 32, but the target's is 64"),
        ("eagle3", {"hidden_size": 32}, "hidden_size is 32, but the target's is 64"),
        ("eagle1", {"hidden_size": 32, "target_hidden_size": 64}, "hidden_size is 32, but the target's is 64"),
        ("eagle3", {"target_hidden_size": 32}, "target_hidden_size is 32, but the target's is 64"),
        ("eagle1", {"vocab_size": 500}, "vocab_size is 500, but the target's is 512"),
        ("eagle3", {"vocab_size": 500}, "vocab_size is 500, but the target's is 512"),
        ("eagle3", {"draft_vocab_size": 513}, "draft_vocab_size is 513, but vocab_size is 512"),
        (
            "eagle1",
            {"draft_vocab_size": 64},
            "draft_vocab_size is 64, but an EAGLE-1 head drafts",
        ),
        ("eagle1", {"intermediate_size": None}, "intermediate_size is missing"),
        ("eagle1", {"num_attention_heads": "4"}, "num_attention_heads is '4', but a whole number"),
        ("eagle1", {"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide 4 heads"),
        (
            "eagle1",
            {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None},
            "num_attention_heads is 5",
        ),
        ("eagle1", {"rms_norm_eps": -1}, "rms_norm_eps is -1, but a positive number is needed"),
        ("eagle1", {"rope_theta": "1e4"}, "rope_theta is '1e4', but a positive number is needed"),
        ("eagle1", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu' is supported"),
        ("eagle3", {"norm_before_fc": True, "fc_norm": True}, "fc_norm and norm_before_fc exclude each other"),
        ("eagle3", {"parallel_drafting": True}, "parallel_drafting is true, which is not supported"),
        (
            "eagle3",
            {"eagle_config": {"use_aux_hidden_state": False}},
            "eagle_config.use_aux_hidden_state is false, which is not supported",
        ),
        (
            "eagle3",
            {"speculators_model_type": "peagle"},
            "speculators_model_type is 'peagle', but only 'eagle3'",
        ),
        (
            "eagle3",
            {"transformer_layer_config": 1},
            "transformer_layer_config is 1, but a JSON object is needed",
        ),
        (
            "eagle3",
            {"hidden_size": None, "transformer_layer_config": {"hidden_size": 32}},
            r"transformer_layer_config\.hidden_size is 32, but the target's is 64",
        ),
        (
            "eagle3",
            {"eagle_config": None, "model": {"eagle_config": {AUX: [0]}}},
            rf"model\.eagle_config\.{AUX} means the taps \[0\]",
        ),
        ("eagle3", {"use_sliding_window": True}, "sliding_window is missing"),
        ("eagle3", {AUX: [2, 3, 7]}, f"{AUX} means the taps \\[2, 3, 7\\], but the target has 6 layers"),
        ("eagle3", {AUX: [1, 3, 6]}, f"{AUX} means the taps \\[2, 4, 7\\], but the target has 6 layers"),
        ("eagle3", {AUX: [0, 3, 5]}, f"{AUX} means the taps \\[0, 3, 5\\]"),
        ("eagle3", {"eagle_config": {AUX: "2"}}, rf"eagle_config\.{AUX} is '2', but a list of whole numbers"),
        (
            "eagle3",
            {"norm_before_residual": "yes"},
            "norm_before_residual is 'yes', but true or false",
        ),
    ],
)
def test_a_config_that_does_not_fit_is_named_by_field(
    tmp_path: Path, target: Path, kind: Any, config: dict[str, Any], message: str
) -> None:
    folder = make_head(tmp_path, kind, target, config=config)
    assert re.match(f"{re.escape(str(folder / 'config.json'))}: {message}", refusal(folder))


def test_default_taps_need_enough_layers(tmp_path: Path, target: Path) -> None:
    folder = make_head(tmp_path, "eagle3", target, aux_ids=None)
    assert "means the taps [2, 1, 0], but the target has 3 layers" in refusal(folder, TargetShape(64, 3, 512))


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("mask_hidden", "P-EAGLE"),
        ("fusion_fc.weight", "the old speculators layout"),
    ],
)
def test_a_variant_is_known_by_its_tensors(tmp_path: Path, target: Path, name: str, variant: str) -> None:
    folder = make_head(
        tmp_path, "eagle3", target, edit=lambda _, tensors: tensors.update({name: torch.zeros(3)})
    )
    message = refusal(folder)
    assert message.startswith(f"{folder / 'model.safetensors'}: {name} belongs to ")
    assert variant in message


@pytest.mark.parametrize(
    ("flag", "layout", "parts"),
    [
        ({"norm_before_fc": True}, {}, ["input_norm.weight [192] is missing"]),
        (
            {"norm_before_fc": False},
            {"input_norm": True},
            ["input_norm.weight in model.safetensors is unknown"],
        ),
        ({"fc_norm": True}, {}, [f"fc_norm.{i}.weight [64] is missing" for i in range(3)]),
        (
            {"fc_norm": False},
            {"fc_norm": True},
            [f"fc_norm.{i}.weight in model.safetensors is unknown" for i in (0, 1)],
        ),
    ],
)
def test_flags_and_tensors_that_contradict_each_other(
    tmp_path: Path, target: Path, flag: dict[str, Any], layout: dict[str, Any], parts: list[str]
) -> None:
    message = refusal(make_head(tmp_path, "eagle3", target, config=flag, **layout))
    assert all(part in message for part in parts)


@pytest.mark.parametrize("layout", [{"draft_vocab": 64}, {"hidden": 32, "embed": True}])
def test_the_targets_lm_head_fits_only_a_head_of_its_shape(
    tmp_path: Path, target: Path, layout: dict[str, Any]
) -> None:
    folder = make_head(
        tmp_path, "eagle3", target, edit=lambda _, tensors: tensors.pop("lm_head.weight"), **layout
    )
    assert "lm_head.weight" in refusal(folder)


def test_query_and_key_norms_come_together(tmp_path: Path, target: Path) -> None:
    def drop(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors["midlayer.self_attn.k_norm.weight"]

    folder = make_head(tmp_path, "eagle3", target, edit=drop, attention_norm=True)
    assert "midlayer.self_attn.k_norm.weight [16] is missing" in refusal(folder)


def test_a_folder_that_holds_no_head(tmp_path: Path, target: Path) -> None:
    write_checkpoint(tmp_path, head_config(head_layout("eagle1", target)), {"fc.weight": torch.zeros(64, 128)})
    assert refusal(tmp_path).startswith(f"{tmp_path}: no EAGLE head")


def test_a_target_is_not_taken_for_a_head(target: Path) -> None:
    assert refusal(target).startswith(f"{target}: no EAGLE head")


def test_one_error_lists_every_tensor_that_is_wrong(tmp_path: Path, target: Path) -> None:
    def spoil(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors["norm.weight"], tensors["midlayer.hidden_norm.weight"]
        tensors["midlayer.self_attn.k_proj.weight"] = torch.zeros(16, 128)
        tensors["midlayer.mlp.up_proj.weight"] = torch.zeros(128, 64, dtype=torch.int8)
        tensors["midlayer.self_attn.rotary.weight"] = torch.zeros(16)
        tensors["layers.1.input_layernorm.weight"] = torch.zeros(64)

    message = refusal(make_head(tmp_path, "eagle3", target, edit=spoil))
    assert message.startswith(f"{tmp_path}: the tensors are not those of config.json: ")
    for part in (
        "norm.weight [64] is missing",
        "midlayer.hidden_norm.weight [64] is missing",
        "midlayer.self_attn.k_proj.weight in model.safetensors is [16, 128], but [32, 128] is needed",
        "midlayer.mlp.up_proj.weight in model.safetensors has dtype torch.int8",
        "midlayer.self_attn.rotary.weight in model.safetensors is unknown",
        "layers.1.input_layernorm.weight in model.safetensors is unknown",
    ):
        assert part in message
    assert message.count(";") == 5


@pytest.mark.parametrize("name", ["layers.0.input_layernorm.weight", "t2d", "norm.weight", "token_map"])
def test_eagle1_has_no_other_tensors(tmp_path: Path, target: Path, name: str) -> None:
    folder = make_head(
        tmp_path, "eagle1", target, edit=lambda _, tensors: tensors.update({name: torch.zeros(64)})
    )
    assert f"{name} in model.safetensors is unknown" in refusal(folder)


def test_a_wrong_tensor_is_named_with_its_shard(tmp_path: Path, target: Path) -> None:
    folder = make_head(tmp_path, "eagle1", target, sharded=True, config={"intermediate_size": 96})
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = "layers.0.mlp.down_proj.weight"
    assert f"{name} in {index[name]} is [64, 128], but [64, 96] is needed" in refusal(folder)


def test_attention_biases_come_together(tmp_path: Path, target: Path) -> None:
    def drop(_: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors["layers.0.self_attn.k_proj.bias"]

    folder = make_head(tmp_path, "eagle1", target, edit=drop, attention_bias=True)
    assert "layers.0.self_attn.k_proj.bias [32] is missing" in refusal(folder)


def test_a_narrower_head_without_an_embedding(tmp_path: Path, target: Path) -> None:
    folder = make_head(tmp_path, "eagle3", target, hidden=32)
    assert "embed_tokens.weight [512, 32] is missing" in refusal(folder)


def test_a_wrong_number_of_taps_shows_in_fc(tmp_path: Path, target: Path) -> None:
    folder = make_head(tmp_path, "eagle3", target, config={AUX: [2, 4]})
    assert "fc.weight in model.safetensors is [64, 192], but [64, 128] is needed" in refusal(folder)


# ---- the draft vocabulary


def remapped(folder: Path, target: Path, **tensors: Tensor | None) -> Path:
    """A head with 64 draft tokens whose d2t and t2d are replaced, or left out for None."""

    def replace(_: dict[str, Any], held: dict[str, Tensor]) -> None:
        for name, value in tensors.items():
            del held[name]
            if value is not None:
                held[name] = value

    return make_head(folder, "eagle3", target, edit=replace, draft_vocab=64)


def test_a_reduced_vocabulary_without_a_map(tmp_path: Path, target: Path) -> None:
    assert "d2t [64] is missing" in refusal(remapped(tmp_path, target, d2t=None))


def test_an_all_zero_map_that_t2d_contradicts(tmp_path: Path, target: Path) -> None:
    folder = remapped(tmp_path, target, d2t=torch.zeros(64, dtype=torch.int64))
    assert refusal(folder) == f"{folder / 'model.safetensors'}: d2t is all zeros"


def test_an_all_zero_map_that_nothing_confirms(tmp_path: Path, target: Path) -> None:
    folder = remapped(tmp_path, target, d2t=torch.zeros(64, dtype=torch.int64), t2d=None)
    assert refusal(folder) == f"{folder / 'model.safetensors'}: d2t is all zeros"


def test_an_all_zero_map_that_t2d_confirms(tmp_path: Path, target: Path) -> None:
    folder = remapped(tmp_path, target, **vocabulary_map(range(64), 512))
    assert read_head(folder, TARGET).weights.target_ids is None


@pytest.mark.parametrize("offset", [-1, 449])
def test_a_map_out_of_range(tmp_path: Path, target: Path, offset: int) -> None:
    d2t = vocabulary_map(range(64), 512)["d2t"]
    d2t[0 if offset < 0 else 63] = offset
    message = refusal(remapped(tmp_path, target, d2t=d2t))
    assert message.startswith(f"{tmp_path / 'model.safetensors'}: d2t leads to ids ")
    assert message.endswith("but vocab_size is 512")


def test_absolute_ids_are_not_taken_for_offsets(tmp_path: Path, target: Path) -> None:
    message = refusal(remapped(tmp_path, target, d2t=torch.arange(1, 128, 2)))
    assert "d2t is another set of ids than t2d's" in message


def test_a_map_that_names_a_token_twice(tmp_path: Path, target: Path) -> None:
    d2t = torch.full((64,), 7)
    d2t[63] = 6
    assert "names one twice" in refusal(remapped(tmp_path, target, d2t=d2t, t2d=None))


def test_a_map_of_floats(tmp_path: Path, target: Path) -> None:
    message = refusal(remapped(tmp_path, target, d2t=torch.ones(64)))
    assert "d2t in model.safetensors has dtype torch.float32" in message


def test_a_map_needs_no_mask(tmp_path: Path, target: Path) -> None:
    target_ids = read_head(remapped(tmp_path, target, t2d=None), TARGET).weights.target_ids
    assert target_ids is not None
    assert target_ids.tolist() == list(range(1, 128, 2))
