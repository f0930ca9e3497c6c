"""The supervisor over real processes: order, signals, deaths, restarts, and what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.helpers.processes import descendants, is_alive, python, read_until, wait_for


@contextmanager
def supervised(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The supervisor once its services serve."""
    with python("-m", "tests.helpers.supervised", str(folder), *options) as process:
        read_until(process, "ready")
        assert {name_of(child) for child in descendants(process.pid)} == {"target", "draft", "gateway"}
        yield process


def name_of(child: psutil.Process) -> str:
    arguments = child.cmdline()
    return arguments[arguments.index("--name") + 1]


def child_of(process: subprocess.Popen[str], name: str) -> psutil.Process:
    return next(child for child in descendants(process.pid) if name_of(child) == name)


def finish(process: subprocess.Popen[str], children: list[psutil.Process], folder: Path) -> str:
    """Waits for the supervisor's end, and checks that nothing is left; what it printed last."""
    output, errors = process.communicate(timeout=120)
    assert not any(is_alive(child) for child in children)
    assert list(folder.iterdir()) == []
    return output + errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_stops_everything_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with supervised(tmp_path) as process:
        children = descendants(process.pid)
        # As a terminal does it: to the whole process group.
        os.killpg(process.pid, number)
        output = finish(process, children, tmp_path)
        assert process.returncode == 0
    drained = [line.split()[0] for line in output.splitlines() if line.endswith("draining")]
    assert drained == ["gateway", "draft", "target"]


def test_sockets_are_in_a_private_folder(tmp_path: Path) -> None:
    with supervised(tmp_path):
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {path.name for path in folder.iterdir()} == {"target.sock", "draft.sock", "gateway.sock"}


@pytest.mark.parametrize("name", ["target", "gateway"])
def test_death_takes_the_rest_down(tmp_path: Path, name: str) -> None:
    with supervised(tmp_path) as process:
        children = descendants(process.pid)
        child_of(process, name).kill()
        output = finish(process, children, tmp_path)
        assert process.returncode == 1
    # With its last lines.
    assert f"error: the {name} was killed by SIGKILL; its last lines:\n  {name} listening on " in output


def test_draft_is_started_again(tmp_path: Path) -> None:
    with supervised(tmp_path) as process:
        others = {child_of(process, name).pid for name in ("target", "gateway")}
        first = child_of(process, "draft")
        first.kill()
        read_until(process, "the draft was killed by SIGKILL; starting it again in 1 s")
        read_until(process, "draft listening on")
        assert child_of(process, "draft").pid != first.pid
        assert {child_of(process, name).pid for name in ("target", "gateway")} == others
        children = descendants(process.pid)
        process.terminate()
        finish(process, children, tmp_path)
        assert process.returncode == 0


@pytest.mark.parametrize("name", ["target", "draft", "gateway"])
def test_service_that_cannot_start_ends_it_with_its_words(tmp_path: Path, name: str) -> None:
    with python("-m", "tests.helpers.supervised", str(tmp_path), "--break", name) as process:
        output = finish(process, [], tmp_path)
        assert process.returncode == 1
        assert descendants(process.pid) == []
    assert output.endswith(f"error: the {name} ended with exit code 3; its last lines:\n  no weights here\n")


def test_signal_during_the_start(tmp_path: Path) -> None:
    with python("-m", "tests.helpers.supervised", str(tmp_path)) as process:
        wait_for(lambda: len(descendants(process.pid)) == 3)
        children = descendants(process.pid)
        process.terminate()
        finish(process, children, tmp_path)
        assert process.returncode == 0


def test_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with supervised(tmp_path, "--deaf", "gateway") as process:
        children = descendants(process.pid)
        process.terminate()
        read_until(process, "gateway is deaf")
        assert process.poll() is None
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
        # Killed before the supervisor left, but the kernel takes a moment.
        wait_for(lambda: not any(is_alive(child) for child in children))
        finish(process, children, tmp_path)


def test_services_do_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    with supervised(tmp_path) as process:
        children = descendants(process.pid)
        process.kill()
        wait_for(lambda: not any(is_alive(child) for child in children))


def test_service_that_starts_after_its_supervisor_has_died_ends_at_once(tmp_path: Path) -> None:
    arguments = ("-m", "tests.helpers.echo_service", f"unix:{tmp_path}/target.sock", "--parent")
    with python("-c", "pass") as gone:
        gone.wait(60)
        with python(*arguments, str(gone.pid)) as orphan:
            assert orphan.wait(60) == 1
