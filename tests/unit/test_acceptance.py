"""Rejection sampling of a verified block: the drafts that the target drew too, then its own next token."""

from __future__ import annotations

from itertools import product

import pytest

from gateway.acceptance import accept
from gateway.request import TokenSource

D, T = TokenSource.DRAFT, TokenSource.TARGET


@pytest.mark.parametrize(
    ("drafts", "sampled", "block"),
    [
        ([], [7], [(7, T)]),
        ([5], [5, 6], [(5, D), (6, T)]),
        ([5], [4, 6], [(4, T)]),
        ([5, 6, 7], [5, 6, 7, 8], [(5, D), (6, D), (7, D), (8, T)]),
        ([5, 6, 7], [5, 6, 9, 8], [(5, D), (6, D), (9, T)]),
        ([5, 6, 7], [5, 9, 7, 8], [(5, D), (9, T)]),
        ([5, 5, 5], [9, 5, 5, 5], [(9, T)]),
    ],
)
def test_block(drafts: list[int], sampled: list[int], block: list[tuple[int, TokenSource]]) -> None:
    assert accept(drafts, sampled) == block


def test_the_block_is_the_target_s_own_draws_up_to_the_first_other_draft() -> None:
    """For every pattern of three drafts: never a token that the target did not draw for that place."""
    for drafts in product((0, 1), repeat=3):
        for sampled in product((0, 1), repeat=4):
            ids = [token for token, _ in accept(drafts, sampled)]
            assert ids == list(sampled[: len(ids)])
            assert list(drafts[: len(ids) - 1]) == ids[:-1]
            assert len(ids) == 4 or drafts[len(ids) - 1] != ids[-1]
