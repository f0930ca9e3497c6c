"""Fixtures of a draft beside its target, both real: `target`, `draft`, `rounds`, and what the head should draft.

A test module names this one in `pytest_plugins`; its tests choose a head of HEADS by indirect parameter.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service import service
from tests.helpers.pair import Streams, streams
from tests.helpers.reference_head import ReferenceHead, target_features
from tests.helpers.services import RunningDraft, RunningTarget, running_draft, running_target
from tests.helpers.tiny_heads import vocabulary_map
from tests.helpers.tiny_models import make_head, make_target

NUM_SLOT_PAGES = 30


def _shuffled_vocabulary(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Draft ids in no order of target ids."""
    ids = torch.randperm(512, generator=torch.Generator().manual_seed(5))[:64]
    tensors["d2t"] = ids - torch.arange(64)
    tensors["t2d"] = vocabulary_map(ids.sort().values.tolist(), 512)["t2d"]


HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1"},
    "eagle1-bias": {"kind": "eagle1", "fc_bias": True, "attention_bias": True},
    "eagle3": {"kind": "eagle3"},
    "eagle3-reduced": {"kind": "eagle3", "draft_vocab": 64, "fc_bias": True},
    "eagle3-shuffled": {"kind": "eagle3", "draft_vocab": 64, "edit": _shuffled_vocabulary},
    "eagle3-norm": {"kind": "eagle3", "config": {"norm_before_residual": True}, "layer_name": "layers.0"},
    "eagle3-narrow": {"kind": "eagle3", "hidden": 32, "embed": True, "heads": 2, "aux_ids": (4, 2)},
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's checkpoint."""
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def heads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The heads' checkpoints."""
    return {
        name: make_head(tmp_path_factory.mktemp(name), target_folder=folder, **options)
        for name, options in HEADS.items()
    }


@pytest.fixture
async def target(folder: Path, tmp_path: Path) -> AsyncIterator[RunningTarget]:
    async with running_target(folder, tmp_path, num_pages=60) as target:
        yield target


@pytest.fixture(params=["eagle3"])
def head(request: pytest.FixtureRequest, heads: dict[str, Path]) -> Path:
    return heads[request.param]


@pytest.fixture
async def draft(head: Path, tmp_path: Path, target: RunningTarget) -> AsyncIterator[RunningDraft]:
    async with running_draft(head, tmp_path, target.address, num_pages=NUM_SLOT_PAGES) as draft:
        yield draft


@pytest.fixture
async def rounds(target: RunningTarget, draft: RunningDraft) -> AsyncIterator[Streams]:
    """The streams of one gateway."""
    async with streams(target, draft) as rounds:
        yield rounds


@pytest.fixture
def reference(head: Path, folder: Path) -> Callable[[list[int], int], list[int]]:
    """A text and k -> what the reference head drafts behind it."""
    slow = ReferenceHead(head, folder)

    def propose_behind(text: list[int], k: int) -> list[int]:
        return slow.propose(text[1:], target_features(folder, text[:-1], slow.taps), k)

    return propose_behind


def _wait_for_features(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(service, "FEATURE_SECONDS", seconds)
    monkeypatch.setattr(service, "STEP_SECONDS", seconds)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features are waited for as long as it takes, so that no test depends on the machine's speed."""
    _wait_for_features(monkeypatch, 1e6)


@pytest.fixture
def give_up_soon(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """To be called when no more features come."""
    return lambda: _wait_for_features(monkeypatch, 0.05)
