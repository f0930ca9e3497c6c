"""A draft that answers nonsense, or says that it cannot: the text does not change, and the gateway goes on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from eyas.v1 import draft_pb2
from gateway.request import GenerationRequest
from tests.helpers.engine import Answer, Gateway, ask, running_gateway, until
from tests.helpers.services import RunningDraft, RunningTarget, running_draft, running_target
from tests.helpers.standins import OK, StandIn, lead_by_the_nose, oracle, running_stand_in
from tests.helpers.tiny_models import make_head
from tests.helpers.tiny_tokenizer import VOCAB_SIZE

pytest_plugins = ("tests.helpers.tiny_fixtures",)

K = 3
MAX_TOKENS = 30
REQUESTS = (ask("an eyas", MAX_TOKENS, k=K), ask("another", MAX_TOKENS, k=K))

Plain = dict[GenerationRequest, Answer]
Spoil = Callable[[draft_pb2.ProposeResponse], None]


@pytest.fixture(autouse=True)
def attach_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.draft_client.RETRY_SECONDS", 0.02)


@pytest_asyncio.fixture
async def target(tiny_target: Path, tmp_path: Path) -> AsyncIterator[RunningTarget]:
    async with running_target(tiny_target, tmp_path) as target:
        yield target
        await target.until_free()


@pytest_asyncio.fixture
async def plain(target: RunningTarget) -> Plain:
    async with running_gateway(target.address) as gateway:
        return {r: await gateway.answer(replace(r, num_draft_tokens=0)) for r in REQUESTS}


@pytest.fixture
def stand_in(plain: Plain) -> StandIn:
    return StandIn(oracle([[*request.prompt_ids, *answer.ids] for request, answer in plain.items()]))


def stale_round(response: draft_pb2.ProposeResponse) -> None:
    response.round -= 1


def other_epoch(response: draft_pb2.ProposeResponse) -> None:
    response.proposals[0].epoch += 1


def unknown_sequence(response: draft_pb2.ProposeResponse) -> None:
    response.proposals[0].sequence_id ^= 1


def swapped(response: draft_pb2.ProposeResponse) -> None:
    first, second = list(response.proposals)
    del response.proposals[:]
    response.proposals.extend((second, first))


def one_missing(response: draft_pb2.ProposeResponse) -> None:
    del response.proposals[0]


def one_more(response: draft_pb2.ProposeResponse) -> None:
    response.proposals.append(response.proposals[0])


def beyond_the_vocabulary(response: draft_pb2.ProposeResponse) -> None:
    response.proposals[1].draft_tokens[1] = VOCAB_SIZE


def far_beyond_the_vocabulary(response: draft_pb2.ProposeResponse) -> None:
    response.proposals[1].draft_tokens[1] = 2**32 - 1


def more_than_asked_for(response: draft_pb2.ProposeResponse) -> None:
    response.proposals[0].draft_tokens.append(7)


NONSENSE: dict[Spoil, str] = {
    stale_round: "an answer to round ",
    other_epoch: "not for the sequence that was asked for",
    unknown_sequence: "not for the sequence that was asked for",
    swapped: "not for the sequence that was asked for",
    one_missing: "1 proposals instead of 2",
    one_more: "3 proposals instead of 2",
    beyond_the_vocabulary: f"draft token {VOCAB_SIZE} is beyond the vocabulary of {VOCAB_SIZE}",
    far_beyond_the_vocabulary: "is beyond the vocabulary",
    more_than_asked_for: f"{K + 1} draft tokens instead of {K}",
}


@asynccontextmanager
async def gateway_of(
    kind: str, model: Path, target: RunningTarget, folder: Path, plain: Plain, spoil: Spoil
) -> AsyncIterator[Gateway]:
    """A gateway whose draft knows the answers but spoils its own: a stand-in, or a real one, told of steps ahead."""
    policy = oracle([[*request.prompt_ids, *answer.ids] for request, answer in plain.items()])
    async with AsyncExitStack() as stack:
        draft: StandIn | RunningDraft
        if kind == "stand-in":
            draft = StandIn(policy)
            draft.spoil = spoil
            address = (await stack.enter_async_context(running_stand_in(draft, folder))).address
        else:
            head = make_head(folder / "head", "eagle3", model)
            draft = await stack.enter_async_context(running_draft(head, folder, target.address))
            lead_by_the_nose(draft, policy, spoil)
            address = draft.address
        async with running_gateway(target.address, address) as gateway:
            yield gateway
            await draft.until_free()


@pytest.mark.parametrize("kind", ["stand-in", "head"])
@pytest.mark.parametrize("spoil", NONSENSE, ids=lambda spoil: spoil.__name__)
async def test_nonsense_detaches_the_draft(
    spoil: Spoil,
    kind: str,
    tiny_target: Path,
    target: RunningTarget,
    plain: Plain,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once, in the midst of two answers; the log says what was wrong, and afterwards it may try again."""
    num_answers = 0

    def spoil_the_fourth(response: draft_pb2.ProposeResponse) -> None:
        nonlocal num_answers
        num_answers += 1
        if num_answers == 4:
            spoil(response)

    caplog.set_level(logging.INFO, "gateway.draft_client")
    async with gateway_of(kind, tiny_target, target, tmp_path, plain, spoil_the_fourth) as gateway:
        answers = await gateway.answers(REQUESTS)
        assert [a.visible for a in answers] == [plain[r].visible for r in REQUESTS]
        assert all(answer.accepted[:4] == [0, K, K, 0] for answer in answers)
        assert num_answers == 4
        [error] = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert NONSENSE[spoil] in error.getMessage()

        await until(lambda: not gateway.engine.is_degraded)
        answers = await gateway.answers(REQUESTS)
        assert [a.visible for a in answers] == [plain[r].visible for r in REQUESTS]
        assert all(answer.accepted[:4] == [0, K, K, K] for answer in answers)
    assert sum("attached at" in message for message in caplog.messages) == 2


