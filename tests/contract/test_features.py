"""The feature stream over a real socket: who may subscribe, which rows come, and what a slow reader costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.transport import LAYOUT_VERSION, MAX_PAYLOAD_BYTES, decode_tensor, encode_tensor
from eyas.v1 import common_pb2, target_pb2
from eyas_kernels.attention import BlockRows, plan_rows
from target_service import features
from target_service.features import RowSpan, Subscription, gather_features, make_batches
from target_service.model import Decoder
from tests.helpers.messages import OK, block, opening, refused, refused_field, step
from tests.helpers.reference_head import greedy_tokens
from tests.helpers.services import RunningTarget, exchange, running_target, target_stub
from tests.helpers.tiny_models import make_target

NO_PAGES = target_pb2.BLOCK_STATUS_NO_PAGES
UNKNOWN = target_pb2.BLOCK_STATUS_UNKNOWN_SEQUENCE
BYTES = common_pb2.FEATURE_TRANSPORT_BYTES
TEXT = [*range(40, 100)]
EAGLE3 = (2, 3, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
async def target(folder: Path, tmp_path: Path) -> AsyncIterator[RunningTarget]:
    async with running_target(folder, tmp_path, num_pages=20, max_rows=64) as target:
        yield target


@pytest.fixture
async def stub(target: RunningTarget) -> AsyncIterator[Any]:
    async with target_stub(target.address) as stub:
        yield stub


def subscribe(taps: Sequence[int] = EAGLE3, **fields: Any) -> target_pb2.FeaturesRequest:
    """No taps: the hidden state after the final norm."""
    known: dict[str, Any] = {
        "head": "a-head",
        "source": common_pb2.FeatureSource(taps=taps, final_norm=not taps),
        "hidden_size": 64,
        "vocab_size": 512,
        "layout_version": LAYOUT_VERSION,
        "transports": [BYTES],
    }
    return target_pb2.FeaturesRequest(subscribe=target_pb2.FeatureSubscribe(**{**known, **fields}))


async def subscribed(stub: Any, taps: Sequence[int] = EAGLE3) -> tuple[Any, int]:
    """A feature stream and its id."""
    stream = stub.Features()
    return stream, (await exchange(stream, subscribe(taps))).subscribed.subscription_id


def expected_rows(model: Decoder, tokens: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
    """The features of a text, straight from the model."""
    pages = [*range(1, 2 + len(tokens) // 16)]
    step = plan_rows([BlockRows(0, len(tokens), pages)], 16, "cpu")
    with torch.inference_mode():
        return gather_features(model.forward(tokens, step, model.new_cache(20, 16), frozenset(taps)), taps)


async def read_batch(stream: Any) -> target_pb2.FeatureBatch:
    response = await stream.read()
    assert response.WhichOneof("kind") == "batch"
    batch: target_pb2.FeatureBatch = response.batch
    return batch


def spans(batch: target_pb2.FeatureBatch) -> list[tuple[int, int, int, int, int]]:
    return [(span.sequence_id, span.epoch, span.start, span.count, span.row) for span in batch.spans]


# ---- who may subscribe


@pytest.mark.parametrize(("taps", "width"), [((), 64), (EAGLE3, 192), ((0,), 64), ((6, 1), 128)])
async def test_the_answer_to_a_subscription(stub: Any, taps: tuple[int, ...], width: int) -> None:
    found = (await exchange(stub.Features(), subscribe(taps))).subscribed
    assert found.subscription_id != 0
    assert found == target_pb2.FeatureSubscribed(
        subscription_id=found.subscription_id,
        transport=BYTES,
        feature_width=width,
        scalar_type=common_pb2.SCALAR_TYPE_FLOAT32,
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 128}, "head 'a-head' was made for hidden_size 128, but the target's is 64"),
        ({"vocab_size": 500}, "head 'a-head' was made for vocab_size 500, but the target's is 512"),
        ({"layout_version": 2}, "head 'a-head' was made for layout_version 2, but the target's is 1"),
        ({"taps": (2, 3, 7)}, "head 'a-head' reads tap 7, but the target has 6 layers"),
        ({"transports": [common_pb2.FEATURE_TRANSPORT_CUDA_IPC]}, "subscribe.transports: "),
        ({"transports": []}, "subscribe.transports: "),
    ],
)
async def test_a_head_that_does_not_fit_is_refused(
    target: RunningTarget, stub: Any, fields: dict[str, Any], message: str
) -> None:
    error = await refused(exchange(stub.Features(), subscribe(**fields)), grpc.StatusCode.FAILED_PRECONDITION)
    assert (error.details() or "").startswith(message)


@pytest.mark.parametrize("source", [{}, {"taps": [2], "final_norm": True}])
async def test_a_source_is_taps_or_the_final_norm(stub: Any, source: dict[str, Any]) -> None:
    request = subscribe(source=common_pb2.FeatureSource(**source))
    assert await refused_field(exchange(stub.Features(), request)) == "subscribe.source"


async def test_the_first_message_subscribes(stub: Any) -> None:
    request = target_pb2.FeaturesRequest(ack=target_pb2.FeatureAck(batch=1))
    assert await refused_field(exchange(stub.Features(), request)) == "kind"
    empty = stub.Features()
    await empty.done_writing()
    assert await refused_field(empty.read()) == "kind"


# ---- which rows come


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("taps", [(), EAGLE3, (5, 2), (0, 6)])
async def test_rows_are_the_models_own_to_the_bit(
    folder: Path, tmp_path: Path, taps: tuple[int, ...], dtype: str
) -> None:
    async with (
        running_target(folder, tmp_path, num_pages=20, dtype=dtype) as target,
        target_stub(target.address) as stub,
    ):
        stream, subscription = await subscribed(stub, taps)
        request = step(block(7, 0, TEXT[:20], epoch=2), round=9, opens=[opening(7, 2, subscription)])
        await exchange(stub.Step(), request)
        batch = await read_batch(stream)
        assert (batch.batch, batch.round, spans(batch)) == (1, 9, [(7, 2, 0, 20, 0)])
        rows = decode_tensor(batch.rows)
        assert rows.dtype == getattr(torch, dtype)
        assert torch.equal(rows, expected_rows(target.engine.model, TEXT[:20], taps))


async def test_a_sequence_from_prompt_to_verify(target: RunningTarget, stub: Any) -> None:
    """Chunks, verified rows that may be rejected later, and the rows that overwrite them."""
    stream, subscription = await subscribed(stub)
    steps = stub.Step()
    runs = [(0, TEXT[:10]), (10, TEXT[10:18]), (18, [TEXT[18], 1, 2, 3]), (19, TEXT[19:23])]
    opens = [opening(1, 0, subscription)]
    for round_, (start, tokens) in enumerate(runs):
        await exchange(
            steps, step(block(1, start, tokens, 1), round=round_, opens=opens if round_ == 0 else [])
        )
        batch = await read_batch(stream)
        assert (batch.batch, batch.round) == (round_ + 1, round_)
        assert spans(batch) == [(1, 0, start, len(tokens), 0)]
        text = [*TEXT[:start], *tokens]
        expected = expected_rows(target.engine.model, text, EAGLE3)[start:]
        torch.testing.assert_close(decode_tensor(batch.rows), expected, atol=0, rtol=0)


async def test_every_subscription_gets_its_own_sequences_and_taps(target: RunningTarget, stub: Any) -> None:
    """In one step, beside a sequence without a subscription and one whose subscription is unknown."""
    eagle3, eagle3_id = await subscribed(stub)
    eagle1, eagle1_id = await subscribed(stub, ())
    assert eagle3_id != eagle1_id
    subscriptions = {1: eagle3_id, 2: 0, 3: eagle1_id, 4: eagle3_id, 5: 12345}
    texts = {1: TEXT[:20], 2: TEXT[3:9], 3: TEXT[5:8], 4: TEXT[30:37], 5: TEXT[:2]}
    opens = [opening(i, 0, subscription) for i, subscription in subscriptions.items()]
    response = await exchange(stub.Step(), step(*(block(i, 0, text) for i, text in texts.items()), opens=opens))
    assert [result.status for result in response.results] == [OK] * 5
    model = target.engine.model
    for stream, taps, members in ((eagle3, EAGLE3, {1, 4}), (eagle1, (), {3})):
        batch = await read_batch(stream)
        rows, found = decode_tensor(batch.rows), spans(batch)
        assert {span[0] for span in found} == members
        assert len(rows) == sum(len(texts[i]) for i in members)
        for sequence, _, start, count, row in found:
            assert (start, count) == (0, len(texts[sequence]))
            assert torch.equal(rows[row : row + count], expected_rows(model, texts[sequence], taps))


async def test_a_block_that_did_not_run_is_said_to_have_no_features(target: RunningTarget, stub: Any) -> None:
    """Beside a block that did, and when none did."""
    stream, subscription = await subscribed(stub)
    opens = [opening(i, 0, subscription) for i in (1, 2)]
    steps = stub.Step()
    await exchange(steps, step(block(1, 0, [5] * 64), opens=opens))
    for start in range(64, 320, 64):
        await exchange(steps, step(block(1, start, [5] * 64)))
    full = step(block(2, 0, TEXT[:3], 1), block(1, 0, [6]), block(3, 0, [1]), round=7)
    assert [result.status for result in (await exchange(steps, full)).results] == [NO_PAGES, OK, UNKNOWN]
    await exchange(steps, step(block(2, 0, TEXT[:3], 1), block(3, 0, [1]), round=8))
    seven, eight = [await read_batch(stream) for _ in range(7)][-2:]
    assert (seven.round, eight.round) == (7, 8)
    assert {(span.sequence_id, span.count, span.not_run) for span in seven.spans} == {
        (1, 1, False),
        (2, 0, True),
    }
    assert [(span.sequence_id, span.count, span.not_run) for span in eight.spans] == [(2, 0, True)]
    assert decode_tensor(eight.rows).shape == (0, 192)


async def test_the_rows_come_with_what_the_block_commits(
    folder: Path, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts that the target draws too, then its next draw; where rows are cut, with the last of them."""
    stream, subscription = await subscribed(stub)
    steps, (a, b, c, d, e) = stub.Step(), greedy_tokens(folder, TEXT[:14], 5)
    wrong = 511

    async def committed(start: int, tokens: list[int], num_scored: int) -> list[list[int]]:
        """What each span of the step says."""
        opens = [opening(1, 0, subscription)] if start == 0 else []
        await exchange(steps, step(block(1, start, tokens, num_scored), opens=opens))
        found: list[target_pb2.FeatureSpan] = []
        while sum(span.count for span in found) < len(tokens):
            found += (await read_batch(stream)).spans
        return [list(span.committed_tokens) for span in found]

    assert await committed(0, TEXT[:10], 0) == [[]]
    assert await committed(10, TEXT[10:14], 1) == [[a]]
    assert await committed(14, [a], 1) == [[b]]
    assert await committed(14, [a, b, c, wrong], 4) == [[b, c, d]]
    assert await committed(14, [a, b, wrong, d], 4) == [[b, c]]
    assert await committed(14, [a, wrong, c], 3) == [[b]]
    assert await committed(14, [a, b, c], 3) == [[b, c, d]]
    assert await committed(14, [a, b, c, d], 2) == [[d, e]]
    monkeypatch.setattr(features, "MAX_PAYLOAD_BYTES", 2 * 192 * 4)
    assert await committed(14, [a, b, c, wrong, wrong], 5) == [[], [], [b, c, d]]


