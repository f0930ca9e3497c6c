"""What may be wrong with a head that loads: the ways in which its tensors could have been meant otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from draft_service.head import Head
from draft_service.head_spec import DEFAULT_ROPE_THETA, HeadSpec, default_taps

Rope = tuple[float, dict[str, Any] | None]


class Suspect(NamedTuple):
    """A reading of the head other than the one in use; `fault` says what would be wrong with that one."""

    fault: str
    head: Head


def other_taps(spec: HeadSpec, num_layers: int) -> list[tuple[int, ...]]:
    """Taps that a head may have been trained on instead of its spec's: off by one block either way, the usual ones,
    and the same in another order. Those that the target does not have are left out."""
    taps = spec.taps
    others = [tuple(tap + shift for tap in taps) for shift in (-1, 1)]
    others += [default_taps(num_layers)] if len(taps) == len(default_taps(num_layers)) else []
    others += itertools.permutations(taps) if len(taps) <= 3 else []
    fitting = [other for other in others if other != taps and all(1 <= tap <= num_layers for tap in other)]
    return list(dict.fromkeys(fitting))


def suspects(head: Head, num_layers: int, target_rope: Rope) -> Iterator[Suspect]:
    """Every other reading that is worth a try, made one by one."""
    spec = head.spec
    for taps in other_taps(spec, num_layers):
        numbers = ",".join(map(str, taps))
        what = "the order of fc's inputs is" if sorted(taps) == sorted(spec.taps) else "the taps are"
        yield Suspect(
            f"{what} wrong: {list(taps)} fit, not {list(spec.taps)} (--taps {numbers})",
            head.reread(replace(spec, taps=taps)),
        )
    if not spec.taps:
        yield Suspect(
            "fc's inputs are in the wrong order: it reads the hidden state first",
            head.reread(spec, swap_fc=True),
        )
    if head.target_ids is not None:
        ascending = head.target_ids.sort().values
        yield Suspect("d2t is shuffled: its ids in ascending order fit", head.reread(spec, ascending))
    if spec.kind == "eagle3":
        flag = not spec.norm_before_residual
        yield Suspect(
            f"norm_before_residual is wrong: {str(flag).lower()} fits",
            head.reread(replace(spec, norm_before_residual=flag)),
        )
    for theta, scaling in ((DEFAULT_ROPE_THETA, None), (target_rope[0], None), target_rope):
        if (theta, scaling) != (spec.rope_theta, spec.rope_scaling):
            yield Suspect(
                f"rope is wrong: base {theta:g} and scaling {scaling} fit, not {spec.rope_theta:g} and"
                f" {spec.rope_scaling} (--rope-theta, --rope-scaling)",
                head.reread(replace(spec, rope_theta=theta, rope_scaling=scaling)),
            )