REFUSALS = [status for status in draft_pb2.ProposalStatus.values() if status != OK]


@pytest.mark.parametrize("status", REFUSALS, ids=draft_pb2.ProposalStatus.Name)
@pytest.mark.parametrize("moment", [1, 2, 4])
async def test_a_refused_sequence_goes_on_plainly_and_alone(
    moment: int,
    status: draft_pb2.ProposalStatus,
    target: RunningTarget,
    plain: Plain,
    stand_in: StandIn,
    tmp_path: Path,
) -> None:
    """The other one keeps its drafts, and what was held for the refused one is freed at once."""
    refused: list[int] = []

    def refuse(response: draft_pb2.ProposeResponse) -> None:
        if len(stand_in.requests) > moment and not refused:
            proposal = response.proposals[0]
            refused.append(proposal.sequence_id)
            proposal.status = status
            del proposal.draft_tokens[:]

    stand_in.spoil = refuse
    async with (
        running_stand_in(stand_in, tmp_path) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        answers = await gateway.answers(REQUESTS)
        assert [a.visible for a in answers] == [plain[r].visible for r in REQUESTS]
        assert sum(answers[0].accepted[moment:]) == 0
        assert all(count == K for count in answers[1].accepted[1:-1])
        later = stand_in.requests[moment + 1 :]
        assert refused[0] in {close.sequence_id for close in later[0].closes}
        assert refused[0] not in {extend.sequence_id for request in later for extend in request.extends}
        again = await gateway.answer(REQUESTS[0])
        assert all(count == K for count in again.accepted[1:-1])
        await stand_in.until_free()


@pytest.mark.parametrize("length", range(K))
async def test_fewer_drafts_than_asked_for(
    length: int, target: RunningTarget, plain: Plain, stand_in: StandIn, tmp_path: Path
) -> None:
    def shorten(response: draft_pb2.ProposeResponse) -> None:
        for proposal in response.proposals:
            del proposal.draft_tokens[length:]

    stand_in.spoil = shorten
    async with (
        running_stand_in(stand_in, tmp_path) as draft,
        running_gateway(target.address, draft.address) as gateway,
    ):
        answer = await gateway.answer(REQUESTS[0])
    assert answer.visible == plain[REQUESTS[0]].visible
    assert all(count == length for count in answer.accepted[1:-1])
    assert answer.stats is not None
    assert (answer.stats.num_drafts > 0) == (length > 0)
