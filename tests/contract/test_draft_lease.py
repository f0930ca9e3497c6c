"""The draft's leases over a real socket: what frees a sequence, what is refused, and what is seen from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from eyas.v1 import common_pb2, draft_pb2
from tests.helpers.messages import extend, propose, refused_field, slots
from tests.helpers.pair import Pair, Streams, prompted, streams, words
from tests.helpers.services import RunningDraft, RunningTarget, draft_stub, exchange, running_draft

pytest_plugins = ["tests.helpers.draft_fixtures"]
pytestmark = pytest.mark.usefixtures("patient")

UNKNOWN = draft_pb2.PROPOSAL_STATUS_UNKNOWN_SEQUENCE


# ---- the stream is the lease


@pytest.mark.parametrize("end", ["cancel", "finish", "close the channel"])
async def test_the_end_of_a_stream_frees_its_sequences(
    target: RunningTarget, draft: RunningDraft, end: str
) -> None:
    async with streams(target, draft) as rounds:
        pair = await prompted(rounds)
        await pair.draft(3)
        await rounds.propose(opens=[slots(2)])
        assert draft.used_pages == 2
        assert draft.num_held == 2
        if end == "cancel":
            rounds.proposals.cancel()
            await draft.until_free()
        elif end == "finish":
            await rounds.proposals.done_writing()
            assert await rounds.proposals.read() is grpc.aio.EOF
            await draft.until_free()
    await draft.until_free()


async def test_a_closed_sequence_is_freed(rounds: Streams, draft: RunningDraft) -> None:
    pair = await prompted(rounds)
    await pair.draft(3)
    response = await rounds.propose(closes=[1, 77])
    assert response.free_pages == 30
    assert draft.num_held == 0
    assert (await rounds.propose(extend(1, 20, [5]))).proposals[0].status == UNKNOWN


async def test_gateways_do_not_disturb_each_other(
    target: RunningTarget, draft: RunningDraft, reference: Any
) -> None:
    async with streams(target, draft) as one, streams(target, draft) as other:
        first, second = await prompted(one), await prompted(other, 9, seed=3, sequence=2)
        assert await first.draft(3) == reference(first.text, 3)
        assert await second.draft(2) == reference(second.text, 2)
        assert (await other.propose(extend(1, 0, [5]))).proposals[0].status == UNKNOWN
        one.proposals.cancel()
        while draft.used_pages > 1:
            await asyncio.sleep(0.005)
        await second.settle([], 0, 30)
        assert await second.draft(4) == reference(second.text, 4)


async def test_a_sequence_that_moves_to_another_stream_keeps_its_features(
    target: RunningTarget, draft: RunningDraft, reference: Any
) -> None:
    """It was preempted and opened again; the end of the old stream comes late."""
    async with streams(target, draft) as old, streams(target, draft) as new:
        await prompted(old)
        pair = await prompted(new, 12, seed=4, epoch=1)
        old.proposals.cancel()
        old.steps.cancel()
        while target.used_pages > 1:
            await asyncio.sleep(0.005)
        assert await pair.draft(3) == reference(pair.text, 3)


async def test_many_streams_cancelled_on_the_way_leak_nothing(
    target: RunningTarget, draft: RunningDraft
) -> None:
    """Some wait for features, some compute, some have answered."""
    async with streams(target, draft) as rounds, draft_stub(draft.address) as stub:
        for i in range(40):
            rounds.proposals = stub.Propose()
            pair = Pair(rounds, sequence=i + 1, text=words(21, i))
            await pair.open()
            if i % 3:
                await pair.feed(20)
            await rounds.proposals.write(propose(extend(i + 1, 0, pair.text[1:], 8, rounds.round), round=1))
            if i % 3 == 2:
                await rounds.proposals.read()
            rounds.proposals.cancel()
            await rounds.step(closes=[i + 1])
        await draft.until_free()
        rounds.proposals = stub.Propose()
        assert len(await (await prompted(rounds, sequence=99)).draft(2)) == 2


# ---- contract violations


def bad_opening(**law: Any) -> draft_pb2.ProposeRequest:
    return propose(opens=[slots(8), slots(9, **law)])


VIOLATIONS = {
    "gap": (propose(extend(1, 21, [5], 1)), "extends[0].slot"),
    "token beyond the vocabulary": (propose(extend(1, 20, [512])), "extends[0].tokens"),
    "no tokens": (propose(extend(1, 20, [], 3)), "extends[0].tokens"),
    "no tokens at the first slot": (propose(extend(2, 0, [], 3, 0)), "extends[0].tokens"),
    "too many drafts": (propose(extend(1, 20, [5], 9)), "extends[0].num_draft_tokens"),
    "a sequence twice": (propose(extend(1, 20, [5]), extend(1, 21, [5])), "extends"),
    "run-ahead": (propose(draft_pb2.Extend(sequence_id=1, after_round=1)), "extends[0].base"),
    "no base": (propose(extend(9, 0, [5]), draft_pb2.Extend(sequence_id=1, tokens=[5])), "extends[1].base"),
    "opened again": (propose(opens=[slots(1)]), "opens[0].sequence_id"),
    "opened twice": (propose(opens=[slots(8), slots(8)]), "opens[1].sequence_id"),
    "temperature NaN": (bad_opening(temperature=float("nan")), "opens[1].sampling.temperature"),
    "top_p zero": (bad_opening(top_p=0), "opens[1].sampling.top_p"),
}


@pytest.mark.parametrize(("request_", "field"), VIOLATIONS.values(), ids=VIOLATIONS)
async def test_a_broken_contract_names_the_field_and_frees_all(
    rounds: Streams,
    draft: RunningDraft,
    request_: draft_pb2.ProposeRequest,
    field: str,
    give_up_soon: Callable[[], None],
) -> None:
    pair = await prompted(rounds)
    await pair.draft(2)
    await rounds.propose(opens=[slots(2)])
    give_up_soon()
    assert await refused_field(exchange(rounds.proposals, request_)) == field
    await draft.until_free()


async def test_a_rollback_makes_a_gap_of_what_lay_behind(
    rounds: Streams, give_up_soon: Callable[[], None]
) -> None:
    pair = await prompted(rounds)
    await pair.draft(2)
    pair.text, pair.num_computed, pair.num_slots = [*pair.text[:11], 9], 10, 10
    await pair.feed(1)
    await pair.draft(2)
    give_up_soon()
    assert await refused_field(rounds.propose(extend(1, 12, [5]))) == "extends[0].slot"


# ---- what is seen from outside


async def test_the_description(draft: RunningDraft, rounds: Streams) -> None:
    async with draft_stub(draft.address) as stub:
        info = await stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest())
    assert info == draft_pb2.GetDraftInfoResponse(
        head="tiny-head",
        kind="eagle3",
        source=common_pb2.FeatureSource(taps=(2, 3, 5)),
        draft_vocab_size=512,
        max_draft_tokens=8,
        subscription_id=rounds.subscription,
        transport=common_pb2.FEATURE_TRANSPORT_BYTES,
        target_model="tiny",
        page_size=16,
        num_pages=30,
        device="cpu",
    )


@pytest.mark.parametrize("head", ["eagle1"], indirect=True)
async def test_an_eagle1_head_reads_the_final_norm(draft: RunningDraft) -> None:
    async with draft_stub(draft.address) as stub:
        info = await stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest())
    assert (info.kind, info.source) == ("eagle1", common_pb2.FeatureSource(final_norm=True))


def metric(draft: RunningDraft, name: str, **labels: str) -> float | None:
    return draft.metrics.registry.get_sample_value(name, labels)


async def test_metrics(draft: RunningDraft, rounds: Streams, give_up_soon: Callable[[], None]) -> None:
    pair = await prompted(rounds)
    await pair.draft(3)
    await rounds.propose(extend(9, 0, [5]))
    give_up_soon()
    await rounds.propose(extend(1, 20, [5], 1, rounds.round + 1))
    assert metric(draft, "eyas_draft_tokens_total") == 3
    assert metric(draft, "eyas_draft_slot_pages") == 30
    assert metric(draft, "eyas_draft_slot_pages_used") == 2
    assert metric(draft, "eyas_draft_attached") == 1
    assert metric(draft, "eyas_draft_feature_transport", transport="bytes") == 1
    failed = "eyas_draft_extends_failed_total"
    assert metric(draft, failed, reason="unknown_sequence") == 1
    assert metric(draft, failed, reason="no_features") == 1


TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("end", ["close", "cancel"])
async def test_a_span_for_as_long_as_a_sequence_is_held(
    head: Path, tmp_path: Path, target: RunningTarget, end: str
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with (
        running_draft(head, tmp_path, target.address, tracer=provider.get_tracer("test")) as draft,
        streams(target, draft) as rounds,
    ):
        traced = slots(5, epoch=3)
        traced.traceparent = f"00-{TRACE_ID}-{SPAN_ID}-01"
        await rounds.propose(opens=[traced])
        assert not exporter.get_finished_spans()
        if end == "close":
            await rounds.propose(closes=[5])
        else:
            rounds.proposals.cancel()
        while not exporter.get_finished_spans():
            await asyncio.sleep(0.005)
        (span,) = exporter.get_finished_spans()
        assert (span.name, dict(span.attributes or {})) == ("draft.sequence", {"eyas.epoch": 3})
        assert span.parent is not None
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
