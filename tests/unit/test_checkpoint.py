"""Checkpoint: config.json and tensors from every file layout, and one clear error for every damaged folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas_kernels.checkpoint import Checkpoint, CheckpointError
from tests.helpers.tiny_models import write_checkpoint

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b.weight": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "ids": torch.tensor([3, 1, 2]),
    "mask": torch.tensor([True, False]),
}
LAYOUTS = [
    pytest.param(
        {"bin": bin, "sharded": sharded}, id=f"{'bin' if bin else 'safetensors'}{'-sharded' * sharded}"
    )
    for bin in (False, True)
    for sharded in (False, True)
]


@pytest.fixture(params=LAYOUTS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, {"hidden_size": 3}, TENSORS, **request.param)
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    return str(caught.value)


def weight_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".bin", ".safetensors"))


def test_every_layout_lists_and_loads_the_same_tensors(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    assert checkpoint.names().keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        info = checkpoint.names()[name]
        assert (info.shape, info.dtype) == (tuple(expected.shape), expected.dtype)
        assert (folder / info.file) in weight_files(folder)
        assert checkpoint.file_of(name) == info.file
        loaded = checkpoint.load(name)
        assert loaded.dtype == expected.dtype
        assert torch.equal(loaded, expected)


def test_load_converts_and_places(folder: Path) -> None:
    loaded = Checkpoint(folder).load("b.weight", torch.float32, "cpu")
    assert loaded.dtype == torch.float32
    assert loaded.tolist() == [1.5, -2.0]
    assert Checkpoint(folder).load("b.weight", torch.float32, "meta").device.type == "meta"


def test_safetensors_win_over_a_bin_beside_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {"old": torch.zeros(1)}, bin=True)
    write_checkpoint(tmp_path, {}, {"new": torch.zeros(1)})
    assert Checkpoint(tmp_path).names().keys() == {"new"}


def test_a_bin_in_the_format_before_zip_is_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {})
    (tmp_path / "model.safetensors").unlink()
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(Checkpoint(tmp_path).load("a.weight"), TENSORS["a.weight"])


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no tensor c\.weight"):
        Checkpoint(folder).load("c.weight")
    with pytest.raises(CheckpointError, match=r"there is no tensor c\.weight"):
        Checkpoint(folder).file_of("c.weight")


def test_a_missing_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: there is no such folder"


def test_a_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder) == f"{folder / 'config.json'}: the file is missing"


@pytest.mark.parametrize("content", ['{"hidden_size": ', "", "\xff\xfe"], ids=["cut", "empty", "binary"])
def test_a_malformed_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    assert refusal(folder).startswith(f"{folder / 'config.json'}: is not valid JSON")


def test_a_config_that_is_no_object(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    assert refusal(folder) == f"{folder / 'config.json'}: must hold a JSON object"


def test_no_weight_file(folder: Path) -> None:
    for path in (*weight_files(folder), *folder.glob("*.index.json")):
        path.unlink()
    message = refusal(folder)
    assert message.startswith(f"{folder}: there is no weight file")
    assert "model.safetensors" in message
    assert "pytorch_model.bin" in message


@pytest.mark.parametrize("size", [0, 5, -40], ids=["empty", "header", "tail"])
def test_a_file_cut_short_is_named(folder: Path, size: int) -> None:
    file = weight_files(folder)[-1]
    os.truncate(file, size if size >= 0 else file.stat().st_size + size)
    assert refusal(folder).startswith(f"{file}: cut short, damaged or not a weight file")


def test_a_damaged_file_is_named(folder: Path) -> None:
    file = weight_files(folder)[0]
    file.write_bytes(b"\x00garbage" * 100)
    assert refusal(folder).startswith(f"{file}: cut short, damaged or not a weight file")


class Payload:
    """A pickle that would make a folder if it were run."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.made),))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {}, bin=True)
    torch.save({"a": Payload(tmp_path / "made")}, tmp_path / "pytorch_model.bin")
    assert str(tmp_path / "pytorch_model.bin") in refusal(tmp_path)
    assert not (tmp_path / "made").exists()


def test_a_bin_that_holds_no_tensors_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {}, bin=True)
    torch.save({"model": {"a": torch.zeros(1)}}, tmp_path / "pytorch_model.bin")
    assert refusal(tmp_path) == f"{tmp_path / 'pytorch_model.bin'}: must hold a dictionary of tensors"


@pytest.fixture(params=[False, True], ids=["safetensors", "bin"])
def sharded(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, {}, TENSORS, bin=request.param, sharded=True)
    return tmp_path


def edit_index(folder: Path, **entries: Any) -> Path:
    path = next(folder.glob("*.index.json"))
    index = json.loads(path.read_text())
    index["weight_map"].update(entries)
    path.write_text(json.dumps(index))
    return path


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = weight_files(sharded)[1]
    shard.unlink()
    message = refusal(sharded)
    assert message.startswith(f"{shard}: the file is missing, but ")
    assert "index.json names it" in message


def test_a_tensor_that_only_the_index_knows_is_named(sharded: Path) -> None:
    shard = weight_files(sharded)[0]
    index = edit_index(sharded, **{"c.weight": shard.name})
    assert refusal(sharded) == f"{shard}: c.weight missing, but in {index.name}"


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_weight_map(sharded: Path, content: str) -> None:
    index = next(sharded.glob("*.index.json"))
    index.write_text(content)
    assert refusal(sharded) == f"{index}: weight_map must name the file of every tensor"


def test_a_malformed_index(sharded: Path) -> None:
    index = next(sharded.glob("*.index.json"))
    index.write_text("{")
    assert refusal(sharded).startswith(f"{index}: is not valid JSON")


def test_a_dtype_that_is_not_supported_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, {})
    header = json.dumps({"a": {"dtype": "U16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x00\x00")
    assert refusal(tmp_path) == f"{tmp_path / 'model.safetensors'}: a has dtype U16, which is not supported"


def test_tensors_of_a_safetensors_file_are_mapped_not_read(tmp_path: Path) -> None:
    big: dict[str, Tensor] = {"big": torch.zeros(2**24)}
    write_checkpoint(tmp_path, {}, big)
    before = resident_bytes()
    kept = Checkpoint(tmp_path).load("big")
    assert resident_bytes() - before < 2**24
    assert kept.shape == (2**24,)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
