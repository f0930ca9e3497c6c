"""Command-line options: made from the configurations, and a configuration turned into them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from eyas.config import CommonConfig, ConfigError, DraftConfig, GatewayConfig, TargetConfig
from eyas.options import arguments, configure, options, with_options

CONFIGS = [
    TargetConfig(model=Path("/models/a b"), served_name="--odd name"),
    TargetConfig(
        model=Path("/m"),
        served_name="m",
        listen="unix:/t.sock",
        dtype="float32",
        device="cuda:0",
        num_pages=7,
        metrics_listen="127.0.0.1:9",
        trace_console=True,
        log_level="debug",
    ),
    DraftConfig(head=Path("/h"), head_name="h", target_checkpoint=Path("/t"), rope_theta=1e6, wait_seconds=0.5),
    GatewayConfig(),
    GatewayConfig(draft="unix:/d.sock", port=0, trace_share=0.125, otlp_endpoint="http://c:4317"),
]


def run(kind: type[CommonConfig], *words: str) -> Any:
    """What the command line makes of `kind`."""
    app, made = typer.Typer(), []

    @app.command()
    @with_options(options(kind))
    def command(**values: Any) -> None:
        made.append(configure(kind, values))

    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return made[0]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_arguments_make_the_same_configuration(config: CommonConfig) -> None:
    assert run(type(config), *arguments(config)) == config


def test_arguments_leave_defaults_out() -> None:
    assert arguments(GatewayConfig()) == []
    assert arguments(GatewayConfig(port=1, trace_console=True)) == ["--trace-console", "--port", "1"]


@pytest.mark.parametrize("kind", [TargetConfig, DraftConfig, GatewayConfig])
def test_every_field_has_an_option_with_help(kind: type[CommonConfig]) -> None:
    app = typer.Typer()
    app.command()(with_options(options(kind))(lambda **values: None))
    page = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).output.split())
    for field in dataclasses.fields(kind):
        assert f"--{field.name.replace('_', '-')} " in page
    assert "(debug, info, warning, error)" in page


def test_options_can_be_chosen() -> None:
    assert [option.name for option in options(GatewayConfig, only=("port", "host"))] == ["host", "port"]
    assert "port" not in {option.name for option in options(GatewayConfig, without=("port",))}


def test_configure_takes_its_own_fields_and_checks_them() -> None:
    values = {"port": 1, "dtype": "float32"}
    assert configure(GatewayConfig, values) == GatewayConfig(port=1)
    with pytest.raises(ConfigError, match=r"^port: "):
        configure(GatewayConfig, values, port=-1)
