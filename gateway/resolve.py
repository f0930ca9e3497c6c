"""What a client asks for, checked and filled with defaults; the same for REST and gRPC."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eyas.errors import EyasError
from gateway.chat_template import ChatTemplateError
from gateway.request import GenerationRequest, ModelCard, Sampling
from gateway.text import Tokenizer

MAX_TEMPERATURE = 100.0
MAX_STOP_STRINGS = 4
MAX_CHOICES = 128  # all prompts of a request together
MAX_UINT32 = 2**32 - 1
ROLES = ("system", "user", "assistant")
RETRY_AFTER_SECONDS = 1  # what a client is told that finds the queue full


class InvalidRequestError(EyasError):
    """`field` is a field of Ask; the message says what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(InvalidRequestError):
    """Prompt and answer together would be longer than the context."""


class UnknownModelError(InvalidRequestError):
    """Another model than the served one."""

    def __init__(self, model: str) -> None:
        super().__init__("model", f"the model {model!r} does not exist")


@dataclass(frozen=True)
class Chat:
    """A conversation: turns with `role` and `content`, oldest first."""

    messages: tuple[Mapping[str, str], ...]


Prompt = str | tuple[int, ...] | Chat


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request as it came in: `num_choices` answers to each prompt; None where the client does not say."""

    prompts: Sequence[Prompt]
    model: str | None = None
    num_choices: int = 1
    temperature: float | None = None
    max_temperature: float = MAX_TEMPERATURE
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    speculation: bool | None = None
    num_draft_tokens: int | None = None


def resolve(
    ask: Ask, card: ModelCard, tokenizer: Tokenizer, *, request_id: str, traceparent: str
) -> list[GenerationRequest]:
    """One generation for every choice: those of the first prompt, then of the next. Raises InvalidRequestError.

    Encodes the prompts, so call it in a thread. All choices share the seed, and differ in `choice_index`.
    """
    if ask.model not in (None, "", card.model):
        raise UnknownModelError(ask.model or "")
    _check_choices(ask)
    _check_stop(ask.stop)
    sampling = _sampling(ask)
    num_draft_tokens = _num_draft_tokens(ask, card)
    first_choices = [
        GenerationRequest(
            request_id=request_id,
            prompt_ids=ids,
            sampling=sampling,
            max_tokens=_max_tokens(ask.max_tokens, len(ids), card.context_length),
            stop=ask.stop,
            num_draft_tokens=num_draft_tokens,
            traceparent=traceparent,
        )
        for ids in (_prompt_ids(prompt, card, tokenizer) for prompt in ask.prompts)
    ]
    return [
        replace(request, sampling=replace(sampling, choice_index=index))
        for request in first_choices
        for index in range(ask.num_choices)
    ]


def _check_choices(ask: Ask) -> None:
    _in_range("num_choices", ask.num_choices, 1, MAX_CHOICES)
    if not ask.prompts:
        raise InvalidRequestError("prompts", "at least one prompt is needed")
    if len(ask.prompts) * ask.num_choices > MAX_CHOICES:
        raise InvalidRequestError("prompts", f"more than {MAX_CHOICES} choices in one request")


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError("stop", f"at most {MAX_STOP_STRINGS} stop strings, not {len(stop)}")
    if "" in stop:
        raise InvalidRequestError("stop", "a stop string must not be empty")


def _sampling(ask: Ask) -> Sampling:
    temperature = 1.0 if ask.temperature is None else ask.temperature
    _in_range("temperature", temperature, 0, ask.max_temperature)
    top_p = 1.0 if ask.top_p is None else ask.top_p
    if not 0 < top_p <= 1:
        raise InvalidRequestError("top_p", f"must be above 0 and at most 1, not {top_p}")
    top_k = ask.top_k or 0
    _in_range("top_k", top_k, 0, MAX_UINT32)
    # 53 bits survive every JSON reader, so a reported seed can be sent back.
    seed = secrets.randbits(53) if ask.seed is None else ask.seed
    _in_range("seed", seed, 0, 2**64 - 1)
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)


def _num_draft_tokens(ask: Ask, card: ModelCard) -> int:
    if ask.num_draft_tokens is not None:
        _in_range("num_draft_tokens", ask.num_draft_tokens, 0, card.max_draft_tokens)
    if ask.speculation is False:
        if ask.num_draft_tokens:
            raise InvalidRequestError("num_draft_tokens", "must not be above 0 where speculation is off")
        return 0
    return card.default_draft_tokens if ask.num_draft_tokens is None else ask.num_draft_tokens


def _prompt_ids(prompt: Prompt, card: ModelCard, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(prompt, Chat):
        ids = _encode(_render(prompt, tokenizer), tokenizer, add_special_tokens=False)
    elif isinstance(prompt, str):
        ids = _encode(prompt, tokenizer, add_special_tokens=True)
    else:
        ids = prompt
    if not ids:
        raise InvalidRequestError("prompts", "a prompt needs at least one token")
    if not (min(ids) >= 0 and max(ids) < card.vocab_size):
        wrong = next(i for i in ids if not 0 <= i < card.vocab_size)
        raise InvalidRequestError("prompts", f"token ids lie in [0, {card.vocab_size - 1}]; {wrong} does not")
    return ids


def _encode(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool) -> tuple[int, ...]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON's escapes can say what no text holds
        raise InvalidRequestError("prompts", f"not Unicode text: {error.reason}") from error
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _render(chat: Chat, tokenizer: Tokenizer) -> str:
    if not chat.messages:
        raise InvalidRequestError("prompts", "at least one message is needed")
    for i, message in enumerate(chat.messages):
        if message["role"] not in ROLES:
            raise InvalidRequestError("prompts", f"message {i}: role {message['role']!r} is none of {ROLES}")
    try:
        return tokenizer.render_chat(chat.messages)
    except ChatTemplateError as error:
        raise InvalidRequestError("prompts", str(error)) from error


def _max_tokens(asked: int | None, num_prompt_tokens: int, context_length: int) -> int:
    """What is asked for, or the rest of the context."""
    if asked is not None and asked < 1:
        raise InvalidRequestError("max_tokens", f"must be at least 1, not {asked}")
    num_tokens = num_prompt_tokens + (asked or 1)
    if num_tokens > context_length:
        raise ContextLengthError(
            "prompts",
            f"this model's maximum context length is {context_length} tokens, but {num_tokens} are needed"
            f" ({num_prompt_tokens} in the prompt, {asked or 'at least 1'} in the answer)",
        )
    return asked or context_length - num_prompt_tokens


def _in_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        raise InvalidRequestError(field, f"must lie in [{low}, {high}], not {value}")
