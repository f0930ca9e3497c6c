"""The observer: what becomes of noted rounds, and when."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from eyas.telemetry import parse_traceparent
from gateway.commit import CommitState
from gateway.exchange import NOTHING_SENT, Exchange
from gateway.metrics import Metrics
from gateway.observer import Observer
from gateway.records import RoundRecord, SequenceRecord
from gateway.request import FinishReason, RoundTimes, Sampling
from gateway.sequence import Sequence
from gateway.stop_strings import StopStrings
from gateway.text import TextStream, Tokenizer
from tests.helpers.engine import ask
from tests.helpers.tiny_tokenizer import tiny_tokenizer_files

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TIMES = RoundTimes(draft=0.001, target=0.004, wire=0.002, gateway=0.0005)
DRAFTED = Exchange(began=0.0001, round_trip=0.002, compute=0.001)
VERIFIED = Exchange(began=0.0025, round_trip=0.005, compute=0.004)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def observer(exporter: InMemorySpanExporter, metrics: Metrics) -> Observer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Observer(metrics, provider.get_tracer("test"))


def sequence(traceparent: str = CLIENT, num_prompt: int = 6) -> Sequence:
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=0, seed=2**63)
    request = ask([0] * num_prompt, 10, k=3, traceparent=traceparent, sampling=sampling, request_id="r1")
    text = TextStream(Tokenizer(tiny_tokenizer_files()))
    return Sequence(request, CommitState(10, frozenset(), StopStrings(()), text), list(request.prompt_ids))


def round_of(
    *blocks: SequenceRecord, number: int = 1, draft: Exchange = DRAFTED, began: float = 0.0
) -> RoundRecord:
    return RoundRecord(number, began, TIMES, draft, VERIFIED, blocks)


def named(exporter: InMemorySpanExporter, name: str) -> list[Any]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, labels) or 0.0


def test_a_request_s_span(observer: Observer, exporter: InMemorySpanExporter) -> None:
    one = sequence()
    observer.request_began(one, "tiny")
    one.commit.finish_reason = FinishReason.STOP
    one.commit.completion_tokens, one.num_rounds = 4, 2
    observer.request_ended(one)
    [span] = exporter.get_finished_spans()
    assert span.name == "generate tiny"
    assert span.parent == parse_traceparent(CLIENT)
    own = parse_traceparent(one.traceparent)
    assert own is not None
    assert (own.trace_id, own.span_id) == (span.context.trace_id, span.context.span_id)
    assert span.attributes is not None
    assert {
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": str(2**63),  # attributes hold 63 bits
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop",),
        "eyas.request.id": "r1",
        "eyas.num_rounds": 2,
    }.items() <= span.attributes.items()


def test_rounds_become_spans_only_when_there_is_time(
    observer: Observer, exporter: InMemorySpanExporter
) -> None:
    one = sequence()
    observer.request_began(one, "tiny")
    observer.round_ended(round_of(SequenceRecord(one, 6, 1, 3, 2, 3), number=7))
    assert not exporter.get_finished_spans()
    observer.flush()
    observer.flush()
    [span] = named(exporter, "round")
    assert span.attributes == {
        "eyas.round": 7,
        "eyas.batch_size": 1,
        "eyas.position": 6,
        "eyas.num_fed": 1,
        "eyas.k": 3,
        "eyas.accepted": 2,
        "eyas.committed": 3,
        "eyas.transport": "bytes",
        "eyas.draft_us": 1000,
        "eyas.target_us": 4000,
        "eyas.wire_us": 2000,
        "eyas.gateway_us": 500,
    }
    assert span.end_time - span.start_time == pytest.approx(TIMES.total * 1e9, abs=1000)
    for name, exchange in (("draft", DRAFTED), ("verify", VERIFIED)):
        [child] = named(exporter, name)
        assert child.parent is not None
        assert child.parent.span_id == span.context.span_id
        assert child.start_time - span.start_time == pytest.approx(exchange.began * 1e9, abs=1000)
        assert child.end_time - child.start_time == pytest.approx(exchange.round_trip * 1e9, abs=1000)
        assert child.attributes == {
            "eyas.compute_us": round(exchange.compute * 1e6),
            "eyas.wire_us": round(exchange.wire * 1e6),
        }


def test_the_last_rounds_are_in_before_the_request_s_span_ends(
    observer: Observer, exporter: InMemorySpanExporter
) -> None:
    one = sequence()
    observer.request_began(one, "tiny")
    observer.round_ended(round_of(SequenceRecord(one, 0, 6, 0, 0, 1), draft=NOTHING_SENT))
    observer.request_ended(one)
    assert [span.name for span in exporter.get_finished_spans()] == ["verify", "round", "generate tiny"]


def test_rounds_of_a_request_that_is_gone_are_counted_but_not_traced(
    observer: Observer, exporter: InMemorySpanExporter, metrics: Metrics
) -> None:
    one = sequence()
    observer.request_began(one, "tiny")
    observer.request_ended(one)
    observer.round_ended(round_of(SequenceRecord(one, 6, 1, 3, 2, 3)))
    observer.flush()
    assert named(exporter, "round") == []
    assert value(metrics, "eyas_rounds_total") == 1


def test_a_request_that_was_not_finished_is_an_error(
    observer: Observer, exporter: InMemorySpanExporter, metrics: Metrics
) -> None:
    one = sequence()
    observer.request_began(one, "tiny")
    observer.request_ended(one)
    [span] = exporter.get_finished_spans()
    assert not span.status.is_ok
    assert span.attributes is not None
    assert span.attributes["gen_ai.response.finish_reasons"] == ("aborted",)
    assert 0 <= int(str(span.attributes["eyas.queue_us"])) < 60e6
    assert value(metrics, "eyas_requests_total", reason="aborted") == 1


def test_without_a_tracer_only_metrics_are_kept(metrics: Metrics) -> None:
    observer, one = Observer(metrics, None), sequence()
    observer.request_began(one, "tiny")
    observer.round_ended(round_of(SequenceRecord(one, 6, 1, 3, 2, 3)))
    observer.first_token(one)
    observer.request_ended(one)
    assert one.traceparent == ""
    assert value(metrics, "eyas_rounds_total") == 1
    assert value(metrics, "eyas_time_to_first_token_seconds_count") == 1


def test_what_a_round_counts(observer: Observer, metrics: Metrics) -> None:
    """A prompt's first chunk, its last one, a verified block, plain decoding, and a block that found no pages."""
    blocks = [
        SequenceRecord(sequence(), 0, 4, 0),
        SequenceRecord(sequence(), 5, 1, 0, 0, 1),
        SequenceRecord(sequence(), 6, 1, 3, 2, 3),
        SequenceRecord(sequence(), 9, 1, 0, 0, 1),
        SequenceRecord(sequence(), 8, 0, 0),
    ]
    observer.round_ended(round_of(*blocks))
    observer.flush()
    for name, count in {
        "rounds": 1,
        "prompt_tokens": 5,
        "generation_tokens": 5,
        "spec_decode_num_drafts": 1,
        "spec_decode_num_draft_tokens": 3,
        "spec_decode_num_accepted_tokens": 2,
    }.items():
        assert value(metrics, f"eyas_{name}_total") == count, name
    per_position = "eyas_spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, per_position, position=str(i)) for i in range(3)] == [1, 1, 0]
    for part in ("draft", "target", "wire", "gateway"):
        assert value(metrics, "eyas_round_part_seconds_total", part=part) == getattr(TIMES, part)


