"""Configurations: what is refused, and that the message names the field."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from eyas.config import (
    CommonConfig,
    ConfigError,
    DraftConfig,
    GatewayConfig,
    TargetConfig,
    socket_path,
    split_host_port,
)

TARGET = {"model": Path("/models/target"), "served_name": "target"}
DRAFT = {"head": Path("/models/head"), "head_name": "head"}

GOOD = [
    (TargetConfig, {"listen": "unix:/run/eyas/target.sock", "device": "cuda:1", "dtype": "float32"}),
    (TargetConfig, {"listen": "[::1]:0", "metrics_listen": "127.0.0.1:9090"}),
    (DraftConfig, {"rope_theta": 5e5, "target": "target:50051"}),
    (DraftConfig, {"rope_scaling": '{"rope_type": "linear", "factor": 2}', "taps": "2,15,27"}),
    (GatewayConfig, {"draft": "unix:/draft", "num_draft_tokens": 0, "max_queue": 0, "trace_share": 0.25}),
    (GatewayConfig, {"otlp_endpoint": "http://collector:4317", "grpc_listen": "0.0.0.0:9000"}),
]

BAD = [
    (TargetConfig, "listen", "target"),
    (TargetConfig, "listen", "host:65536"),
    (TargetConfig, "listen", "unix:relative.sock"),
    (TargetConfig, "listen", f"unix:/{'x' * 107}"),
    (TargetConfig, "metrics_listen", "unix:/metrics"),
    (TargetConfig, "dtype", "int8"),
    (TargetConfig, "device", "tpu"),
    (TargetConfig, "device", "cuda:"),
    (TargetConfig, "page_size", 0),
    (TargetConfig, "num_pages", -1),
    (TargetConfig, "threads", 1.5),
    (TargetConfig, "max_rows", True),
    (TargetConfig, "context_length", -1),
    (TargetConfig, "served_name", ""),
    (TargetConfig, "log_level", "loud"),
    (DraftConfig, "head_name", ""),
    (DraftConfig, "listen", ":1"),
    (DraftConfig, "target", ""),
    (DraftConfig, "max_draft_tokens", 0),
    (DraftConfig, "rope_theta", 0.0),
    (DraftConfig, "rope_scaling", "[8]"),
    (DraftConfig, "rope_scaling", "linear"),
    (DraftConfig, "taps", "2, 3"),
    (DraftConfig, "taps", "0,3"),
    (DraftConfig, "head_floor", 1.1),
    (DraftConfig, "wait_seconds", float("inf")),
    (GatewayConfig, "host", ""),
    (GatewayConfig, "port", -1),
    (GatewayConfig, "port", 65536),
    (GatewayConfig, "grpc_listen", "9000"),
    (GatewayConfig, "target", "nowhere"),
    (GatewayConfig, "draft", "nowhere"),
    (GatewayConfig, "num_draft_tokens", -1),
    (GatewayConfig, "max_sequences", 0),
    (GatewayConfig, "max_queue", -1),
    (GatewayConfig, "prefill_rows", 0),
    (GatewayConfig, "draft_timeout_ms", 0),
    (GatewayConfig, "wait_seconds", 0),
    (GatewayConfig, "trace_share", 1.1),
    (GatewayConfig, "trace_share", "all"),
    (GatewayConfig, "otlp_endpoint", "collector:4317"),
]


def make(kind: type[CommonConfig], **values: Any) -> CommonConfig:
    required = {TargetConfig: TARGET, DraftConfig: DRAFT}.get(kind, {})
    return kind.from_mapping({**required, **values})


@pytest.mark.parametrize(("kind", "values"), GOOD)
def test_good_values_are_kept(kind: type[CommonConfig], values: dict[str, Any]) -> None:
    config = make(kind, **values)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize(("kind", "field", "value"), BAD)
def test_bad_value_is_refused_by_name(kind: type[CommonConfig], field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        make(kind, **{field: value})


def test_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^max_batch: TargetConfig has no such field"):
        make(TargetConfig, max_batch=4)


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^head_name: missing"):
        DraftConfig.from_mapping({"head": Path("/head")})


def test_configurations_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GatewayConfig().port = 1  # type: ignore[misc]


def test_default_addresses_fit_together() -> None:
    target, draft, gateway = make(TargetConfig), make(DraftConfig), GatewayConfig()
    assert isinstance(target, TargetConfig)
    assert isinstance(draft, DraftConfig)
    assert gateway.target == draft.target == target.listen != draft.listen


def test_parts_of_addresses() -> None:
    assert socket_path("unix:/run/a.sock") == Path("/run/a.sock")
    assert socket_path("host:1") is None
    assert split_host_port("[::1]:80") == ("::1", 80)
    assert split_host_port("host:80") == ("host", 80)
    for address in ("host", "host:", ":80", "host:-1", "host:٣"):
        with pytest.raises(ValueError, match="neither unix:/path nor host:port"):
            split_host_port(address)
