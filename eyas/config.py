"""Configuration of the three services: frozen, checked when made, passed whole.

The text beside each field is its help on the command line.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from eyas.errors import EyasError

DType = Literal["auto", "bfloat16", "float16", "float32"]
LogLevel = Literal["debug", "info", "warning", "error"]

TARGET_ADDRESS = "127.0.0.1:50051"
DRAFT_ADDRESS = "127.0.0.1:50052"

# Linux's sockaddr_un holds this many bytes of path, without the final zero.
MAX_SOCKET_PATH = 107


class ConfigError(EyasError, ValueError):
    """A configuration value that cannot be; the message begins with the field's name."""


def socket_path(address: str) -> Path | None:
    """Path of a Unix socket address `unix:/path`; None for `host:port`."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None


def split_host_port(address: str) -> tuple[str, int]:
    """Host (brackets of an IPv6 address taken off) and port of `host:port`. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address!r} is neither unix:/path nor host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def check_tcp_address(field: str, address: str) -> None:
    """Raises ConfigError unless `address` is `host:port`."""
    try:
        split_host_port(address)
    except ValueError as error:
        raise ConfigError(f"{field}: {error}") from None


def check_address(field: str, address: str) -> None:
    """Raises ConfigError unless `address` is `unix:/absolute/path` or `host:port`."""
    path = socket_path(address)
    if path is None:
        check_tcp_address(field, address)
    elif not path.is_absolute():
        raise ConfigError(f"{field}: the socket path in {address!r} must be absolute")
    elif len(bytes(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"{field}: the socket path {path} is longer than {MAX_SOCKET_PATH} bytes")


def _json(text: str) -> Any:
    """The value written in JSON, None for anything else."""
    try:
        return json.loads(text)
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    """What every service has."""

    log_level: Annotated[LogLevel, "Least severe log lines that are written."] = "info"
    otlp_endpoint: Annotated[
        str | None, "Send traces to this OpenTelemetry collector (OTLP over gRPC), as http://host:4317."
    ] = None
    trace_console: Annotated[bool, "Write finished spans to standard error, one JSON line each."] = False

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Makes a configuration; raises ConfigError for a key that is unknown or missing."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                raise ConfigError(f"{name}: {cls.__name__} has no such field")
        for name, field in fields.items():
            if field.default is dataclasses.MISSING and name not in values:
                raise ConfigError(f"{name}: missing")
        return cls(**values)

    def __post_init__(self) -> None:
        self._one_of("log_level", "debug", "info", "warning", "error")
        if self.otlp_endpoint is not None and not re.match(r"https?://[^/]", self.otlp_endpoint):
            raise ConfigError(f"otlp_endpoint: {self.otlp_endpoint!r} does not begin with http:// or https://")

    def _at_least(self, minimum: int, *fields: str) -> None:
        for field in fields:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ConfigError(f"{field}: must be a whole number of at least {minimum}, not {value!r}")

    def _positive(self, *fields: str) -> None:
        for field in fields:
            value = getattr(self, field)
            if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigError(f"{field}: must be a number above 0, not {value!r}")

    def _one_of(self, field: str, *choices: str) -> None:
        value = getattr(self, field)
        if value not in choices:
            raise ConfigError(f"{field}: must be one of {', '.join(choices)}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(CommonConfig):
    """What the two services that compute share."""

    dtype: DType
    device: Annotated[str, "cpu, cuda, cuda:N, or auto: the first GPU if there is one."] = "auto"
    page_size: Annotated[int, "Tokens in a page of the cache."] = 16
    num_pages: Annotated[int, "Pages of the cache; 0 sizes it from the free memory."] = 0
    threads: Annotated[int, "CPU threads that compute; 0 takes every core."] = 0
    metrics_listen: Annotated[str | None, "Serve Prometheus metrics over HTTP on this host:port."] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("dtype", "auto", "bfloat16", "float16", "float32")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device: must be cpu, cuda, cuda:N or auto, not {self.device!r}")
        self._at_least(1, "page_size")
        self._at_least(0, "num_pages", "threads")
        if self.metrics_listen is not None:
            check_tcp_address("metrics_listen", self.metrics_listen)


@dataclass(frozen=True, kw_only=True)
class TargetConfig(ModelConfig):
    """The target service."""

    model: Annotated[Path, "Folder of the target's checkpoint."]
    served_name: Annotated[str, "Name under which the model is served."]
    listen: Annotated[str, "Where to serve: host:port or unix:/path."] = TARGET_ADDRESS
    dtype: Annotated[DType, "Element type of weights and cache; auto takes the checkpoint's."] = "auto"
    max_rows: Annotated[int, "Largest number of rows in one pass, all sequences together."] = 512
    context_length: Annotated[int, "Largest number of tokens in a sequence; 0 takes the model's."] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.served_name:
            raise ConfigError("served_name: must not be empty")
        check_address("listen", self.listen)
        self._at_least(1, "max_rows")
        self._at_least(0, "context_length")


@dataclass(frozen=True, kw_only=True)
class DraftConfig(ModelConfig):
    """The draft service."""

    head: Annotated[Path, "Folder of the EAGLE head's checkpoint."]
    head_name: Annotated[str, "Name under which the head is reported."]
    listen: Annotated[str, "Where to serve: host:port or unix:/path."] = DRAFT_ADDRESS
    target: Annotated[str, "Address of the target service."] = TARGET_ADDRESS
    target_checkpoint: Annotated[
        Path | None, "Where this host has the target's checkpoint, if not where the target has it."
    ] = None
    dtype: Annotated[DType, "Element type of weights and slots; auto takes the target's."] = "auto"
    threads: Annotated[int, "CPU threads that compute; 0 takes one, which suits a small head."] = 0
    max_draft_tokens: Annotated[int, "Largest number of tokens in one proposal."] = 8
    rope_theta: Annotated[
        float | None, "Base of the rotary embedding, where the head's config.json is wrong."
    ] = None
    rope_scaling: Annotated[
        str | None, "Scaling of the rotary embedding, as JSON like config.json's; {} for none. Same use."
    ] = None
    taps: Annotated[
        str | None, "Target blocks applied before each hidden state that the head reads: 2,15,27. Same use."
    ] = None
    wait_seconds: Annotated[float, "How long to wait for the target to come up."] = 120.0
    strict_head: Annotated[bool, "Refuse to start with a head that fails the self-test."] = False
    skip_self_test: Annotated[bool, "Do not try the head on texts of the target at the start."] = False
    head_floor: Annotated[
        float, "Self-test: smallest share of first drafts that must be the target's own choice."
    ] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.head_name:
            raise ConfigError("head_name: must not be empty")
        check_address("listen", self.listen)
        check_address("target", self.target)
        self._at_least(1, "max_draft_tokens")
        self._positive("wait_seconds")
        if self.strict_head and self.skip_self_test:
            raise ConfigError("strict_head: needs the self-test, which skip_self_test leaves out")
        if not isinstance(self.head_floor, (int, float)) or not 0 <= self.head_floor <= 1:
            raise ConfigError(f"head_floor: must be between 0 and 1, not {self.head_floor!r}")
        if self.rope_theta is not None:
            self._positive("rope_theta")
        if not isinstance(_json(self.rope_scaling or "{}"), dict):
            raise ConfigError(f"rope_scaling: must be a JSON object, not {self.rope_scaling!r}")
        if self.taps is not None and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", self.taps):
            raise ConfigError(f"taps: must be numbers from 1 up with commas between them, not {self.taps!r}")

    @property
    def rope_scaling_fields(self) -> dict[str, Any] | None:
        """`rope_scaling` as a dictionary."""
        return None if self.rope_scaling is None else dict(_json(self.rope_scaling))

    @property
    def tap_numbers(self) -> tuple[int, ...] | None:
        """`taps` as numbers."""
        return None if self.taps is None else tuple(map(int, self.taps.split(",")))


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(CommonConfig):
    """The gateway."""

    host: Annotated[str, "Address on which the REST API is served."] = "127.0.0.1"
    port: Annotated[int, "Port on which the REST API is served; 0 takes a free one."] = 8000
    grpc_listen: Annotated[str | None, "Serve the gRPC API as well, on host:port or unix:/path."] = None
    target: Annotated[str, "Address of the target service."] = TARGET_ADDRESS
    draft: Annotated[str | None, "Address of the draft service; without one the gateway decodes plainly."] = (
        None
    )
    num_draft_tokens: Annotated[int, "Draft tokens a round when a request does not say; 0 decodes plainly."] = 3
    max_sequences: Annotated[int, "Largest number of sequences that step together."] = 16
    max_queue: Annotated[int, "Requests that may wait; beyond it they are refused with 429."] = 256
    prefill_rows: Annotated[int, "Largest number of prompt tokens in one round."] = 256
    draft_timeout_ms: Annotated[int, "A proposal later than this is dropped and the round goes on without."] = (
        5000
    )
    wait_seconds: Annotated[float, "How long to wait for the services to come up."] = 120.0
    trace_share: Annotated[float, "Share of requests that are traced when the client does not say."] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.host:
            raise ConfigError("host: must not be empty")
        self._at_least(0, "port", "num_draft_tokens", "max_queue")
        if self.port > 65535:
            raise ConfigError(f"port: must be at most 65535, not {self.port}")
        self._at_least(1, "max_sequences", "prefill_rows", "draft_timeout_ms")
        self._positive("wait_seconds")
        check_address("target", self.target)
        for field in ("grpc_listen", "draft"):
            if (address := getattr(self, field)) is not None:
                check_address(field, address)
        if not isinstance(self.trace_share, (int, float)) or not 0 <= self.trace_share <= 1:
            raise ConfigError(f"trace_share: must be between 0 and 1, not {self.trace_share!r}")
