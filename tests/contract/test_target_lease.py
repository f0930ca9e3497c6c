"""The target's leases over a real socket: what frees a sequence, what is refused, and what is seen from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from eyas.v1 import target_pb2
from tests.helpers.messages import OK, block, opening, refused, refused_field, sampling, step
from tests.helpers.services import RunningTarget, exchange, running_target, target_stub
from tests.helpers.tiny_models import make_target

TEXT = [*range(40, 90)]
NUM_PAGES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
async def target(folder: Path, tmp_path: Path) -> AsyncIterator[RunningTarget]:
    async with running_target(folder, tmp_path, num_pages=NUM_PAGES, max_rows=64) as target:
        yield target


@pytest.fixture
async def stub(target: RunningTarget) -> AsyncIterator[Any]:
    async with target_stub(target.address) as stub:
        yield stub


# ---- the stream is the lease


async def opened(stub: Any) -> Any:
    """A stream that holds pages."""
    stream = stub.Step()
    await exchange(stream, step(block(1, 0, TEXT), block(2, 0, [1]), opens=[opening(1), opening(2)]))
    return stream


async def test_a_cancelled_stream_frees_its_sequences(target: RunningTarget, stub: Any) -> None:
    stream = await opened(stub)
    assert target.used_pages == 5
    stream.cancel()
    await target.until_free()


async def test_a_closed_channel_frees_its_sequences(target: RunningTarget) -> None:
    async with target_stub(target.address) as stub:
        await opened(stub)
        assert target.used_pages == 5
    await target.until_free()


async def test_a_finished_stream_frees_its_sequences(target: RunningTarget, stub: Any) -> None:
    stream = await opened(stub)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK
    await target.until_free()


async def test_many_streams_cancelled_on_the_way_leak_nothing(target: RunningTarget, stub: Any) -> None:
    """Some before their step is read, some while it computes, some after the answer."""
    for i in range(50):
        stream = stub.Step()
        await stream.write(step(block(1, 0, TEXT[: 1 + i % 40], 1), opens=[opening(1), opening(2)]))
        if i % 3 == 1:
            await asyncio.sleep(0.001)
        if i % 3 == 2:
            await stream.read()
            await stream.write(step(block(1, 0, TEXT[:20], 1), block(2, 0, TEXT[:20], 1)))
        stream.cancel()
    answer = await exchange(stub.Step(), step(block(3, 0, TEXT[:3], 1), opens=[opening(3)]))
    assert answer.results[0].status == OK
    while target.used_pages > 1:
        await asyncio.sleep(0.005)


# ---- contract violations


def bad_opening(**law: Any) -> target_pb2.StepRequest:
    return step(opens=[opening(8), target_pb2.OpenSequence(sequence_id=9, sampling=sampling(**law))])


VIOLATIONS = {
    "gap": (step(block(1, 12, [5])), "blocks[0].start"),
    "gap in a new sequence": (step(block(8, 1, [5]), opens=[opening(8)]), "blocks[0].start"),
    "far gap": (step(block(1, 2**32 - 1, [5])), "blocks[0].start"),
    "token beyond the vocabulary": (step(block(2, 5, [5]), block(1, 11, [5, 512])), "blocks[1].tokens"),
    "no tokens": (step(block(1, 11, [])), "blocks[0].tokens"),
    "beyond the context": (step(block(1, 11, [5] * 31)), "blocks[0].tokens"),
    "too many rows": (step(block(1, 0, [5] * 33), block(2, 0, [5] * 32)), "blocks"),
    "a sequence twice": (step(block(1, 11, [5]), block(1, 12, [5])), "blocks"),
    "more scored than sent": (step(block(1, 11, [5, 6], 3)), "blocks[0].num_scored"),
    "no base": (step(target_pb2.Block(sequence_id=1, tokens=[5])), "blocks[0].base"),
    "opened again": (step(opens=[opening(1)]), "opens[0].sequence_id"),
    "opened twice": (step(opens=[opening(8), opening(8)]), "opens[1].sequence_id"),
    "negative temperature": (bad_opening(temperature=-1), "opens[1].sampling.temperature"),
    "temperature above 100": (bad_opening(temperature=101), "opens[1].sampling.temperature"),
    "temperature NaN": (bad_opening(temperature=float("nan")), "opens[1].sampling.temperature"),
    "top_p zero": (bad_opening(top_p=0), "opens[1].sampling.top_p"),
    "top_p above 1": (bad_opening(top_p=1.5), "opens[1].sampling.top_p"),
    "top_p NaN": (bad_opening(top_p=float("nan")), "opens[1].sampling.top_p"),
    "no sampling": (step(opens=[target_pb2.OpenSequence(sequence_id=8)]), "opens[0].sampling.top_p"),
}


@pytest.mark.parametrize(("request_", "field"), VIOLATIONS.values(), ids=VIOLATIONS)
async def test_a_broken_contract_names_the_field_and_frees_all(
    folder: Path, tmp_path: Path, request_: target_pb2.StepRequest, field: str
) -> None:
    """What came before it on the stream is still answered."""
    async with (
        running_target(folder, tmp_path, num_pages=NUM_PAGES, max_rows=64, context_length=40) as target,
        target_stub(target.address) as stub,
    ):
        stream = stub.Step()
        await stream.write(step(block(1, 0, TEXT[:10]), block(2, 0, TEXT[:5]), opens=[opening(1), opening(2)]))
        await stream.write(step(block(1, 10, TEXT[10:11], 1), round=2))
        await stream.write(request_)
        assert [(await stream.read()).round for _ in range(2)] == [1, 2]
        assert await refused_field(stream.read()) == field
        await target.until_free()
        assert (await exchange(stub.Step(), step(block(1, 0, [1]), opens=[opening(1)]))).results[0].status == OK


async def test_a_rollback_makes_a_gap_of_what_lay_behind(stub: Any) -> None:
    stream = await opened(stub)
    await exchange(stream, step(block(1, 5, [1, 2])))
    assert (await exchange(stream, step(block(1, 7, [3])))).results[0].status == OK
    assert await refused_field(exchange(stream, step(block(1, 9, [4])))) == "blocks[0].start"


async def test_what_is_sent_behind_a_violation_is_not_done(target: RunningTarget, stub: Any) -> None:
    stream = stub.Step()
    await stream.write(step(block(1, 5, [1]), opens=[opening(1)]))
    for i in range(3):
        await stream.write(step(block(2 + i, 0, TEXT), opens=[opening(2 + i)]))
    assert await refused_field(stream.read()) == "blocks[0].start"
    await target.until_free()


async def test_a_fault_in_the_model_ends_the_stream_alone(
    target: RunningTarget, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await opened(stub)
    with monkeypatch.context() as patch:
        patch.setattr(target.engine.model, "forward", lambda *_: 1 / 0)
        await refused(exchange(stream, step(block(1, 50, [1]))), grpc.StatusCode.INTERNAL)
    await target.until_free()
    assert (await exchange(stub.Step(), step(block(1, 0, [1]), opens=[opening(1)]))).results[0].status == OK


# ---- what is seen from outside


def metric(target: RunningTarget, name: str) -> float | None:
    return target.metrics.registry.get_sample_value(name)


async def test_metrics(target: RunningTarget, stub: Any) -> None:
    stream = await opened(stub)
    await exchange(stream, step(block(1, 50, [1, 2, 3])))
    await exchange(stream, step(closes=[2]))
    assert metric(target, "eyas_target_kv_pages") == NUM_PAGES
    assert metric(target, "eyas_target_kv_pages_used") == 4
    assert metric(target, "eyas_target_feature_batches_dropped") == 0
    while metric(target, "eyas_target_step_seconds_count") != 3:
        await asyncio.sleep(0.001)
    assert metric(target, "eyas_target_rows_total") == 54


TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def compute_at_once(compute: ThreadPoolExecutor, patch: pytest.MonkeyPatch) -> None:
    """Whatever is submitted has been computed when `submit` returns."""
    submit = compute.submit

    def submit_and_wait(*work: Any) -> Future[Any]:
        future: Future[Any] = submit(*work)
        wait([future])
        return future

    patch.setattr(compute, "submit", submit_and_wait)


@pytest.mark.parametrize("end", ["close", "cancel", "violation"])
async def test_a_span_for_as_long_as_a_sequence_is_held(
    folder: Path, tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with (
        running_target(folder, tmp_path, num_pages=4, tracer=provider.get_tracer("test")) as target,
        target_stub(target.address) as stub,
    ):
        compute_at_once(target.compute, monkeypatch)
        stream = stub.Step()
        traced = opening(5, epoch=3)
        traced.traceparent = f"00-{TRACE_ID}-{SPAN_ID}-01"
        await exchange(stream, step(opens=[traced, opening(6)]))
        await exchange(stream, step(block(5, 0, [1], epoch=3)))
        assert not exporter.get_finished_spans()
        if end == "close":
            await exchange(stream, step(closes=[5, 6]))
        elif end == "cancel":
            stream.cancel()
        else:
            await refused_field(exchange(stream, step(block(5, 9, [1], epoch=3))))
        while len(exporter.get_finished_spans()) < 2:
            await asyncio.sleep(0.005)
        spans = {(span.attributes or {})["eyas.epoch"]: span for span in exporter.get_finished_spans()}
        assert set(spans) == {0, 3}
        assert {span.name for span in spans.values()} == {"target.sequence"}
        parent = spans[3].parent
        assert parent is not None
        assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
        assert spans[0].parent is None
