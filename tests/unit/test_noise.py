"""The noise is Exp(1), and a function of its key alone."""

from __future__ import annotations

import pytest
import torch

from eyas_kernels.noise import exponential_noise

VOCABULARY = 50_000


def flat(num_positions: int = 20, seed: int = 7) -> torch.Tensor:
    """A million numbers."""
    return torch.cat([exponential_noise(seed, 0, i, VOCABULARY) for i in range(num_positions)]).double()


def test_moments_are_those_of_exp_1() -> None:
    """The k-th moment of Exp(1) is k!, and the variance of its mean over n numbers ((2k)! - k!^2) / n."""
    noise = flat()
    for power, moment, variance in ((1, 1, 1), (2, 2, 20), (3, 6, 684), (4, 24, 39744)):
        error = abs(float(noise.pow(power).mean()) - moment)
        assert error < 4 * (variance / len(noise)) ** 0.5


def test_kolmogorov_smirnov() -> None:
    ordered = flat().sort().values
    ranks = torch.arange(len(ordered) + 1, dtype=torch.float64) / len(ordered)
    law = 1 - (-ordered).exp()
    distance = max(float((law - ranks[:-1]).max()), float((ranks[1:] - law).max()))
    assert distance * len(ordered) ** 0.5 < 1.95  # exceeded once in a thousand keys


def test_small_numbers_are_fine_grained() -> None:
    """The winners of a draw: the least of n numbers is Exp(n)."""
    least = (
        torch.stack([exponential_noise(3, 0, i, VOCABULARY).min() for i in range(300)]).double() * VOCABULARY
    )
    assert abs(float(least.mean()) - 1) < 0.2
    assert len(least.unique()) > 290


def test_neighbours_are_independent() -> None:
    """Along tokens, and across the positions, seeds and choices that differ by one."""
    base = exponential_noise(5, 1, 9, VOCABULARY).double()
    pairs = {
        "token": (base[:-1], base[1:]),
        "position": (base, exponential_noise(5, 1, 10, VOCABULARY).double()),
        "seed": (base, exponential_noise(6, 1, 9, VOCABULARY).double()),
        "choice": (base, exponential_noise(5, 2, 9, VOCABULARY).double()),
        "swapped": (base, exponential_noise(1, 5, 9, VOCABULARY).double()),
    }
    for name, pair in pairs.items():
        assert abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) < 4 / VOCABULARY**0.5, name


def test_the_same_key_gives_the_same_numbers_however_many_are_asked_for() -> None:
    whole = exponential_noise(11, 2, 1000, 1001)
    assert whole.dtype == torch.float32
    for size in (1, 2, 3, 500, 1001):
        assert torch.equal(exponential_noise(11, 2, 1000, size), whole[:size])


def test_every_64_bit_seed_counts() -> None:
    seeds = (0, 1, 2**32, 2**63, 2**64 - 1)
    assert len({exponential_noise(seed, 0, 0, 4).sum().item() for seed in seeds}) == len(seeds)


@pytest.mark.parametrize(("position", "token"), [(197, 11214), (643, 34160)])
def test_no_number_is_infinite(position: int, token: int) -> None:
    """At these places the generator's bits are so high that they round to 2^32."""
    noise = exponential_noise(0, 0, position, token + 1)
    assert 16 < noise[token] < 23
    assert (noise > 0).all()
