"""Reading an EAGLE head in its published layout, and the tensors that it borrows from its target."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draft_service.head_spec import HeadSpec, TargetShape, layer_prefix, read_spec
from eyas_kernels.checkpoint import Checkpoint, CheckpointError

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadWeights:
    """Weights of a head, fused where one product serves several projections.

    H and Ht are the widths of head and target; A is the width of what attention reads, H for EAGLE-1 and 2H for
    EAGLE-3; V and D are the sizes of the target's and of the draft vocabulary.
    """

    fc: Tensor  # [H, 2H] on (embedding, feature) for EAGLE-1; [H, taps * Ht] on the feature for EAGLE-3
    fc_bias: Tensor | None  # [H]
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, A]: queries, keys, values
    qkv_bias: Tensor | None
    out: Tensor  # [H, num_heads * head_dim]
    gate_up: Tensor  # [2 * intermediate_size, H], gate first
    down: Tensor  # [H, intermediate_size]
    post_attention_layernorm: Tensor  # [H]
    input_layernorm: Tensor | None  # [H], on the embedding; EAGLE-3
    hidden_norm: Tensor | None  # [H], on the hidden state; EAGLE-3
    norm: Tensor | None  # [H], before lm_head; EAGLE-3
    lm_head: Tensor | None  # [D, H]; None borrows the target's
    embed: Tensor | None  # [V, H]; None borrows the target's
    target_ids: Tensor | None  # int64 [D], target id of every draft id; None where the ids are the same


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head as read from its folder."""

    spec: HeadSpec
    weights: HeadWeights


