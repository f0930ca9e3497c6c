"""Traces by configuration, trace contexts, and log lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context

from eyas.config import GatewayConfig
from eyas.telemetry import (
    format_traceparent,
    parse_traceparent,
    start_logging,
    start_tracing,
)

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OpenTelemetry collector that keeps the names of spans, and of the services they come from."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(attributes["service.name"], span.name) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    collector, server = Collector(), grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(None)


def under(traceparent: str) -> SpanContext:
    context = parse_traceparent(traceparent)
    assert context is not None
    return context


def spans_of(provider: TracerProvider | None, traceparent: str | None) -> None:
    """Makes one span, under the client's if there is one."""
    assert provider is not None
    context = set_span_in_context(NonRecordingSpan(under(traceparent))) if traceparent else None
    provider.get_tracer("test").start_span("request", context=context).end()
    provider.shutdown()


def test_nothing_is_set_up_unless_it_is_asked_for() -> None:
    assert start_tracing("eyas-gateway", GatewayConfig()) is None


def test_shutdown_sends_the_spans_to_the_collector(collector: tuple[Collector, str]) -> None:
    received, endpoint = collector
    spans_of(start_tracing("eyas-gateway", GatewayConfig(otlp_endpoint=endpoint)), None)
    assert received.spans == [("eyas-gateway", "request")]


@pytest.mark.parametrize(
    ("traceparent", "share", "is_traced"),
    [(None, 0.0, False), (None, 1.0, True), (SAMPLED, 0.0, True), (UNSAMPLED, 1.0, False)],
)
def test_the_client_decides_and_otherwise_the_share(
    capsys: pytest.CaptureFixture[str], traceparent: str | None, share: float, is_traced: bool
) -> None:
    spans_of(start_tracing("eyas-gateway", GatewayConfig(trace_console=True), share), traceparent)
    lines = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["request"] * is_traced


class TestTraceparent:
    @pytest.mark.parametrize("text", [SAMPLED, UNSAMPLED])
    def test_round_trip(self, text: str) -> None:
        context = under(text)
        assert context.is_remote
        assert format_traceparent(context) == text

    def test_later_versions_may_have_more_fields(self) -> None:
        assert under(f"01{SAMPLED[2:]}-more") == under(SAMPLED)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "nonsense",
            f"ff{SAMPLED[2:]}",
            f"{SAMPLED}-more",
            SAMPLED.upper(),
            SAMPLED[:-1],
            f"00-{'0' * 32}-b7ad6b7169203331-01",
            f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01",
        ],
    )
    def test_what_is_not_valid_is_none(self, text: str) -> None:
        assert parse_traceparent(text) is None


def test_log_lines_have_one_format_and_libraries_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    root, eyas = logging.getLogger(), logging.getLogger("eyas")
    before = root.handlers[:], root.level, eyas.level
    try:
        start_logging("target", "info")
        logging.getLogger("eyas.server").info("listening on %s", "unix:/x")
        logging.getLogger("httpx").info("never seen")
    finally:
        root.handlers[:], root.level, eyas.level = before
    assert capsys.readouterr().err.split(" ", 1)[1] == "target  INFO    listening on unix:/x\n"
