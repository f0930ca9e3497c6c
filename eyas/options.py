"""Command-line options made from the configuration classes, and a configuration turned into a command line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from eyas.config import CommonConfig, ModelConfig

Command = Callable[..., None]
Config = TypeVar("Config", bound=CommonConfig)

# Headings of the help page, by the class that has the field.
_PANELS = {CommonConfig: "Logs and traces", ModelConfig: "Computing"}


def options(
    config: type[CommonConfig], *, only: Collection[str] | None = None, without: Collection[str] = ()
) -> list[inspect.Parameter]:
    """One option for every field, or for those in `only`: its name, type, default and help are the field's."""
    hints = get_type_hints(config, include_extras=True)
    fields = [
        f for f in dataclasses.fields(config) if (only is None or f.name in only) and f.name not in without
    ]
    # The service's own options first.
    fields.sort(key=lambda field: list(config.__mro__).index(_owner(config, field.name)))
    return [_option(config, field, hints[field.name]) for field in fields]


def configure(kind: type[Config], values: Mapping[str, Any], **more: Any) -> Config:
    """The configuration made of those `values` that are its fields. Raises ConfigError."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind.from_mapping({name: value for name, value in values.items() if name in names} | more)


def flag(name: str) -> str:
    """The option's name for a field."""
    return f"--{name.replace('_', '-')}"


def _option(config: type[CommonConfig], field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    kind, text = get_args(hint)
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    option = typer.Option(
        flag(field.name),
        help=f"{text} ({', '.join(choices)})" if choices else text,
        metavar="<choice>" if choices else None,
        rich_help_panel=_PANELS.get(_owner(config, field.name), "Options"),
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
        annotation=Annotated[kind, option],
    )


def _owner(config: type, name: str) -> type:
    """The most basic class that has the field."""
    return next(cls for cls in reversed(config.__mro__) if name in inspect.get_annotations(cls))


def with_options(*parameters: list[inspect.Parameter]) -> Callable[[Command], Command]:
    """Gives a command, written as `def command(own options, **values)`, these options for its `values`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(**values)

        hints = get_type_hints(command, include_extras=True)
        own = [
            p.replace(annotation=hints[name])
            for name, p in inspect.signature(command).parameters.items()
            if p.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        run.__signature__ = inspect.Signature([*own, *itertools.chain(*parameters)])  # type: ignore[attr-defined]
        return run

    return decorate


def arguments(config: CommonConfig) -> list[str]:
    """The options that make this configuration; those that have their default are left out."""
    words = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != field.default:
            # A switch is off by default, and has no value.
            words += [flag(field.name)] if value is True else [flag(field.name), str(value)]
    return words
