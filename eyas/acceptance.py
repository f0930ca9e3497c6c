"""The rule of acceptance, which the gateway applies and the target foresees for the draft."""

from collections.abc import Sequence


def count_accepted(drafts: Sequence[int], sampled: Sequence[int]) -> int:
    """How many of the draft tokens d_1 .. d_k are accepted, given the target's own draws y_0 .. y_k, y_i for the
    place of d_{i+1}: those before the first that differs."""
    matches = (draft == drawn for draft, drawn in zip(drafts, sampled, strict=False))
    return next((index for index, match in enumerate(matches) if not match), len(drafts))
