"""Metrics and traces of requests and rounds. Rounds are only noted when they end; metrics and spans are made from
the notes while the next round waits for the target."""

from __future__ import annotations

import time

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

from eyas.observe import parent_context
from eyas.telemetry import format_traceparent
from gateway.exchange import Exchange
from gateway.metrics import Metrics
from gateway.records import RoundRecord, SequenceRecord
from gateway.sequence import Sequence

TRANSPORT = "bytes"


class Observer:
    """Told by the engine what happens; with no tracer it keeps metrics only."""

    def __init__(self, metrics: Metrics, tracer: Tracer | None) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._spans: dict[int, Span] = {}  # of requests, by sequence id
        self._noted: list[RoundRecord] = []
        # Spans carry wall-clock times, rounds are timed on the monotonic clock.
        self._clock_offset = time.time() - time.perf_counter()

    def request_began(self, sequence: Sequence, model: str) -> None:
        """Opens the request's span, and names it to the services."""
        if self._tracer is None:
            return
        request = sequence.request
        span = self._tracer.start_span(
            f"generate {model}",
            parent_context(request.traceparent),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": "generate",
                "gen_ai.provider.name": "eyas",
                "gen_ai.request.model": model,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.request.temperature": request.sampling.temperature,
                "gen_ai.request.top_p": request.sampling.top_p,
                "gen_ai.request.seed": str(request.sampling.seed),
                "gen_ai.usage.input_tokens": len(request.prompt_ids),
                "eyas.request.id": request.request_id,
                "eyas.request.num_draft_tokens": request.num_draft_tokens,
            },
            start_time=self._nanoseconds(sequence.queued_at),
        )
        self._spans[sequence.id] = span
        sequence.traceparent = format_traceparent(span.get_span_context())

    def round_ended(self, record: RoundRecord) -> None:
        """Notes a round; `flush` makes something of it."""
        self._noted.append(record)

    def flush(self) -> None:
        """Counts the noted rounds and makes their spans."""
        noted, self._noted = self._noted, []
        for record in noted:
            self._metrics.round_ended(record)
            if self._tracer is not None:
                for block in record.blocks:
                    self._trace_block(self._tracer, record, block)

    def first_token(self, sequence: Sequence) -> None:
        """Notes that a request's first token is committed."""
        self._metrics.first_token(time.perf_counter() - sequence.queued_at)

    def request_ended(self, sequence: Sequence) -> None:
        """Counts the request and ends its span."""
        self.flush()
        reason = sequence.commit.finish_reason
        self._metrics.request_ended(reason, time.perf_counter() - sequence.queued_at)
        span = self._spans.pop(sequence.id, None)
        if span is None:
            return
        stats = sequence.stats()
        span.set_attributes(
            {
                "gen_ai.response.finish_reasons": [reason.value] if reason else ["aborted"],
                "gen_ai.usage.output_tokens": stats.completion_tokens,
                "eyas.queue_us": _microseconds(stats.queue_seconds),
                "eyas.num_rounds": stats.num_rounds,
                "eyas.num_drafts": stats.num_drafts,
                "eyas.num_draft_tokens": stats.num_draft_tokens,
                "eyas.num_accepted_tokens": stats.num_accepted_tokens,
            }
        )
        if reason is None:
            span.set_status(Status(StatusCode.ERROR, "aborted"))
        span.end()

    def _trace_block(self, tracer: Tracer, record: RoundRecord, block: SequenceRecord) -> None:
        parent = self._spans.get(block.sequence.id)
        if parent is None or not parent.is_recording():
            return
        times = record.times
        span = tracer.start_span(
            "round",
            set_span_in_context(parent),
            attributes={
                "eyas.round": record.number,
                "eyas.batch_size": len(record.blocks),
                "eyas.position": block.start,
                "eyas.num_fed": block.num_fed,
                "eyas.k": block.num_drafts,
                "eyas.accepted": block.num_accepted,
                "eyas.committed": block.num_committed,
                "eyas.transport": TRANSPORT,
                "eyas.draft_us": _microseconds(times.draft),
                "eyas.target_us": _microseconds(times.target),
                "eyas.wire_us": _microseconds(times.wire),
                "eyas.gateway_us": _microseconds(times.gateway),
            },
            start_time=self._nanoseconds(record.began),
        )
        for name, exchange in (("draft", record.draft), ("verify", record.target)):
            if exchange.round_trip:
                self._trace_exchange(tracer, span, name, exchange)
        span.end(self._nanoseconds(record.began + times.total))

    def _trace_exchange(self, tracer: Tracer, parent: Span, name: str, exchange: Exchange) -> None:
        """A message to a service and its answer, as a child of the round."""
        span = tracer.start_span(
            name,
            set_span_in_context(parent),
            SpanKind.CLIENT,
            {"eyas.compute_us": _microseconds(exchange.compute), "eyas.wire_us": _microseconds(exchange.wire)},
            start_time=self._nanoseconds(exchange.began),
        )
        span.end(self._nanoseconds(exchange.began + exchange.round_trip))

    def _nanoseconds(self, seconds: float) -> int:
        """Wall clock of a reading of time.perf_counter."""
        return round((seconds + self._clock_offset) * 1e9)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
