"""`eyas up`, `demo` and `chat` with a tiny model: three real processes, and nothing left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.processes import ROOT, descendants, free_port, is_alive, python, read_until, wait_for
from tests.helpers.tiny_models import make_head, make_target
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer_files

HELLO = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class Pair:
    """A target and a head of which part of the drafts is accepted; `other_head` is for a wider target."""

    target: Path
    head: Path
    other_head: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    files = tiny_tokenizer_files()
    target = make_target(folder / "tiny", vocab_size=VOCAB_SIZE, layer_scale=0.01, tokenizer_files=files)
    wider = make_target(folder / "wider", vocab_size=VOCAB_SIZE, hidden_size=128)
    head = make_head(folder / "head", "eagle3", target, imitate=True)
    return Pair(target, head, make_head(folder / "other", "eagle3", wider))


@dataclass(frozen=True)
class Up:
    """A running `eyas up`."""

    process: subprocess.Popen[str]
    url: str
    sockets: Path

    def post(self, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def stop(self, number: signal.Signals) -> str:
        """Signals it, and checks that nothing is left; its last log lines."""
        children = descendants(self.process.pid)
        assert len(children) >= 2
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=120)
        assert not any(is_alive(child) for child in children)
        assert list(self.sockets.iterdir()) == []
        return log


@contextmanager
def up(pair: Pair, sockets: Path, *more: str) -> Iterator[Up]:
    port = free_port()
    words = ("--target", str(pair.target), "--draft", str(pair.head), "--port", str(port))
    env = {"XDG_RUNTIME_DIR": str(sockets)}
    shared_memory = shared_memory_files()
    with python("-m", "eyas", "up", *words, *more, env=env) as process:
        read_until(process, "serving tiny under ", process.stderr)
        yield Up(process, f"http://127.0.0.1:{port}", sockets)
    assert shared_memory_files() <= shared_memory


def shared_memory_files() -> set[str]:
    """Files in /dev/shm of this user."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.lstat().st_uid == os.getuid()}


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_speculates_and_leaves_nothing(pair: Pair, tmp_path: Path, number: signal.Signals) -> None:
    with up(pair, tmp_path) as running:
        body = {"messages": HELLO, "max_tokens": 40, "temperature": 0}
        drafted = running.post(body)
        plain = running.post({**body, "eyas": {"speculation": False}})
        assert drafted["eyas"]["speculation"]["num_accepted_tokens"] > 0
        assert plain["eyas"]["speculation"]["num_draft_tokens"] == 0
        assert text_of(drafted) == text_of(plain)
        running.stop(number)
        assert running.process.returncode == 0


def test_up_without_a_head(pair: Pair, tmp_path: Path) -> None:
    with up(pair, tmp_path, "--draft", "none") as running:
        answer = running.post({"messages": HELLO, "max_tokens": 5})
        assert answer["eyas"]["speculation"]["num_draft_tokens"] == 0
        running.stop(signal.SIGTERM)


def test_up_goes_on_while_its_draft_is_replaced(pair: Pair, tmp_path: Path) -> None:
    with up(pair, tmp_path) as running:
        draft = next(c for c in descendants(running.process.pid) if "draft" in c.cmdline()[:6])
        draft.send_signal(signal.SIGKILL)
        body = {"messages": HELLO, "max_tokens": 20, "temperature": 0}
        plain = running.post(body)
        read_until(running.process, "the draft was killed by SIGKILL", running.process.stderr)

        def speculates() -> bool:
            answer = running.post(body)
            assert text_of(answer) == text_of(plain)
            return bool(answer["eyas"]["speculation"]["num_accepted_tokens"])

        wait_for(speculates)
        running.stop(signal.SIGTERM)


def test_up_ends_when_its_target_dies(pair: Pair, tmp_path: Path) -> None:
    with up(pair, tmp_path) as running:
        children = descendants(running.process.pid)
        next(c for c in children if "target" in c.cmdline()[:6]).kill()
        _, log = running.process.communicate(timeout=120)
        assert running.process.returncode == 1
        assert "error: the target was killed by SIGKILL; its last lines:" in log
        assert not any(is_alive(child) for child in children)
    assert list(tmp_path.iterdir()) == []


def test_services_do_not_outlive_a_killed_up(pair: Pair, tmp_path: Path) -> None:
    with up(pair, tmp_path) as running:
        children = descendants(running.process.pid)
        running.process.kill()
        wait_for(lambda: not any(is_alive(child) for child in children))


def test_head_for_another_width_ends_it_with_the_reason(pair: Pair, tmp_path: Path) -> None:
    words = ("--target", str(pair.target), "--draft", str(pair.other_head), "--port", str(free_port()))
    with python("-m", "eyas", "up", *words, env={"XDG_RUNTIME_DIR": str(tmp_path)}) as process:
        _, log = process.communicate(timeout=120)
        assert process.returncode == 1
    assert "error: the draft ended with exit code 1; its last lines:" in log
    reason = log.splitlines()[-1]
    assert str(pair.other_head) in reason
    assert "hidden_size" in reason
    assert list(tmp_path.iterdir()) == []


def eyas(*words: str, text: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eyas", *words],
        input=text,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_demo_marks_sums_up_and_stops(pair: Pair, tmp_path: Path) -> None:
    before = {process.pid for process in psutil.process_iter()}
    words = ("demo", "--target", str(pair.target), "--draft", str(pair.head), "--max-tokens", "60")
    done = eyas(*words, XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "tiny with the head head" in done.stdout
    answer = done.stdout.partition("a few sentences.\n")[2]
    assert "«" in answer
    assert "»" in answer
    for row in ("tokens/s", "rounds", "acceptance length", "draft ", "target ", "wire ", "gateway "):
        assert row in answer
    assert list(tmp_path.iterdir()) == []
    new = [p for p in psutil.process_iter() if p.pid not in before and str(tmp_path) in " ".join(p.cmdline())]
    assert new == []


def test_chat_talks_until_quit(pair: Pair, tmp_path: Path) -> None:
    with up(pair, tmp_path) as running:
        lines = "hello\n/k 2\n/speculation off\nagain\n/quit\nnever asked\n"
        done = eyas("chat", "--url", running.url, "--max-tokens", "20", text=lines)
        assert done.returncode == 0, done.stderr
        assert "tiny at " in done.stdout
        assert done.stdout.count("tokens/s") == 2
        assert done.stdout.count("acceptance length") == 1
        running.stop(signal.SIGTERM)


def test_draft_alone_waits_for_its_target_and_then_says_so(pair: Pair) -> None:
    address = f"127.0.0.1:{free_port()}"
    words = ("draft", "--head", str(pair.head), "--target", address, "--listen", "127.0.0.1:0")
    done = eyas(*words, "--wait-seconds", "1")
    assert done.returncode == 1
    assert f"waiting for the target at {address}: no connection: Connection refused" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert (
        last == f"error: the target at {address} did not come up within 1 s: no connection: Connection refused"
    )


def test_target_alone_stops_cleanly(pair: Pair, tmp_path: Path) -> None:
    socket = tmp_path / "target.sock"
    with python("-m", "eyas", "target", "--model", str(pair.target), "--listen", f"unix:{socket}") as process:
        read_until(process, f"listening on unix:{socket}", process.stderr)
        process.terminate()
        assert process.wait(60) == 0
    assert not socket.exists()
