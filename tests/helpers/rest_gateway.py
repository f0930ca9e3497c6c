"""Talking to the REST API of a gateway whose engine is fake."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from gateway.request import Delta, GenerationRequest, ModelCard
from gateway.text import Tokenizer
from tests.helpers.fake_engine import FakeEngine

MAX_BODY_BYTES = 20_000
HELLO: list[Any] = [{"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}


class Gateway:
    """One server for all tests; each has an engine of its own behind it."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.healthy = True
        self.port = 0

    @property
    def card(self) -> ModelCard:
        return self.engine.card

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        return self.engine.generate(request)

    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, body: object, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        """Sends a JSON body; bytes go as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with httpx.AsyncClient(base_url=self.url) as client:
            return await client.post(path, content=content, headers=JSON | headers)

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url) as client:
            return await client.get(path)


def events(response: httpx.Response) -> list[Any]:
    """The stream's chunks, without the final [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, which has OpenAI's four fields and no others."""
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return dict(body["error"])
