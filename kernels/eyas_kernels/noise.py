"""Counter-based noise: every number is a function of (seed, choice, position, purpose) and of nothing else, so
it does not depend on batches, order, rounds or retries."""

from __future__ import annotations

import enum

import numpy as np
import torch

LARGEST_UNIFORM = 1 - 2.0**-24


class Purpose(enum.IntEnum):
    """What a stream of noise decides; one counter space each."""

    TOKEN = 0


def exponential_noise(
    seed: int, choice: int, position: int, size: int, purpose: Purpose = Purpose.TOKEN
) -> torch.Tensor:
    """float32 [size] of independent Exp(1) numbers for the token at `position`; entry i belongs to token id i.

    Philox 4x64-10 (Salmon et al., 2011), keyed by (seed, choice), counted from (0, position, purpose). With
    u = (bits + 0.5) / 2^32 the number is -log(1 - u), which keeps full relative precision near 0: there lie the
    winners of a Gumbel-max draw.
    """
    generator = np.random.Philox(
        key=np.array([seed, choice], dtype=np.uint64),
        counter=np.array([0, position, purpose, 0], dtype=np.uint64),
    )
    bits = generator.random_raw(-(-size // 2)).view(np.uint32)[:size]
    # In float32 the largest u rounds to 1, and an infinite number would outweigh every logit.
    uniform = torch.from_numpy(bits).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_()
