"""The self-test at a draft's start, over real sockets: a wrong head is reported by its fault, or refused."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_service.sample import Sample, take_sample
from draft_service.self_test import examine
from draft_service.suspects import other_taps, suspects
from eyas.config import ConfigError, DraftConfig
from eyas.errors import EyasError
from eyas.models import DEFAULT_HEAD, resolve_head
from tests.helpers.default_model import default_target
from tests.helpers.reference_head import target_features, target_model
from tests.helpers.services import RunningDraft, RunningTarget, running_draft, running_target
from tests.helpers.tiny_models import make_head, make_target

FLOOR = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose next token depends on the last one almost alone, so that a made head can agree with it."""
    return make_target(tmp_path_factory.mktemp("target"), layer_scale=0.05)


@pytest.fixture
async def target(folder: Path, tmp_path: Path) -> AsyncIterator[RunningTarget]:
    async with running_target(folder, tmp_path, num_pages=40) as target:
        yield target


async def started(head: Path, tmp_path: Path, target: RunningTarget, **config: Any) -> float:
    """Starts a draft that tests its head, and stops it; the agreement that it reports."""
    config = {"skip_self_test": False, "head_floor": FLOOR, **config}
    async with running_draft(head, tmp_path, target.address, **config) as draft:
        await target.until_free()
        agreement = draft.metrics.registry.get_sample_value("eyas_draft_self_test_agreement")
    assert agreement is not None
    return agreement


def swap_fc(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, 1)[::-1], 1).contiguous()


def shuffle_d2t(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    ids = torch.arange(200) + tensors["d2t"]
    shuffled = ids[torch.randperm(200, generator=torch.Generator().manual_seed(1))]
    tensors["d2t"] = shuffled - torch.arange(200)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "fc order": ({"kind": "eagle1", "imitate": True, "edit": swap_fc}, "fc's inputs are in the wrong order"),
    "d2t": ({"kind": "eagle3", "imitate": True, "draft_vocab": 200, "edit": shuffle_d2t}, "d2t is shuffled"),
    "all": ({"kind": "eagle3"}, "agreement is below 5%, and no single fault explains it"),
}


@pytest.mark.parametrize("options", [{"kind": "eagle1"}, {"kind": "eagle3", "draft_vocab": 200}])
async def test_a_head_that_suits_its_target(
    folder: Path, target: RunningTarget, tmp_path: Path, options: Any, caplog: pytest.LogCaptureFixture
) -> None:
    head = make_head(tmp_path / "head", target_folder=folder, imitate=True, **options)
    assert await started(head, tmp_path, target, strict_head=True) >= FLOOR
    assert "does not suit" not in caplog.text


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_head_is_reported_by_its_fault(
    folder: Path, target: RunningTarget, tmp_path: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    options, fault = WRONG[wrong]
    head = make_head(tmp_path / "head", target_folder=folder, **options)
    assert await started(head, tmp_path, target) < FLOOR
    assert f"tiny-head: the head does not suit its target: {fault}" in caplog.text


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_strict_draft_refuses_a_wrong_head(
    folder: Path, target: RunningTarget, tmp_path: Path, wrong: str
) -> None:
    options, fault = WRONG[wrong]
    head = make_head(tmp_path / "head", target_folder=folder, **options)
    with pytest.raises(EyasError, match=f"tiny-head: the head does not suit its target: {fault}"):
        await started(head, tmp_path, target, strict_head=True)
    await target.until_free()


async def test_a_target_without_room(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = make_head(tmp_path / "head", "eagle1", folder)
    async with running_target(folder, tmp_path, num_pages=7) as target:
        assert math.isnan(await started(head, tmp_path, target))
        assert "the self-test could not run: the target has no free pages" in caplog.text
        with pytest.raises(EyasError, match="could not run"):
            await started(head, tmp_path, target, strict_head=True)


async def test_it_can_be_left_out(folder: Path, target: RunningTarget, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", "eagle1", folder)
    assert math.isnan(await started(head, tmp_path, target, skip_self_test=True))
    with pytest.raises(ConfigError, match="strict_head"):
        DraftConfig(head=head, head_name="head", skip_self_test=True, strict_head=True)


async def sampled(draft: RunningDraft, taps: tuple[int, ...]) -> Sample:
    link = draft.service._link
    return await take_sample(link, await link.wait(60), taps)


@pytest.mark.parametrize("limits", [{}, {"max_rows": 5}, {"context_length": 33}])
@pytest.mark.parametrize("taps", [(), (1, 4, 6)])
async def test_a_sample_is_what_the_target_thinks(
    folder: Path, tmp_path: Path, taps: tuple[int, ...], limits: dict[str, int]
) -> None:
    head = make_head(tmp_path / "head", "eagle1", folder)
    async with (
        running_target(folder, tmp_path, num_pages=40, **limits) as target,
        running_draft(head, tmp_path, target.address) as draft,
    ):
        sample = await sampled(draft, taps)
    assert sample.tokens.shape == (limits.get("max_rows", 8), limits.get("context_length", 64))
    assert len({tuple(text) for text in sample.tokens.tolist()}) == len(sample.tokens)
    for text, choices, features in zip(sample.tokens, sample.choices, sample.features_at(taps), strict=True):
        ids = text.tolist()
        with torch.no_grad():
            assert choices.tolist() == target_model(folder)(text[None]).logits[0].argmax(-1).tolist()
        torch.testing.assert_close(features, target_features(folder, ids, taps or None), atol=1e-3, rtol=1e-3)


async def test_faults_of_the_default_head_are_named(tmp_path: Path) -> None:
    """Some of them cost a few percent only."""
    async with (
        running_target(default_target(), tmp_path, num_pages=64) as target,
        running_draft(resolve_head(DEFAULT_HEAD, tmp_path), tmp_path, target.address) as draft,
    ):
        head = draft.engine.head
        shifted = replace(head.spec, taps=(3, 16, 28))
        taps = {tap for spec in (head.spec, shifted) for other in other_taps(spec, 30) for tap in other}
        sample = await sampled(draft, tuple(sorted(taps | {3, 16, 28})))
        rope = draft.service._link.target_rope(await draft.service._link.wait(60))

    def fault(**changes: Any) -> str:
        wrong = head.reread(replace(head.spec, **changes))
        return examine(wrong, sample, suspects(wrong, 30, rope), 0.1).fault

    assert examine(head, sample, suspects(head, 30, rope), 0.1).agreement > 0.3
    assert fault() == ""
    assert "the taps are wrong: [2, 15, 27] fit" in fault(taps=shifted.taps)
    assert "the order of fc's inputs is wrong: [2, 15, 27] fit" in fault(taps=(27, 15, 2))
    assert fault(norm_before_residual=True) == "norm_before_residual is wrong: false fits"
    assert "rope is wrong: base 100000" in fault(rope_theta=100.0)
