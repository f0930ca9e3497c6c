"""What an EAGLE head is: its kind from its tensors, its sizes from config.json, checked against the target."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal

from eyas_kernels.checkpoint import Checkpoint, CheckpointError, Config

HeadKind = Literal["eagle1", "eagle3"]

# Base of the rotary embedding in the reference training code, whatever the target's is.
DEFAULT_ROPE_THETA = 10000.0
# Length that the reference training code cuts samples to.
DEFAULT_TRAINED_LENGTH = 2048

# Tensors (by prefix) of variants with another forward pass.
FOREIGN_TENSORS = {
    "mask_hidden": "parallel drafting (P-EAGLE)",
    "fusion_fc.": "the old speculators layout",
    "input_norm.": "norm_before_fc",
    "fc_norm.": "fc_norm (EAGLE 3.1)",
}
# Flags, and the value of each that asks for another forward pass.
FOREIGN_FLAGS = {
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
    "parallel_drafting": True,
    "use_aux_hidden_state": False,
}


@dataclass(frozen=True)
class TargetShape:
    """What a head must know of its target."""

    hidden_size: int
    num_layers: int
    vocab_size: int


@dataclass(frozen=True)
class HeadSpec:
    """The head's architecture, every default resolved.

    `taps` counts blocks applied, one entry for each hidden state that fc reads; empty for EAGLE-1, which reads
    the hidden state behind the final norm. `max_position_embeddings` is the length it was trained on, not a
    limit. `rope_scaling` is the dictionary of config.json, None for plain rotary embeddings.
    """

    kind: HeadKind
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    attention_bias: bool
    max_position_embeddings: int
    taps: tuple[int, ...]
    norm_before_residual: bool

    @property
    def feature_size(self) -> int:
        """Width of a feature h_i."""
        return self.target_hidden_size * max(len(self.taps), 1)


def layer_prefix(names: Set[str]) -> str:
    """Where the decoder layer's tensors are: "midlayer." in published EAGLE-3 heads, else "layers.0."."""
    return "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."


def read_spec(checkpoint: Checkpoint, target: TargetShape, rope_theta: float | None) -> HeadSpec:
    """Reads config.json; `rope_theta` overrides what it says.

    Raises CheckpointError, naming file and field, for a variant that is unsupported or does not fit the target.
    """
    names = checkpoint.names().keys()
    config = _unwrapped(checkpoint.config)
    _refuse_foreign(checkpoint, config)
    kind = _kind(checkpoint)
    hidden_size = config.integer("hidden_size")
    num_heads, num_kv_heads, head_dim = config.heads(hidden_size)
    theta, scaling = config.rope(DEFAULT_ROPE_THETA)
    vocab_size = _fitting(config, "vocab_size", target.vocab_size)
    return HeadSpec(
        kind=kind,
        hidden_size=hidden_size,
        target_hidden_size=_target_hidden_size(config, kind, target),
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps"),
        vocab_size=vocab_size,
        draft_vocab_size=_draft_vocab_size(config, kind, vocab_size),
        rope_theta=theta if rope_theta is None else rope_theta,
        rope_scaling=scaling,
        attention_bias=any(name.endswith(".self_attn.q_proj.bias") for name in names),
        max_position_embeddings=config.integer("max_position_embeddings", DEFAULT_TRAINED_LENGTH),
        taps=_taps(config, target.num_layers) if kind == "eagle3" else (),
        norm_before_residual=kind == "eagle3" and config.flag("norm_before_residual", False),
    )


def _unwrapped(config: Config) -> Config:
    """vLLM's EAGLEConfig keeps the head's own config under `model`."""
    inner = config.section("model").values
    return Config({**config.values, **inner}, config.file)


def _refuse_foreign(checkpoint: Checkpoint, config: Config) -> None:
    for prefix, variant in FOREIGN_TENSORS.items():
        found = next((name for name in checkpoint.names() if name.startswith(prefix)), None)
        if found is not None:
            file = checkpoint.folder / checkpoint.file_of(found)
            raise CheckpointError(f"{file}: {found} belongs to {variant}, which is not supported")
    for key in ("speculators_config", "speculators_model_type"):
        if config.has(key):
            raise config.error(key, "belongs to the speculators format, which is not supported")
    for place in (config, config.section("eagle_config")):
        for key, foreign in FOREIGN_FLAGS.items():
            if place.flag(key, not foreign) == foreign:
                raise place.error(key, f"is {str(foreign).lower()}, which is not supported")
    if config.text("hidden_act", "silu") != "silu":
        raise config.error("hidden_act", f"is {config.text('hidden_act')!r}, but only 'silu' is supported")


def _kind(checkpoint: Checkpoint) -> HeadKind:
    names = checkpoint.names().keys()
    prefix = layer_prefix(names)
    if prefix == "midlayer." or f"{prefix}hidden_norm.weight" in names:
        return "eagle3"
    if any(name.startswith(prefix) for name in names):
        return "eagle1"
    raise CheckpointError(f"{checkpoint.folder}: no EAGLE head: there are no tensors midlayer.* or layers.0.*")


def _fitting(config: Config, key: str, expected: int) -> int:
    size = config.integer(key)
    if size != expected:
        raise config.error(key, f"is {size}, but the target's is {expected}")
    return size


def _target_hidden_size(config: Config, kind: HeadKind, target: TargetShape) -> int:
    # An EAGLE-1 head's output takes the place of the target's own hidden state, so it is as wide.
    if kind == "eagle1" or not config.has("target_hidden_size"):
        return _fitting(config, "hidden_size", target.hidden_size)
    return _fitting(config, "target_hidden_size", target.hidden_size)


def _draft_vocab_size(config: Config, kind: HeadKind, vocab_size: int) -> int:
    size = config.integer("draft_vocab_size", vocab_size)
    if size > vocab_size:
        raise config.error("draft_vocab_size", f"is {size}, but vocab_size is {vocab_size}")
    if kind == "eagle1" and size != vocab_size:
        raise config.error(
            "draft_vocab_size", f"is {size}, but an EAGLE-1 head drafts from the whole vocabulary"
        )
    return size


def _taps(config: Config, num_layers: int) -> tuple[int, ...]:
    """Blocks applied before each hidden state that fc reads.

    Configs number the layers in two ways: by the layer whose output is read, starting with 1; or by the layer
    in front of which it is read, which is the number of blocks applied, starting with 2.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    place = config if config.has(key) else config.section("eagle_config")
    if not place.has(key):
        ids = [2, num_layers // 2, num_layers - 3]
    else:
        ids = place.integers(key)
        ids = [i + 1 for i in ids] if ids[0] == 1 else ids
    if not all(1 <= tap <= num_layers for tap in ids):
        raise place.error(key, f"means the taps {ids}, but the target has {num_layers} layers")
    return tuple(ids)
