"""Real processes for tests: started in their own process group, and never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def python(*arguments: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A running `python ARGUMENTS`, its output in pipes; it and all its children are killed on leaving."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", **(env or {})},
        start_new_session=True,
        # Whoever runs the tests under nohup would otherwise hand its ignored signal down.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        for child in descendants(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGKILL)
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str, stream: IO[str] | None = None) -> str:
    """Reads the process's standard output, or `stream`, up to the line that has `text`; that line."""
    for line in stream or process.stdout or ():
        if text in line:
            return line
    raise AssertionError(f"the process ended without saying {text!r}")


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def descendants(pid: int) -> list[psutil.Process]:
    """Children of a process, and theirs."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that only waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until `condition()`; raises AssertionError after `seconds`, which only a hang reaches."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
