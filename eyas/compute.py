"""Work on a service's one compute thread, and how long it took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from eyas.v1 import common_pb2

Result = TypeVar("Result")


class Timer:
    """Times the work on one message, from now on. Seconds are on the clock of time.perf_counter."""

    def __init__(self) -> None:
        self._received = self._began = self._ended = time.perf_counter()

    async def run(self, compute: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        """What `work` returns; it runs on the thread of `compute`, behind what was given to it before."""
        return await asyncio.get_running_loop().run_in_executor(compute, self._run, work)

    def _run(self, work: Callable[[], Result]) -> Result:
        self._began = time.perf_counter()
        result = work()
        self._ended = time.perf_counter()
        return result

    @property
    def seconds(self) -> float:
        """What the work itself took."""
        return self._ended - self._began

    def timing(self) -> common_pb2.ServiceTiming:
        """The times as the reply tells them; `total_us` ends now."""
        return common_pb2.ServiceTiming(
            queue_us=round((self._began - self._received) * 1e6),
            compute_us=round(self.seconds * 1e6),
            total_us=round((time.perf_counter() - self._received) * 1e6),
        )
