"""Faults in a round and at the start, and what the draft is told of the steps."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from eyas.config import GatewayConfig
from eyas.v1 import draft_pb2
from gateway.request import GenerationError
from gateway.service import wait_for_services
from gateway.text import TokenizerError
from tests.helpers.engine import ask, running_gateway, until
from tests.helpers.equivalence import plain_answers, texts
from tests.helpers.services import RunningTarget, running_draft, running_target
from tests.helpers.standins import StandIn, oracle, running_stand_in
from tests.helpers.tiny_models import make_head, make_target

pytest_plugins = ("tests.helpers.tiny_fixtures",)


@pytest_asyncio.fixture
async def target(tiny_target: Path, tmp_path: Path) -> AsyncIterator[RunningTarget]:
    """A target that holds nothing in the end."""
    async with running_target(tiny_target, tmp_path) as target:
        yield target
        await target.until_free()


async def test_the_draft_is_told_which_step_computed_its_features(
    target: RunningTarget, tmp_path: Path
) -> None:
    """Of a sequence that steps in every round, the one before; and its slots follow each other without a gap."""
    request = ask("an eyas at dawn", 20, k=2)
    [plain] = await plain_answers(target, [request])
    stand_in = StandIn(oracle(texts([request], [plain])))
    async with (
        running_stand_in(stand_in, tmp_path) as draft,
        running_gateway(target.address, draft.address, prefill_rows=6) as gateway,
    ):
        await gateway.answer(request)
    extends = [(message.round, extend) for message in stand_in.requests for extend in message.extends]
    assert [extend.feature_round for _, extend in extends] == [round_ - 1 for round_, _ in extends]
    num_slots = 0
    for _, extend in extends:
        assert extend.slot == num_slots
        num_slots += len(extend.tokens)
    assert [len(extend.tokens) for _, extend in extends] == [6, 6, 3, *[3] * 6]


async def test_a_draft_that_reads_features_is_told_of_every_step_ahead(
    tiny_target: Path, target: RunningTarget, tmp_path: Path
) -> None:
    """So that it does not wait for the gateway: behind the message that opens the sequence, one for each step."""
    head = make_head(tmp_path / "head", "eagle3", tiny_target)
    told: list[draft_pb2.ProposeRequest] = []
    async with running_draft(head, tmp_path, target.address) as draft:
        service: Any = draft.service
        propose = service._propose

        async def note(*args: Any) -> Any:
            told.append(copy.deepcopy(args[-1]))
            return await propose(*args)

        service._propose = note
        async with running_gateway(target.address, draft.address, prefill_rows=6) as gateway:
            answer = await gateway.answer(ask("an eyas at dawn", 20, k=2))
            await draft.until_free()
    [opening, *others] = told
    assert len(opening.opens) == 1
    extends = [extend for message in others for extend in message.extends]
    assert [extend.feature_round - opening.round for extend in extends] == list(range(len(answer.blocks) + 2))
    assert [extend.then_committed for extend in extends] == [False] * 2 + [True] * len(answer.blocks)
    assert [len(extend.tokens) for extend in extends] == [6, 6, 2] + [0] * (len(answer.blocks) - 1)


# --- faults --------------------------------------------------------------------------------------------------


async def test_a_fault_in_a_round_fails_its_requests_only(
    target: RunningTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the services hold for them is freed, and the next request is served."""
    request = ask("an eyas", 20, k=2)
    [plain] = await plain_answers(target, [request])
    stand_in = StandIn(oracle(texts([request], [plain])))
    async with (
        running_stand_in(stand_in, tmp_path) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        with monkeypatch.context() as patch:
            patch.setattr("gateway.engine.accept", lambda *_: 1 / 0)
            for result in await asyncio.gather(
                *(gateway.answer(request) for _ in range(2)), return_exceptions=True
            ):
                assert isinstance(result, GenerationError)
        await until(lambda: gateway.engine.is_connected)
        await target.until_free()
        await stand_in.until_free()
        assert (await gateway.answer(request)).visible == plain.visible
        assert stand_in.num_streams == 1


async def test_a_fault_in_a_round_leaves_the_draft_usable(
    tiny_target: Path, target: RunningTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been told of a step that came to nothing, and must not wait for its features."""
    request = ask("an eyas", 20, k=2)
    head = make_head(tmp_path / "head", "eagle3", tiny_target)
    async with (
        running_draft(head, tmp_path, target.address) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        plain = await gateway.answer(request)
        with monkeypatch.context() as patch:
            patch.setattr("target_service.engine.draw", lambda *_: 1 / 0)
            with pytest.raises(GenerationError):
                await gateway.answer(request)
        await until(lambda: gateway.engine.is_connected and not gateway.engine.is_degraded)
        answer = await gateway.answer(request)
        assert answer.visible == plain.visible
        assert answer.stats is not None
        assert answer.stats.num_drafts > 10
        await draft.until_free()


async def test_a_target_without_a_tokenizer_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_target(tmp_path / "model", num_layers=4)
    async with (
        running_target(model, tmp_path) as target,
        running_gateway(target.address, wait=False) as gateway,
    ):
        with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
            await wait_for_services(GatewayConfig(target=target.address), gateway.engine)
    [error] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "cannot be served: tokenizer.json is missing" in error.getMessage()
