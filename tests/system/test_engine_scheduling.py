"""Who runs when: the queue, admission by pages, the limits of the target, and what happens when something is wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from eyas.config import GatewayConfig
from eyas.v1 import common_pb2, target_pb2
from gateway.request import FinishReason, GenerationError, GenerationRequest, QueueFull
from gateway.resolve import Ask, ContextLengthError, resolve
from gateway.service import wait_for_services
from gateway.text import TokenizerError
from tests.helpers.engine import Answer, Gateway, ask, running_gateway, until
from tests.helpers.services import RunningTarget, exchange, running_draft, running_target, target_stub
from tests.helpers.standins import StandIn, oracle, running_stand_in
from tests.helpers.tiny_models import make_head, make_target

pytest_plugins = ("tests.helpers.tiny_fixtures",)

PAGE_SIZE = 4


@pytest_asyncio.fixture
async def target(tiny_target: Path, tmp_path: Path) -> AsyncIterator[RunningTarget]:
    """A target that holds nothing in the end."""
    async with running_target(tiny_target, tmp_path) as target:
        yield target
        await target.until_free()


async def plain_answers(target: RunningTarget, requests: list[GenerationRequest]) -> list[Answer]:
    async with running_gateway(target.address) as gateway:
        return [await gateway.answer(replace(request, num_draft_tokens=0)) for request in requests]


def oracle_for(requests: list[GenerationRequest], answers: list[Answer]) -> StandIn:
    return StandIn(oracle([[*r.prompt_ids, *a.ids] for r, a in zip(requests, answers, strict=True)]))


async def started(gateway: Gateway, *requests: GenerationRequest) -> list[asyncio.Task[Answer]]:
    """Generations that are in the engine, one behind the other."""
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(gateway.answer(request)))
        await asyncio.sleep(0)
    return tasks


# --- the queue -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_queue", [0, 1, 3])
async def test_queue_full(max_queue: int, target: RunningTarget) -> None:
    """What may run does not count as waiting, though everything passes through the queue."""
    async with running_gateway(target.address, max_sequences=2, max_queue=max_queue) as gateway:
        tasks = await started(gateway, *[ask("an eyas", 20)] * (2 + max_queue))
        with pytest.raises(QueueFull, match="already"):
            await gateway.answer(ask("too many"))
        assert len({tuple((await task).ids) for task in tasks}) == 1
        assert (await gateway.answer(ask("an eyas", 5))).finish_reason is FinishReason.LENGTH


async def test_first_come_first_served(target: RunningTarget) -> None:
    order: list[int] = []
    async with running_gateway(target.address, max_sequences=1) as gateway:
        tasks = await started(gateway, *[ask("an eyas", 20 - 3 * i) for i in range(5)])
        for task in tasks:
            task.add_done_callback(lambda done: order.append(len(done.result().ids)))
        await asyncio.gather(*tasks)
    assert order == [20, 17, 14, 11, 8]


async def test_as_many_are_admitted_as_pages_allow(tiny_target: Path, tmp_path: Path) -> None:
    """Prompts of 10 tokens take 3 pages; of 8 pages, two may begin."""
    async with (
        running_target(tiny_target, tmp_path, num_pages=8, page_size=PAGE_SIZE) as target,
        running_gateway(target.address) as gateway,
    ):
        engine = gateway.engine
        deltas = engine.generate(ask("0123456789", 6))
        first = asyncio.ensure_future(anext(deltas))
        others = await started(gateway, *[ask("9876543210", 6)] * 4)
        await first
        assert (engine.num_running, engine.num_waiting) == (2, 3)
        async for _ in deltas:
            assert engine.num_running <= 2
        answers = await asyncio.gather(*others)
    assert len({tuple(answer.ids) for answer in answers}) == 1


async def test_a_request_waits_for_pages_that_another_gateway_holds(tiny_target: Path, tmp_path: Path) -> None:
    request = ask("an eyas at dawn", 20)
    async with (
        running_target(tiny_target, tmp_path, num_pages=16, page_size=PAGE_SIZE) as target,
        running_gateway(target.address) as gateway,
    ):
        expected = await gateway.answer(request)
        async with target_stub(target.address) as stub:
            other = stub.Step()
            await exchange(other, holding_step(num_tokens=PAGE_SIZE * 15))
            waiting = asyncio.create_task(gateway.answer(request))
            before = gateway.counter("eyas_rounds_total")
            await until(lambda: gateway.counter("eyas_rounds_total") > before + 3)
            assert not waiting.done()
            other.cancel()
            assert (await waiting).visible == expected.visible
        await target.until_free()


def holding_step(num_tokens: int) -> target_pb2.StepRequest:
    """Opens a sequence that takes the pages of so many tokens."""
    return target_pb2.StepRequest(
        round=1,
        opens=[target_pb2.OpenSequence(sequence_id=1, sampling=common_pb2.SamplingParams(top_p=1))],
        blocks=[target_pb2.Block(sequence_id=1, start=0, tokens=[0] * num_tokens)],
    )


# --- limits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "context"),
    [({"num_pages": 8, "page_size": PAGE_SIZE}, 32), ({"context_length": 30, "page_size": PAGE_SIZE}, 30)],
)
async def test_the_context_is_refused_beyond_and_served_up_to_the_last_token(
    config: dict[str, Any], context: int, tiny_target: Path, tmp_path: Path
) -> None:
    async with running_target(tiny_target, tmp_path, **config) as target:
        request = ask("an eyas", context - len("an eyas"), k=5)
        [plain] = await plain_answers(target, [request])
        stand_in = oracle_for([request], [plain])
        async with (
            running_stand_in(stand_in, tmp_path) as draft,
            running_gateway(target.address, draft.address) as gateway,
        ):
            card, tokenizer = gateway.engine.card, gateway.engine.tokenizer()
            assert card.context_length == context
            with pytest.raises(ContextLengthError):
                resolve(
                    Ask(prompts=["x" * context], model=card.model),
                    card,
                    tokenizer,
                    request_id="",
                    traceparent="",
                )
            answer = await gateway.answer(request)
    assert answer.visible == plain.visible
    assert len(answer.ids) == request.max_tokens


@pytest.mark.parametrize("max_rows", [1, 2, 7, 20])
async def test_no_more_rows_than_the_target_takes(max_rows: int, tiny_target: Path, tmp_path: Path) -> None:
    """Six sequences that would draft 8 tokens each, behind prompts longer than a step."""
    requests = [ask(f"{i} eyases at dawn", 16 + i, k=8) for i in range(6)]
    async with running_target(tiny_target, tmp_path, max_rows=512) as target:
        plain = await plain_answers(target, requests)
    async with running_target(tiny_target, tmp_path, max_rows=max_rows) as target:
        async with (
            running_stand_in(oracle_for(requests, plain), tmp_path) as draft,
            running_gateway(target.address, draft.address) as gateway,
        ):
            answers = await gateway.answers(requests)
        await target.until_free()
    assert [a.visible for a in answers] == [a.visible for a in plain]
    drafted = sum(a.stats.num_draft_tokens for a in answers if a.stats)
    assert (drafted > 0) == (max_rows > 1)


async def test_the_draft_is_told_which_step_computed_its_features(
    target: RunningTarget, tmp_path: Path
) -> None:
    """Of a sequence that steps in every round, the one before; and its slots follow each other without a gap."""
    request = ask("an eyas at dawn", 20, k=2)
    [plain] = await plain_answers(target, [request])
    stand_in = oracle_for([request], [plain])
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


# --- faults --------------------------------------------------------------------------------------------------


async def test_a_fault_in_a_round_fails_its_requests_only(
    target: RunningTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the services hold for them is freed, and the next request is served."""
    request = ask("an eyas", 20, k=2)
    [plain] = await plain_answers(target, [request])
    stand_in = oracle_for([request], [plain])
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


