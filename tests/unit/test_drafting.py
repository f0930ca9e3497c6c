"""The draft's part of a round without a draft: what is asked, and what is made of the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from eyas.v1 import draft_pb2
from gateway.commit import CommitState
from gateway.draft_client import Answer, DraftClient
from gateway.drafting import FALLBACK_MAX_DRAFT_TOKENS, Drafting
from gateway.exchange import NOTHING_SENT, Exchange
from gateway.scheduler import Close, Share
from gateway.sequence import Sequence
from gateway.stop_strings import StopStrings
from gateway.text import TextStream, Tokenizer
from tests.helpers.engine import ask
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer_files

OK = draft_pb2.PROPOSAL_STATUS_OK
NO_PAGES = draft_pb2.PROPOSAL_STATUS_NO_PAGES
NO_FEATURES = draft_pb2.PROPOSAL_STATUS_NO_FEATURES


def info(subscription_id: int) -> draft_pb2.GetDraftInfoResponse:
    return draft_pb2.GetDraftInfoResponse(head="head", max_draft_tokens=5, subscription_id=subscription_id)


@dataclass
class FakeClient:
    """Attached to a draft that proposes 1, 2, .. for everything; while `is_late`, no answer comes."""

    info: draft_pb2.GetDraftInfoResponse | None
    attachment: int = 1
    is_late: bool = False
    status: draft_pb2.ProposalStatus = OK
    asked: list[draft_pb2.ProposeRequest] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    pending: draft_pb2.ProposeResponse | None = None
    on_answer: Callable[[], None] = lambda: None

    @property
    def is_waiting(self) -> bool:
        return self.pending is not None

    @property
    def is_ready(self) -> bool:
        return self.info is not None and (self.pending is None or not self.is_late)

    def send(self, request: draft_pb2.ProposeRequest) -> None:
        assert self.pending is None
        self.asked.append(request)
        proposals = [
            draft_pb2.Proposal(
                sequence_id=extend.sequence_id,
                epoch=extend.epoch,
                status=self.status,
                draft_tokens=range(1, extend.num_draft_tokens + 1) if self.status == OK else (),
            )
            for extend in request.extends
        ]
        self.pending = draft_pb2.ProposeResponse(round=request.round, proposals=proposals)

    async def answer(self) -> Answer | None:
        if self.is_late or self.pending is None:
            return None
        answer, self.pending = self.pending, None
        return answer, Exchange(0.0, 1.0, 1e-9)

    def reject(self, fault: str) -> None:
        self.faults.append(fault)
        self.detach()

    def detach(self) -> None:
        self.info = self.pending = None


@pytest.fixture
def client() -> FakeClient:
    """Of a draft that reads features, so that it can be told of a step ahead."""
    return FakeClient(info(subscription_id=9))


@pytest.fixture
def drafting(client: FakeClient) -> Drafting:
    return Drafting(cast(DraftClient, client))


def sequence(k: int = 3, max_tokens: int = 20) -> Sequence:
    """A prompt of the tokens 10 .. 13."""
    request = ask(range(10, 14), max_tokens, k=k)
    text = TextStream(Tokenizer(tiny_tokenizer_files()))
    commit = CommitState(max_tokens, frozenset(), StopStrings(()), text)
    return Sequence(request, commit, list(request.prompt_ids), traceparent="t")


def commit(one: Sequence, *tokens: int) -> None:
    """What the engine does once a step has computed everything that there was, and these tokens were committed."""
    one.opened = True
    one.num_computed = len(one.tokens) + len(tokens) - 1
    one.tokens += tokens
    one.commit.completion_tokens += len(tokens)
    one.feature_round += 1


async def propose(
    drafting: Drafting, round_: int, *sequences: Sequence, closes: tuple[Close, ...] = (), room: int = 100
) -> Exchange:
    return await drafting.propose(round_, sequences, closes, room=room, vocab_size=VOCAB_SIZE)


def send_ahead(drafting: Drafting, round_: int, *sequences: Sequence) -> None:
    """With all that is left to compute of each."""
    drafting.send_ahead(round_, [Share(one, one.num_uncomputed) for one in sequences])


async def prompt_round(drafting: Drafting, *sequences: Sequence) -> None:
    """Round 1: the prompts go in, and token 7 comes out."""
    await propose(drafting, 1, *sequences)
    send_ahead(drafting, 1, *sequences)
    for one in sequences:
        commit(one, 7)


async def test_no_draft_is_configured() -> None:
    drafting, one = Drafting(None), sequence()
    await prompt_round(drafting, one)
    assert await propose(drafting, 2, one, closes=(Close(1, 1),)) == NOTHING_SENT
    assert (drafting.head, drafting.max_draft_tokens, drafting.subscription_of(one)) == ("", 0, 0)
    assert not drafting.has_work


async def test_a_sequence_is_opened_with_its_prompt(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    await propose(drafting, 1, one)
    [opening] = client.asked[0].opens
    assert (opening.sequence_id, opening.epoch, opening.traceparent) == (one.id, 0, "t")
    assert opening.sampling == one.sampling()
    assert not client.asked[0].extends
    assert drafting.subscription_of(one) == 9


# --- ahead of a step -----------------------------------------------------------------------------------------


async def test_the_draft_is_told_ahead_what_the_step_will_give(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    await prompt_round(drafting, one)
    [extend] = client.asked[1].extends
    assert (extend.slot, list(extend.tokens)) == (
        0,
        [11, 12, 13],
    )  # slot i takes token i + 1; 7 is still to come
    assert (extend.feature_round, extend.num_draft_tokens, extend.then_committed) == (1, 3, True)
    await propose(drafting, 2, one)
    assert (one.num_slots, one.drafts) == (4, [1, 2, 3])

    send_ahead(drafting, 2, one)
    [extend] = client.asked[2].extends
    assert (extend.slot, list(extend.tokens), extend.feature_round) == (4, [], 2)
    commit(one, 1, 2, 8)
    await propose(drafting, 3, one)
    assert (one.num_slots, one.drafts) == (7, [1, 2, 3])
    assert len(client.asked) == 3


async def test_a_prompt_chunk_fills_slots_without_drafts(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    await propose(drafting, 1, one)
    drafting.send_ahead(1, [Share(one, 2)])
    [extend] = client.asked[1].extends
    assert (extend.slot, list(extend.tokens)) == (0, [11, 12])
    assert (extend.num_draft_tokens, extend.then_committed) == (0, False)
    one.opened, one.num_computed = True, 2
    await propose(drafting, 2, one)
    assert (one.num_slots, one.drafts) == (2, [])


async def test_a_block_that_did_not_run_changes_nothing(client: FakeClient, drafting: Drafting) -> None:
    """It found no pages, so the draft had nothing to do; the sequence keeps its slots."""
    one = sequence()
    await prompt_round(drafting, one)
    await propose(drafting, 2, one)
    client.status = NO_FEATURES
    send_ahead(drafting, 2, one)
    await propose(drafting, 3, one)
    assert (one.num_slots, one.drafts) == (4, [])
    assert drafting.subscription_of(one) == 9


async def test_after_a_failed_step_a_message_that_waits_for_it_is_given_up(
    client: FakeClient, drafting: Drafting
) -> None:
    one = sequence()
    await propose(drafting, 1, one)
    drafting.step_failed()
    assert client.info is not None
    send_ahead(drafting, 1, one)
    drafting.step_failed()
    assert client.info is None


# --- behind a step: a draft that reads no features, or one that has fallen behind ----------------------------


async def test_without_features_the_draft_is_asked_when_the_step_is_over(
    client: FakeClient, drafting: Drafting
) -> None:
    client.info = info(subscription_id=0)
    one = sequence()
    await prompt_round(drafting, one)
    assert len(client.asked) == 1
    await propose(drafting, 2, one)
    [extend] = client.asked[1].extends
    assert (extend.slot, list(extend.tokens)) == (0, [11, 12, 13, 7])
    assert (extend.feature_round, extend.num_draft_tokens, extend.then_committed) == (1, 3, False)
    assert (one.num_slots, one.drafts) == (4, [1, 2, 3])
    commit(one, 1, 2, 8)
    await propose(drafting, 3, one)
    [extend] = client.asked[2].extends
    assert (extend.slot, list(extend.tokens), extend.feature_round) == (4, [1, 2, 8], 2)


async def test_a_late_answer_fills_slots_and_gives_no_drafts(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    await prompt_round(drafting, one)
    client.is_late = True
    await propose(drafting, 2, one)
    assert one.drafts == []
    send_ahead(drafting, 2, one)
    commit(one, 8)
    await propose(drafting, 3, one)
    commit(one, 9)
    assert len(client.asked) == 2

    client.is_late = False
    await propose(drafting, 4, one)
    [extend] = client.asked[2].extends
    assert (extend.slot, list(extend.tokens), extend.feature_round) == (4, [8, 9], 3)
    assert (one.num_slots, one.drafts) == (6, [1, 2, 3])


@pytest.mark.parametrize("subscription_id", [0, 9])
async def test_late_drafts_are_none_though_nothing_follows(
    subscription_id: int, client: FakeClient, drafting: Drafting
) -> None:
    client.info = info(subscription_id)
    one = sequence()
    await prompt_round(drafting, one)
    client.is_late = True
    await propose(drafting, 2, one)
    commit(one, 8)
    client.is_late = False
    drafting._request_now = lambda *_: None  # type: ignore[method-assign]
    await propose(drafting, 3, one)
    assert (one.num_slots, one.drafts) == (4, [])


async def test_a_late_answer_to_an_earlier_epoch_is_nothing(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    await prompt_round(drafting, one)
    client.is_late = True
    await propose(drafting, 2, one)
    one.reopen()
    client.is_late = False
    await propose(drafting, 3, one)
    assert (one.num_slots, one.drafts, one.epoch) == (0, [], 1)
    assert [opening.epoch for opening in client.asked[2].opens] == [1]


async def test_waiting_for_a_late_draft_is_counted_as_its_time(client: FakeClient, drafting: Drafting) -> None:
    client.is_late = True
    took = await propose(drafting, 1, sequence())
    assert took.began > 0
    assert (took.compute, took.round_trip) == (0, took.wire)


# --- how many ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subscription_id", [0, 9])
@pytest.mark.parametrize(
    ("k", "max_tokens", "room", "drafted"),
    [(3, 20, 100, 3), (9, 20, 100, 5), (3, 3, 100, 1), (3, 2, 100, 0), (3, 20, 2, 2), (3, 20, 0, 0)],
)
async def test_how_many_drafts(
    k: int,
    max_tokens: int,
    room: int,
    drafted: int,
    subscription_id: int,
    client: FakeClient,
    drafting: Drafting,
) -> None:
    """k of the request, at most what the head makes, what the target has room for, and one less than is left."""
    client.info = info(subscription_id)
    one = sequence(k, max_tokens)
    await prompt_round(drafting, one)
    await propose(drafting, 2, one, room=room)
    assert len(one.drafts) == drafted


async def test_a_block_that_was_accepted_leaves_less_to_draft(drafting: Drafting) -> None:
    """The draft was asked before it was known how many tokens the step would commit."""
    one = sequence(k=3, max_tokens=8)
    await prompt_round(drafting, one)
    await propose(drafting, 2, one)
    send_ahead(drafting, 2, one)
    commit(one, 1, 2, 3, 8)
    await propose(drafting, 3, one)
    assert one.drafts == [1, 2]


async def test_the_room_is_shared_in_order(drafting: Drafting) -> None:
    some = [sequence() for _ in range(3)]
    await prompt_round(drafting, *some)
    await propose(drafting, 2, *some, room=5)
    assert [len(one.drafts) for one in some] == [3, 2, 0]


async def test_without_speculation_nothing_is_sent(client: FakeClient, drafting: Drafting) -> None:
    one = sequence(k=0)
    await prompt_round(drafting, one)
    assert await propose(drafting, 2, one) == NOTHING_SENT
    assert client.asked == []
    assert drafting.subscription_of(one) == 0


# --- the end of a sequence -----------------------------------------------------------------------------------


async def test_closes_are_for_the_stream_that_holds_the_slots(client: FakeClient, drafting: Drafting) -> None:
    client.attachment = 4
    await propose(drafting, 1, closes=(Close(11, 4), Close(12, 3), Close(13, 0)))
    assert [close.sequence_id for close in client.asked[0].closes] == [11]


async def test_closes_ride_ahead_of_the_same_round_s_step(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    await prompt_round(drafting, one)
    await propose(drafting, 2, one, closes=(Close(11, 1),))
    assert len(client.asked) == 2
    send_ahead(drafting, 2, one)
    assert [close.sequence_id for close in client.asked[2].closes] == [11]


async def test_closes_wait_for_a_late_draft(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    client.is_late = True
    await propose(drafting, 1, one)
    await propose(drafting, 2, closes=(Close(one.id, 1),))
    assert len(client.asked) == 1
    assert not drafting.has_work
    client.is_late = False
    assert drafting.has_work
    await propose(drafting, 3)
    assert [close.sequence_id for close in client.asked[1].closes] == [one.id]
    assert not drafting.has_work


async def test_a_refused_sequence_is_closed_and_goes_on_without(client: FakeClient, drafting: Drafting) -> None:
    one, other = sequence(), sequence()
    await prompt_round(drafting, one, other)
    client.pending.proposals[0].status = NO_PAGES  # type: ignore[union-attr]
    await propose(drafting, 2, one, other)
    assert (one.drafts, other.drafts) == ([], [1, 2, 3])
    assert (drafting.subscription_of(one), drafting.subscription_of(other)) == (0, 9)
    send_ahead(drafting, 2, one, other)
    assert [close.sequence_id for close in client.asked[2].closes] == [one.id]
    assert [extend.sequence_id for extend in client.asked[2].extends] == [other.id]


# --- a draft that comes and goes -----------------------------------------------------------------------------


async def test_what_an_earlier_stream_held_is_gone(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    await prompt_round(drafting, one)
    await propose(drafting, 2, one)
    client.attachment = 2
    assert await propose(drafting, 3, one) == NOTHING_SENT
    send_ahead(drafting, 3, one)
    assert len(client.asked) == 2
    assert drafting.subscription_of(one) == 0


async def test_nothing_is_sent_to_a_draft_that_is_away(client: FakeClient, drafting: Drafting) -> None:
    client.info = None
    one = sequence()
    await prompt_round(drafting, one)
    assert await propose(drafting, 2, one) == NOTHING_SENT
    assert client.asked == []
    assert one.attachment == 0
    assert drafting.max_draft_tokens == FALLBACK_MAX_DRAFT_TOKENS


async def test_the_largest_k_is_remembered_while_the_draft_is_away(
    client: FakeClient, drafting: Drafting
) -> None:
    assert (drafting.head, drafting.max_draft_tokens) == ("head", 5)
    client.info = None
    assert (drafting.head, drafting.max_draft_tokens) == ("", 5)


async def test_an_answer_to_another_round_is_rejected(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    await prompt_round(drafting, one)
    client.pending.round = 5  # type: ignore[union-attr]
    await propose(drafting, 2, one)
    assert client.faults == ["an answer to round 5 instead of 1"]
    assert one.drafts == []
