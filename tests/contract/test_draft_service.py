"""What a draft proposes over real sockets, beside a real target: against slow reference heads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.engine import DraftSequence, Engine, Lease
from eyas.v1 import draft_pb2, target_pb2
from eyas_kernels.sampling import SamplingLaw, draw
from target_service.features import Subscription
from tests.helpers.messages import DRAFTED, block, extend, opening, propose, slots
from tests.helpers.pair import Pair, Streams, prompted, streams, words
from tests.helpers.reference_head import ReferenceHead, target_features
from tests.helpers.services import RunningDraft, RunningTarget, running_draft, running_target
from tests.helpers.tiny_models import make_head, make_target

pytest_plugins = ["tests.helpers.draft_fixtures"]
pytestmark = pytest.mark.usefixtures("patient")

HEADS = ("eagle1", "eagle1-bias", "eagle3", "eagle3-reduced", "eagle3-shuffled", "eagle3-norm", "eagle3-narrow")

NO_PAGES = draft_pb2.PROPOSAL_STATUS_NO_PAGES
UNKNOWN = draft_pb2.PROPOSAL_STATUS_UNKNOWN_SEQUENCE
STALE = draft_pb2.PROPOSAL_STATUS_STALE_EPOCH
NO_FEATURES = draft_pb2.PROPOSAL_STATUS_NO_FEATURES

SCRIPT = ((3, 0), (3, 3), (1, 1), (8, 2), (4, 0), (2, 1), (8, 8), (3, 1))
"""Rounds of a conversation: k, and how many drafts are accepted."""


async def play(pair: Pair, script: Any = SCRIPT) -> list[tuple[list[int], list[int]]]:
    """Runs the rounds; returns the text before each and what was drafted behind it."""
    said, bonuses = [], iter(words(100, seed=9))
    for k, num_accepted in script:
        drafts = await pair.draft(k)
        said.append((list(pair.text), drafts))
        await pair.settle(drafts, num_accepted, next(bonuses))
    return said


# ---- what it proposes


@pytest.mark.parametrize("head", HEADS, indirect=True)
async def test_drafts_are_those_of_the_reference_head(rounds: Streams, reference: Any) -> None:
    """Through a conversation with rejections, over several pages."""
    for text, drafts in await play(await prompted(rounds)):
        assert drafts == reference(text, len(drafts))


@pytest.mark.parametrize("head", ["eagle1", "eagle3-shuffled"], indirect=True)
@pytest.mark.parametrize("sizes", [(1,) * 24, (16, 8), (5, 12, 7), (23, 1)])
async def test_a_prompt_in_chunks_drafts_like_a_whole_one(
    rounds: Streams, reference: Any, sizes: tuple[int, ...]
) -> None:
    """The chunks of the slots need not be those of the target."""
    pair = Pair(rounds, text=words(25))
    await pair.open()
    for size in (10, 14):
        await pair.feed(size)
        while pair.num_slots + sizes[0] <= pair.num_computed and len(sizes) > 1:
            assert await pair.draft(0, pair.num_slots + sizes[0]) == []
            sizes = sizes[1:]
    assert await pair.draft(4) == reference(pair.text, 4)


@pytest.fixture
def sequences(draft: RunningDraft, monkeypatch: pytest.MonkeyPatch) -> dict[int, DraftSequence]:
    """What the draft holds open on the stream that spoke last."""
    held: dict[int, DraftSequence] = {}

    def propose_and_look(lease: Lease, *rest: Any) -> list[draft_pb2.Proposal]:
        proposals = Engine.propose(draft.engine, lease, *rest)
        held.clear()
        held.update(lease.sequences)
        return proposals

    monkeypatch.setattr(draft.engine, "propose", propose_and_look)
    return held


async def test_slots_left_behind_are_those_of_a_whole_text(
    rounds: Streams, draft: RunningDraft, sequences: dict[int, DraftSequence]
) -> None:
    """After many rounds, with drafts written and rejected, the same keys and values stand in the slots."""
    pair = await prompted(rounds)
    await play(pair)
    await pair.draft(8)
    whole = Pair(rounds, 2, text=list(pair.text))
    await whole.open()
    await whole.feed(len(pair.text) - 1)
    await whole.draft(0)
    cache = draft.engine._cache.layer(0)
    assert sequences[1].num_slots == sequences[2].num_slots == len(pair.text) - 1
    found, expected = (cache[held.pages].flatten(0, 1)[: held.num_slots] for held in sequences.values())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e4])
async def test_what_lies_behind_the_slots_does_not_matter(
    rounds: Streams, draft: RunningDraft, sequences: dict[int, DraftSequence], reference: Any, garbage: float
) -> None:
    """Scratch slots of old drafts, and the pages that others have used."""
    pair = await prompted(rounds)
    await play(pair, SCRIPT[:3])
    for _ in range(3):
        cache, pages, num_slots = draft.engine._cache.layer(0), sequences[1].pages, sequences[1].num_slots
        kept = cache[pages].flatten(0, 1)[:num_slots].clone()
        cache.fill_(garbage)
        for slot in range(num_slots):
            cache[pages[slot // 16], slot % 16] = kept[slot]
        drafts = await pair.draft(5)
        assert drafts == reference(pair.text, 5)
        await pair.settle(drafts, 1, 17)


@pytest.mark.parametrize("head", ["eagle1", "eagle3-reduced"], indirect=True)
async def test_it_catches_up_after_rounds_without_drafts(rounds: Streams, reference: Any) -> None:
    """The target went on alone for some rounds, of one token and of several; all arrives in one extend."""
    pair = await prompted(rounds)
    await play(pair, SCRIPT[:2])
    for tokens in (words(1, 4), words(3, 5), words(2, 6)):
        await pair.settle(tokens, len(tokens), 7)
    assert await pair.draft(3) == reference(pair.text, 3)


async def test_slots_can_be_written_again_from_an_earlier_one(rounds: Streams, reference: Any) -> None:
    """State is addressed by position: the target and the draft go back to a prefix."""
    pair = await prompted(rounds)
    await play(pair, SCRIPT[:3])
    pair.text, pair.num_computed, pair.num_slots = [*pair.text[:15], *words(6, 8)], 14, 14
    await pair.feed(6)
    assert await pair.draft(4) == reference(pair.text, 4)


async def test_sequences_of_one_message(rounds: Streams, reference: Any) -> None:
    """Of different lengths and k, beside ones that cannot run; the answer keeps the order."""
    pairs = [await prompted(rounds, n, seed=n, sequence=n) for n in (40, 3, 17, 1)]
    extends = [pair.extend(k) for pair, k in zip(pairs, (2, 8, 0, 5), strict=True)]
    response = await rounds.propose(*extends[:2], extend(99, 0, [1]), *extends[2:])
    assert [proposal.sequence_id for proposal in response.proposals] == [40, 3, 99, 17, 1]
    statuses = [proposal.status for proposal in response.proposals]
    assert statuses == [DRAFTED, DRAFTED, UNKNOWN, DRAFTED, DRAFTED]
    drafts = [list(proposal.draft_tokens) for proposal in response.proposals if proposal.status == DRAFTED]
    assert drafts == [reference(pair.text, k) for pair, k in zip(pairs, (2, 8, 0, 5), strict=True)]


@pytest.mark.parametrize("head", ["eagle1", "eagle3", "eagle3-reduced", "eagle3-shuffled"], indirect=True)
async def test_at_a_temperature_it_draws_with_the_targets_noise(
    rounds: Streams, head: Path, folder: Path
) -> None:
    law = {"temperature": 1.3, "top_p": 0.95, "top_k": 40, "seed": 77, "choice_index": 1}
    pair = await prompted(rounds, 12, law=law)
    drafts = await pair.draft(4)
    slow = ReferenceHead(head, folder)
    known, hidden = list(pair.text[1:]), slow._fuse(target_features(folder, pair.text[:-1], slow.taps))
    for i, found in enumerate(drafts):
        output = slow._layer(known, hidden, first_row=len(known) - 1)
        (column,) = draw(slow._logits(output), [SamplingLaw(1.3, 0.95, 40, 77, 1)], [13 + i], slow.target_ids)
        assert found == int(slow.target_ids[column])
        known, hidden = [*known, found], torch.cat((hidden, output))


async def test_the_targets_draw_is_the_drafts_when_they_think_alike(folder: Path, tmp_path: Path) -> None:
    """The position in the noise is the token's own on both sides."""
    plain = make_target(tmp_path / "plain", layer_scale=0.01)
    head = make_head(tmp_path / "head", "eagle3", plain, imitate=True)
    law = {"temperature": 1.0, "seed": 5}
    async with (
        running_target(plain, tmp_path, num_pages=60) as target,
        running_draft(head, tmp_path, target.address) as draft,
        streams(target, draft) as rounds,
    ):
        pair = await prompted(rounds, 20, law=law)
        agreed = 0
        for _ in range(30):
            drafts = await pair.draft(1)
            (sampled, _) = await pair.verify([pair.text[-1], *drafts])
            agreed += [sampled] == drafts
            await pair.settle([], 0, sampled)
        assert agreed >= 15


