"""How much is drafted, and what becomes of slots when a sequence or the draft goes."""

from __future__ import annotations

from typing import cast

import pytest

from eyas.v1 import draft_pb2
from gateway.draft_client import DraftClient
from gateway.drafting import FALLBACK_MAX_DRAFT_TOKENS, Drafting
from gateway.exchange import NOTHING_SENT
from gateway.scheduler import Close
from tests.helpers.fake_draft import FakeClient, commit, info, prompt_round, propose, send_ahead, sequence

NO_PAGES = draft_pb2.PROPOSAL_STATUS_NO_PAGES


@pytest.fixture
def client() -> FakeClient:
    """Of a draft that reads features, so that it can be told of a step ahead."""
    return FakeClient(info(subscription_id=9))


@pytest.fixture
def drafting(client: FakeClient) -> Drafting:
    return Drafting(cast(DraftClient, client))


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
