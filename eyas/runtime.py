"""Process matters: stop signals, death with the parent, and how long waiting threads spin."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator

_PR_SET_PDEATHSIG = 1
# GNU's (a count of turns) and Intel's (milliseconds).
_OPENMP = {"GOMP_SPINCOUNT": "40000", "KMP_BLOCKTIME": "0"}


@contextlib.contextmanager
def stop_signals(leave_now: Callable[[int], None]) -> Iterator[asyncio.Event]:
    """An event that the first SIGTERM, SIGINT or SIGHUP sets; the second calls `leave_now` with its number."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            leave_now(number)
        stop.set()

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def run_until(stop: asyncio.Event, work: asyncio.Future[None]) -> bool:
    """Waits for `work` and raises what it raises; cancels it once `stop` is set. True if it ended by itself."""
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        ended = work.done()
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
    return ended


def tune_openmp() -> None:
    """Has OpenMP's threads spin for about 0.4 ms and then sleep; to be called before torch is imported.

    Target and draft compute in turns on the same cores: spinning threads of one would take them from the other.
    Sleeping at once is no better: a pass has hundreds of parallel parts, and each would begin with a wake-up.
    """
    for name, value in _OPENMP.items():
        os.environ.setdefault(name, value)


def die_with_parent(parent: int) -> None:
    """Has the kernel send SIGTERM when the process `parent` ends; ends at once if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
