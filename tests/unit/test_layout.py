"""The shape of the tree: which folder imports what, what stays out of the gateway, and pinned dependencies."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Set
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SERVICES = ("target_service", "draft_service", "gateway")
FOLDERS = {**{name: ROOT / name for name in ("eyas", *SERVICES)}, "eyas_kernels": ROOT / "kernels/eyas_kernels"}
# What each may import of the others. Only the `eyas` command imports a service, once it is to be one.
COMMAND = "eyas/cli.py"
TRANSPORT = "eyas/transport.py"
MAY_IMPORT: dict[str, set[str]] = {
    "eyas": set(),
    "eyas_kernels": {"eyas"},
    "target_service": {"eyas", "eyas_kernels"},
    "draft_service": {"eyas", "eyas_kernels"},
    "gateway": {"eyas"},
}
# Extras that declare what each may import besides the base dependencies.
EXTRAS = {
    "eyas": ("target", "gateway", "demo"),
    "eyas_kernels": ("target", "gpu"),
    "target_service": ("target",),
    "draft_service": ("draft",),
    "gateway": ("gateway",),
}
IMAGES = {"target": ("target", "demo"), "draft": ("draft",), "gateway": ("gateway",)}
ALL_EXTRAS = ("target", "draft", "gateway", "demo", "dev")


class Import(NamedTuple):
    package: str
    file: str
    line: int
    is_lazy: bool  # inside a function, or for type checkers only


def imports(package: str) -> Iterator[Import]:
    """The top-level package of every import in the Python files of `package`."""
    for path in sorted(FOLDERS[package].rglob("*.py")):
        tree = ast.parse(path.read_text(), path.name)
        lazy = {inner for node in ast.walk(tree) if _runs_later(node) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name in _names(node):
                    yield Import(name.partition(".")[0], str(path.relative_to(ROOT)), node.lineno, node in lazy)


def _runs_later(node: ast.AST) -> bool:
    function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return function or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if node.level == 0 and node.module else []


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_is_not_a_package() -> None:
    """transformers probes an import package named `kernels`; a local one would break its models."""
    assert not (ROOT / "kernels/__init__.py").exists()
    run_python("from transformers import LlamaForCausalLM; LlamaForCausalLM.generate")


@pytest.mark.parametrize("package", FOLDERS)
def test_imports_run_one_way(package: str) -> None:
    others = FOLDERS.keys() - MAY_IMPORT[package] - {package}
    wrong = [found for found in imports(package) if found.package in others]
    assert not [found for found in wrong if not (found.file == COMMAND and found.is_lazy)]


def test_torch_stays_out_of_gateway_and_of_all_but_the_transport_in_eyas() -> None:
    assert not [found for found in imports("gateway") if found.package == "torch"]
    assert {found.file for found in imports("eyas") if found.package == "torch"} == {TRANSPORT}


def test_gateway_and_eyas_load_without_torch() -> None:
    files = [*FOLDERS["gateway"].rglob("*.py"), *FOLDERS["eyas"].rglob("*.py")]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    names -= {"eyas.__main__", "eyas.transport"}
    assert {"eyas.v1.target_pb2_grpc", "eyas.cli", "gateway.service", "gateway.rest"} <= names
    code = "import importlib, sys\nfor name in {names}: importlib.import_module(name)\nprint(*sys.modules)"
    loaded = run_python(code.format(names=sorted(names))).split()
    assert names <= set(loaded)
    assert not {"torch", "transformers"} & set(loaded)


@pytest.mark.parametrize("package", FOLDERS)
def test_every_import_is_declared(package: str) -> None:
    declared = {canonicalize_name(Requirement(text).name) for text in requirements(*EXTRAS[package])}
    known = {*FOLDERS, *sys.stdlib_module_names, *modules_of(declared)}
    assert not [found for found in imports(package) if found.package not in known]


@pytest.mark.parametrize(("service", "extras"), IMAGES.items())
def test_service_starts_with_nothing_but_its_extras(service: str, extras: tuple[str, ...]) -> None:
    """What an image lacks is what neither the base nor the extras bring."""
    present = closure(requirements(*extras))
    absent = importlib.metadata.packages_distributions().keys() - modules_of(present) - FOLDERS.keys()
    assert ("torch" in absent) == (service == "gateway")
    assert "transformers" in absent
    code = "import sys; sys.modules.update(dict.fromkeys({absent})); {then}"
    module = service if service == "gateway" else f"{service}_service"
    run_python(code.format(absent=sorted(absent), then=f"import {module}.service"))
    then = f"sys.argv[1:] = ['{service}', '--help']; from eyas.cli import main; main()"
    assert "--log-level" in run_python(code.format(absent=sorted(absent), then=then))


def requirements(*extras: str) -> list[str]:
    """What pyproject.toml asks for: the base and these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        *project["dependencies"],
        *(text for name in extras for text in project["optional-dependencies"][name]),
    ]


def closure(wanted: list[str]) -> set[str]:
    """Canonical names of what the requirements bring here, themselves included."""
    found: set[str] = set()
    todo = [Requirement(text) for text in wanted]
    done: set[str] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if str(requirement) in done or name == "eyas":
            continue
        done.add(str(requirement))
        found.add(name)
        for child in map(Requirement, importlib.metadata.requires(name) or ()):
            extras = requirement.extras or {""}
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(child)
    return found


def modules_of(distributions: Set[str]) -> set[str]:
    """Names under which these distributions are imported."""
    providers = importlib.metadata.packages_distributions().items()
    return {module for module, of in providers if distributions & set(map(canonicalize_name, of))}


def pins() -> dict[str, str]:
    lines = re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return dict(lines)


def test_every_requirement_is_pinned_within_its_range() -> None:
    for requirement in map(Requirement, requirements(*ALL_EXTRAS, "gpu", "flash-attn")):
        if requirement.name != "eyas":
            assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), requirement


def test_every_installed_dependency_is_pinned() -> None:
    loose = closure(requirements(*ALL_EXTRAS)) - pins().keys()
    # A CUDA build of torch brings packages that it pins itself.
    assert not {name for name in loose if not name.startswith(("nvidia-", "cuda-"))}
