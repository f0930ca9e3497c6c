"""Steps that run behind a step that is still under way, over real sockets: the target goes on with what it has drawn
itself, and with proposals that the draft hands in at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eyas.acceptance import count_accepted
from eyas.v1 import draft_pb2, target_pb2
from target_service import proposals
from target_service.proposals import Awaited, ProposalInbox
from tests.helpers.messages import OK, block, extend, opening, propose, refused_field, slots, step
from tests.helpers.pair import Streams, words
from tests.helpers.reference_head import greedy_tokens
from tests.helpers.services import RunningDraft, RunningTarget, exchange, running_target, target_stub

pytest_plugins = ["tests.helpers.draft_fixtures"]
pytestmark = pytest.mark.usefixtures("patient")

PROMPT = words(20)
SKIPPED = target_pb2.BLOCK_STATUS_SKIPPED
NO_PAGES = target_pb2.BLOCK_STATUS_NO_PAGES
FOREVER_MS = 10**8


def ahead(after_round: int, k: int = 0, **fields: Any) -> target_pb2.Block:
    return target_pb2.Block(sequence_id=1, after_round=after_round, num_draft_tokens=k, **fields)


def waiting_step(*blocks: target_pb2.Block, round: int, wait_ms: int = FOREVER_MS) -> target_pb2.StepRequest:
    request = step(*blocks, round=round)
    request.draft_wait_ms = wait_ms
    return request


@pytest.fixture
async def steps(target: RunningTarget) -> AsyncIterator[Any]:
    async with target_stub(target.address) as stub:
        yield stub.Step()


@pytest.fixture
def plain(folder: Path) -> list[int]:
    """What the target says behind the prompt."""
    return greedy_tokens(folder, PROMPT, 24)


async def test_plain_decoding_runs_ahead(steps: Any, plain: list[int]) -> None:
    """All is sent before anything is answered."""
    await steps.write(step(block(1, 0, PROMPT, 1), opens=[opening(1)], round=1))
    for round_ in (2, 3, 4):
        await steps.write(step(ahead(round_ - 1), round=round_))
    results = [(await steps.read()).results[0] for _ in range(4)]
    assert [list(result.sampled_tokens) for result in results] == [[token] for token in plain[:4]]


async def test_a_prompt_goes_in_ahead(steps: Any, plain: list[int]) -> None:
    await steps.write(step(block(1, 0, PROMPT[:5]), opens=[opening(1)], round=1))
    await steps.write(step(ahead(1, tokens=PROMPT[5:12]), round=2))
    await steps.write(step(ahead(2, tokens=PROMPT[12:], num_scored=1), round=3))
    await steps.write(step(ahead(3), round=4))
    drawn = [list((await steps.read()).results[0].sampled_tokens) for _ in range(4)]
    assert drawn == [[], [], [plain[0]], [plain[1]]]


async def test_a_block_behind_one_that_did_not_run_is_skipped(folder: Path, tmp_path: Path) -> None:
    async with running_target(folder, tmp_path, num_pages=1) as target, target_stub(target.address) as stub:
        steps = stub.Step()
        await steps.write(step(block(1, 0, PROMPT[:8]), opens=[opening(1)], round=1))
        await steps.write(step(ahead(1, tokens=PROMPT[8:], num_scored=1), round=2))
        await steps.write(step(ahead(2), round=3))
        await steps.write(step(block(1, 8, PROMPT[8:12], 1), round=4))
        statuses = [(await steps.read()).results[0].status for _ in range(4)]
    assert statuses == [OK, NO_PAGES, SKIPPED, OK]


class Ahead:
    """A gateway with two steps under way at most, and a proposal of k for each."""

    def __init__(self, rounds: Streams, k: int) -> None:
        self.rounds, self.k = rounds, k
        self.text = list(PROMPT)
        self.num_computed = 0
        self.round = 0  # of the last step sent

    async def begin(self) -> None:
        await self.rounds.steps.write(
            step(block(1, 0, PROMPT, 1), opens=[opening(1, subscription=self.rounds.subscription)], round=1)
        )
        self.round = 1
        await self.ask(PROMPT[1:], 0, opens=[slots(1)])

    async def ask(self, tokens: Sequence[int], slot: int, **rest: Any) -> None:
        """The draft, for the block behind the step sent last."""
        extend_ = extend(1, slot, tokens, self.k, self.round, then_committed=True)
        extend_.to_target = True
        await self.rounds.proposals.write(propose(extend_, round=self.round, **rest))

    async def send(self, wait_ms: int = FOREVER_MS) -> None:
        """The next step."""
        self.round += 1
        await self.rounds.steps.write(
            waiting_step(ahead(self.round - 1, self.k), round=self.round, wait_ms=wait_ms)
        )

    async def read(self) -> tuple[list[int], list[int]]:
        """Commits an answer: the text before it, and the drafts that it verified."""
        (result,) = (await self.rounds.steps.read()).results
        assert result.status == OK
        before, drafts = list(self.text), list(result.verified_tokens)
        num_accepted = count_accepted(drafts, result.sampled_tokens)
        assert not drafts or result.num_accepted == num_accepted
        self.text += [*drafts[:num_accepted], result.sampled_tokens[num_accepted]]
        self.num_computed = len(self.text) - 1
        return before, drafts

    async def answered(self) -> draft_pb2.Proposal:
        """The draft's own answer."""
        (proposal,) = (await self.rounds.proposals.read()).proposals
        return proposal


