"""The `eyas` command: a function a subcommand. The only place that reads the environment."""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
import uvloop

from eyas.config import CommonConfig, DraftConfig, GatewayConfig, TargetConfig
from eyas.errors import EyasError, describe
from eyas.launch import Stack, find_models, make_stack, own_name
from eyas.models import DEFAULT_HEAD, DEFAULT_TARGET, default_home, resolve_head, resolve_target
from eyas.options import Command, configure, options, with_options
from eyas.runtime import die_with_parent, tune_openmp
from eyas.supervisor import run_services
from eyas.telemetry import start_logging

NO_HEAD = "none"
QUESTION = "How does an eagle catch a fish? Answer in a few sentences."

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_MODEL_HELP = "The model: a folder in Hugging Face format, a hub id (owner/name), or the built-in one."
_HEAD_HELP = "The EAGLE head: a folder, a hub id (owner/name), or the built-in one"
Model = Annotated[str, typer.Option(help=_MODEL_HELP)]
Head = Annotated[str, typer.Option(help=f"{_HEAD_HELP}.")]
HeadOrNone = Annotated[str, typer.Option(help=f"{_HEAD_HELP}; {NO_HEAD} decodes plainly.")]
Name = Annotated[str | None, typer.Option(help="Name to go by; left out, its own.")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest answer, in tokens.", min=1, metavar="<int>")]
Temperature = Annotated[float, typer.Option(help="0 takes the most probable token.", min=0, metavar="<float>")]
DraftTokens = Annotated[
    int | None,
    typer.Option(help="Draft tokens a round; left out, the gateway's default.", min=0, metavar="<int>"),
]
Parent = Annotated[int | None, typer.Option(hidden=True)]

_COMPUTING = options(TargetConfig, only=("dtype", "device", "threads", "context_length"))


def clear_errors(command: Command) -> Command:
    """An error becomes one clear line and exit code 1; `--log-level debug` shows where it came from."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        try:
            command(**values)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            if values.get("log_level") == "debug":
                raise
            _say(f"error: {_explain(error)}")
            raise typer.Exit(1) from None

    return run


def _explain(error: Exception) -> str:
    if isinstance(error, EyasError):
        return str(error)
    if isinstance(error, grpc.aio.AioRpcError):
        return describe(error)
    return f"{type(error).__name__}: {error} (--log-level debug shows where it happened)"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@app.callback()
def eyas() -> None:
    """Serve a language model with EAGLE speculative decoding: target, draft head and gateway, as services.

    The text is the same as without the head; it only comes faster. Models are kept in $EYAS_HOME, by default
    ~/.cache/eyas.
    """


@app.command()
@clear_errors
@with_options(
    options(GatewayConfig, without=("target", "draft", *(f.name for f in fields(CommonConfig)))),
    options(DraftConfig, only=("max_draft_tokens", "strict_head", "skip_self_test")),
    _COMPUTING,
    options(CommonConfig),
)
def up(*, target: Model = DEFAULT_TARGET, draft: HeadOrNone = DEFAULT_HEAD, **values: Any) -> None:
    """Start target, draft and gateway on this host, and keep them running until Ctrl-C.

    The gateway serves OpenAI's API under http://127.0.0.1:8000/v1; the services talk over Unix sockets. The
    built-in model is fetched at the first start.
    """
    stack = _stack(target, draft, values)

    async def body() -> None:
        _say(f"serving {stack.target.served_name} under {stack.url}/v1; Ctrl-C stops it")
        await asyncio.Event().wait()

    _run_stack(stack, body, echo=_say)


@app.command()
@clear_errors
@with_options(_COMPUTING, options(CommonConfig, only=("log_level",)))
def demo(
    *,
    target: Model = DEFAULT_TARGET,
    draft: HeadOrNone = DEFAULT_HEAD,
    question: Annotated[str, typer.Option(help="What to ask.")] = QUESTION,
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = 256,
    num_draft_tokens: DraftTokens = None,
    **values: Any,
) -> None:
    """Start everything, ask one question, show which tokens of the answer were drafted, and stop.

    The first time, the built-in model is fetched.
    """
    from eyas.client.demo import ask
    from eyas.client.rest import Settings

    stack = _stack(target, draft, {**values, "port": 0})
    settings = Settings(temperature=temperature, max_tokens=max_tokens, num_draft_tokens=num_draft_tokens)
    echo = _say if values["log_level"] == "debug" else lambda line: None
    _say("starting target, draft and gateway ...")
    if not _run_stack(stack, lambda: ask(stack.url, question, settings), echo=echo):
        raise typer.Exit(128 + signal.SIGINT)


@app.command()
@clear_errors
@with_options(options(TargetConfig, without=("model", "served_name")))
def target(
    *, model: Model = DEFAULT_TARGET, served_name: Name = None, parent: Parent = None, **values: Any
) -> None:
    """Serve a target model: the big one, which every token of the text comes from.

    It owns the key-value cache, checks what the head drafts, and draws the tokens.
    """
    config = configure(TargetConfig, values, model=Path(model), served_name=served_name or own_name(model))
    _prepare("target", config, parent)
    config = replace(config, model=resolve_target(model, default_home(os.environ), progress=_say))
    tune_openmp()
    from target_service.service import run

    uvloop.run(run(config))


@app.command()
@clear_errors
@with_options(options(DraftConfig, without=("head", "head_name")))
def draft(*, head: Head = DEFAULT_HEAD, head_name: Name = None, parent: Parent = None, **values: Any) -> None:
    """Serve an EAGLE head: the small one, which drafts tokens for a target to check.

    It waits for its target, reads the target's features, and is told by gateways what to draft.
    """
    config = configure(DraftConfig, values, head=Path(head), head_name=head_name or own_name(head))
    _prepare("draft", config, parent)
    config = replace(config, head=resolve_head(head, default_home(os.environ), progress=_say))
    tune_openmp()
    from draft_service.service import run

    uvloop.run(run(config))


@app.command()
@clear_errors
@with_options(options(GatewayConfig))
def gateway(*, parent: Parent = None, **values: Any) -> None:
    """Serve clients: OpenAI's API over REST, and gRPC if wanted.

    It drives the rounds of target and draft. Without a draft, or while it is away, the text is the same and
    comes more slowly.
    """
    config = configure(GatewayConfig, values)
    _prepare("gateway", config, parent)
    from gateway.service import run

    uvloop.run(run(config))


@app.command()
@clear_errors
def chat(
    *,
    url: Annotated[str, typer.Option(help="Address of the gateway.")] = "http://127.0.0.1:8000",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = None,
    num_draft_tokens: DraftTokens = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Decode plainly: the same text, without drafts.")
    ] = False,
) -> None:
    """Talk to the model of a running gateway; drafted tokens are marked."""
    from eyas.client.chat import converse
    from eyas.client.rest import Settings

    settings = Settings(
        temperature=temperature,
        max_tokens=max_tokens,
        speculation=not plain,
        num_draft_tokens=num_draft_tokens,
    )
    converse(url, settings, system)


@app.command()
def version() -> None:
    """Print the version."""
    print(importlib.metadata.version("eyas"))


def _prepare(name: str, config: CommonConfig, parent: int | None) -> None:
    """What comes before every service: `parent` is the supervisor's process, which it must not outlive."""
    if parent is not None:
        die_with_parent(parent)
    start_logging(name, config.log_level)


def _stack(target: str, draft: str, values: Mapping[str, Any]) -> Stack:
    """The services to start, their models found. Raises EyasError."""
    head = None if draft == NO_HEAD else draft
    return find_models(make_stack(target, head, values), default_home(os.environ), _say)


def _run_stack(stack: Stack, body: Callable[[], Awaitable[None]], *, echo: Callable[[str], None]) -> bool:
    folder = os.environ.get("XDG_RUNTIME_DIR")
    # After su or sudo it may be another user's.
    parent = Path(folder) if folder and os.access(folder, os.W_OK) else None
    return asyncio.run(run_services(stack.services, body, folder=parent, say=_say, echo=echo))


def main() -> None:
    """Entry point of `eyas` and of `python -m eyas`."""
    # gRPC's own notices, such as that a peer has gone, are no errors.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    app(prog_name="eyas")
