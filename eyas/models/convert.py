"""Turns a llama.cpp GGUF file of a Llama model into a Hugging Face folder of bfloat16 safetensors. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.models.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from numpy.typing import NDArray

_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.

    `folder` must exist. Weights are dequantised in float32 and rounded once to bfloat16. Raises ModelError for
    an architecture or a tokenizer other than SmolLM's Llama, and for a tensor it does not know.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    for key, expected in (("general.architecture", "llama"), ("tokenizer.ggml.pre", "smollm")):
        if metadata.get(key) != expected:
            raise ModelError(f"{gguf}: {key} is {metadata.get(key)!r}; only {expected!r} can be converted")
    config = llama_config(metadata, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {k: config[k] for k in _SPECIAL_IDS})
    _write_tokenizer(metadata, folder)
    _save_weights(dict(_weights(reader, config)), folder / "model.safetensors")


def llama_config(metadata: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    """The config.json of a GGUF file's metadata; `tied` says that lm_head is the embedding."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        # GGUF holds float32, in which 1e-5 is 9.99999975e-06.
        "rms_norm_eps": float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": metadata["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises ModelError for others."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
    raise ModelError(f"tensor {name}: no such tensor in a Llama model")


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Puts the rows of a query or key projection, [num_heads * head_dim, hidden], back in Hugging Face's order.

    RoPE turns rows in pairs: llama.cpp stores a head's pair as rows (2i, 2i + 1), Hugging Face as rows
    (i, i + head_dim / 2).
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def bfloat16_bits(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounds finite float32 to bfloat16, to nearest, ties to even; NumPy has no such type, so its bits."""
    import numpy as np

    bits = np.ascontiguousarray(array).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _weights(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        yield name, bfloat16_bits(unpermute(weight, heads[part]) if part in heads else weight)


def _save_weights(weights: dict[str, NDArray[np.uint16]], path: Path) -> None:
    from safetensors import TensorSpec, serialize

    specs = {
        name: TensorSpec(dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes)
        for name, bits in weights.items()
    }
    path.write_bytes(serialize(specs, {"format": "pt"}))


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """SmolLM's tokenizer: byte-level BPE over GPT-2's splits, with every digit on its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata))


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
