"""Rotary position embedding (Su et al., 2021), half-split layout, with the scalings of published checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Rotation(NamedTuple):
    """Cosines and signed sines of a step's positions, each [rows, 1, head_dim] in the model's dtype."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Rope:
    """Angles per position: `inv_freq` is float32 [head_dim / 2]."""

    inv_freq: torch.Tensor

    def rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """positions int64 [rows] -> the rotation of every row; there is no table and so no largest position."""
        angles = positions[:, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return Rotation(
            torch.cat((cos, cos), -1).to(dtype).unsqueeze(1), torch.cat((-sin, sin), -1).to(dtype).unsqueeze(1)
        )


def rotate_(x: torch.Tensor, rotation: Rotation) -> None:
    """Rotates x [rows, heads, head_dim] in place."""
    halves_swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(rotation.cos).addcmul_(halves_swapped, rotation.sin)


def make_rope(
    head_dim: int, theta: float, scaling: Mapping[str, Any] | None, device: torch.device | str = "cpu"
) -> Rope:
    """Rope from the fields of a config.json. Raises ValueError, worded to follow the name of the scaling's field,
    for a scaling that is not implemented or lacks a number."""
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return Rope(_scaled(inv_freq, scaling or {}).to(device))


def _scaled(inv_freq: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / _number(scaling, "factor")
    if kind == "llama3":
        return _llama3(inv_freq, scaling)
    raise ValueError(f"is of type {kind!r}, but only default, linear and llama3 are supported")


def _llama3(inv_freq: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, original = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    wavelength = 2 * math.pi / inv_freq
    kept_share: torch.Tensor = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return kept_share * inv_freq + (1 - kept_share) * inv_freq / factor


def _number(scaling: Mapping[str, Any], key: str) -> float:
    value: Any = scaling.get(key)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"has {key} {value!r}, but a positive number is needed")
    return float(value)
