"""Fixtures: tiny targets on disk, made once a run. A test module names this one in `pytest_plugins`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_models import make_target
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer_files


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 target whose tokens are bytes, and whose next token depends on all before it."""
    return make_target(
        tmp_path_factory.mktemp("tiny_target"),
        vocab_size=VOCAB_SIZE,
        tokenizer_files=tiny_tokenizer_files(),
    )


@pytest.fixture(scope="session")
def mild_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with layers that count for little, so that a head made to imitate it is accepted now and then."""
    return make_target(
        tmp_path_factory.mktemp("mild_target"),
        vocab_size=VOCAB_SIZE,
        tokenizer_files=tiny_tokenizer_files(),
        layer_scale=0.05,
    )
