"""What a model's name means, and the errors of names that mean nothing; the hub is a small server made here."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import snapshot_download
from safetensors import safe_open

from eyas.models import DEFAULT_HEAD, ModelError, default_home, resolve_head, resolve_target

COMMIT = "c" * 40
REPOSITORY = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights again",
    "pytorch_model.bin": b"pickled weights",
    "onnx/model.safetensors": b"weights",
    "README.md": b"text",
}


class Hub(BaseHTTPRequestHandler):
    """Serves repository `owner/model`; knows no other."""

    def do_GET(self) -> None:
        route = self.path.partition("?")[0].strip("/").split("/")
        match route:
            case ["api", "models", "owner", "model", "revision", _]:
                self.send(json.dumps({"id": "owner/model", "sha": COMMIT}).encode())
            case ["api", "models", "owner", "model", "tree", *_]:
                files = [
                    {"type": "file", "path": path, "size": len(data), "oid": sha1(data).hexdigest()}
                    for path, data in REPOSITORY.items()
                ]
                self.send(json.dumps(files).encode())
            case ["owner", "model", "resolve", _, *parts] if "/".join(parts) in REPOSITORY:
                self.send(REPOSITORY["/".join(parts)])
            case _:
                self.send(b"", status=404)

    do_HEAD = do_GET

    def send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{sha1(body).hexdigest()}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keeps the test's output clean."""


def look_at(monkeypatch: pytest.MonkeyPatch, hub: str) -> None:
    download = functools.partial(snapshot_download, endpoint=hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=[0.01]).start()
        look_at(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("hub")
def test_a_hub_target_comes_with_safetensors_config_and_tokenizer_only(tmp_path: Path) -> None:
    folder = resolve_target("owner/model", tmp_path)
    assert names(folder) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert tmp_path in folder.parents


@pytest.mark.usefixtures("hub")
def test_a_hub_head_may_be_a_pickle(tmp_path: Path) -> None:
    assert "pytorch_model.bin" in names(resolve_head("owner/model", tmp_path))


@pytest.mark.usefixtures("hub")
def test_a_hub_target_once_downloaded_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resolve_target("owner/model", tmp_path)
    look_at(monkeypatch, "http://127.0.0.1:9")
    assert resolve_target("owner/model", tmp_path) == folder


@pytest.mark.usefixtures("hub")
def test_an_unknown_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"target owner/other: no such folder here, and no such repository"):
        resolve_target("owner/other", tmp_path)


def test_an_unreachable_hub_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look_at(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"head owner/model: .* the Hugging Face hub cannot be reached"):
        resolve_head("owner/model", tmp_path)


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "owner" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_target("owner/model", tmp_path) == folder
    assert resolve_head(str(folder), tmp_path) == folder


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"target {tmp_path}: {tmp_path} holds no config\.json"):
        resolve_target(str(tmp_path), tmp_path)


@pytest.mark.parametrize("name", ["smollm", "/no/such/folder", "./x", "../x", "a/b/c", "model.safetensors"])
def test_a_name_that_means_nothing_is_refused_without_a_look_at_the_hub(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"not a folder, a hub id \(owner/name\) or the built-in smollm2-135m-instruct"
    ):
        resolve_target(name, tmp_path)


def test_the_built_in_head_is_part_of_the_package(tmp_path: Path) -> None:
    folder = resolve_head(DEFAULT_HEAD, tmp_path)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    assert shapes["fc.weight"] == (576, 3 * 576)
    assert shapes["lm_head.weight"] == (8192, 576)
    assert shapes["d2t"] == (8192,)
    assert len(shapes) == 15


def test_the_built_in_head_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=f"head {DEFAULT_HEAD}: the draft service"):
        resolve_head(DEFAULT_HEAD, tmp_path)


def test_home() -> None:
    assert default_home({"EYAS_HOME": "/data/eyas"}) == Path("/data/eyas")
    assert default_home({}) == default_home({"EYAS_HOME": ""}) == Path.home() / ".cache" / "eyas"
