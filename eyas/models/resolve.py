"""What a model's name means: a built-in model, a folder, or a repository on the Hugging Face hub."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from eyas.models.errors import ModelError
from eyas.models.fetch import SMOLLM2_135M_INSTRUCT, Progress, provide

DEFAULT_TARGET = SMOLLM2_135M_INSTRUCT.name
DEFAULT_HEAD = "smollm2-135m-eagle3"

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
# `model*` leaves out the second copy of the weights that some repositories hold (consolidated.safetensors).
_TARGET_FILES = ["*.json", "model*.safetensors", "*.jinja"]
_HEAD_FILES = ["*.json", "*.safetensors", "*.bin"]


def default_home(environ: Mapping[str, str]) -> Path:
    """Where models are kept: `$EYAS_HOME`, or ~/.cache/eyas when that is unset or empty."""
    return Path(environ.get("EYAS_HOME") or "~/.cache/eyas").expanduser().absolute()


def resolve_target(name: str, home: Path, *, progress: Progress | None = None) -> Path:
    """The Hugging Face folder of target `name`, with at least a config.json.

    `name` is DEFAULT_TARGET (fetched and converted at its first use), or a folder, or a hub id `owner/name`
    (downloaded into `home`). `progress` is told what is being waited for. Raises ModelError.
    """
    if name == DEFAULT_TARGET:
        return provide(SMOLLM2_135M_INSTRUCT, home, progress)
    return _folder_or_hub(name, home, progress, kind="target", built_in=DEFAULT_TARGET, files=_TARGET_FILES)


def resolve_head(name: str, home: Path, *, progress: Progress | None = None) -> Path:
    """The folder of EAGLE head `name`, with at least a config.json.

    `name` is DEFAULT_HEAD (part of the draft service's package), or a folder, or a hub id `owner/name`
    (downloaded into `home`). `progress` is told what is being waited for. Raises ModelError.
    """
    if name == DEFAULT_HEAD:
        return _packaged_head(name)
    return _folder_or_hub(name, home, progress, kind="head", built_in=DEFAULT_HEAD, files=_HEAD_FILES)


def _packaged_head(name: str) -> Path:
    # Finding the package's folder this way does not run its code, which would import torch.
    spec = importlib.util.find_spec("draft_service")
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location) / "heads" / name
        if (folder / "config.json").is_file():
            return folder
    raise ModelError(f"head {name}: the draft service, whose package holds it, is not installed here")


def _folder_or_hub(
    name: str, home: Path, progress: Progress | None, *, kind: str, built_in: str, files: list[str]
) -> Path:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.exists() or not _HUB_ID.fullmatch(name):
            raise ModelError(f"{kind} {name}: not a folder, a hub id (owner/name) or the built-in {built_in}")
        if progress:
            progress(f"Looking for {kind} {name} on the Hugging Face hub")
        try:
            folder = _from_hub(name, home, files)
        except ModelError as error:
            raise ModelError(f"{kind} {name}: no such folder here, and {error}") from error
    if not (folder / "config.json").is_file():
        raise ModelError(f"{kind} {name}: {folder} holds no config.json")
    return folder.absolute()


def _from_hub(repo: str, home: Path, files: list[str]) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        # "*/*" leaves out folders: other formats of the same weights (onnx/, original/).
        path = snapshot_download(repo, cache_dir=home / "hub", allow_patterns=files, ignore_patterns=["*/*"])
    except errors.GatedRepoError as error:
        raise ModelError("on the Hugging Face hub its owner grants access; ask there and log in") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError("no such repository on the Hugging Face hub (or a private one: log in)") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(f"the Hugging Face hub cannot be reached, nor is all of it in {home} yet") from error
    except Exception as error:  # among them those of the hub client's own HTTP library
        raise ModelError(f"the download from the Hugging Face hub to {home} failed: {error}") from error
    return Path(path)
