"""Rejection sampling of a verified block."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.acceptance import count_accepted
from gateway.request import TokenSource


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> list[tuple[int, TokenSource]]:
    """Draft tokens d_1 .. d_k and the target's own draws y_0 .. y_k, y_i for the place of d_{i+1} -> the accepted
    block: the drafts that the target drew too, then its first other draw (a correction, or the bonus y_k).

    For drafts that are one-hot proposals this is rejection sampling (Leviathan et al., 2023): y follows p, so
    d is accepted with probability p(d), and given a rejection y follows p without d. And it is exact along the
    path: y depends on seed and position alone, so the committed text is the one that plain decoding draws.
    """
    num_accepted = count_accepted(drafts, sampled)
    accepted = [(draft, TokenSource.DRAFT) for draft in drafts[:num_accepted]]
    return [*accepted, (sampled[num_accepted], TokenSource.TARGET)]
