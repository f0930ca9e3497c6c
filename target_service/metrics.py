"""Prometheus metrics of the target service."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from eyas.observe import STEP_BUCKETS
from target_service.engine import Engine


class Metrics:
    """The service's own registry, so that several services can live in one process (as in tests)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._step_seconds = Histogram(
            "eyas_target_step_seconds", "Time to compute one step", buckets=STEP_BUCKETS, registry=self.registry
        )
        self._rows = Counter("eyas_target_rows", "Rows run through the model", registry=self.registry)
        self._pages = Gauge("eyas_target_kv_pages", "KV pages that sequences may use", registry=self.registry)
        self._used = Gauge("eyas_target_kv_pages_used", "KV pages held by sequences", registry=self.registry)
        self._late = Counter(
            "eyas_target_late_proposals",
            "Steps that ran without a draft's proposal, which had not come in time",
            registry=self.registry,
        )
        self._dropped = Gauge(
            "eyas_target_feature_batches_dropped",
            "Feature batches that attached drafts did not read in time",
            registry=self.registry,
        )

    def watch(self, engine: Engine) -> None:
        """Reads the gauges off the engine whenever they are scraped."""
        allocator, subscriptions = engine.allocator, engine.subscriptions
        self._pages.set(allocator.num_pages)
        self._used.set_function(lambda: allocator.num_pages - allocator.num_free)
        self._dropped.set_function(lambda: subscriptions.num_dropped_batches)

    def proposals_late(self) -> None:
        """Counts a step that waited for proposals in vain."""
        self._late.inc()

    def observe_step(self, num_rows: int, seconds: float) -> None:
        """Counts one step."""
        self._step_seconds.observe(seconds)
        self._rows.inc(num_rows)
