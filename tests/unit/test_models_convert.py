"""GGUF to Hugging Face: weights, row order, rounding, config, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer

from eyas.models import ModelError
from eyas.models.convert import bfloat16_bits, convert_gguf, hugging_face_name, unpermute
from tests.helpers import tiny_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_gguf.write_tiny_gguf(folder / "tiny.gguf", tiny_gguf.tiny_weights())
    convert_gguf(folder / "tiny.gguf", folder)
    return folder


def test_every_weight_is_the_original_in_bfloat16(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    expected = {hugging_face_name(name): weight for name, weight in tiny_gguf.tiny_weights().items()}
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], torch.from_numpy(weight).bfloat16()), name


def test_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert (
        config
        | {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": len(tiny_gguf.TOKENS),
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_theta": 50000.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        }
        == config
    )
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>the 12 thé 안녕 👩‍👧\n\t  <|im_end|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("a th 12<|im_end|>").tokens == ["a", "Ġth", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode([2, *tokenizer.encode("th").ids]) == "th"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == tiny_gguf.CHAT_TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def _rotate(x: NDArray[np.float32], y: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Turns the pairs (x, y), both [heads, head_dim / 2, hidden], each by its own angle."""
    angle = np.linspace(0.1, 1.5, x.shape[1], dtype=np.float32)[:, None]
    return x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)


def test_unpermuted_rows_turn_under_half_split_rope_as_the_stored_ones_turn_in_neighbouring_pairs() -> None:
    heads, half, hidden = 3, 4, 5
    stored = np.random.default_rng(0).standard_normal((heads * 2 * half, hidden), np.float32)
    pairs = stored.reshape(heads, half, 2, hidden)
    turned = np.stack(_rotate(pairs[:, :, 0], pairs[:, :, 1]), axis=2).reshape(stored.shape)

    halves = unpermute(stored, heads).reshape(heads, 2, half, hidden)
    expected = np.stack(_rotate(halves[:, 0], halves[:, 1]), axis=1).reshape(stored.shape)
    np.testing.assert_array_equal(unpermute(turned, heads), expected)
    assert not np.array_equal(unpermute(stored, heads), stored)


def test_rounding_is_to_nearest_with_ties_to_even() -> None:
    step = 2.0**-7  # of bfloat16 between 1 and 2
    values = [
        1 + step / 2,
        1 + 3 * step / 2,
        1 + step / 2 + 2.0**-20,
        -1 - step / 2 - 2.0**-20,
        0.0,
        3e-39,
        1e38,
    ]
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(bfloat16_bits(array), expected)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    tiny_gguf.write_tiny_gguf(tmp_path / "tiny.gguf", tiny_gguf.tiny_weights(), architecture="falcon")
    with pytest.raises(ModelError, match=r"tiny\.gguf: general\.architecture is 'falcon'"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    tiny_gguf.write_tiny_gguf(tmp_path / "tiny.gguf", tiny_gguf.tiny_weights() | extra)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path)
