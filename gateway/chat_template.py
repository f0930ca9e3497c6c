"""A model's chat template, rendered as Hugging Face's tokenizers render it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eyas.errors import EyasError


class ChatTemplateError(EyasError):
    """The model has no chat template, or the template rejects the conversation."""


class ChatTemplate:
    """`source` in jinja, None where the model has no template; `special_tokens` (bos_token, eos_token, ...) are
    variables of it."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The conversation as the model was trained to read it. Raises ChatTemplateError."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatTemplateError(f"the model's chat template rejects the messages: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        if self._source is None:
            raise ChatTemplateError("the model has no chat template; only plain completions are possible")
        return _environment().from_string(self._source)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part of a template for training; here its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.Environment:
    """What chat templates are written for; they come with checkpoints and are not trusted."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """jinja2's own filter escapes HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
