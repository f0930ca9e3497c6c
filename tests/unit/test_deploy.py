"""deploy/: what compose files and Dockerfile promise; that Compose and the command line accept them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from eyas.server import CLEANUP_SECONDS, GRACE_SECONDS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVICES = ("target", "draft", "gateway")
FILES = ("compose.yaml", "compose.cpu.yaml")


@cache
def services(file: str) -> dict[str, dict[str, Any]]:
    """The services of a compose file with defaults filled in and `extends` carried out."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / file).read_text())
    assert "$" not in text
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    for name, service in found.items():
        if base := service.pop("extends", None):
            found[name] = services(base["file"])[base["service"]] | service
    return found


def options(command: list[str]) -> dict[str, str]:
    """`--name value` pairs of a command line."""
    return dict(zip(command[::2], command[1::2], strict=True))


@cache
def stages() -> dict[str, list[str]]:
    """Stage of the Dockerfile -> its instructions, those of the stages it is built from first."""
    text = re.sub(r"(?m)^ *#.*\n", "", (DEPLOY / "Dockerfile").read_text()).replace("\\\n", "")
    found: dict[str, list[str]] = {}
    for part in re.split(r"(?m)^FROM ", text)[1:]:
        head, *lines = part.strip().splitlines()
        base, _, name = head.partition(" AS ")
        found[name] = [*found.get(base, []), *(" ".join(line.split()) for line in lines if line.strip())]
    return found


def last(stage: str, instruction: str) -> str:
    return [line for line in stages()[stage] if line.startswith(f"{instruction} ")][-1]


def exec_form(line: str) -> list[str]:
    return json.loads(line[line.index("[") :])  # type: ignore[no-any-return]


@cache
def help_of(service: str) -> str:
    command = [sys.executable, "-m", "eyas", service, "--help"]
    env = {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "dumb"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compose_client() -> list[str] | None:
    for client in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(client[0]) and not subprocess.run([*client, "version"], capture_output=True).returncode:
            return client
    return None


@pytest.mark.parametrize("file", FILES)
def test_docker_compose_accepts(file: str) -> None:
    client = compose_client()
    if client is None:
        pytest.skip("no Docker Compose client here (Debian's package docker-compose has one)")
    env = {**os.environ, "EYAS_TARGET": "Qwen/Qwen3-8B", "EYAS_TARGET_ARGS": "--context-length 4096"}
    command = [*client, "-f", str(DEPLOY / file), "config"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    resolved = yaml.safe_load(done.stdout)["services"]
    assert set(resolved) == set(SERVICES)
    for name in SERVICES:
        assert resolved[name].get("ipc") == services(file)[name].get("ipc")
        assert Path(resolved[name]["build"]["context"]) == ROOT
    # A list from Compose 2, a string from Compose 1.
    words = resolved["target"]["command"]
    given = options(shlex.split(words) if isinstance(words, str) else words)
    assert (given["--model"], given["--context-length"]) == ("Qwen/Qwen3-8B", "4096")


def test_every_variable_is_documented() -> None:
    used = {name for file in DEPLOY.glob("*.yaml") for name in re.findall(r"\$\{(\w+)", file.read_text())}
    readme = (DEPLOY / "README.md").read_text()
    assert {"EYAS_TARGET", "EYAS_HEAD", "EYAS_PORT", "TORCH_INDEX"} <= used
    assert not [name for name in used if f"`{name}`" not in readme]


@pytest.mark.parametrize("file", FILES)
def test_every_option_exists(file: str) -> None:
    for name in SERVICES:
        for command in (shlex.split(services(file)[name]["command"]), exec_form(last(name, "CMD"))):
            missing = [option for option in options(command) if not re.search(rf"{option}\b", help_of(name))]
            assert not missing, f"eyas {name} has no {missing}"


@pytest.mark.parametrize("file", FILES)
def test_addresses_fit_together(file: str) -> None:
    flags = {name: options(shlex.split(services(file)[name]["command"])) for name in SERVICES}
    target, draft = flags["target"]["--listen"], flags["draft"]["--listen"]
    assert flags["draft"]["--target"] == flags["gateway"]["--target"] == target
    assert flags["gateway"]["--draft"] == draft
    probed = {name: exec_form(last(name, "HEALTHCHECK"))[-1] for name in SERVICES}
    port = flags["gateway"]["--port"]
    assert probed == {"target": target, "draft": draft, "gateway": f"http://127.0.0.1:{port}/health"}
    for name in SERVICES:
        assert "sockets:/run/eyas" in services(file)[name]["volumes"]


@pytest.mark.parametrize("file", FILES)
def test_only_the_gateway_is_published_and_on_loopback(file: str) -> None:
    published = {name: service.get("ports", []) for name, service in services(file).items()}
    assert published == {"target": [], "draft": [], "gateway": ["127.0.0.1:8000:8000"]}


@pytest.mark.parametrize("file", FILES)
def test_start_order_restart_and_drain(file: str) -> None:
    for service in services(file).values():
        assert service["restart"] == "unless-stopped"
        assert float(service["stop_grace_period"].removesuffix("s")) > GRACE_SECONDS + CLEANUP_SECONDS
    healthy = {"condition": "service_healthy"}
    assert services(file)["draft"]["depends_on"] == {"target": healthy}
    assert services(file)["gateway"]["depends_on"] == {"target": healthy, "draft": healthy}


@pytest.mark.parametrize("file", FILES)
def test_draft_reads_the_checkpoint_where_the_target_has_it(file: str) -> None:
    for name in ("target", "draft"):
        assert "models:/var/lib/eyas" in services(file)[name]["volumes"]
        assert "EYAS_HOME=/var/lib/eyas" in last(name, "ENV")


def test_one_gpu_is_shared() -> None:
    found = services("compose.yaml")
    devices = [found[name]["deploy"]["resources"]["reservations"]["devices"] for name in ("target", "draft")]
    assert devices[0] == devices[1] == [{"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}]
    assert found["target"]["ipc"] == "shareable"
    assert found["draft"]["ipc"] == found["draft"]["pid"] == "service:target"
    assert "deploy" not in found["gateway"]


def test_cpu_variant_asks_for_no_gpu() -> None:
    for service in services("compose.cpu.yaml").values():
        assert not {"deploy", "ipc", "pid"} & service.keys()


@pytest.mark.parametrize("stage", SERVICES)
def test_image_runs_its_service_as_the_common_user_under_init(stage: str) -> None:
    assert last(stage, "USER") == "USER 10001:10001"
    assert exec_form(last(stage, "ENTRYPOINT")) == ["tini", "-s", "--", "eyas", stage]
    for file in FILES:
        assert services(file)[stage]["build"]["target"] == stage


def test_images_hold_the_extras_of_their_service() -> None:
    """With test_layout.py, which checks that these suffice. The gateway has no torch."""
    installs = {name: [line for line in stages()[name] if "pip install" in line] for name in SERVICES}
    assert [len(installs[name]) for name in SERVICES] == [2, 2, 1]
    assert installs["target"][0] == installs["draft"][0]
    assert installs["target"][0].endswith(" torch")
    extras = {name: re.findall(r"'/src\[(.*)\]'", installs[name][-1]) for name in SERVICES}
    assert extras == {"target": ["target,demo"], "draft": ["draft"], "gateway": ["gateway"]}


def test_context_holds_every_package() -> None:
    packages = re.findall(r"^packages = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    kept = set(re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert {name.strip(' "').partition("/")[0] for name in packages.split(",")} <= kept
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= kept