@pytest.mark.parametrize("head", ["eagle1", "eagle3-shuffled"], indirect=True)
@pytest.mark.parametrize("k", [1, 3])
async def test_proposals_take_the_short_way(rounds: Streams, reference: Any, plain: list[int], k: int) -> None:
    """The target never waits for the gateway, and the gateway sees what has been verified."""
    gateway = Ahead(rounds, k)
    await gateway.begin()
    await gateway.send()
    assert await gateway.read() == (PROMPT, [])
    while len(gateway.text) < len(PROMPT) + 12:
        drafted = await gateway.answered()
        slot = gateway.num_computed
        await gateway.ask(gateway.text[slot + 1 :], slot)
        await gateway.send()
        before, drafts = await gateway.read()
        assert drafts == list(drafted.draft_tokens) == reference(before, k)
    assert gateway.text[len(PROMPT) :] == plain[: len(gateway.text) - len(PROMPT)]


async def test_a_draft_that_dies_is_not_waited_for(
    rounds: Streams, draft: RunningDraft, plain: list[int]
) -> None:
    gateway = Ahead(rounds, 3)
    await gateway.begin()
    await gateway.send()
    await gateway.read()
    await gateway.read()
    await gateway.send()  # the draft has not been asked
    draft.attached.cancel()
    _, drafts = await gateway.read()
    assert not drafts
    assert gateway.text[len(PROMPT) :] == plain[: len(gateway.text) - len(PROMPT)]


async def test_a_late_draft_is_waited_for_as_long_as_was_said(
    rounds: Streams, target: RunningTarget, plain: list[int]
) -> None:
    gateway = Ahead(rounds, 3)
    await gateway.begin()
    await gateway.send()
    await gateway.read()
    await gateway.read()
    for _ in range(2):
        await gateway.send(wait_ms=1)  # the draft has not been asked
        _, drafts = await gateway.read()
        assert not drafts
    assert target.metrics.registry.get_sample_value("eyas_target_late_proposals_total") == 2
    assert gateway.text[len(PROMPT) :] == plain[: len(gateway.text) - len(PROMPT)]


async def test_an_extend_that_fails_is_handed_in_too(rounds: Streams, plain: list[int]) -> None:
    """The sequence is not open at the draft: the target, which waits for ever, goes on."""
    gateway = Ahead(rounds, 3)
    open_ = opening(1, subscription=rounds.subscription)
    await rounds.steps.write(step(block(1, 0, PROMPT, 1), opens=[open_], round=1))
    gateway.round = 1
    await gateway.ask(PROMPT[1:], 0)
    await gateway.send()
    await gateway.read()
    assert (await gateway.read())[1] == []
    assert gateway.text[len(PROMPT) :] == plain[:2]


VIOLATIONS = {
    "no token to go on with": (step(ahead(2), round=3), "blocks[0].tokens"),
    "drafts behind tokens": (step(ahead(2, 3, tokens=[5]), round=3), "blocks[0].num_draft_tokens"),
    "drafts at a start": (
        step(target_pb2.Block(sequence_id=1, start=8, tokens=[5], num_draft_tokens=1), round=3),
        "blocks[0].num_draft_tokens",
    ),
    "scored without tokens": (step(ahead(2, num_scored=1), round=3), "blocks[0].num_scored"),
    "too many rows": (step(ahead(2, 2**20), round=3), "blocks"),
}


@pytest.mark.parametrize(("request_", "field"), VIOLATIONS.values(), ids=VIOLATIONS)
async def test_a_broken_contract_names_the_field(
    steps: Any, request_: target_pb2.StepRequest, field: str
) -> None:
    await exchange(steps, step(opens=[opening(1)], round=1))
    await exchange(steps, step(block(1, 0, PROMPT[:8]), round=2))
    assert await refused_field(exchange(steps, request_)) == field


async def test_handing_in_needs_committed_tokens(rounds: Streams, give_up_soon: Callable[[], None]) -> None:
    give_up_soon()
    asked = extend(1, 0, PROMPT[1:], 3)
    asked.to_target = True
    assert (
        await refused_field(exchange(rounds.proposals, propose(asked, opens=[slots(1)])))
        == "extends[0].to_target"
    )


# ---- the inbox


def handed_in(*of: int, after_round: int = 1, tokens: Sequence[int] = (7,)) -> target_pb2.DraftProposals:
    return target_pb2.DraftProposals(
        proposals=[
            target_pb2.DraftProposal(sequence_id=id_, after_round=after_round, draft_tokens=tokens)
            for id_ in of
        ]
    )


async def test_the_inbox_knows_rounds_and_keeps_the_last() -> None:
    inbox = ProposalInbox()
    inbox.add(handed_in(1, after_round=1))
    assert not await inbox.wait([Awaited(1, 0, 2)], 0.01)
    inbox.add(handed_in(1, after_round=2, tokens=(8, 9)))
    assert not inbox.take([Awaited(1, 1, 2)]), "another epoch"
    assert {id_: list(tokens) for id_, tokens in inbox.take([Awaited(1, 0, 2)]).items()} == {1: [8, 9]}
    assert not inbox.take([Awaited(1, 0, 2)])


async def test_the_inbox_waits_for_all_or_for_the_end() -> None:
    inbox = ProposalInbox()
    awaited = [Awaited(1, 0, 1), Awaited(2, 0, 1)]
    waiting = asyncio.ensure_future(inbox.wait(awaited, 1e6))
    await asyncio.sleep(0)
    inbox.add(handed_in(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    inbox.close()
    assert await waiting
    assert list(inbox.take(awaited)) == [1]


def test_the_inbox_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proposals, "MAX_PROPOSALS", 3)
    inbox = ProposalInbox()
    inbox.add(handed_in(*range(10)))
    assert list(inbox.take([Awaited(id_, 0, 1) for id_ in range(10)])) == [7, 8, 9]
