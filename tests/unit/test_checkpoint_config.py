"""Config: typed fields of config.json, and errors that name the file and the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas_kernels.checkpoint import CheckpointError, Config


def config(**values: Any) -> Config:
    return Config(values, Path("config.json"))


@pytest.mark.parametrize(
    ("read", "values", "message"),
    [
        (lambda c: c.integer("n"), {}, "config.json: n is missing"),
        (lambda c: c.integer("n"), {"n": None}, "config.json: n is missing"),
        (lambda c: c.integer("n"), {"n": "8"}, "n is '8', but a whole number from 1 up is needed"),
        (lambda c: c.integer("n"), {"n": True}, "n is True, but a whole number"),
        (lambda c: c.integer("n"), {"n": 8.0}, "n is 8.0, but a whole number"),
        (lambda c: c.integer("n"), {"n": 0}, "n is 0, but a whole number from 1 up"),
        (lambda c: c.integers("n"), {"n": []}, "n is \\[\\], but a list of whole numbers"),
        (lambda c: c.integers("n"), {"n": [1, "2"]}, "but a list of whole numbers is needed"),
        (lambda c: c.integers("n"), {"n": [-1]}, "but a list of whole numbers is needed"),
        (lambda c: c.number("x"), {"x": "1e4"}, "x is '1e4', but a positive number is needed"),
        (lambda c: c.number("x"), {"x": 0}, "x is 0, but a positive number is needed"),
        (lambda c: c.number("x"), {"x": float("nan")}, "x is nan, but a positive number is needed"),
        (lambda c: c.text("s"), {"s": 1}, "s is 1, but a string is needed"),
        (lambda c: c.flag("f", False), {"f": "no"}, "f is 'no', but true or false is needed"),
        (lambda c: c.section("o"), {"o": [1]}, "o is \\[1\\], but a JSON object is needed"),
        (lambda c: c.section("o").integer("n"), {"o": {"n": -1}}, r"config.json: o\.n is -1, but"),
    ],
)
def test_a_wrong_field_is_named(read: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(config(**values))


def test_fields_and_their_defaults() -> None:
    values = config(n=3, x=1, s="silu", f=True, ids=[0, 2], o={"n": 4}, null=None)
    assert values.integer("n") == 3
    assert values.number("x") == 1.0
    assert values.text("s") == "silu"
    assert values.flag("f", False)
    assert values.integers("ids") == [0, 2]
    assert values.section("o").integer("n") == 4
    assert values.integer("null", 7) == 7
    assert values.integer("zero", 0, at_least=0) == 0
    assert not values.has("null")


def test_a_lifted_section_fills_in_what_is_missing() -> None:
    values = config(own=1, null=None, inner={"own": 2, "null": 3, "low": 4, "deep": {"n": 5, "own": 6}})
    lifted = values.lift("inner").lift("deep").lift("absent")
    assert [lifted.integer(key) for key in ("own", "null", "low", "n")] == [1, 3, 4, 5]
    with pytest.raises(CheckpointError, match=r"config.json: inner\.deep\.n is 5, but a string"):
        lifted.text("n")
    with pytest.raises(CheckpointError, match=r"config.json: inner\.low is 4"):
        lifted.text("low")
    with pytest.raises(CheckpointError, match=r"config.json: own is 1"):
        lifted.text("own")


LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (1e4, None)),
        ({"rope_theta": 5e5}, (5e5, None)),
        ({"rope_theta": 500000, "rope_scaling": None}, (5e5, None)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, (5e5, None)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, (5e5, LINEAR)),
        ({"rope_theta": 5e5, "rope_scaling": LINEAR}, (5e5, LINEAR)),
        ({"rope_parameters": {"rope_theta": 5e5, **LINEAR}}, (5e5, LINEAR)),
        ({"rope_parameters": LINEAR}, (1e4, LINEAR)),
    ],
)
def test_rope_is_read_from_its_old_and_its_new_place(values: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert config(**values).rope(1e4) == expected


def test_a_wrong_rope_field_is_named_where_it_is() -> None:
    with pytest.raises(CheckpointError, match=r"rope_parameters\.rope_theta is 'big'"):
        config(rope_parameters={"rope_theta": "big"}).rope(1e4)