def test_tokens_computed_again_after_a_preemption_are_prompt_tokens_only_so_far(
    observer: Observer, metrics: Metrics
) -> None:
    """Six of the prompt; the four behind were generated before."""
    observer.round_ended(round_of(SequenceRecord(sequence(), 0, 10, 0, 0, 1)))
    observer.flush()
    assert value(metrics, "eyas_prompt_tokens_total") == 6


def test_acceptance_is_counted_by_context_length(observer: Observer, metrics: Metrics) -> None:
    """A context is what is committed before the drafts; a block without drafts does not count."""
    blocks = [
        (510, 1, 3, 3),
        (511, 1, 3, 2),
        (512, 1, 2, 0),
        (1000, 24, 4, 1),
        (1024, 1, 1, 1),
        (1024, 1, 0, 0),
    ]
    for start, num_fed, num_drafts, num_accepted in blocks:
        record = SequenceRecord(sequence(), start, num_fed, num_drafts, num_accepted, num_accepted + 1)
        observer.round_ended(round_of(record))
    observer.flush()
    for context, drafts, accepted in (("512", 2, 5), ("1024", 2, 1), ("2048", 1, 1), ("4096", 0, 0)):
        assert value(metrics, "eyas_spec_decode_context_drafts_total", context=context) == drafts
        assert value(metrics, "eyas_spec_decode_context_accepted_tokens_total", context=context) == accepted
