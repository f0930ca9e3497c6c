"""Draws follow the request's law, and are a function of logits, seed, choice and position."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from eyas.errors import StatusError
from eyas.v1 import common_pb2
from eyas_kernels.sampling import SamplingLaw, draw, process, read_law

PROBABILITIES = torch.tensor([0.05, 0.3, 0.1, 0.2, 0.15, 0.02, 0.08, 0.1])
LOGITS = PROBABILITIES.log()
NUM_DRAWS = 4000


def law(**fields: Any) -> SamplingLaw:
    return dataclasses.replace(SamplingLaw(temperature=1, top_p=1, top_k=0, seed=1, choice=0), **fields)


def draws(sampling: SamplingLaw, count: int = NUM_DRAWS, logits: torch.Tensor = LOGITS) -> list[int]:
    return draw(logits.expand(count, -1), [sampling] * count, range(count))


def assert_follows(tokens: list[int], probabilities: torch.Tensor) -> None:
    """Pearson's chi-square at about one in a thousand; tokens of no probability must not be there."""
    counts = Counter(tokens)
    possible = [i for i, p in enumerate(probabilities.tolist()) if p > 0]
    assert set(counts) <= set(possible)
    expected = {i: float(probabilities[i]) * len(tokens) for i in possible}
    statistic = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in possible)
    limits = {0: 1e-9, 1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3}
    assert statistic < limits[len(possible) - 1]


def only(*kept: int, probabilities: torch.Tensor = PROBABILITIES) -> torch.Tensor:
    mask = torch.zeros(len(probabilities))
    mask[list(kept)] = 1
    return probabilities * mask / (probabilities * mask).sum()


# ---- the law


def test_greedy_takes_the_most_probable_whatever_else_is_asked() -> None:
    assert draws(law(temperature=0), 5) == [1] * 5
    assert draws(law(temperature=0, top_k=3, top_p=0.1, seed=9), 5) == [1] * 5
    assert draws(law(temperature=0), 1, torch.tensor([0.0, 2.0, 1.0, 2.0])) == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature: float) -> None:
    assert_follows(draws(law(temperature=temperature)), (LOGITS / temperature).softmax(0))


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, (1,)), (2, (1, 3)), (3, (1, 3, 4)), (8, range(8)), (50, range(8))]
)
def test_top_k(top_k: int, kept: tuple[int, ...]) -> None:
    assert_follows(draws(law(top_k=top_k)), only(*kept))


def test_ties_at_the_border_of_top_k_are_kept() -> None:
    """Tokens 2 and 7 are equally probable, so four tokens stand for the four best and for five."""
    four, five = process(LOGITS, law(top_k=4)), process(LOGITS, law(top_k=5))
    assert four.isfinite().nonzero().flatten().tolist() == [1, 2, 3, 4, 7]
    assert torch.equal(four, five)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-6, (1,)),
        (0.29, (1,)),
        (0.31, (1, 3)),
        (0.49, (1, 3)),
        (0.51, (1, 3, 4)),
        (0.999, range(8)),
        (1, range(8)),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: tuple[int, ...]) -> None:
    assert_follows(draws(law(top_p=top_p)), only(*kept))


def test_top_p_is_taken_of_what_top_k_leaves() -> None:
    """0.3 and 0.2 are 0.6 and 0.4 of the best two."""
    assert_follows(draws(law(top_k=2, top_p=0.55)), only(1))
    assert_follows(draws(law(top_p=0.55)), only(1, 3, 4))


def test_top_p_is_taken_after_the_temperature() -> None:
    warm = (LOGITS / 2).softmax(0)
    kept = [1, 3, 4]  # 0.21, 0.17 and 0.15 of the mass
    assert_follows(draws(law(temperature=2, top_p=0.5)), only(*kept, probabilities=warm))


def test_a_very_low_temperature_is_greedy() -> None:
    assert draws(law(temperature=1e-6), 200) == [1] * 200


