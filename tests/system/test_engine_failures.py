"""What the gateway's engine does when the target or a client goes away: never another text, never a leak."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.request import TargetUnavailable
from tests.helpers.engine import ask, running_gateway, until
from tests.helpers.services import RunningTarget, running_draft, running_target
from tests.helpers.standins import StandIn, oracle, running_stand_in
from tests.helpers.tiny_models import make_head

pytest_plugins = ("tests.helpers.tiny_fixtures",)

K = 2
NUM_TOKENS = 40
REQUEST = ask("an eyas", NUM_TOKENS, k=K)
OTHER = ask("another eyas", NUM_TOKENS, k=K)


@pytest.fixture(autouse=True)
def attach_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.draft_client.RETRY_SECONDS", 0.02)
    monkeypatch.setattr("gateway.engine.RECONNECT_SECONDS", 0.02)


@pytest_asyncio.fixture
async def target(tiny_target: Path, tmp_path: Path) -> AsyncIterator[RunningTarget]:
    """A target that holds nothing in the end."""
    async with running_target(tiny_target, tmp_path) as target:
        yield target
        await target.until_free()


# --- the target ----------------------------------------------------------------------------------------------


async def test_target_gone_and_back(tiny_target: Path, tmp_path: Path) -> None:
    """Requests under way and in the queue fail, the gateway serves again when the target is back, and its draft
    with it."""
    head = make_head(tmp_path / "head", "eagle3", tiny_target)
    async with AsyncExitStack() as stack:
        async with running_target(tiny_target, tmp_path) as target:
            draft = await stack.enter_async_context(running_draft(head, tmp_path, target.address))
            gateway = await stack.enter_async_context(
                running_gateway(target.address, draft.address, max_sequences=2)
            )
            expected = await gateway.answer(REQUEST)
            long = replace(REQUEST, max_tokens=400)
            answering = [asyncio.create_task(gateway.answer(long)) for _ in range(3)]
            await until(lambda: target.used_pages > 4)
            await target.server.stop(0)
            for result in await asyncio.gather(*answering, return_exceptions=True):
                assert isinstance(result, TargetUnavailable)
        with pytest.raises(TargetUnavailable):
            await gateway.answer(REQUEST)
        await draft.until_free()
        async with running_target(tiny_target, tmp_path) as target:
            await until(lambda: gateway.engine.is_connected and not gateway.engine.is_degraded)
            answer = await gateway.answer(REQUEST)
            assert answer.visible == expected.visible
            assert answer.stats is not None
            assert answer.stats.num_drafts > 10
            await target.until_free()
            await draft.until_free()


# --- the client ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2, 5])
async def test_client_gone(rounds: int, tiny_target: Path, target: RunningTarget, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", "eagle3", tiny_target)
    async with (
        running_draft(head, tmp_path, target.address) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        answer = await gateway.answer(REQUEST, cancel_after=rounds)
        assert answer.finish_reason is None
        await target.until_free()
        await draft.until_free()


async def test_client_gone_is_told_with_the_next_message(target: RunningTarget, tmp_path: Path) -> None:
    """While another sequence goes on, so that rounds follow each other."""
    stand_in = StandIn(oracle([]))
    async with (
        running_stand_in(stand_in, tmp_path) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        other = asyncio.create_task(gateway.answer(OTHER))
        await gateway.answer(REQUEST, cancel_after=3)
        num_messages = len(stand_in.requests)
        await other
    [gone] = {o.sequence_id for r in stand_in.requests for o in r.opens} - {
        e.sequence_id for e in stand_in.requests[-2].extends
    }
    closing = next(i for i, r in enumerate(stand_in.requests) if gone in {c.sequence_id for c in r.closes})
    assert closing - num_messages in (0, 1)


async def test_clients_gone_leave_no_task_behind(
    tiny_target: Path, target: RunningTarget, tmp_path: Path
) -> None:
    head = make_head(tmp_path / "head", "eagle3", tiny_target)
    async with (
        running_draft(head, tmp_path, target.address) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        await gateway.answer(REQUEST)
        await draft.until_free()
        before = len(asyncio.all_tasks())
        for i in range(50):
            await gateway.answer(REQUEST, cancel_after=1 + i % 5)
        await target.until_free()
        await draft.until_free()
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_client_gone_while_it_waits_in_the_queue(target: RunningTarget) -> None:
    async with running_gateway(target.address, max_sequences=1) as gateway:
        first = asyncio.create_task(gateway.answer(REQUEST))
        await until(lambda: gateway.engine.num_running == 1)
        second = asyncio.create_task(gateway.answer(OTHER))
        await until(lambda: gateway.engine.num_waiting == 1)
        second.cancel()
        await first
        await until(lambda: gateway.engine.num_waiting == 0)
        assert gateway.counter("eyas_requests_total", reason="aborted") == 1