LINEAR = {"rope_type": "linear", "factor": 4}


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        ({"rope_theta": 77.0}, {"rope_theta": 77.0}),
        ({"rope_scaling": json.dumps(LINEAR)}, {"rope_scaling": LINEAR}),
        ({"taps": "4,1,6"}, {"eagle_aux_hidden_state_layer_ids": [4, 1, 6]}),
        ({"page_size": 5}, {}),
        ({"page_size": 1, "num_pages": 100}, {}),
    ],
)
async def test_what_the_configuration_changes(
    folder: Path, tmp_path: Path, target: RunningTarget, config: dict[str, Any], meant: dict[str, Any]
) -> None:
    """As if the head's config.json said it."""
    head = make_head(tmp_path / "head", "eagle3", folder)
    slow = ReferenceHead(make_head(tmp_path / "meant", "eagle3", folder, config=meant), folder)
    async with (
        running_draft(head, tmp_path, target.address, **config) as draft,
        streams(target, draft) as rounds,
    ):
        for text, drafts in await play(await prompted(rounds)):
            assert drafts == slow.propose(text[1:], target_features(folder, text[:-1], slow.taps), len(drafts))


@pytest.mark.parametrize(("asked", "dtype"), [("auto", torch.bfloat16), ("float32", torch.float32)])
async def test_the_element_type_is_the_targets_unless_another_is_asked_for(
    folder: Path, head: Path, tmp_path: Path, asked: str, dtype: torch.dtype
) -> None:
    async with (
        running_target(folder, tmp_path, num_pages=60, dtype="bfloat16") as target,
        running_draft(head, tmp_path, target.address, dtype=asked) as draft,
        streams(target, draft) as rounds,
    ):
        assert draft.engine.head.dtype == dtype
        assert len(await (await prompted(rounds)).draft(3)) == 3


