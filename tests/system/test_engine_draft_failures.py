"""What the gateway's engine does when the draft dies, hangs or is late: the same text, and no leak."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from eyas.errors import unavailable
from eyas.v1 import draft_pb2
from gateway.request import GenerationRequest
from tests.helpers.engine import Answer, Gateway, ask, running_gateway, until
from tests.helpers.equivalence import plain_answers, texts
from tests.helpers.services import RunningTarget, running_draft, running_target
from tests.helpers.standins import StandIn, oracle, running_stand_in
from tests.helpers.tiny_models import make_head

pytest_plugins = ("tests.helpers.tiny_fixtures",)

K = 2
NUM_TOKENS = 40
REQUEST = ask("an eyas", NUM_TOKENS, k=K)
OTHER = ask("another eyas", NUM_TOKENS, k=K)
LATE_SECONDS = 0.03

Plain = dict[GenerationRequest, Answer]


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


@pytest_asyncio.fixture
async def plain(target: RunningTarget) -> Plain:
    """The answers of plain decoding."""
    async with running_gateway(target.address) as gateway:
        return {r: await gateway.answer(replace(r, num_draft_tokens=0)) for r in (REQUEST, OTHER)}


@pytest.fixture
def stand_in(plain: Plain) -> StandIn:
    """An oracle for both requests."""
    return StandIn(oracle([[*request.prompt_ids, *answer.ids] for request, answer in plain.items()]))


def check(answers: list[Answer], plain: Plain) -> None:
    """Answers to REQUEST and OTHER in turns."""
    for i, answer in enumerate(answers):
        assert answer.visible == plain[OTHER if i % 2 else REQUEST].visible


def wait_briefly(
    gateway: Gateway, message: int, monkeypatch: pytest.MonkeyPatch, give_up: float = 90.0
) -> None:
    """Has the gateway's guard be short for the draft's answer to that message, and long for every other: so it is
    late if it is held back, and no other is. `give_up` seconds are those of this one, too."""
    client: Any = gateway.engine._drafting._client
    send, numbers = client.send, itertools.count(1)

    def send_numbered(request: draft_pb2.ProposeRequest) -> None:
        is_it = next(numbers) == message
        client._timeout = LATE_SECONDS if is_it else 60.0
        monkeypatch.setattr("gateway.draft_client.GIVE_UP_SECONDS", give_up if is_it else 90.0)
        send(request)

    client.send = send_numbered


def is_fully_drafted(answer: Answer) -> bool:
    """Whether every round but the prompt's committed K accepted drafts and a token of the target."""
    return len(answer.blocks) == 1 + -(-(NUM_TOKENS - 1) // (K + 1))


@pytest.mark.parametrize("moment", [1, 2, 3, 7])
async def test_draft_killed_and_back(
    moment: int, target: RunningTarget, plain: Plain, stand_in: StandIn, tmp_path: Path
) -> None:
    """The moment counts messages: the first one opens the sequences."""
    stand_in.hold_at = moment
    async with (
        running_stand_in(stand_in, tmp_path) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        answering = asyncio.create_task(gateway.answers([REQUEST, OTHER]))
        await stand_in.held.wait()
        await draft.kill()
        answers = await answering
        check(answers, plain)
        assert not any(map(is_fully_drafted, answers))
        assert gateway.engine.is_degraded
        assert gateway.engine.card.head == ""

        answers = await gateway.answers([REQUEST, OTHER])
        check(answers, plain)
        assert [sum(answer.accepted) for answer in answers] == [0, 0]

        stand_in.gate.set()
        async with running_stand_in(stand_in, tmp_path):
            await until(lambda: not gateway.engine.is_degraded)
            answers = await gateway.answers([REQUEST, OTHER])
            check(answers, plain)
            assert all(map(is_fully_drafted, answers))
            await stand_in.until_free()


@pytest.mark.parametrize("moment", [1, 2, 3, 7])
async def test_draft_breaks_off_a_stream(
    moment: int, target: RunningTarget, plain: Plain, stand_in: StandIn, tmp_path: Path
) -> None:
    def break_off(response: draft_pb2.ProposeResponse) -> None:
        if len(stand_in.requests) == moment:
            raise unavailable("the target went away")

    stand_in.spoil = break_off
    async with (
        running_stand_in(stand_in, tmp_path) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        check(await gateway.answers([REQUEST, OTHER]), plain)
        await until(lambda: stand_in.num_streams == 2)
        answers = await gateway.answers([REQUEST, OTHER])
        check(answers, plain)
        assert all(map(is_fully_drafted, answers))
        await stand_in.until_free()


@pytest.mark.parametrize("moment", [1, 2, 3, 7])
async def test_draft_hangs_and_wakes_up(
    moment: int,
    target: RunningTarget,
    plain: Plain,
    stand_in: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rounds go on without it after the guard's time; once it has answered, new sequences speculate again."""
    stand_in.hold_at = moment
    async with (
        running_stand_in(stand_in, tmp_path) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        wait_briefly(gateway, moment, monkeypatch)
        for _ in range(2):
            answers = await gateway.answers([REQUEST, OTHER])
            check(answers, plain)
            assert not any(map(is_fully_drafted, answers))
        assert len(stand_in.requests) == moment  # one message is under way at most

        await until(lambda: gateway.engine.kv_usage == 0)
        stand_in.gate.set()
        await stand_in.until_free()  # though no round is to be made for any sequence
        answers = await gateway.answers([REQUEST, OTHER])
        check(answers, plain)
        assert all(map(is_fully_drafted, answers))
        await stand_in.until_free()
        assert stand_in.num_streams == 1


async def test_draft_that_hangs_for_good_is_attached_anew(
    target: RunningTarget,
    plain: Plain,
    stand_in: StandIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in.hold_at = 2
    async with (
        running_stand_in(stand_in, tmp_path) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        wait_briefly(gateway, 2, monkeypatch, give_up=3 * LATE_SECONDS)
        check(await gateway.answers([REQUEST, OTHER]), plain)
        await until(lambda: stand_in.num_streams == 2)
        assert not stand_in.open
        stand_in.gate.set()
        answers = await gateway.answers([REQUEST, OTHER])
        check(answers, plain)
        assert all(map(is_fully_drafted, answers))


async def test_draft_that_is_late_more_often_than_not(
    target: RunningTarget, plain: Plain, stand_in: StandIn, tmp_path: Path
) -> None:
    """Its answers come some rounds behind, and every one ends somewhere."""
    stand_in.delay = 0.01
    async with (
        running_stand_in(stand_in, tmp_path) as draft,
        running_gateway(target.address, draft.address, draft_timeout_ms=1) as gateway,
    ):
        for _ in range(3):
            check(await gateway.answers([REQUEST, OTHER, REQUEST, OTHER]), plain)
        await stand_in.until_free()
    assert len(stand_in.requests) > 3


async def test_late_answers_fill_slots_but_are_no_drafts(
    target: RunningTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that was without drafts for some rounds has them again, behind all its tokens."""
    request = replace(REQUEST, max_tokens=200)
    [plain] = await plain_answers(target, [request])
    stand_in = StandIn(oracle(texts([request], [plain])))
    stand_in.hold_at = 3
    async with (
        running_stand_in(stand_in, tmp_path) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        wait_briefly(gateway, 3, monkeypatch)
        answer = Answer()
        async for delta in gateway.engine.generate(request):
            answer.take(delta)
            if len(answer.blocks) == 6:
                assert answer.accepted == [0, K, 0, 0, 0, 0]
                stand_in.gate.set()
    assert answer.visible == plain.visible
    [resumed, *_] = stand_in.requests[3].extends
    assert len(resumed.tokens) > 3
    again = answer.accepted.index(K, 6)
    assert set(answer.accepted[again:-2]) == {K}


async def test_the_real_draft_killed_and_back(
    tiny_target: Path, target: RunningTarget, plain: Plain, tmp_path: Path
) -> None:
    head = make_head(tmp_path / "head", "eagle3", tiny_target)
    async with AsyncExitStack() as stack:
        gateway = await _with_real_draft(stack, head, target, tmp_path, plain)
        async with running_draft(head, tmp_path, target.address) as draft:
            await until(lambda: not gateway.engine.is_degraded)
            answers = await gateway.answers([REQUEST, OTHER])
            check(answers, plain)
            assert all(answer.stats and answer.stats.num_drafts > 10 for answer in answers)
            await draft.until_free()


async def _with_real_draft(
    stack: AsyncExitStack, head: Path, target: RunningTarget, folder: Path, plain: Plain
) -> Gateway:
    """A gateway whose draft has died while it computed."""
    async with running_draft(head, folder, target.address) as draft:
        gateway = await stack.enter_async_context(running_gateway(target.address, draft.address))
        answering = asyncio.create_task(gateway.answers([REQUEST, OTHER]))
        await until(lambda: draft.used_pages > 0)
        await draft.server.stop(0)
        check(await answering, plain)
        await draft.until_free()
    return gateway
