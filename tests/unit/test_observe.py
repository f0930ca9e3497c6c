"""What target and draft show of themselves: the metrics port, and a span for every sequence."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, Counter

from eyas.config import TargetConfig
from eyas.listen import ListenError
from eyas.observe import SequenceSpans, observed
from eyas.telemetry import parse_traceparent
from eyas.v1 import target_pb2
from tests.helpers.processes import free_port

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def config(port: int | None = None, *, trace: bool = False) -> TargetConfig:
    listen = None if port is None else f"127.0.0.1:{port}"
    return TargetConfig(model=Path("/model"), served_name="m", metrics_listen=listen, trace_console=trace)


def opening(sequence_id: int) -> target_pb2.OpenSequence:
    return target_pb2.OpenSequence(sequence_id=sequence_id, epoch=4, traceparent=SAMPLED)


def test_a_span_lives_as_long_as_its_sequence_under_the_request() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = SequenceSpans(provider.get_tracer("test"), "target.sequence")
    spans.update([opening(1), opening(2)], [])
    assert exporter.get_finished_spans() == ()
    spans.update([], [1])
    (first,) = exporter.get_finished_spans()
    assert first.name == "target.sequence"
    assert first.parent == parse_traceparent(SAMPLED)
    assert first.attributes == {"eyas.epoch": 4}
    spans.end([1, 2, 3])
    assert len(exporter.get_finished_spans()) == 2


def test_without_a_tracer_there_are_no_spans() -> None:
    spans = SequenceSpans(None, "target.sequence")
    spans.update([opening(1)], [])
    spans.end([1])


def test_metrics_are_served_and_the_port_is_given_back() -> None:
    registry, port = CollectorRegistry(), free_port()
    Counter("eyas_rounds", "Rounds.", registry=registry).inc(3)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(2):
        with observed("eyas-target", config(port), registry) as tracer:
            assert tracer is None
            with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
                assert b"eyas_rounds_total 3.0" in response.read()


def test_metrics_port_in_use_is_named() -> None:
    port = free_port()
    with (
        observed("eyas-target", config(port), CollectorRegistry()),
        pytest.raises(ListenError, match=f"127.0.0.1:{port}: Address already in use"),
        observed("eyas-draft", config(port), CollectorRegistry()),
    ):
        pass


def test_spans_are_written_on_leaving(capsys: pytest.CaptureFixture[str]) -> None:
    with observed("eyas-target", config(trace=True), CollectorRegistry()) as tracer:
        assert tracer is not None
        tracer.start_span("target.sequence").end()
    assert '"name": "target.sequence"' in capsys.readouterr().err