# ---- features


async def test_it_waits_for_features_that_come_later(rounds: Streams, reference: Any) -> None:
    """The proposal is asked for before the target has begun the step it names."""
    pair = Pair(rounds, text=words(21))
    await pair.open()
    await rounds.proposals.write(propose(extend(1, 0, pair.text[1:], 3, rounds.round + 2), round=5))
    await pair.feed(8)
    await pair.feed(12)
    response = await rounds.proposals.read()
    assert list(response.proposals[0].draft_tokens) == reference(pair.text, 3)
    assert response.timing.total_us >= response.timing.queue_us > 0


async def test_features_of_an_older_step_are_not_taken_for_the_named_ones(
    rounds: Streams, draft: RunningDraft, reference: Any
) -> None:
    """Rows of rejected drafts lie at the same positions as the true ones that come later."""
    pair = await prompted(rounds)
    await pair.draft(3)
    newest = pair.text[-1]
    await pair.verify([newest, 1, 2, 3])  # rejected
    await draft.until_held(pair.sequence, 24)
    pair.text += [4, 5, 6]
    named = extend(1, 20, pair.text[21:], 3, rounds.round + 1)
    await rounds.proposals.write(propose(named, round=9))
    await pair.feed(3)
    assert list((await rounds.proposals.read()).proposals[0].draft_tokens) == reference(pair.text, 3)


