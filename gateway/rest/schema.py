"""Bodies of the requests. Unknown fields are passed over, as OpenAI's clients expect; a known one that is not
supported is refused unless its value changes nothing."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gateway.resolve import Ask, Chat, Prompt
from gateway.rest.errors import ApiError

MAX_TEMPERATURE = 2.0

# Fields of both routes, with the value that changes nothing; null never does.
_UNSUPPORTED: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "min_p": 0,
    "min_tokens": 0,
    "stop_token_ids": [],
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "response_format": {"type": "text"},
    "structured_outputs": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "prompt_logprobs": None,
}


class Body(BaseModel):
    """A JSON object; `UNSUPPORTED` are the fields it refuses, `PATH` leads to it."""

    model_config = ConfigDict(strict=True, extra="ignore")

    UNSUPPORTED: ClassVar[dict[str, Any]] = {}
    PATH: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in cls.UNSUPPORTED.keys() & values.keys():
                if values[name] is not None and values[name] != cls.UNSUPPORTED[name]:
                    param = f"{cls.PATH}{name}"
                    raise ApiError(400, f"{param} is not supported", param=param, code="unsupported_parameter")
        return values


class StreamOptions(Body):
    """OpenAI's object of that name."""

    include_usage: bool = False


class EyasOptions(BaseModel):
    """Eyas's own options."""

    model_config = ConfigDict(strict=True, extra="forbid")

    speculation: Annotated[bool | None, Field(description="False decodes plainly; the text is the same.")] = (
        None
    )
    num_draft_tokens: Annotated[int | None, Field(description="Draft tokens a round.")] = None
    provenance: Annotated[bool, Field(description="Tell of every token who proposed it, and when.")] = False


def _to_stops(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class CompletionBase(Body):
    """What both routes take."""

    UNSUPPORTED: ClassVar = _UNSUPPORTED

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: Annotated[
        tuple[str, ...] | None, BeforeValidator(_to_stops, json_schema_input_type=str | list[str] | None)
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    eyas: EyasOptions = EyasOptions()

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> CompletionBase:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for streams only", param="stream_options")
        return self

    def ask(self) -> Ask:
        """The request in the words of both front doors."""
        return Ask(
            prompts=self._prompts(),
            model=self.model,
            num_choices=1 if self.n is None else self.n,
            temperature=self.temperature,
            max_temperature=MAX_TEMPERATURE,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            seed=self.seed,
            max_tokens=self._max_tokens(),
            stop=self.stop or (),
            speculation=self.eyas.speculation,
            num_draft_tokens=self.eyas.num_draft_tokens,
        )

    def param(self, field: str) -> str:
        """This body's name of a field of Ask."""
        names = {"num_choices": "n", "speculation": "eyas.speculation"}
        return (names | {"num_draft_tokens": "eyas.num_draft_tokens"} | self._names()).get(field, field)

    def _prompts(self) -> list[Prompt]:
        raise NotImplementedError

    def _max_tokens(self) -> int | None:
        return self.max_tokens

    def _names(self) -> dict[str, str]:
        raise NotImplementedError


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def _to_prompts(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if _is_ids(value):
        return [tuple(value)]
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return value
    if isinstance(value, list) and value and all(_is_ids(part) for part in value):
        return [tuple(part) for part in value]
    raise ValueError("a string, a list of strings, a list of token ids or a list of such lists is expected")


class CompletionRequest(CompletionBase):
    """POST /v1/completions."""

    UNSUPPORTED: ClassVar = _UNSUPPORTED | {"logprobs": None, "best_of": 1, "echo": False, "suffix": ""}

    prompt: Annotated[
        list[str | tuple[int, ...]],
        BeforeValidator(_to_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]

    def _prompts(self) -> list[Prompt]:
        return list(self.prompt)

    def _names(self) -> dict[str, str]:
        return {"prompts": "prompt"}


def _to_text(content: Any) -> Any:
    """The text of a message; parts of it are joined by line breaks."""
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError("only parts of type text are supported")
    return "\n".join(part["text"] for part in content)


class ChatMessage(Body):
    """One turn of a conversation."""

    UNSUPPORTED: ClassVar = {"tool_calls": [], "tool_call_id": None, "function_call": None, "audio": None}
    PATH: ClassVar = "messages."

    role: str
    content: Annotated[str, BeforeValidator(_to_text, json_schema_input_type=str | list[dict[str, str]])]
    name: str | None = None


class ChatRequest(CompletionBase):
    """POST /v1/chat/completions."""

    UNSUPPORTED: ClassVar = _UNSUPPORTED | {
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "none",
        "functions": [],
        "function_call": "none",
        "modalities": ["text"],
        "audio": None,
        "prediction": None,
        "reasoning_effort": None,
        "web_search_options": None,
        "chat_template": None,
        "chat_template_kwargs": {},
        "add_generation_prompt": True,
        "continue_final_message": False,
    }

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatRequest:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens differ", param="max_completion_tokens")
        return self

    def _prompts(self) -> list[Prompt]:
        return [Chat(tuple(message.model_dump(exclude_none=True) for message in self.messages))]

    def _max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _names(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"prompts": "messages", "max_tokens": limit}
