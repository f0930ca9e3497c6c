"""Prometheus metrics of the gateway; the speculation counters have the meaning that vLLM gives them."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from eyas.observe import STEP_BUCKETS
from gateway.records import RoundRecord, SequenceRecord
from gateway.request import FinishReason

LATENCY_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60)

SHORTEST_CONTEXT = 512
"""Acceptance is counted by context length: up to this many tokens, up to twice as many, and so on."""


class Metrics:
    """The gateway's own registry, so that several gateways can live in one process (as in tests)."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._rounds = Counter("eyas_rounds", "Rounds of the engine", registry=registry)
        self._part_seconds = Counter(
            "eyas_round_part_seconds", "Time of rounds by where it went", ["part"], registry=registry
        )
        self._round_seconds = Histogram(
            "eyas_round_seconds", "Time of one round", buckets=STEP_BUCKETS, registry=registry
        )
        self._drafts = Counter(
            "eyas_spec_decode_num_drafts",
            "Blocks verified with at least one draft token; mean acceptance length = 1 + accepted / drafts",
            registry=registry,
        )
        self._draft_tokens = Counter(
            "eyas_spec_decode_num_draft_tokens", "Draft tokens verified", registry=registry
        )
        self._accepted = Counter(
            "eyas_spec_decode_num_accepted_tokens", "Draft tokens accepted and committed", registry=registry
        )
        self._accepted_at = Counter(
            "eyas_spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in their block; divided by drafts, the rate at that position",
            ["position"],
            registry=registry,
        )
        self._drafts_in_context = Counter(
            "eyas_spec_decode_context_drafts",
            "Blocks verified with at least one draft token, by the power of two that their context is up to",
            ["context"],
            registry=registry,
        )
        self._accepted_in_context = Counter(
            "eyas_spec_decode_context_accepted_tokens",
            "Draft tokens accepted, likewise; 1 + accepted / drafts falls where a head is beyond its trained length",
            ["context"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "eyas_prompt_tokens", "Prompt tokens computed, again after a preemption", registry=registry
        )
        self._generated = Counter("eyas_generation_tokens", "Tokens committed", registry=registry)
        self._finished = Counter("eyas_requests", "Requests by how they ended", ["reason"], registry=registry)
        self._first_token = Histogram(
            "eyas_time_to_first_token_seconds",
            "From the queue to the first token",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self._request_seconds = Histogram(
            "eyas_request_seconds",
            "From the queue to the last token",
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Adds a gauge that is read whenever it is scraped."""
        Gauge(name, text, registry=self.registry).set_function(read)

    def render(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)

    def round_ended(self, record: RoundRecord) -> None:
        """Counts one round."""
        self._rounds.inc()
        self._round_seconds.observe(record.times.total)
        for part in ("draft", "target", "wire", "gateway"):
            # The gateway's share is a difference of clock readings, which may come out a hair below 0.
            self._part_seconds.labels(part).inc(max(0.0, getattr(record.times, part)))
        for block in record.blocks:
            self._block_ended(block)

    def _block_ended(self, block: SequenceRecord) -> None:
        self._generated.inc(block.num_committed)
        num_prompt_tokens = len(block.sequence.request.prompt_ids)
        self._prompt_tokens.inc(max(0, min(block.num_fed, num_prompt_tokens - block.start)))
        if block.num_drafts:
            self._drafts.inc()
            self._draft_tokens.inc(block.num_drafts)
            self._accepted.inc(block.num_accepted)
            for position in range(block.num_accepted):
                self._accepted_at.labels(str(position)).inc()
            context = context_bucket(block.start + block.num_fed)
            self._drafts_in_context.labels(context).inc()
            self._accepted_in_context.labels(context).inc(block.num_accepted)

    def first_token(self, seconds: float) -> None:
        """Notes a request's time to its first token."""
        self._first_token.observe(seconds)

    def request_ended(self, reason: FinishReason | None, seconds: float) -> None:
        """Counts a request that ended; without a reason it was cancelled or failed."""
        self._finished.labels(reason.value if reason is not None else "aborted").inc()
        self._request_seconds.observe(seconds)


def context_bucket(num_tokens: int) -> str:
    """The smallest power of two, from SHORTEST_CONTEXT up, that is at least `num_tokens`."""
    return str(max(SHORTEST_CONTEXT, 1 << (num_tokens - 1).bit_length()))
