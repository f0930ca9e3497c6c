"""Runs the services as subprocesses: starts them, waits for them, keeps them up, leaves nothing behind."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas.errors import EyasError
from eyas.runtime import run_until, stop_signals

# Longer than the services' own grace: only one that hangs is killed.
STOP_SECONDS = 20.0

RESTART_SECONDS = 1.0
MAX_RESTART_SECONDS = 30.0
# After this long in service the next restart is quick again.
STEADY_SECONDS = 60.0

TAIL_LINES = 12
MAX_LINE_BYTES = 1024 * 1024

Say = Callable[[str], None]


class ServiceDied(EyasError):
    """A service that ended by itself; the text has its last lines."""


@dataclass(frozen=True)
class Service:
    """One process: its command line, and `until_serving`, which returns once it can be used.

    With `restart`, it is started again when it dies after it has served once.
    """

    name: str
    command: Sequence[str]
    until_serving: Callable[[], Awaitable[None]]
    restart: bool = False


class Supervisor:
    """Runs services that are given in order of dependence, and stops them from the last to the first."""

    def __init__(self, services: Sequence[Service], *, say: Say, echo: Say) -> None:
        """`say` is told of restarts; `echo` gets every line that a service writes."""
        self._children = [_Child(service, say, echo) for service in services]

    async def run(self, body: Callable[[], Awaitable[None]]) -> None:
        """Starts the services together, runs `body` once all of them serve, and stops them.

        Raises ServiceDied, or what `body` or an `until_serving` raises, after everything has been stopped.
        """
        keepers = [child.start() for child in self._children]
        main = asyncio.ensure_future(self._when_serving(body))
        try:
            done, _ = await asyncio.wait((*keepers, main), return_when=asyncio.FIRST_COMPLETED)
            # A death explains whatever `body` raised at the same moment.
            for task in (*keepers, main):
                if task in done:
                    task.result()
        finally:
            await _cancel(main)
            for child in reversed(self._children):
                await child.stop()

    async def _when_serving(self, body: Callable[[], Awaitable[None]]) -> None:
        for child in self._children:
            await child.service.until_serving()
            child.has_served = True
        await body()

    def kill(self) -> None:
        """Ends every process at once."""
        for child in self._children:
            child.signal(signal.SIGKILL)


async def run_services(
    services: Callable[[Path], Sequence[Service]],
    body: Callable[[], Awaitable[None]],
    *,
    folder: Path | None,
    say: Say,
    echo: Say,
) -> bool:
    """Supervisor.run for services whose sockets lie in a private folder. False if a signal came before its end.

    That folder is made in `folder`, or where temporary files go. Nothing is left behind: no process, no socket,
    no folder. A second signal ends it all at once.
    """

    def leave_now(number: int) -> None:
        resources.close()
        os._exit(128 + number)

    with stop_signals(leave_now) as stop, contextlib.ExitStack() as resources:
        sockets = Path(tempfile.mkdtemp(prefix="eyas-", dir=folder))
        resources.callback(shutil.rmtree, sockets, ignore_errors=True)
        supervisor = Supervisor(services(sockets), say=say, echo=echo)
        resources.callback(supervisor.kill)
        return await run_until(stop, asyncio.ensure_future(supervisor.run(body)))


class _Child:
    """The process of one service, over its restarts."""

    def __init__(self, service: Service, say: Say, echo: Say) -> None:
        self.service = service
        self.has_served = False
        self._stopping = False
        self._say, self._echo = say, echo
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """The task that keeps the process running; it raises ServiceDied."""
        self._keeper = asyncio.ensure_future(self._keep())
        return self._keeper

    async def stop(self) -> None:
        """Has the process end with SIGTERM, and with SIGKILL after STOP_SECONDS."""
        if self._keeper is None:
            return
        self._stopping = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.signal(number):
                await asyncio.wait([self._keeper], timeout=STOP_SECONDS)
        await _cancel(self._keeper)

    def signal(self, number: signal.Signals) -> bool:
        """Signals the process; False if none is running."""
        if self._process is None or self._process.returncode is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        return True

    async def _keep(self) -> None:
        pause = RESTART_SECONDS
        while True:
            began = time.monotonic()
            code = await self._run()
            if self._stopping:
                return
            if not (self.service.restart and self.has_served):
                raise ServiceDied(self._obituary(code))
            pause = RESTART_SECONDS if time.monotonic() - began > STEADY_SECONDS else pause
            self._say(f"the {self.service.name} {_manner(code)}; starting it again in {pause:g} s")
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RESTART_SECONDS)

    async def _run(self) -> int:
        """Runs the process to its end; its exit code, or minus the signal that killed it."""
        self._process = await asyncio.create_subprocess_exec(
            *self.service.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE_BYTES,
            # A terminal's Ctrl-C reaches the supervisor alone, which stops the services in order.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._tail.append(line.decode(errors="replace").rstrip())
            self._echo(self._tail[-1])
        return await self._process.wait()

    def _obituary(self, code: int) -> str:
        last = "".join(f"\n  {line}" for line in self._tail)
        return f"the {self.service.name} {_manner(code)}{'; its last lines:' if last else ''}{last}"


def _manner(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


async def _cancel(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
