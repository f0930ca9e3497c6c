"""Who runs when: the queue, admission by pages, the limits of the target, and what happens when something is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from eyas.v1 import common_pb2, target_pb2
from gateway.request import FinishReason, GenerationRequest, QueueFull
from gateway.resolve import Ask, ContextLengthError, resolve
from tests.helpers.engine import Answer, Gateway, ask, running_gateway, until
from tests.helpers.equivalence import plain_answers, texts
from tests.helpers.services import RunningTarget, exchange, running_target, target_stub
from tests.helpers.standins import StandIn, oracle, running_stand_in

pytest_plugins = ("tests.helpers.tiny_fixtures",)

PAGE_SIZE = 4


@pytest_asyncio.fixture
async def target(tiny_target: Path, tmp_path: Path) -> AsyncIterator[RunningTarget]:
    """A target that holds nothing in the end."""
    async with running_target(tiny_target, tmp_path) as target:
        yield target
        await target.until_free()


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
        stand_in = StandIn(oracle(texts([request], [plain])))
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
            running_stand_in(StandIn(oracle(texts(requests, plain))), tmp_path) as draft,
            running_gateway(target.address, draft.address) as gateway,
        ):
            answers = await gateway.answers(requests)
        await target.until_free()
    assert [a.visible for a in answers] == [a.visible for a in plain]
    drafted = sum(a.stats.num_draft_tokens for a in answers if a.stats)
    assert (drafted > 0) == (max_rows > 1)


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