# --- figures -------------------------------------------------------------------------------------------------


async def test_figures_of_the_engine(tiny_target: Path, tmp_path: Path) -> None:
    async with (
        running_target(tiny_target, tmp_path, num_pages=20, page_size=PAGE_SIZE) as target,
        running_gateway(target.address, max_sequences=1) as gateway,
    ):
        assert gateway.counter("eyas_requests_running") == 0
        deltas = gateway.engine.generate(ask("0123456789", 20))
        first = asyncio.ensure_future(anext(deltas))
        [waiting] = await started(gateway, ask("an eyas", 3))
        await first
        assert gateway.counter("eyas_requests_running") == 1
        assert gateway.counter("eyas_requests_waiting") == 1
        assert gateway.counter("eyas_kv_usage") == pytest.approx(3 / 20)
        assert gateway.counter("eyas_degraded") == 0
        await deltas.aclose()
        await waiting
        await until(lambda: gateway.counter("eyas_kv_usage") == 0)
        assert (gateway.engine.card.head, gateway.engine.card.max_draft_tokens) == ("", 0)


async def test_queue_time_is_measured_for_those_that_never_ran(target: RunningTarget) -> None:
    async with running_gateway(target.address, max_sequences=1) as gateway:
        [first] = await started(gateway, ask("an eyas", 100))
        second = gateway.engine.generate(ask("an eyas", 100))
        waiting = asyncio.ensure_future(anext(second))
        await until(lambda: gateway.engine.num_waiting == 1)
        [sequence] = gateway.engine._scheduler.waiting
        assert 0 <= sequence.stats().queue_seconds < 60
        waiting.cancel()
        await first
