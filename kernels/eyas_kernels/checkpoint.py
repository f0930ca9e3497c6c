"""Reading a model folder: config.json and the tensors beside it, lazily and memory-mapped."""

import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from eyas.errors import EyasError

# In the order in which they are looked for; the first that exists is read.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class CheckpointError(EyasError):
    """A model folder that cannot be used. The message names the file, and the key or the tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """What a checkpoint says of one tensor before it is read; `file` is the name of the file that holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str


class Config:
    """Typed reads of one JSON object. A null counts as absent; every error names the file and the key."""

    def __init__(self, values: dict[str, Any], file: Path, section: str = "") -> None:
        self.values = values
        self.file = file
        self._path = f"{section}." if section else ""
        self._lifted: dict[str, str] = {}  # path of the section that a key was lifted from

    def error(self, key: str, problem: str) -> CheckpointError:
        """The error to raise for a key: "FILE: KEY PROBLEM"."""
        return CheckpointError(f"{self.file}: {self._full(key)} {problem}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, at_least: int = 1) -> int:
        """A whole number from `at_least` up. Raises CheckpointError for anything else, or if it is absent."""
        value = self._value(key, default)
        if type(value) is not int or value < at_least:
            raise self.error(key, f"is {value!r}, but a whole number from {at_least} up is needed")
        return value

    def integers(self, key: str) -> list[int]:
        """One or more whole numbers from 0 up. Raises CheckpointError as `integer` does."""
        values = self._value(key, None)
        whole = isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
        if not values or not whole:
            raise self.error(key, f"is {values!r}, but a list of whole numbers is needed")
        return list(values)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number. Raises CheckpointError as `integer` does."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(key, f"is {value!r}, but a positive number is needed")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string. Raises CheckpointError if it is something else, or absent with no default."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {value!r}, but a string is needed")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false. Raises CheckpointError if it is something else."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {value!r}, but true or false is needed")
        return value

    def section(self, key: str) -> "Config":
        """The JSON object under the key, empty if absent. Raises CheckpointError if it is something else."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"is {value!r}, but a JSON object is needed")
        return Config(value, self.file, self._full(key))

    def lift(self, key: str) -> "Config":
        """The same object with those keys of the section `key` beside its own that it lacks. Errors name where a key
        stands in the file. Raises CheckpointError as `section` does."""
        inner = {name: value for name, value in self.section(key).values.items() if not self.has(name)}
        lifted = Config({**self.values, **inner}, self.file)
        lifted._path = self._path
        lifted._lifted = {**self._lifted, **dict.fromkeys(inner, f"{self._full(key)}.")}
        return lifted

    def heads(self, hidden_size: int) -> tuple[int, int, int]:
        """Number of query heads, number of key heads, and width of a head. Raises CheckpointError, also where
        they do not fit together."""
        num_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise self.error(
                "num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} heads"
            )
        if not self.has("head_dim") and hidden_size % num_heads:
            raise self.error("num_attention_heads", f"is {num_heads}, which does not divide hidden_size")
        return num_heads, num_kv_heads, self.integer("head_dim", hidden_size // num_heads)

    @property
    def rope_key(self) -> str:
        """Where the scaling of the rotary embedding stands."""
        return "rope_parameters" if self.has("rope_parameters") else "rope_scaling"

    def rope(self, default_theta: float) -> tuple[float, dict[str, Any] | None]:
        """The rotary base, and the scaling or None for plain rotary embeddings.

        Reads both places: `rope_parameters`, where transformers 5 keeps everything, then the older flat
        `rope_theta` and `rope_scaling`. The scaling has its kind under "rope_type" (older files say "type") and
        its other keys as they stand in the file.
        """
        scaling = self.section(self.rope_key)
        holder = scaling if scaling.has("rope_theta") else self
        theta = holder.number("rope_theta", default_theta)
        kind = scaling.text("rope_type", scaling.text("type", "default"))
        if kind == "default":
            return theta, None
        rest = {key: value for key, value in scaling.values.items() if key not in ("type", "rope_theta")}
        return theta, {**rest, "rope_type": kind}

    def _full(self, key: str) -> str:
        return self._lifted.get(key, self._path) + key

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is missing")
        return value


class Checkpoint:
    """A model folder in Hugging Face's layout: config.json and safetensors or PyTorch files, single or sharded.

    Only headers are read at first; `load` maps a tensor's bytes when it is asked for.
    """

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError for a file that is missing, malformed or cut short."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such folder")
        self.folder = folder
        self.config = Config(read_json(folder / "config.json"), folder / "config.json")
        self._tensors: dict[str, TensorInfo] = {}
        self._load: dict[str, Callable[[str], Tensor]] = {}
        path = _weight_file(folder)
        if path.name.endswith(".index.json"):
            self._open_shards(path)
        else:
            self._open(path)

    def names(self) -> dict[str, TensorInfo]:
        """Every tensor of the folder by name."""
        return dict(self._tensors)

    def file_of(self, name: str) -> str:
        """Name of the file that holds the tensor. Raises CheckpointError if there is no such tensor."""
        return self._info(name).file

    def load(
        self, name: str, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """The tensor, as stored unless a dtype or a device is given.

        On the CPU and in its own dtype it is a view of the mapped file. Raises CheckpointError if it is absent.
        """
        file = self._info(name).file
        try:
            tensor = self._load[file](name)
        except Exception as error:
            raise CheckpointError(f"{self.folder / file}: {name} cannot be read ({error})") from error
        return tensor.to(device=device, dtype=dtype)

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder}: there is no tensor {name}")
        return self._tensors[name]

    def _open(self, path: Path) -> set[str]:
        try:
            tensors, load = _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)
        except CheckpointError:
            raise
        except Exception as error:  # Damaged bytes raise whatever the parser trips over.
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"{path}: cut short, damaged or not a weight file ({reason})") from error
        self._tensors |= tensors
        self._load[path.name] = load
        return set(tensors)

    def _open_shards(self, index: Path) -> None:
        weight_map = Config(read_json(index), index).section("weight_map").values
        if not weight_map or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{index}: weight_map must name the file of every tensor")
        for file in sorted(set(weight_map.values())):
            if not (self.folder / file).is_file():
                raise CheckpointError(f"{self.folder / file}: the file is missing, but {index.name} names it")
            held = self._open(self.folder / file)
            absent = [name for name, place in weight_map.items() if place == file and name not in held]
            if absent:
                raise CheckpointError(f"{self.folder / file}: {', '.join(absent)} missing, but in {index.name}")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError if the file is missing or holds anything else."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: the file is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return values


def _weight_file(folder: Path) -> Path:
    for name in WEIGHT_FILES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f"{folder}: there is no weight file ({', '.join(WEIGHT_FILES)})")


def _open_safetensors(path: Path) -> tuple[dict[str, TensorInfo], Callable[[str], Tensor]]:
    file = safe_open(path, framework="pt")
    tensors = {}
    for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
        header = file.get_slice(name)
        dtype = SAFETENSORS_DTYPES.get(header.get_dtype())
        if dtype is None:
            raise CheckpointError(f"{path}: {name} has dtype {header.get_dtype()}, which is not supported")
        tensors[name] = TensorInfo(tuple(header.get_shape()), dtype, path.name)
    return tensors, file.get_tensor


def _open_pickle(path: Path) -> tuple[dict[str, TensorInfo], Callable[[str], Tensor]]:
    # Only the zip format can be mapped; files from before PyTorch 1.6 are read whole.
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CheckpointError(f"{path}: must hold a dictionary of tensors")
    tensors = {name: TensorInfo(tuple(value.shape), value.dtype, path.name) for name, value in state.items()}
    return tensors, state.__getitem__