def read_head(
    folder: Path,
    target: TargetShape,
    rope_theta: float | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> HeadCheckpoint:
    """Reads an EAGLE-1 or EAGLE-3 head; the kind follows from the tensors, not from the config.

    `rope_theta` overrides the head's own rotary base. Raises CheckpointError, naming the file and the field or
    the tensors, for a head that is damaged, of an unsupported variant, or made for another target.
    """
    checkpoint = Checkpoint(folder)
    spec = read_spec(checkpoint, target, rope_theta)
    required, optional = _shapes(spec, layer_prefix(checkpoint.names().keys()))
    _check_tensors(checkpoint, required, optional)
    weights = _load_weights(checkpoint, spec, dtype, device)
    for name, used in (("embed_tokens.weight", weights.embed), ("lm_head.weight", weights.lm_head)):
        if name in checkpoint.names() and used is None:
            logger.info("%s: %s is left aside, the target's is used", folder, name)
    return HeadCheckpoint(spec, weights)


def read_borrowed(
    target_folder: Path, need_lm_head: bool, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor | None]:
    """The target's embedding [V, Ht], and its lm_head [V, Ht] if needed, else None; tied, they are one tensor.

    Only these tensors are read. Raises CheckpointError if one is missing or its shape is not config.json's.
    """
    checkpoint = Checkpoint(target_folder)
    config = checkpoint.config
    shape = (config.integer("vocab_size"), config.integer("hidden_size"))
    names = ["model.embed_tokens.weight"]
    if need_lm_head and not config.flag("tie_word_embeddings", False):
        names.append("lm_head.weight")
    problems = _problems(checkpoint, dict.fromkeys(names, shape))
    if problems:
        raise CheckpointError(f"{target_folder}: {'; '.join(problems)}")
    tensors = [checkpoint.load(name, dtype, device) for name in names]
    return tensors[0], tensors[-1] if need_lm_head else None


def _shapes(spec: HeadSpec, layer: str) -> tuple[Shapes, Shapes]:
    """Shapes of the tensors that a head must have, and of those that it may have, by name."""
    hidden, inner, eagle3 = spec.hidden_size, spec.intermediate_size, spec.kind == "eagle3"
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention_in = 2 * hidden if eagle3 else hidden
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    norms = ["post_attention_layernorm", *(["input_layernorm", "hidden_norm"] if eagle3 else [])]
    required: Shapes = {
        "fc.weight": (hidden, spec.feature_size if eagle3 else 2 * hidden),
        **{f"{layer}self_attn.{name}.weight": (size, attention_in) for name, size in projections.items()},
        f"{layer}self_attn.o_proj.weight": (hidden, queries),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
        **{f"{layer}{name}.weight": (hidden,) for name in norms},
    }
    optional: Shapes = {"fc.bias": (hidden,)}
    if spec.attention_bias:
        required |= {f"{layer}self_attn.{name}.bias": (size,) for name, size in projections.items()}
    lm_head = {"lm_head.weight": (spec.draft_vocab_size, hidden)}
    if eagle3:
        required |= {"norm.weight": (hidden,), **lm_head}
        optional["t2d"] = (spec.vocab_size,)
        reduced = spec.draft_vocab_size < spec.vocab_size
        (required if reduced else optional)["d2t"] = (spec.draft_vocab_size,)
    else:
        optional |= lm_head
    owns_embedding = hidden != spec.target_hidden_size
    (required if owns_embedding else optional)["embed_tokens.weight"] = (spec.vocab_size, hidden)
    return required, optional


def _check_tensors(checkpoint: Checkpoint, required: Shapes, optional: Shapes) -> None:
    """Raises one CheckpointError with everything that is unknown, missing, mis-shaped or of a wrong type."""
    found = checkpoint.names()
    known = required | {name: shape for name, shape in optional.items() if name in found}
    problems = _problems(checkpoint, known)
    problems += [f"{name} in {info.file} is unknown" for name, info in found.items() if name not in known]
    if problems:
        raise CheckpointError(
            f"{checkpoint.folder}: the tensors are not those of config.json: {'; '.join(problems)}"
        )


def _problems(checkpoint: Checkpoint, expected: Shapes) -> list[str]:
    found = checkpoint.names()
    problems = []
    for name, shape in expected.items():
        if name not in found:
            problems.append(f"{name} {list(shape)} is missing")
            continue
        info = found[name]
        if info.shape != shape:
            problems.append(f"{name} in {info.file} is {list(info.shape)}, but {list(shape)} is needed")
        if info.dtype.is_floating_point == (name in ("d2t", "t2d")):
            problems.append(f"{name} in {info.file} has dtype {info.dtype}, which does not fit")
    return problems


def _load_weights(
    checkpoint: Checkpoint, spec: HeadSpec, dtype: torch.dtype, device: torch.device | str
) -> HeadWeights:
    names = checkpoint.names()
    layer = layer_prefix(names.keys())

    def load(name: str) -> Tensor:
        return checkpoint.load(name, dtype, device)

    def fuse(kind: str, *parts: str) -> Tensor:
        return torch.cat([load(f"{layer}{part}.{kind}") for part in parts])

    eagle3 = spec.kind == "eagle3"
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    target_ids = _target_ids(checkpoint, spec)
    return HeadWeights(
        fc=load("fc.weight"),
        fc_bias=load("fc.bias") if "fc.bias" in names else None,
        qkv=fuse("weight", *qkv),
        qkv_bias=fuse("bias", *qkv) if spec.attention_bias else None,
        out=load(f"{layer}self_attn.o_proj.weight"),
        gate_up=fuse("weight", "mlp.gate_proj", "mlp.up_proj"),
        down=load(f"{layer}mlp.down_proj.weight"),
        post_attention_layernorm=load(f"{layer}post_attention_layernorm.weight"),
        input_layernorm=load(f"{layer}input_layernorm.weight") if eagle3 else None,
        hidden_norm=load(f"{layer}hidden_norm.weight") if eagle3 else None,
        norm=load("norm.weight") if eagle3 else None,
        lm_head=load("lm_head.weight") if eagle3 else None,
        # Some exports hold an embedding that was never trained, so the target's is taken wherever it fits.
        embed=load("embed_tokens.weight") if spec.hidden_size != spec.target_hidden_size else None,
        target_ids=None if target_ids is None else target_ids.to(device),
    )


def _target_ids(checkpoint: Checkpoint, spec: HeadSpec) -> Tensor | None:
    """Target id of every draft id, from the offsets d2t. The mask of these ids, t2d, must agree if present."""
    names = checkpoint.names()
    if "d2t" not in names:
        return None
    where = checkpoint.folder / names["d2t"].file
    draft_ids = torch.arange(spec.draft_vocab_size)
    target_ids = draft_ids + checkpoint.load("d2t", torch.int64)
    lowest, highest = int(target_ids.min()), int(target_ids.max())
    if lowest < 0 or highest >= spec.vocab_size:
        raise CheckpointError(
            f"{where}: d2t leads to ids {lowest} to {highest}, but vocab_size is {spec.vocab_size}"
        )
    marked = target_ids.unique()
    if "t2d" in names:
        marked = checkpoint.load("t2d", torch.bool).nonzero()[:, 0]
    identity = torch.equal(target_ids, draft_ids)
    unconfirmed = identity and "t2d" not in names and spec.draft_vocab_size < spec.vocab_size
    if unconfirmed or not torch.equal(target_ids.sort().values, marked):
        detail = "all zeros" if identity else "another set of ids than t2d's, or names one twice"
        raise CheckpointError(f"{where}: d2t is {detail}")
    return None if identity else target_ids
