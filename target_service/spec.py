"""What a target checkpoint's config.json says about the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eyas_kernels.checkpoint import Checkpoint, Config, read_json

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class DecoderSpec:
    """Shape and constants of a Llama-family decoder. Whether there are biases and query/key norms is read off the
    tensors, so that it is not said twice."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tied_embeddings: bool
    sliding_window: int | None
    dtype: str  # as stored, one of DTYPES
    eos_token_ids: tuple[int, ...]


def read_spec(checkpoint: Checkpoint) -> DecoderSpec:
    """Reads config.json. Raises CheckpointError naming the file and the key."""
    config = checkpoint.config
    architecture = _architecture(config)
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise config.error("hidden_act", f"is {activation!r}, but only silu is supported")
    if config.flag("mlp_bias", False):
        raise config.error("mlp_bias", "is true, but biases in the MLP are not supported")
    hidden_size = config.integer("hidden_size")
    num_heads, num_kv_heads, head_dim = config.heads(hidden_size)
    rope_theta, rope_scaling = config.rope(10000.0)
    return DecoderSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        context_length=config.integer("max_position_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        sliding_window=_sliding_window(config, architecture),
        dtype=_dtype(config),
        eos_token_ids=_eos_token_ids(checkpoint),
    )


def _architecture(config: Config) -> str:
    named = config.values.get("architectures")
    if not (isinstance(named, list) and len(named) == 1 and named[0] in ARCHITECTURES):
        raise config.error("architectures", f"is {named!r}, but one of {', '.join(ARCHITECTURES)} is needed")
    return str(named[0])


def _sliding_window(config: Config, architecture: str) -> int | None:
    """Mistral's window holds wherever it is set; the Qwen configs carry a number that a switch enables."""
    if architecture == "MistralForCausalLM" and config.has("sliding_window"):
        return config.integer("sliding_window")
    if config.flag("use_sliding_window", False):
        raise config.error("use_sliding_window", "is true, but windows on some of the layers are not supported")
    return None


def _dtype(config: Config) -> str:
    key = "dtype" if config.has("dtype") else "torch_dtype"
    if (dtype := config.text(key, "bfloat16")) not in DTYPES:
        raise config.error(key, f"is {dtype!r}, but one of {', '.join(DTYPES)} is needed")
    return dtype


def _eos_token_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Every id that ends a generation: generation_config.json may list more than config.json, and either counts."""
    sources = [checkpoint.config]
    if (generation := checkpoint.folder / "generation_config.json").exists():
        sources.append(Config(read_json(generation), generation))
    ids: set[int] = set()
    for source in sources:
        if isinstance(source.values.get("eos_token_id"), list):
            ids.update(source.integers("eos_token_id"))
        elif source.has("eos_token_id"):
            ids.add(source.integer("eos_token_id", at_least=0))
    return tuple(sorted(ids))
