"""What an EAGLE head is: its kind from its tensors, its sizes from config.json, checked against the target."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal

from draft_service.head_config import is_speculators, read_config
from eyas_kernels.checkpoint import Checkpoint, CheckpointError, Config

HeadKind = Literal["eagle1", "eagle3"]

# Base of the rotary embedding in the reference training code, whatever the target's is.
DEFAULT_ROPE_THETA = 10000.0
# Length that the reference training code cuts samples to.
DEFAULT_TRAINED_LENGTH = 2048

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class TargetShape:
    """What a head must know of its target."""

    hidden_size: int
    num_layers: int
    vocab_size: int


@dataclass(frozen=True)
class Overrides:
    """What the user knows better than config.json; None leaves it to the file.

    `rope_scaling` is as in config.json, empty for plain rotary embeddings; `taps` counts blocks applied.
    """

    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    taps: tuple[int, ...] | None = None


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
    attention_bias: bool  # on queries, keys and values
    attention_norm: bool  # on each head's query and key, as in Qwen3
    sliding_window: int | None
    max_position_embeddings: int
    taps: tuple[int, ...]
    norm_before_fc: bool  # one norm over all taps side by side
    fc_norm: bool  # a norm for each tap (EAGLE 3.1)
    norm_before_residual: bool  # the residual stream begins with the normed hidden state
    norm_output: bool  # the next step is given the output behind the last norm (EAGLE 3.1)
    owns_embedding: bool

    @property
    def feature_size(self) -> int:
        """Width of a feature h_i."""
        return self.target_hidden_size * max(len(self.taps), 1)

    @property
    def borrows_lm_head(self) -> bool:
        """Whether the target's lm_head fits, so that the head needs none of its own."""
        return self.hidden_size == self.target_hidden_size and self.draft_vocab_size == self.vocab_size


def layer_prefix(names: Set[str]) -> str:
    """Where the decoder layer's tensors are: "midlayer." in raw EAGLE-3 heads, else "layers.0."."""
    return "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."


def read_spec(checkpoint: Checkpoint, target: TargetShape, overrides: Overrides) -> HeadSpec:
    """Reads config.json.

    Raises CheckpointError, naming file and field, for a variant that is unsupported or does not fit the target.
    """
    names = checkpoint.names().keys()
    config = read_config(checkpoint)
    kind = _kind(checkpoint)
    eagle3 = kind == "eagle3"
    hidden_size = config.integer("hidden_size")
    target_hidden_size = _target_hidden_size(config, kind, target)
    num_heads, num_kv_heads, head_dim = config.heads(hidden_size)
    theta, scaling = _rope(config, overrides)
    vocab_size = _fitting(config, "vocab_size", target.vocab_size)
    layer = layer_prefix(names)
    return HeadSpec(
        kind=kind,
        hidden_size=hidden_size,
        target_hidden_size=target_hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps"),
        vocab_size=vocab_size,
        draft_vocab_size=_draft_vocab_size(config, kind, vocab_size),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=f"{layer}self_attn.q_proj.bias" in names,
        attention_norm=f"{layer}self_attn.q_norm.weight" in names,
        # Configs copied from a Mistral carry a window that the reference code knows nothing of.
        sliding_window=config.integer("sliding_window") if config.flag("use_sliding_window", False) else None,
        max_position_embeddings=config.integer("max_position_embeddings", DEFAULT_TRAINED_LENGTH),
        taps=_taps(config, target.num_layers, overrides) if eagle3 else (),
        **_norms(config, names) if eagle3 else NO_NORMS,
        owns_embedding=hidden_size != target_hidden_size or config.flag("embed_requires_grad", False),
    )


NO_NORMS = dict.fromkeys(("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output"), False)


def _norms(config: Config, names: Set[str]) -> dict[str, bool]:
    """Which norms an EAGLE-3 head has beside the usual ones. Where config.json says nothing of a norm with weights
    of its own, the tensors say it."""
    norms = {
        "norm_before_fc": config.flag("norm_before_fc", "input_norm.weight" in names),
        "fc_norm": config.flag("fc_norm", any(name.startswith("fc_norm.") for name in names)),
        # vLLM, for which the speculators format was made, takes it as said where the format leaves it out.
        "norm_before_residual": config.flag("norm_before_residual", is_speculators(config)),
        "norm_output": config.flag("norm_output", False),
    }
    if norms["norm_before_fc"] and norms["fc_norm"]:
        raise config.error("fc_norm", "and norm_before_fc exclude each other, but both are there")
    return norms


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


def _rope(config: Config, overrides: Overrides) -> tuple[float, dict[str, Any] | None]:
    theta, scaling = config.rope(DEFAULT_ROPE_THETA)
    if overrides.rope_scaling is not None:
        scaling = overrides.rope_scaling or None
    return theta if overrides.rope_theta is None else overrides.rope_theta, scaling


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Taps of the reference code, which heads are trained on unless they say otherwise."""
    return (2, num_layers // 2, num_layers - 3)


def _taps(config: Config, num_layers: int, overrides: Overrides) -> tuple[int, ...]:
    """Blocks applied before each hidden state that fc reads.

    Raw configs number the layers in two ways: by the layer whose output is read, starting with 1; or by the layer
    in front of which it is read, which is the number of blocks applied, starting with 2. The speculators format
    knows the second way only.
    """
    if overrides.taps is not None:
        ids = list(overrides.taps)
    elif not config.has(AUX_LAYERS):
        ids = list(default_taps(num_layers))
    else:
        ids = config.integers(AUX_LAYERS)
        ids = [i + 1 for i in ids] if ids[0] == 1 and not is_speculators(config) else ids
    if not all(1 <= tap <= num_layers for tap in ids):
        raise config.error(AUX_LAYERS, f"means the taps {ids}, but the target has {num_layers} layers")
    return tuple(ids)
