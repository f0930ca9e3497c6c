"""The `eyas` command where no service has to run: help, versions, and errors as one line."""

from __future__ import annotations

import importlib.metadata
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.cli import app
from eyas.launch import make_stack, own_name
from eyas.options import arguments
from tests.helpers.processes import ROOT, free_port

COMMANDS = ("up", "target", "draft", "gateway", "chat", "demo", "version")


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """The commands set up logging for a process of their own."""
    root, eyas = logging.getLogger(), logging.getLogger("eyas")
    before = root.handlers[:], root.level, eyas.level
    yield
    root.handlers[:], root.level, eyas.level = before


def eyas(*words: str, **environ: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb", **environ})
    return result.exit_code, result.stdout, result.stderr


def test_help_lists_every_command() -> None:
    code, page, _ = eyas("--help")
    assert code == 0
    for command in COMMANDS:
        assert f" {command} " in page


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_page(command: str) -> None:
    code, page, _ = eyas(command, "-h")
    assert code == 0
    assert "--parent" not in page  # between supervisor and service
    assert page.count("Usage: ") == 1


def test_version() -> None:
    assert eyas("version") == (0, f"{importlib.metadata.version('eyas')}\n", "")


def test_help_is_quick_because_it_loads_no_service() -> None:
    code = "import sys\nfrom eyas.cli import app\nheavy = {'torch', 'fastapi', 'httpx', 'transformers'}\n"
    code += "try: app(['--help'])\nexcept SystemExit: print(*(heavy & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == "\n"


def test_unknown_option_is_a_usage_error() -> None:
    code, _, errors = eyas("gateway", "--draft-tokens", "3")
    assert code == 2
    assert "--draft-tokens" in errors


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("gateway", "--port", "70000"), "error: port: must be at most 65535, not 70000"),
        (("gateway", "--target", "here"), "error: target: 'here' is neither unix:/path nor host:port"),
        (("target", "--max-rows", "0"), "error: max_rows: must be a whole number of at least 1, not 0"),
        (("draft", "--device", "tpu"), "error: device: must be cpu, cuda, cuda:N or auto, not 'tpu'"),
        (("up", "--num-draft-tokens", "9"), "error: num_draft_tokens: must be at most max_draft_tokens, 8"),
        (("chat", "--url", "localhost:8000"), "error: 'localhost:8000' is not an http:// address"),
    ],
)
def test_bad_value_is_one_line(words: tuple[str, ...], line: str) -> None:
    assert eyas(*words) == (1, "", f"{line}\n")


@pytest.mark.parametrize("command", [("target", "--model"), ("up", "--port", "0", "--target")])
def test_unknown_model_is_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    code, _, errors = eyas(*command, f"{tmp_path}/no-model", EYAS_HOME=str(tmp_path))
    assert code == 1
    assert errors.startswith(f"error: target {tmp_path}/no-model: ")
    assert errors.count("\n") == 1


def test_port_in_use_is_found_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # The model would not be found either, but that takes longer.
        outcome = eyas("up", "--port", str(port), "--target", f"{tmp_path}/no-model")
    assert outcome == (1, "", f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n")


def test_debug_shows_where_an_error_came_from() -> None:
    result = CliRunner().invoke(app, ["gateway", "--port", "70000", "--log-level", "debug"])
    assert type(result.exception).__name__ == "ConfigError"


def test_chat_without_a_gateway_is_one_line() -> None:
    port = free_port()
    code, _, errors = eyas("chat", "--url", f"http://127.0.0.1:{port}")
    assert code == 1
    assert errors.startswith(f"error: no connection to http://127.0.0.1:{port}: ")
    assert errors.count("\n") == 1


class TestStack:
    """What `up` and `demo` start."""

    def test_services_meet_at_private_sockets(self, tmp_path: Path) -> None:
        stack = make_stack("org/target", "org/head", {"port": 0, "dtype": "float32", "num_draft_tokens": 2})
        target, draft, gateway = stack.services(tmp_path)
        assert [service.name for service in (target, draft, gateway)] == ["target", "draft", "gateway"]
        assert [service.restart for service in (target, draft, gateway)] == [False, True, False]
        at_target, at_draft = f"unix:{tmp_path}/target.sock", f"unix:{tmp_path}/draft.sock"
        for word in ("--served-name org/target", f"--listen {at_target}", "--dtype float32"):
            assert word in " ".join(target.command)
        for word in (
            "--head-name org/head",
            f"--listen {at_draft}",
            f"--target {at_target}",
            "--dtype float32",
        ):
            assert word in " ".join(draft.command)
        for word in (f"--target {at_target}", f"--draft {at_draft}", "--num-draft-tokens 2"):
            assert word in " ".join(gateway.command)

    def test_without_a_head_there_is_no_draft(self, tmp_path: Path) -> None:
        target, gateway = make_stack("org/target", None, {"port": 0, "num_draft_tokens": 99}).services(tmp_path)
        assert (target.name, gateway.name) == ("target", "gateway")
        assert "--draft" not in gateway.command

    def test_port_0_becomes_a_free_one(self) -> None:
        stack = make_stack("org/target", None, {"port": 0})
        assert stack.gateway.port != 0
        assert stack.url == f"http://127.0.0.1:{stack.gateway.port}"
        assert arguments(stack.gateway) == ["--port", str(stack.gateway.port)]

    def test_a_model_goes_by_its_folder_or_its_name(self, tmp_path: Path) -> None:
        assert own_name(str(tmp_path)) == own_name(f"{tmp_path}/") == tmp_path.name
        assert own_name("org/name") == "org/name"
