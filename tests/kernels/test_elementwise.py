"""Norm, activation and rotary embedding against their formulas and transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eyas_kernels.activation import silu_mul
from eyas_kernels.norm import rms_norm
from eyas_kernels.rope import Rotation, make_rope, rotate_

DTYPES = (torch.float32, torch.bfloat16)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- norm and activation


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_the_formula_in_float32(dtype: torch.dtype) -> None:
    x, weight = random(7, 96, dtype=dtype) * 30, random(96, dtype=dtype, seed=1)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 0.5).sqrt() * weight.double()
    found = rms_norm(x, weight, 0.5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=torch.finfo(dtype).eps)


def test_rms_norm_works_on_heads() -> None:
    x, weight = random(5, 3, 16), random(16, seed=1)
    found = rms_norm(x, weight, 1e-5)
    assert torch.equal(found[2, 1], rms_norm(x[2, 1], weight, 1e-5))


def test_silu_mul_gates_with_the_first_half() -> None:
    x = random(5, 64)
    gate, up = x[:, :32].double(), x[:, 32:].double()
    torch.testing.assert_close(silu_mul(x).double(), gate / (1 + (-gate).exp()) * up, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 1536])
def test_a_row_does_not_depend_on_the_others(width: int, dtype: torch.dtype) -> None:
    x, weight = random(9, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    gates, rope = random(9, 2 * width, dtype=dtype), make_rope(64, 10000.0, None)
    positions = torch.arange(500, 509)
    for rows in range(1, 9):
        assert torch.equal(rms_norm(x[:rows], weight, 1e-5), rms_norm(x, weight, 1e-5)[:rows])
        assert torch.equal(silu_mul(gates[:rows]), silu_mul(gates)[:rows])
        for part, whole in zip(
            rope.rotation(positions[:rows], dtype), rope.rotation(positions, dtype), strict=True
        ):
            assert torch.equal(part, whole[:rows])


# ---- rotary embedding


def theirs(scaling: dict[str, Any] | None, theta: float, head_dim: int) -> LlamaRotaryEmbedding:
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    return LlamaRotaryEmbedding(
        LlamaConfig(head_dim=head_dim, rope_parameters=parameters, max_position_embeddings=2048)
    )


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "default"},
        {"type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
    ],
    ids=["none", "default", "linear", "linear-old-key", "llama3"],
)
def test_rotations_are_those_of_transformers(
    scaling: dict[str, Any] | None, theta: float, head_dim: int
) -> None:
    positions = torch.tensor([0, 1, 2, 77, 1023, 2047])
    query = random(6, 4, head_dim)
    known = dict(scaling or {})
    known["rope_type"] = known.pop("type", known.get("rope_type", "default"))
    cos, sin = theirs(known, theta, head_dim)(query, positions[None])
    expected, _ = apply_rotary_pos_emb(query.transpose(0, 1)[None], query.transpose(0, 1)[None], cos, sin)
    rotate_(query, make_rope(head_dim, theta, scaling).rotation(positions, torch.float32))
    torch.testing.assert_close(query, expected[0].transpose(0, 1), atol=1e-5, rtol=0)


def test_llama3_scaling_stretches_long_wavelengths_alone() -> None:
    plain, scaled = make_rope(64, 1e4, None).inv_freq, make_rope(64, 1e4, LLAMA3).inv_freq
    ratio = plain / scaled
    assert ratio[0] == 1
    assert ratio[-1] == 8
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'yarn', but only default, linear and llama3 are supported"):
        make_rope(64, 1e4, {"rope_type": "yarn", "factor": 2.0})


def test_rotating_works_in_place_on_a_part_of_a_wider_tensor() -> None:
    x = random(3, 6, 16)
    before, part = x.clone(), x[:, :4]
    rotation: Rotation = make_rope(16, 1e4, None).rotation(torch.tensor([3, 4, 5]), torch.float32)
    rotate_(part, rotation)
    assert torch.equal(x[:, 4:], before[:, 4:])
    assert not torch.isclose(x[:, :4], before[:, :4]).all()
    torch.testing.assert_close(x[:, :4].norm(dim=-1), before[:, :4].norm(dim=-1))