async def test_large_steps_come_in_several_messages(
    target: RunningTarget, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row_bytes = 192 * 4
    monkeypatch.setattr(features, "MAX_PAYLOAD_BYTES", 10 * row_bytes + 5)
    stream, subscription = await subscribed(stub)
    opens = [opening(i, 0, subscription) for i in (1, 2, 3)]
    blocks = [block(1, 0, TEXT[:25]), block(2, 0, TEXT[:3]), block(3, 0, TEXT[10:14])]
    await exchange(stub.Step(), step(*blocks, round=4, opens=opens))
    found: dict[int, list[torch.Tensor]] = {1: [], 2: [], 3: []}
    number = 0
    while sum(map(len, found[1])) < 25 or not found[2] or not found[3]:
        batch = await read_batch(stream)
        number += 1
        assert (batch.batch, batch.round) == (number, 4)
        assert len(batch.rows.data) <= 10 * row_bytes
        rows = decode_tensor(batch.rows)
        for sequence, _, start, count, row in spans(batch):
            assert start == sum(map(len, found[sequence]))
            found[sequence].append(rows[row : row + count])
    assert number == 4
    for sequence, text in ((1, TEXT[:25]), (2, TEXT[:3]), (3, TEXT[10:14])):
        assert torch.equal(torch.cat(found[sequence]), expected_rows(target.engine.model, text, EAGLE3))


async def test_the_real_limit_is_below_that_of_messages(stub: Any, target: RunningTarget) -> None:
    """A row of an 8B model takes 24 KiB; 512 of them would be 12 MiB."""
    rows = torch.zeros(512, 3 * 4096, dtype=torch.bfloat16)
    batches = make_batches(1, rows, [RowSpan(1, 0, 0, 512, 0)])
    assert [batch.ByteSize() > MAX_PAYLOAD_BYTES + 1000 for batch in batches] == [False, False]


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=6), st.integers(1, 200))
def test_no_cut_loses_or_moves_a_row(lengths: list[tuple[int, int]], limit: int) -> None:
    """Spans with rows of others between them, cut at any limit."""
    planned, row = [], 0
    for sequence, (count, gap) in enumerate(lengths):
        row += gap
        planned.append(RowSpan(sequence, 1, 10 * sequence, count, row))
        row += count
    rows = torch.arange(row, dtype=torch.float32)[:, None].repeat(1, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "MAX_PAYLOAD_BYTES", limit)
        batches = make_batches(5, rows, planned)
    found: dict[tuple[int, int], float] = {}
    for batch in batches:
        assert len(batch.rows.data) <= max(limit, 8)
        held = decode_tensor(batch.rows)
        for sequence, _, start, count, first in spans(batch):
            for i in range(count):
                assert (sequence, start + i) not in found
                found[sequence, start + i] = float(held[first + i, 0])
    assert found == {
        (span.sequence_id, span.start + i): span.first_row + i for span in planned for i in range(span.num_rows)
    }


