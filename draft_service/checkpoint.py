"""Reading an EAGLE head in its published layout, and the tensors that it borrows from its target."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from draft_service.head_spec import HeadSpec, Overrides, TargetShape, layer_prefix, read_spec
from draft_service.head_tensors import check_tensors, fc_norms, problems_of
from eyas_kernels.checkpoint import Checkpoint, CheckpointError

logger = logging.getLogger(__name__)

NO_OVERRIDES = Overrides()


@dataclass(frozen=True)
class HeadWeights:
    """Weights of a head, fused where one product serves several projections.

    H and Ht are the widths of head and target; A is the width of what attention reads, H for EAGLE-1 and 2H for
    EAGLE-3; V and D are the sizes of the target's and of the draft vocabulary.
    """

    fc: Tensor  # [H, 2H] on (embedding, feature) for EAGLE-1; [H, taps * Ht] on the feature for EAGLE-3
    fc_bias: Tensor | None  # [H]
    fc_norms: tuple[Tensor, ...]  # on the feature: none, one [taps * Ht], or one [Ht] for each tap; EAGLE-3
    qkv: Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, A]: queries, keys, values
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    out: Tensor  # [H, num_heads * head_dim]
    out_bias: Tensor | None  # [H]
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
    overrides: Overrides = NO_OVERRIDES,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> HeadCheckpoint:
    """Reads an EAGLE-1 or EAGLE-3 head; the kind follows from the tensors, not from the config.

    Raises CheckpointError, naming the file and the field or the tensors, for a head that is damaged, of an
    unsupported variant, or made for another target.
    """
    checkpoint = Checkpoint(folder)
    spec = read_spec(checkpoint, target, overrides)
    check_tensors(checkpoint, spec)
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
    problems = problems_of(checkpoint, dict.fromkeys(names, shape))
    if problems:
        raise CheckpointError(f"{target_folder}: {'; '.join(problems)}")
    tensors = [checkpoint.load(name, dtype, device) for name in names]
    return tensors[0], tensors[-1] if need_lm_head else None


def _load_weights(
    checkpoint: Checkpoint, spec: HeadSpec, dtype: torch.dtype, device: torch.device | str
) -> HeadWeights:
    names = checkpoint.names()
    layer = layer_prefix(names.keys())

    def load(name: str) -> Tensor:
        return checkpoint.load(name, dtype, device)

    def maybe(name: str) -> Tensor | None:
        return load(name) if name in names else None

    def fuse(kind: str, *parts: str) -> Tensor:
        return torch.cat([load(f"{layer}{part}.{kind}") for part in parts])

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    target_ids = _target_ids(checkpoint, spec)
    return HeadWeights(
        fc=load("fc.weight"),
        fc_bias=maybe("fc.bias"),
        fc_norms=tuple(map(load, fc_norms(spec))),
        qkv=fuse("weight", *qkv),
        qkv_bias=fuse("bias", *qkv) if spec.attention_bias else None,
        query_norm=maybe(f"{layer}self_attn.q_norm.weight"),
        key_norm=maybe(f"{layer}self_attn.k_norm.weight"),
        out=load(f"{layer}self_attn.o_proj.weight"),
        out_bias=maybe(f"{layer}self_attn.o_proj.bias"),
        gate_up=fuse("weight", "mlp.gate_proj", "mlp.up_proj"),
        down=load(f"{layer}mlp.down_proj.weight"),
        post_attention_layernorm=load(f"{layer}post_attention_layernorm.weight"),
        input_layernorm=maybe(f"{layer}input_layernorm.weight"),
        hidden_norm=maybe(f"{layer}hidden_norm.weight"),
        norm=maybe("norm.weight"),
        lm_head=maybe("lm_head.weight") if spec.kind == "eagle3" else None,
        # Some exports hold an embedding that was never trained, so the target's is taken wherever it fits.
        embed=load("embed_tokens.weight") if spec.owns_embedding else None,
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
