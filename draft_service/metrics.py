"""Prometheus metrics of the draft service."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from draft_service.engine import Engine
from eyas.observe import STEP_BUCKETS
from eyas.v1 import common_pb2, draft_pb2


class Metrics:
    """The service's own registry, so that several services can live in one process (as in tests)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._seconds = Histogram(
            "eyas_draft_proposal_seconds",
            "Time to compute one proposal",
            buckets=STEP_BUCKETS,
            registry=self.registry,
        )
        self._tokens = Counter("eyas_draft_tokens", "Draft tokens proposed", registry=self.registry)
        self._missing = Counter(
            "eyas_draft_extends_failed",
            "Extends that did not run, by reason",
            ["reason"],
            registry=self.registry,
        )
        self._pages = Gauge("eyas_draft_slot_pages", "Pages that slots may use", registry=self.registry)
        self._used = Gauge("eyas_draft_slot_pages_used", "Pages held by sequences", registry=self.registry)
        self._attached = Gauge("eyas_draft_attached", "1 while attached to the target", registry=self.registry)
        self._transport = Gauge(
            "eyas_draft_feature_transport", "1 for the transport in use", ["transport"], registry=self.registry
        )

        self._self_test = Gauge(
            "eyas_draft_self_test_agreement",
            "Share of first drafts that were the target's choice in the self-test; NaN before it, or without one",
            registry=self.registry,
        )
        self._self_test.set(float("nan"))

    def watch(self, engine: Engine) -> None:
        """Reads the gauges off the engine whenever they are scraped."""
        allocator = engine.allocator
        self._pages.set(allocator.num_pages)
        self._used.set_function(lambda: allocator.num_pages - allocator.num_free)

    def self_tested(self, agreement: float) -> None:
        """Notes how the self-test came out."""
        self._self_test.set(agreement)

    def observe_proposals(self, proposals: list[draft_pb2.Proposal], seconds: float) -> None:
        """Counts one message."""
        self._seconds.observe(seconds)
        for proposal in proposals:
            self._tokens.inc(len(proposal.draft_tokens))
            if proposal.status != draft_pb2.PROPOSAL_STATUS_OK:
                name = draft_pb2.ProposalStatus.Name(proposal.status)
                self._missing.labels(name.removeprefix("PROPOSAL_STATUS_").lower()).inc()

    def attached(self, transport: common_pb2.FeatureTransport | None) -> None:
        """Notes which transport features come by; None while detached."""
        self._attached.set(transport is not None)
        self._transport.clear()
        if transport is not None:
            name = common_pb2.FeatureTransport.Name(transport)
            self._transport.labels(name.removeprefix("FEATURE_TRANSPORT_").lower()).set(1)
