"""What a message to a service and its answer took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """Seconds on the gateway's clock: when the message went out, how long the answer took, and how much of that
    the service computed. The rest is wire: transport, queueing and, at the draft, waiting for features."""

    began: float = 0.0
    round_trip: float = 0.0
    compute: float = 0.0

    @property
    def wire(self) -> float:
        """Seconds that nobody computed."""
        return self.round_trip - self.compute


NOTHING_SENT = Exchange()
