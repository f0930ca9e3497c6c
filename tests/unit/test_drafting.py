"""The draft's part of a round without a draft: what is asked, and what is made of the answers."""

from __future__ import annotations

from typing import cast

import pytest

from eyas.v1 import draft_pb2
from gateway.draft_client import DraftClient
from gateway.drafting import Drafting
from gateway.exchange import NOTHING_SENT
from gateway.scheduler import Close, Share
from tests.helpers.fake_draft import FakeClient, commit, info, prompt_round, propose, send_ahead, sequence

NO_FEATURES = draft_pb2.PROPOSAL_STATUS_NO_FEATURES


@pytest.fixture
def client() -> FakeClient:
    """Of a draft that reads features, so that it can be told of a step ahead."""
    return FakeClient(info(subscription_id=9))


@pytest.fixture
def drafting(client: FakeClient) -> Drafting:
    return Drafting(cast(DraftClient, client))


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


async def test_a_late_answer_is_taken_before_the_next_message(client: FakeClient, drafting: Drafting) -> None:
    """It came between a round's two messages: nothing is sent ahead, since the slots that it tells of are not noted."""
    one = sequence()
    await prompt_round(drafting, one)
    client.is_late = True
    await propose(drafting, 2, one)
    client.is_late = False
    send_ahead(drafting, 2, one)
    assert len(client.asked) == 2
    commit(one, 8)
    await propose(drafting, 3, one)
    [extend] = client.asked[2].extends
    assert (extend.slot, list(extend.tokens), extend.then_committed) == (4, [8], False)


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
