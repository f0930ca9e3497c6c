"""The draft's part of a round without a draft: what is asked, and what is made of the answers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import cast

import pytest

from eyas.v1 import draft_pb2
from gateway.commit import CommitState
from gateway.draft_client import Answer, DraftClient
from gateway.drafting import FALLBACK_MAX_DRAFT_TOKENS, Drafting
from gateway.exchange import NOTHING_SENT, Exchange
from gateway.scheduler import Close
from gateway.sequence import Sequence
from gateway.stop_strings import StopStrings
from gateway.text import TextStream, Tokenizer
from tests.helpers.engine import ask
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer_files

INFO = draft_pb2.GetDraftInfoResponse(head="head", max_draft_tokens=5, subscription_id=9)
OK, NO_PAGES = draft_pb2.PROPOSAL_STATUS_OK, draft_pb2.PROPOSAL_STATUS_NO_PAGES
TOOK = Exchange(1.0, 0.5, 0.25)


@dataclass
class FakeClient:
    """Attached; proposes 1, 2, .. unless it is late, and then gives that answer with `take_answer`."""

    info: draft_pb2.GetDraftInfoResponse | None = field(default_factory=lambda: INFO)
    attachment: int = 1
    is_late: bool = False
    late_again: bool = False  # once an answer is taken
    is_ready: bool = True
    status: draft_pb2.ProposalStatus = OK
    asked: list[draft_pb2.ProposeRequest] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    late: deque[Answer] = field(default_factory=deque)

    async def propose(self, request: draft_pb2.ProposeRequest) -> Answer | None:
        self.asked.append(request)
        answer = self._answer(request), TOOK
        if not self.is_late:
            return answer
        self.late.append(answer)
        self.is_ready = False
        return None

    def take_answer(self) -> Answer | None:
        if self.is_late or not self.late:
            return None
        self.is_ready, self.is_late = True, self.late_again
        return self.late.popleft()

    def reject(self, fault: str) -> None:
        self.faults.append(fault)

    def _answer(self, request: draft_pb2.ProposeRequest) -> draft_pb2.ProposeResponse:
        proposals = [
            draft_pb2.Proposal(
                sequence_id=extend.sequence_id,
                epoch=extend.epoch,
                status=self.status,
                draft_tokens=range(1, extend.num_draft_tokens + 1) if self.status == OK else (),
            )
            for extend in request.extends
        ]
        return draft_pb2.ProposeResponse(round=request.round, proposals=proposals)


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def drafting(client: FakeClient) -> Drafting:
    return Drafting(cast(DraftClient, client))


def sequence(k: int = 3, num_prompt: int = 4, max_tokens: int = 20) -> Sequence:
    request = ask(range(10, 10 + num_prompt), max_tokens, k=k)
    text = TextStream(Tokenizer(tiny_tokenizer_files()))
    return Sequence(
        request,
        CommitState(max_tokens, frozenset(), StopStrings(()), text),
        list(request.prompt_ids),
        traceparent="t",
    )


def decode(one: Sequence, *tokens: int) -> None:
    """The target has computed everything, and these tokens were committed."""
    one.opened = True
    one.num_computed = len(one.tokens) + len(tokens) - 1
    one.tokens += tokens
    one.commit.completion_tokens += len(tokens)
    one.feature_round += 1


async def propose(
    drafting: Drafting, round_: int, *sequences: Sequence, closes: tuple[Close, ...] = (), room: int = 100
) -> Exchange:
    return await drafting.propose(round_, sequences, closes, room=room, vocab_size=VOCAB_SIZE)


async def test_no_draft_is_configured() -> None:
    drafting, one = Drafting(None), sequence()
    decode(one, 7)
    assert await propose(drafting, 1, one, closes=(Close(1, 1),)) == NOTHING_SENT
    assert (drafting.head, drafting.max_draft_tokens, drafting.subscription_of(one)) == ("", 0, 0)
    assert not drafting.has_work


async def test_a_sequence_is_opened_with_its_prompt_and_extended_behind_it(
    client: FakeClient, drafting: Drafting
) -> None:
    one = sequence()
    assert await propose(drafting, 1, one) == TOOK
    [opening] = client.asked[0].opens
    assert (opening.sequence_id, opening.epoch, opening.traceparent) == (one.id, 0, "t")
    assert opening.sampling == one.sampling()
    assert not client.asked[0].extends
    assert drafting.subscription_of(one) == INFO.subscription_id

    decode(one, 7)
    await propose(drafting, 2, one)
    [extend] = client.asked[1].extends
    assert (extend.slot, list(extend.tokens)) == (0, [11, 12, 13, 7])  # slot i takes token i + 1
    assert (extend.feature_round, extend.num_draft_tokens) == (1, 3)
    assert one.drafts == [1, 2, 3]
    assert one.num_slots == 4

    decode(one, 1, 2, 8)
    await propose(drafting, 3, one)
    [extend] = client.asked[2].extends
    assert (extend.slot, list(extend.tokens), extend.feature_round) == (4, [1, 2, 8], 2)


async def test_prompt_chunks_fill_slots_without_drafts(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    await propose(drafting, 1, one)
    one.opened, one.num_computed = True, 2
    await propose(drafting, 2, one)
    [extend] = client.asked[1].extends
    assert (list(extend.tokens), extend.num_draft_tokens) == ([11, 12], 0)
    assert one.drafts == []


@pytest.mark.parametrize(
    ("k", "max_tokens", "room", "asked"),
    [(3, 20, 100, 3), (9, 20, 100, 5), (3, 3, 100, 1), (3, 2, 100, 0), (3, 20, 2, 2), (3, 20, 0, 0)],
)
async def test_how_many_drafts(
    k: int, max_tokens: int, room: int, asked: int, client: FakeClient, drafting: Drafting
) -> None:
    """k of the request, at most what the head makes, what the target has room for, and one less than is left."""
    one = sequence(k, max_tokens=max_tokens)
    await propose(drafting, 1, one)
    decode(one, 7)
    await propose(drafting, 2, one, room=room)
    [extend] = client.asked[1].extends
    assert extend.num_draft_tokens == len(one.drafts) == asked


async def test_the_room_is_shared_in_order(drafting: Drafting) -> None:
    some = [sequence() for _ in range(3)]
    await propose(drafting, 1, *some)
    for one in some:
        decode(one, 7)
    await propose(drafting, 2, *some, room=5)
    assert [len(one.drafts) for one in some] == [3, 2, 0]


async def test_without_speculation_nothing_is_opened(client: FakeClient, drafting: Drafting) -> None:
    one = sequence(k=0)
    assert await propose(drafting, 1, one) == NOTHING_SENT
    decode(one, 7)
    assert await propose(drafting, 2, one) == NOTHING_SENT
    assert client.asked == []
    assert drafting.subscription_of(one) == 0


async def test_closes_are_for_the_stream_that_holds_the_slots(client: FakeClient, drafting: Drafting) -> None:
    client.attachment = 4
    await propose(drafting, 1, closes=(Close(11, 4), Close(12, 3), Close(13, 0)))
    assert [close.sequence_id for close in client.asked[0].closes] == [11]


async def test_closes_wait_for_a_late_draft(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    client.is_late = True
    await propose(drafting, 1, one)
    await propose(drafting, 2, closes=(Close(one.id, 1),))
    assert len(client.asked) == 1
    assert not drafting.has_work
    client.is_late, client.is_ready = False, True
    assert drafting.has_work
    await propose(drafting, 3)
    assert [close.sequence_id for close in client.asked[1].closes] == [one.id]
    assert not drafting.has_work


async def test_waiting_for_a_late_draft_is_counted_as_its_time(client: FakeClient, drafting: Drafting) -> None:
    client.is_late = True
    took = await propose(drafting, 1, sequence())
    assert took.began > 0
    assert (took.compute, took.round_trip) == (0, took.wire)


async def test_a_late_answer_fills_slots_and_gives_no_drafts(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    await propose(drafting, 1, one)
    decode(one, 7)
    client.is_late = True
    await propose(drafting, 2, one)
    assert one.drafts == []
    decode(one, 8)
    client.is_late = False
    await propose(drafting, 3, one)
    [extend] = client.asked[2].extends
    assert (extend.slot, list(extend.tokens)) == (4, [8])
    assert one.num_slots == 5
    assert one.drafts == [1, 2, 3]


async def test_late_drafts_are_none_though_the_next_answer_is_late_too(
    client: FakeClient, drafting: Drafting
) -> None:
    one = sequence()
    await propose(drafting, 1, one)
    decode(one, 7)
    client.is_late = True
    await propose(drafting, 2, one)
    decode(one, 8)
    client.is_late = False
    client.late_again = True
    await propose(drafting, 3, one)
    assert (one.num_slots, one.drafts) == (4, [])


async def test_a_late_answer_to_an_earlier_epoch_is_nothing(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    await propose(drafting, 1, one)
    decode(one, 7)
    client.is_late = True
    await propose(drafting, 2, one)
    one.reopen()
    client.is_late = False
    await propose(drafting, 3, one)
    assert (one.num_slots, one.drafts, one.epoch) == (0, [], 1)
    assert [opening.epoch for opening in client.asked[2].opens] == [1]


async def test_a_refused_sequence_is_closed_and_goes_on_without(client: FakeClient, drafting: Drafting) -> None:
    one, other = sequence(), sequence(k=0)
    await propose(drafting, 1, one, other)
    decode(one, 7)
    client.status = NO_PAGES
    await propose(drafting, 2, one, other)
    assert one.drafts == []
    assert drafting.subscription_of(one) == 0
    assert drafting.has_work
    await propose(drafting, 3, one, other)
    assert [close.sequence_id for close in client.asked[2].closes] == [one.id]
    assert not client.asked[2].extends


async def test_what_an_earlier_stream_held_is_gone(client: FakeClient, drafting: Drafting) -> None:
    one = sequence()
    await propose(drafting, 1, one)
    decode(one, 7)
    client.attachment = 2
    assert await propose(drafting, 2, one) == NOTHING_SENT
    assert drafting.subscription_of(one) == 0


async def test_nothing_is_sent_to_a_draft_that_is_away(client: FakeClient, drafting: Drafting) -> None:
    client.info, client.is_ready = None, False
    one = sequence()
    assert await propose(drafting, 1, one) == NOTHING_SENT
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
    await propose(drafting, 1, one)
    decode(one, 7)
    client.is_late = True
    await propose(drafting, 2, one)
    client.is_late = False
    client.late[0][0].round = 1
    await propose(drafting, 3, one)
    assert client.faults == ["an answer to round 1 instead of 2"]
