"""What the target and draft services show of themselves: Prometheus metrics, and a span for every sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanKind, Tracer, set_span_in_context
from prometheus_client import CollectorRegistry, start_http_server

from eyas.config import ModelConfig, split_host_port
from eyas.listen import check_port_free
from eyas.telemetry import parse_traceparent, start_tracing

STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
"""Seconds; rounds take between half a millisecond and, with a long prompt, seconds."""


@contextmanager
def observed(service_name: str, config: ModelConfig, registry: CollectorRegistry) -> Iterator[Tracer | None]:
    """Serves `registry` where `config.metrics_listen` says, and yields a tracer, or None where nothing is exported.
    Raises ListenError when the metrics address is taken."""
    provider = start_tracing(service_name, config)
    stop_metrics = _serve_metrics(config.metrics_listen, registry)
    try:
        yield provider.get_tracer("eyas") if provider is not None else None
    finally:
        stop_metrics()
        if provider is not None:
            provider.shutdown()


def parent_context(traceparent: str) -> Context | None:
    """The context of a W3C traceparent; None where it is empty or not valid."""
    parent = parse_traceparent(traceparent)
    return set_span_in_context(NonRecordingSpan(parent)) if parent is not None else None


class Opening(Protocol):
    """The part that OpenSequence and OpenSlots share."""

    @property
    def sequence_id(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def traceparent(self) -> str: ...


class SequenceSpans:
    """One span for as long as a service holds a sequence, in the trace of its request."""

    def __init__(self, tracer: Tracer | None, name: str) -> None:
        self._tracer = tracer
        self._name = name
        self._open: dict[int, Span] = {}

    def update(self, opened: Iterable[Opening], closed: Iterable[int]) -> None:
        """Notes what one message opened and closed."""
        if self._tracer is None:
            return
        self.end(closed)
        for opening in opened:
            span = self._tracer.start_span(
                self._name, parent_context(opening.traceparent), SpanKind.SERVER, {"eyas.epoch": opening.epoch}
            )
            self._open[opening.sequence_id] = span

    def end(self, sequence_ids: Iterable[int]) -> None:
        """Ends the spans of these sequences, as when a stream ends."""
        for sequence_id in sequence_ids:
            if (span := self._open.pop(sequence_id, None)) is not None:
                span.end()


def _serve_metrics(listen: str | None, registry: CollectorRegistry) -> Callable[[], None]:
    """Starts the scrape endpoint; returns what stops it."""
    if listen is None:
        return lambda: None
    host, port = split_host_port(listen)
    check_port_free(host, port)
    server, _ = start_http_server(port, host, registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop
