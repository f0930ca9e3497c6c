"""The decoder layer's two halves, which target and head share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas_kernels.activation import silu_mul
from eyas_kernels.attention import StepRows, paged_attention, write_kv
from eyas_kernels.linear import Weight, linear
from eyas_kernels.norm import rms_norm
from eyas_kernels.rope import Rotation, rotate_


@dataclass(frozen=True)
class AttentionWeights:
    """Weights of one attention. `qkv` is [(num_heads + 2 * num_kv_heads) * head_dim, in]: queries, keys, values."""

    qkv: Weight
    qkv_bias: torch.Tensor | None
    out: Weight
    out_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [head_dim], Qwen3
    key_norm: torch.Tensor | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True)
class MLPWeights:
    """Weights of a SwiGLU MLP. `gate_up` is [2 * intermediate, in], gate first."""

    gate_up: Weight
    down: Weight


def attention(
    x: torch.Tensor, weights: AttentionWeights, rotation: Rotation, cache: torch.Tensor, step: StepRows
) -> torch.Tensor:
    """x [rows, in], normed -> [rows, hidden]; writes the rows' keys and values into `cache` (one layer)."""
    num_queries, num_keys = weights.num_heads, weights.num_kv_heads
    qkv = linear(x, weights.qkv, weights.qkv_bias)
    split = (num_queries + num_keys) * weights.head_dim
    rotated = qkv[:, :split].view(-1, num_queries + num_keys, weights.head_dim)
    if weights.query_norm is not None and weights.key_norm is not None:
        rotated[:, :num_queries] = rms_norm(rotated[:, :num_queries], weights.query_norm, weights.eps)
        rotated[:, num_queries:] = rms_norm(rotated[:, num_queries:], weights.key_norm, weights.eps)
    rotate_(rotated, rotation)
    write_kv(cache, qkv[:, num_queries * weights.head_dim :], step)
    return linear(paged_attention(rotated[:, :num_queries], cache, step), weights.out, weights.out_bias)


def mlp(x: torch.Tensor, weights: MLPWeights) -> torch.Tensor:
    """x [rows, in], normed -> [rows, hidden]."""
    return linear(silu_mul(linear(x, weights.gate_up)), weights.down)