async def test_a_sequence_without_features_goes_without_drafts(
    rounds: Streams, draft: RunningDraft, reference: Any, give_up_soon: Callable[[], None]
) -> None:
    """It names no subscription at the target; the one beside it is served."""
    await rounds.propose(opens=[slots(2)])
    await rounds.step(block(2, 0, words(5)), opens=[opening(2)])
    pair = await prompted(rounds)
    await draft.until_held(pair.sequence, 20)
    give_up_soon()
    response = await rounds.propose(extend(2, 0, words(5, 1), 3), pair.extend(3))
    assert [proposal.status for proposal in response.proposals] == [NO_FEATURES, DRAFTED]
    assert not response.proposals[0].draft_tokens
    assert list(response.proposals[1].draft_tokens) == reference(pair.text, 3)


async def test_features_of_an_old_epoch_do_not_count(
    rounds: Streams, draft: RunningDraft, reference: Any, give_up_soon: Callable[[], None]
) -> None:
    pair = await prompted(rounds)
    await pair.draft(2)
    await rounds.propose(opens=[slots(1, epoch=1)], closes=[1])
    pair.num_computed = 0
    await pair.feed(20)
    await prompted(rounds, 5, sequence=2)
    await draft.until_held(2, 5)  # and so what was sent before has arrived too
    give_up_soon()
    stale = extend(1, 0, words(20), 2, 1, epoch=1)
    assert (await rounds.propose(stale)).proposals[0].status == NO_FEATURES
    again = Pair(rounds, 1, 1, text=words(15))
    await rounds.step(opens=[opening(1, 1, rounds.subscription)], closes=[1])
    await again.feed(14)
    await draft.until_held(1, 14)
    assert await again.draft(4) == reference(again.text, 4)