# ---- readers


async def test_a_draft_that_leaves_takes_its_subscription_along(target: RunningTarget, stub: Any) -> None:
    stream, subscription = await subscribed(stub)
    staying, staying_id = await subscribed(stub)
    stream.cancel()
    while target.engine.subscriptions.get(subscription) is not None:
        await asyncio.sleep(0.005)
    opens = [opening(1, 0, subscription), opening(2, 0, staying_id)]
    response = await exchange(stub.Step(), step(block(1, 0, TEXT), block(2, 0, [5]), opens=opens))
    assert [result.status for result in response.results] == [OK, OK]
    assert spans(await read_batch(staying)) == [(2, 0, 0, 1, 0)]


async def test_a_draft_that_does_not_read_loses_batches_and_holds_nobody_up(
    target: RunningTarget, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "MAX_UNREAD_BYTES", 200_000)
    (slow, slow_id), (quick, quick_id) = await subscribed(stub), await subscribed(stub, ())
    steps, rounds = stub.Step(), 0
    opens = [opening(1, 0, slow_id), opening(2, 0, quick_id)]
    while not target.metrics.registry.get_sample_value("eyas_target_feature_batches_dropped"):
        request = step(block(1, 0, TEXT), block(2, 0, [5]), round=rounds, opens=opens if rounds == 0 else [])
        await exchange(steps, request)
        assert (await read_batch(quick)).round == rounds
        rounds += 1
        assert rounds < 1000
    subscription = target.engine.subscriptions.get(slow_id)
    assert subscription is not None
    assert 0 < subscription.unread_bytes <= 200_000
    # What was not dropped comes once it is read, and then there is room again.
    lost = int(target.metrics.registry.get_sample_value("eyas_target_feature_batches_dropped") or 0)
    kept = [await read_batch(slow) for _ in range(rounds - lost)]
    assert [batch.batch for batch in kept] == [*range(1, rounds - lost + 1)]
    await exchange(steps, step(block(1, 0, TEXT), round=rounds))
    assert (await read_batch(slow)).round == rounds


async def test_what_is_unread_is_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MAX_UNREAD_BYTES", 1000)
    subscription = Subscription(1, "a-head", ())
    reader = subscription.batches()
    for _ in range(300):
        batch = target_pb2.FeatureBatch(round=300, rows=encode_tensor(torch.zeros(50, 2)))
        subscription.offer([batch, target_pb2.FeatureBatch()])
        assert 400 < subscription.unread_bytes < 450
        await anext(reader)
        await anext(reader)
        assert subscription.unread_bytes == 0
    assert subscription.dropped_batches == 0


async def test_a_batch_that_does_not_fit_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MAX_UNREAD_BYTES", 1000)
    subscription = Subscription(1, "a-head", ())
    offered = [target_pb2.FeatureBatch(rows=encode_tensor(torch.zeros(n, 2))) for n in (100, 100, 10)]
    subscription.offer(offered)
    assert subscription.dropped_batches == 1
    reader = subscription.batches()
    assert [(await anext(reader)).batch for _ in range(2)] == [1, 2]