def test_the_logits_are_left_alone() -> None:
    logits = LOGITS.clone()[None]
    draw(logits, [law(top_k=2, top_p=0.5, temperature=0.7)], [3])
    assert torch.equal(logits[0], LOGITS)


# ---- the noise


def test_the_same_key_draws_the_same_token() -> None:
    assert draws(law(), 64) == draws(law(), 64)


@pytest.mark.parametrize("other", [{"seed": 2}, {"choice": 1}, {"seed": 1 + 2**40}])
def test_another_seed_or_choice_draws_others(other: dict[str, int]) -> None:
    assert draws(law(), 64) != draws(law(**other), 64)


def test_another_position_draws_others() -> None:
    assert len(set(draws(law(), 64))) > 3
    assert draw(LOGITS.expand(64, -1), [law()] * 64, range(64, 128)) != draws(law(), 64)


def test_a_row_does_not_depend_on_the_batch() -> None:
    laws = [law(), law(temperature=0), law(top_k=3, seed=5), law(temperature=1.7, top_p=0.8, choice=3)]
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    together = draw(logits, laws, [9, 4, 9, 70])
    alone = [draw(logits[i : i + 1], [laws[i]], [p])[0] for i, p in enumerate([9, 4, 9, 70])]
    assert together == alone


def test_the_only_token_left_is_drawn_at_any_noise() -> None:
    """At this position the generator's bits for this token are the highest there are."""
    logits = torch.zeros(1, 11_215)
    logits[0, 11_214] = 1
    assert draw(logits, [law(seed=0, top_k=1)], [197]) == [11_214]


# ---- a head that draws with the target's noise


@pytest.mark.parametrize("ids", [[0, 3, 5], [5, 0, 3], [2], [7, 6, 5, 4, 3, 2, 1, 0], [1, 7, 2]])
def test_a_reduced_vocabulary_draws_with_the_noise_of_its_tokens(ids: list[int]) -> None:
    """The same as drawing from all tokens, the others being impossible."""
    token_ids = torch.tensor(ids)
    masked = torch.full_like(LOGITS, float("-inf")).scatter(0, token_ids, LOGITS[token_ids])
    columns = draw(LOGITS[token_ids].expand(200, -1), [law()] * 200, range(200), token_ids)
    assert [ids[column] for column in columns] == draws(law(), 200, masked)


def test_a_reduced_vocabulary_is_greedy_in_its_own_columns() -> None:
    assert draw(LOGITS[torch.tensor([5, 3, 0])][None], [law(temperature=0)], [0], torch.tensor([5, 3, 0])) == [
        1
    ]


def test_the_same_noise_makes_similar_laws_agree() -> None:
    """Draws of independent noise agree in about a fifth of the cases."""
    other = (PROBABILITIES + 0.02 * torch.randn(8, generator=torch.Generator().manual_seed(1)).abs()).log()
    agreeing = sum(a == b for a, b in zip(draws(law()), draws(law(), logits=other), strict=True))
    assert agreeing > 0.85 * NUM_DRAWS


# ---- the message


def message(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{"temperature": 1, "top_p": 1, **fields})


def test_the_law_is_what_the_message_says() -> None:
    read = read_law(message(temperature=0.5, top_p=0.25, top_k=7, seed=2**64 - 1, choice_index=3), "sampling")
    assert read == SamplingLaw(0.5, 0.25, 7, 2**64 - 1, 3)
    assert read_law(message(temperature=0), "sampling").temperature == 0
    assert read_law(message(temperature=100), "sampling").temperature == 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, 100.5, float("nan"), float("inf"))),
        *(("top_p", value) for value in (0, -1, 1.01, float("nan"))),
    ],
)
def test_a_law_out_of_range_is_refused_by_field(field: str, value: float) -> None:
    with pytest.raises(StatusError, match=rf"^opens\[3\]\.sampling\.{field}: ") as caught:
        read_law(message(**{field: value}), "opens[3].sampling")
    assert caught.value.code.name == "INVALID_ARGUMENT"