@asynccontextmanager
async def next_batch_lost(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """What the step within would send to the draft is dropped, as for a draft that does not read."""
    lost = asyncio.Event()
    with monkeypatch.context() as patch:
        patch.setattr(Subscription, "offer", lambda subscription, batches: lost.set())
        yield
        await lost.wait()


async def test_a_lost_batch_is_a_gap_and_not_another_feature(
    rounds: Streams, draft: RunningDraft, monkeypatch: pytest.MonkeyPatch, give_up_soon: Callable[[], None]
) -> None:
    pair = Pair(rounds, text=words(31))
    await pair.open()
    await pair.feed(10)
    async with next_batch_lost(monkeypatch):
        await pair.feed(10)
    await pair.feed(10)
    await draft.until_held(pair.sequence, 30)
    give_up_soon()
    (whole,) = (await rounds.propose(pair.extend(3))).proposals
    (behind,) = (await rounds.propose(pair.extend(3, 10))).proposals
    assert (whole.status, behind.status) == (NO_FEATURES, NO_FEATURES)


async def test_what_cannot_come_is_not_waited_for(rounds: Streams) -> None:
    """Unknown sequences and stale epochs are answered at once, and hold nobody up."""
    await rounds.propose(opens=[slots(1, epoch=2)])
    extends = (extend(1, 0, [5], 3, epoch=1), extend(9, 0, [5], 3))
    response = await rounds.propose(*extends)
    assert [(p.sequence_id, p.epoch, p.status) for p in response.proposals] == [(1, 1, STALE), (9, 0, UNKNOWN)]
    assert not any(proposal.draft_tokens for proposal in response.proposals)


# ---- proposals that are sent before the step


@pytest.mark.parametrize("head", ["eagle1", "eagle3-reduced"], indirect=True)
async def test_it_drafts_behind_what_the_step_commits(
    rounds: Streams, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a prompt, behind rounds of which all, some and none is accepted, and behind rounds without drafts."""
    pair, checked = Pair(rounds, text=words(20)), 0
    await pair.open()
    drafts = list((await pair.verify_ahead([], 3)).draft_tokens)
    for turn in range(8):
        assert drafts == reference(pair.text, len(drafts))
        if turn % 3 == 0:  # the target's own tokens, with a lie at the end
            drafts = [*await true_tokens(pair, turn // 3), 511]
        if turn == 4:
            monkeypatch.setattr("target_service.features.MAX_PAYLOAD_BYTES", 1)
        proposal = await pair.verify_ahead(drafts, 2 + turn % 3)
        assert proposal.status == DRAFTED
        drafts = list(proposal.draft_tokens)
        checked += len(drafts)
    assert checked == sum(2 + turn % 3 for turn in range(8))
    await pair.settle([], 0, 9)
    await pair.settle([5], 1, 10)
    assert list((await pair.verify_ahead([3], 4)).draft_tokens) == reference(pair.text, 4)


async def true_tokens(pair: Pair, count: int) -> list[int]:
    """What the target draws behind the text, found in rounds that commit nothing."""
    found: list[int] = []
    while len(found) < count:
        found.append((await pair.verify([pair.text[-1], *found]))[-1])
    return found


@pytest.mark.parametrize("known", [[], [7]])
async def test_a_step_without_the_block_leaves_the_sequence_as_it_was(
    target: RunningTarget, rounds: Streams, reference: Any, known: list[int]
) -> None:
    """The target had no pages: there is nothing to draft behind, and the stream goes on."""
    pair = await prompted(rounds, 32)
    await pair.draft(1)
    await rounds.step(block(2, 0, [5] * 512), opens=[opening(2)])
    await rounds.step(block(3, 0, [5] * 26 * 16), opens=[opening(3)])
    assert target.engine.allocator.num_free == 0
    ahead = extend(1, 32, known, 3, rounds.round + 1, then_committed=True)
    await rounds.proposals.write(propose(ahead, round=rounds.round + 1))
    response = await rounds.step(block(1, 32, [pair.text[-1]], 1))
    assert response.results[0].status == target_pb2.BLOCK_STATUS_NO_PAGES
    (proposal,) = (await rounds.proposals.read()).proposals
    assert (proposal.status, list(proposal.draft_tokens)) == (NO_FEATURES, [])
    await rounds.step(closes=[2, 3])
    await pair.feed(1)
    pair.text.append(8)
    assert await pair.draft(4) == reference(pair.text, 4)


async def test_a_step_that_is_over_is_not_waited_for(
    rounds: Streams, draft: RunningDraft, reference: Any
) -> None:
    """What it committed is not known any more; its features are."""
    pair = await prompted(rounds)
    await pair.draft(1)
    await pair.settle([], 0, 9)
    missed = pair.feature_round
    await pair.settle([], 0, 10)
    await draft.until_held(pair.sequence, 22)
    ahead = extend(1, 20, [], 3, missed, then_committed=True)
    assert (await rounds.propose(ahead)).proposals[0].status == NO_FEATURES
    assert await pair.draft(4) == reference(pair.text, 4)


async def test_a_lost_step_is_noticed_with_the_next(rounds: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = await prompted(rounds)
    await pair.draft(1)
    ahead = extend(1, 20, [], 3, rounds.round + 1, then_committed=True)
    await rounds.proposals.write(propose(ahead, round=rounds.round + 1))
    async with next_batch_lost(monkeypatch):
        await pair.settle([], 0, 9)
    await pair.settle([], 0, 10)
    assert (await rounds.proposals.read()).proposals[0].status == NO_FEATURES


# ---- pages


async def test_no_pages(head: Path, tmp_path: Path, target: RunningTarget, reference: Any) -> None:
    """Scratch slots count too. A sequence that is closed makes room for the next."""
    async with (
        running_draft(head, tmp_path, target.address, num_pages=3) as draft,
        streams(target, draft) as rounds,
    ):
        first, second = await prompted(rounds, 30), await prompted(rounds, 14, seed=1, sequence=2)
        response = await rounds.propose(first.extend(3), second.extend(4))
        assert [proposal.status for proposal in response.proposals] == [DRAFTED, NO_PAGES]
        assert not response.proposals[1].draft_tokens
        assert response.free_pages == 1
        first.num_slots = first.num_computed
        await first.settle([], 0, 9)
        assert await first.draft(1) == reference(first.text, 1)
        third = await prompted(rounds, 14, seed=2, sequence=3)
        response = await rounds.propose(third.extend(4), closes=[1])
        assert list(response.proposals[0].draft_tokens) == reference(third.text, 4)
        assert response.free_pages == 1
