"""A target checkpoint is refused by file and field, or by file and tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas_kernels.checkpoint import Checkpoint, CheckpointError
from target_service.model import Decoder
from target_service.spec import DecoderSpec, read_spec
from tests.helpers.tiny_models import LLAMA3_ROPE, make_target

SMALL: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "vocab_size": 64, "heads": 2, "kv_heads": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_target(tmp_path / "target", **SMALL)


def configure(folder: Path, **values: Any) -> Path:
    """Sets keys of config.json; None takes them out."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Decoder(folder)
    return str(caught.value)


# ---- config.json

OLD_ROPE = {"rope_parameters": None}


def spec_of(folder: Path, **values: Any) -> DecoderSpec:
    return read_spec(Checkpoint(configure(folder, **values)))


def test_the_spec_is_what_the_config_says(folder: Path) -> None:
    spec = spec_of(folder, rms_norm_eps=0.25)
    assert (spec.architecture, spec.hidden_size, spec.intermediate_size) == ("LlamaForCausalLM", 32, 64)
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 2, 1, 16)
    assert (spec.vocab_size, spec.context_length, spec.dtype) == (64, 512, "float32")
    assert (spec.rms_norm_eps, spec.rope_theta, spec.rope_scaling) == (0.25, 10000.0, None)
    assert (spec.tied_embeddings, spec.sliding_window) == (False, None)


def test_old_and_new_configs_mean_the_same(folder: Path) -> None:
    new = spec_of(folder, rope_parameters=LLAMA3_ROPE, dtype="bfloat16")
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = spec_of(
        folder,
        rope_parameters=None,
        rope_theta=50000.0,
        rope_scaling=scaling,
        dtype=None,
        torch_dtype="bfloat16",
    )
    assert new == old
    assert (new.rope_theta, new.dtype) == (50000.0, "bfloat16")


def test_keys_have_their_usual_defaults(folder: Path) -> None:
    absent = (
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_parameters",
        "dtype",
        "tie_word_embeddings",
    )
    spec = spec_of(folder, **dict.fromkeys(absent))
    assert (spec.num_kv_heads, spec.head_dim) == (2, 16)
    assert (spec.rms_norm_eps, spec.rope_theta) == (1e-6, 10000.0)
    assert (spec.dtype, spec.tied_embeddings) == ("bfloat16", False)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, ()),
        (7, None, (7,)),
        ([7, 3], None, (3, 7)),
        (7, [3, 9], (3, 7, 9)),
        (None, 5, (5,)),
        (0, 0, (0,)),
    ],
)
def test_every_end_token_counts(folder: Path, config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert spec_of(folder, eos_token_id=config).eos_token_ids == expected


def test_the_window_is_mistrals(tmp_path: Path) -> None:
    mistral = make_target(tmp_path / "mistral", "mistral", **SMALL, sliding_window=24)
    assert read_spec(Checkpoint(mistral)).sliding_window == 24
    qwen = make_target(tmp_path / "qwen", "qwen2", **SMALL)
    assert spec_of(qwen, use_sliding_window=False, sliding_window=24).sliding_window is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architectures is ['GPT2LMHeadModel'], but one of LlamaForCausalLM, ",
        ),
        ({"architectures": None}, "architectures is None, but one of"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', but one of"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only silu"),
        ({"mlp_bias": True}, "mlp_bias is true, but biases in the MLP are not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is true, but"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "is of type 'yarn', but only default, linear and",
        ),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_parameters has factor None, but a positive number",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "2"}, **OLD_ROPE}, "rope_scaling has factor '2', but"),
        ({"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": None}}, "has high_freq_factor None, but"),
        ({"hidden_size": "64"}, "hidden_size is '64', but a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, but a whole number"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide 2 heads"),
        (
            {"num_attention_heads": 3, "head_dim": None},
            "num_attention_heads is 3, which does not divide hidden_size",
        ),
        ({"dtype": "float64"}, "dtype is 'float64', but one of"),
        ({"dtype": "no such type"}, "dtype is 'no such type', but one of"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', but"),
        ({"eos_token_id": [1, None]}, "eos_token_id is [1, None], but"),
        ({"eos_token_id": -1}, "eos_token_id is -1, but"),
    ],
)
def test_a_config_is_refused_by_file_and_key(folder: Path, values: dict[str, Any], message: str) -> None:
    text = refusal(configure(folder, **values))
    assert text.startswith(f"{folder / 'config.json'}: ")
    assert message in text


def test_a_config_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert refusal(folder).startswith(f"{folder / 'config.json'}: is not valid JSON")


def test_a_broken_generation_config_is_refused_by_file(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    assert refusal(folder).startswith(f"{folder / 'generation_config.json'}: eos_token_id is 'x'")


# ---- tensors

Q_PROJ = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        f"{Q_PROJ}.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
    ],
)
def test_a_missing_tensor_is_named(folder: Path, name: str) -> None:
    edit(folder, lambda tensors: tensors.pop(name))
    assert refusal(folder) == f"{folder}: tensor {name} is missing"


def test_a_bias_of_one_projection_asks_for_the_others(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({f"{Q_PROJ}.bias": torch.zeros(32)}))
    assert "self_attn.k_proj.bias is missing" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
)
def test_a_tensor_of_another_shape_is_named(folder: Path, name: str) -> None:
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(3, 5)}))
    text = refusal(folder)
    assert text.startswith(f"{folder / 'model.safetensors'}: tensor {name} is (3, 5), ")


def test_more_layers_than_the_config_says_are_refused(folder: Path) -> None:
    text = refusal(configure(folder, num_hidden_layers=1))
    assert "tensors are unknown: model.layers.1.input_layernorm.weight (model.safetensors)" in text


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({f"{Q_PROJ}.qweight": torch.zeros(2)}))
    assert f"1 tensors are unknown: {Q_PROJ}.qweight (model.safetensors)" in refusal(folder)


@pytest.mark.parametrize("bias", ["k_proj", "v_proj"])
def test_a_stray_bias_is_refused(folder: Path, bias: str) -> None:
    name = f"model.layers.0.self_attn.{bias}.bias"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(16)}))
    assert f"unknown: {name}" in refusal(folder)


def test_a_norm_of_the_queries_alone_is_refused(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}))
    assert "self_attn.k_norm.weight is missing" in refusal(folder)


def test_what_older_exports_carry_along_is_passed_over(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "tied", **SMALL, tied=True)

    def carry(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    edit(folder, carry)
    assert Decoder(folder).spec.tied_embeddings


# ---- files


def test_a_file_that_was_cut_short_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert refusal(folder).startswith(f"{file}: cut short, damaged or not a weight file")


def test_a_file_of_garbage_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"garbage" * 100)
    assert refusal(folder).startswith(f"{folder / 'model.safetensors'}: cut short, damaged")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "target", sharded=True)
    shard = sorted(folder.glob("model-*-of-*.safetensors"))[1]
    shard.unlink()
    index = "model.safetensors.index.json"
    assert refusal(folder) == f"{shard}: the file is missing, but {index} names it"


def test_a_shard_without_a_tensor_that_the_index_places_there_is_named(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "target", sharded=True)
    shard = sorted(folder.glob("model-*-of-*.safetensors"))[0]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    save_file({key: value for key, value in tensors.items() if key != name}, shard)
    assert re.search(rf"{shard.name}: {re.escape(name)} missing", refusal(folder))


def test_a_folder_without_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refusal(folder).startswith(f"{folder}: there is no weight file")
