"""Traces and log lines: set up once a process, by configuration."""

from __future__ import annotations

import logging
import re
import sys

from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanContext, TraceFlags

from eyas.config import CommonConfig

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_EXPORT_SECONDS = 5


def start_tracing(service_name: str, config: CommonConfig, share: float = 1.0) -> TracerProvider | None:
    """A provider that exports as configured, or None where nothing is: then tracing costs nothing.

    A request whose client sent a trace context follows the client's decision; of the others `share` are traced.
    `provider.shutdown()` sends what is still held back.
    """
    if config.otlp_endpoint is None and not config.trace_console:
        return None
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(share)),
        resource=Resource.create({SERVICE_NAME: service_name}),
        shutdown_on_exit=False,
    )
    if config.otlp_endpoint is not None:
        # Only here: it costs a tenth of a second to import.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint, timeout=_EXPORT_SECONDS)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    if config.trace_console:
        console = ConsoleSpanExporter(out=sys.stderr, formatter=_one_line)
        provider.add_span_processor(BatchSpanProcessor(console, schedule_delay_millis=500))
    return provider


def _one_line(span: ReadableSpan) -> str:
    return f"{span.to_json(indent=None)}\n"


def parse_traceparent(text: str) -> SpanContext | None:
    """The remote span that a W3C `traceparent` header names; None where it is empty or not valid."""
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None or (match[1] == "00" and match[5] is not None):
        return None
    context = SpanContext(
        int(match[2], 16), int(match[3], 16), is_remote=True, trace_flags=TraceFlags(int(match[4], 16))
    )
    return context if context.is_valid else None


def format_traceparent(context: SpanContext) -> str:
    """The W3C `traceparent` header that names this span."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def start_logging(service_name: str, level: str) -> None:
    """Log lines of one format on standard error, from `level` on; libraries of others only from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {service_name:<7} %(levelname)-7s %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for package in ("eyas", "eyas_kernels", "target_service", "draft_service", "gateway"):
        logging.getLogger(package).setLevel(level.upper())
