"""A client of the gateway's REST API that shows who proposed each token."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx

from eyas.errors import EyasError

Json = dict[str, Any]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLL_SECONDS = 0.1


class RestError(EyasError):
    """A request that the gateway refused, or that did not reach it."""


@dataclass(frozen=True)
class Piece:
    """Text that one token brought; `drafted` if the head proposed that token."""

    text: str
    drafted: bool


@dataclass(frozen=True)
class Summary:
    """What a finished answer took. `acceptance_length` is None where nothing was drafted."""

    finish_reason: str
    completion_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_length: float | None
    times_ms: Mapping[str, float]  # of the parts draft, target, wire and gateway

    @property
    def seconds(self) -> float:
        """From the first round to the last."""
        return sum(self.times_ms.values()) / 1000

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answer in that time."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Settings:
    """How to generate; None leaves it to the gateway."""

    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    speculation: bool = True
    num_draft_tokens: int | None = None


class Client:
    """Talks to the gateway at `url`, for instance http://127.0.0.1:8000."""

    def __init__(self, url: str) -> None:
        try:
            base = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise RestError(f"{url}: {error}") from None
        if base.scheme not in ("http", "https") or not base.host:
            raise RestError(f"{url!r} is not an http:// address")
        self._url = url
        # No time limit between tokens: the first one may be behind a queue. A proxy cannot see our loopback.
        timeout = httpx.Timeout(None, connect=5)
        self._http = httpx.AsyncClient(base_url=base, timeout=timeout, trust_env=base.host not in _LOOPBACK)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def wait_until_healthy(self, seconds: float) -> None:
        """Returns once the gateway says that it can generate. Raises RestError after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while not await self._is_healthy():
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise RestError(f"the gateway at {self._url} did not come up within {seconds:g} s") from None

    async def _is_healthy(self) -> bool:
        try:
            return (await self._http.get("/health")).is_success
        except httpx.TransportError:
            return False

    async def model(self) -> Json:
        """The served model, as /v1/models lists it. Raises RestError."""
        with self._clear_errors():
            response = await self._http.get("/v1/models")
            _check(response.status_code, response.content)
            model: Json = response.json()["data"][0]
            return model

    async def chat(
        self, messages: Sequence[Mapping[str, str]], settings: Settings
    ) -> AsyncGenerator[Piece | Summary, None]:
        """The answer, token by token; last its summary. Raises RestError."""
        with self._clear_errors():
            async with self._http.stream(
                "POST", "/v1/chat/completions", json=_body(messages, settings)
            ) as response:
                if not response.is_success:
                    _check(response.status_code, await response.aread())
                async for item in _items(_events(response.aiter_lines())):
                    yield item

    @contextlib.contextmanager
    def _clear_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise RestError(f"no connection to {self._url}: {str(error) or type(error).__name__}") from None


def _body(messages: Sequence[Mapping[str, str]], settings: Settings) -> Json:
    extension: Json = {"provenance": True, "speculation": settings.speculation}
    if settings.speculation and settings.num_draft_tokens is not None:
        extension["num_draft_tokens"] = settings.num_draft_tokens
    body: Json = {"messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
    for name in ("temperature", "max_tokens", "seed"):
        if (value := getattr(settings, name)) is not None:
            body[name] = value
    return {**body, "eyas": extension}


async def _events(lines: AsyncIterator[str]) -> AsyncIterator[Json]:
    """The JSON of each server-sent event. Raises RestError for one that is an error, and for an early end."""
    async for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            event: Json = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RestError(event["error"]["message"])
            yield event
    raise RestError("the gateway ended the answer early")


async def _items(events: AsyncIterator[Json]) -> AsyncGenerator[Piece | Summary, None]:
    finish_reason = ""
    async for event in events:
        eyas: Json = event.get("eyas") or {}
        for token in eyas.get("tokens", ()):
            yield Piece(token["text"], token["source"] == "draft")
        for choice in event["choices"]:
            finish_reason = choice["finish_reason"] or finish_reason
        if "speculation" in eyas:
            yield _summary(finish_reason, event["usage"]["completion_tokens"], eyas)


def _summary(finish_reason: str, completion_tokens: int, eyas: Json) -> Summary:
    speculation = eyas["speculation"]
    return Summary(
        finish_reason,
        completion_tokens,
        speculation["num_rounds"],
        speculation["num_draft_tokens"],
        speculation["num_accepted_tokens"],
        speculation["acceptance_length"],
        {part: eyas["times_ms"][part] for part in ("draft", "target", "wire", "gateway")},
    )


def _check(status: int, body: bytes) -> None:
    """Raises RestError with the gateway's own words unless the status is a success."""
    if status < 400:
        return
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"HTTP status {status}"
    raise RestError(f"the gateway refused: {message}")
