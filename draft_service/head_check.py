"""The self-test at the start: a sample from the target, the head's examination, and what follows from it."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor

from draft_service.head import Head
from draft_service.metrics import Metrics
from draft_service.sample import NotSampled, take_sample
from draft_service.self_test import Report, examine
from draft_service.suspects import other_taps, suspects
from draft_service.target_link import TargetLink
from eyas.config import DraftConfig
from eyas.errors import EyasError
from eyas.v1 import target_pb2

log = logging.getLogger(__name__)


class HeadCheck:
    """Runs the self-test once; a head that fails it is reported, or refused with `strict_head`."""

    def __init__(
        self, config: DraftConfig, link: TargetLink, compute: ThreadPoolExecutor, metrics: Metrics
    ) -> None:
        self._config, self._link, self._compute, self._metrics = config, link, compute, metrics
        self._is_over = config.skip_self_test

    async def run(self, head: Head, target: target_pb2.GetTargetInfoResponse) -> None:
        """Does nothing from the second time on. Raises EyasError for a head that is refused, TargetLost."""
        if self._is_over:
            return
        began = time.monotonic()
        try:
            report = await self._test(head, target)
        except NotSampled as error:
            self._complain(f"the self-test could not run: {error}")
        else:
            self._metrics.self_tested(report.agreement)
            log.info(
                "self-test: the head's first draft is the target's choice in %.0f%% of %d places (%.1f s)",
                100 * report.agreement, report.num_slots, time.monotonic() - began,
            )  # fmt: skip
            if complaint := report.complaint(self._config.head_floor):
                self._complain(f"the head does not suit its target: {complaint}")
        self._is_over = True

    async def _test(self, head: Head, target: target_pb2.GetTargetInfoResponse) -> Report:
        others = other_taps(head.spec, target.num_layers)
        taps = tuple(sorted({*head.spec.taps, *(tap for other in others for tap in other)}))
        sample = await take_sample(self._link, target, taps)
        tried = suspects(head, target.num_layers, self._link.target_rope(target))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._compute, examine, head, sample, tried, self._config.head_floor)

    def _complain(self, what: str) -> None:
        if self._config.strict_head:
            raise EyasError(f"{self._config.head_name}: {what}")
        log.warning("%s: %s; texts stay right, but come slower than they could", self._config.head_name, what)
