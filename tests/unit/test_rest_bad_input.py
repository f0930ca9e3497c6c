"""What the REST API refuses, and how it says so."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.fake_engine import FakeEngine
from tests.helpers.rest_gateway import HELLO, JSON, MAX_BODY_BYTES, Gateway, error_of
from tests.helpers.tiny_tokenizer import tiny_tokenizer_files

pytestmark = pytest.mark.asyncio(loop_scope="module")
pytest_plugins = ["tests.helpers.rest_fixtures"]

BAD_FOR_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**32}, "top_k"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop.1"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"model": 5}, "model"),
    ({"eyas": {"speculate": True}}, "eyas.speculate"),
    ({"eyas": {"\ud83d": True}}, "eyas"),
    ({"eyas": {"num_draft_tokens": 9}}, "eyas.num_draft_tokens"),
    ({"eyas": {"num_draft_tokens": -1}}, "eyas.num_draft_tokens"),
    ({"eyas": {"num_draft_tokens": "3"}}, "eyas.num_draft_tokens"),
    ({"eyas": {"speculation": False, "num_draft_tokens": 3}}, "eyas.num_draft_tokens"),
    ({"eyas": {"speculation": "off"}}, "eyas.speculation"),
    ({"eyas": 5}, "eyas"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -0.5}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"min_p": 0.1}, "min_p"),
    ({"stop_token_ids": [1]}, "stop_token_ids"),
]
BAD_FOR_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages.0"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ({"messages": [{"content": "hi"}]}, "messages.0.role"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages"),
    ({"messages": [HELLO[0] | {"tool_calls": [{"id": "1"}]}]}, "messages.tool_calls"),
    ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"functions": [{}]}, "functions"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
]
BAD_FOR_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [259]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a", "\ud83d"]}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ({"echo": True}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"logprobs": 0}, "logprobs"),
]
CHAT_ROUTE = ("/v1/chat/completions", {"messages": HELLO})
COMPLETION_ROUTE = ("/v1/completions", {"prompt": "hi"})
BAD = [
    *((route, *bad) for route in (CHAT_ROUTE, COMPLETION_ROUTE) for bad in BAD_FOR_BOTH),
    *((CHAT_ROUTE, *bad) for bad in BAD_FOR_CHAT),
    *((COMPLETION_ROUTE, *bad) for bad in BAD_FOR_COMPLETION),
]


@pytest.mark.parametrize(("route", "fields", "param"), BAD)
async def test_bad_field_is_named(
    gateway: Gateway, route: tuple[str, dict[str, Any]], fields: dict[str, Any], param: str
) -> None:
    path, good = route
    response = await gateway.post(good | fields, path)
    error = error_of(response)
    assert response.status_code == 400
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert param in error["message"]
    assert gateway.engine.requests == []


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[]", b'"text"', b"null", b"\xff", b"[" * 10_000, b'{"messages": 1e}']
)
async def test_bodies_that_are_no_object(gateway: Gateway, body: bytes) -> None:
    response = await gateway.post(body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


async def test_body_of_another_type(gateway: Gateway) -> None:
    response = await gateway.post({"messages": HELLO}, **{"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "Content-Type" in error_of(response)["message"]


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_too_large(gateway: Gateway, chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * MAX_BODY_BYTES}).encode()

    async def parts() -> AsyncIterator[bytes]:
        yield body[:10_000]
        yield body[10_000:]

    async with httpx.AsyncClient(base_url=gateway.url) as client:
        content = parts() if chunked else body
        response = await client.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 413
    assert str(MAX_BODY_BYTES) in error_of(response)["message"]


async def test_context_length(gateway: Gateway, client: openai.AsyncOpenAI) -> None:
    for body in ({"prompt": "x" * 128}, {"prompt": "x" * 100, "max_tokens": 29}):
        response = await gateway.post(body, "/v1/completions")
        assert response.status_code == 400
        error = error_of(response)
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        assert "128" in error["message"]
    assert (await gateway.post({"prompt": "x" * 127}, "/v1/completions")).status_code == 200
    assert (await gateway.post({"prompt": "x" * 100, "max_tokens": 28}, "/v1/completions")).status_code == 200
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(
            model="org/tiny", messages=[{"role": "user", "content": "x" * 128}]
        )
    assert raised.value.code == "context_length_exceeded"


async def test_unknown_model(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        await client.chat.completions.create(model="other", messages=HELLO)
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("template", [None, "{{ raise_exception('user first') }}"])
async def test_chat_template_that_is_missing_or_rejects(gateway: Gateway, template: str | None) -> None:
    files = tiny_tokenizer_files()
    files["tokenizer_config.json"] = json.dumps({"chat_template": template}).encode()
    gateway.engine = FakeEngine(tokenizer_files=files)
    response = await gateway.post({"messages": HELLO})
    assert response.status_code == 400
    assert ("user first" if template else "no chat template") in error_of(response)["message"]
    assert (await gateway.post({"prompt": "hi"}, "/v1/completions")).status_code == 200


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nope", 404), ("PUT", "/health", 405)])
async def test_no_such_route(gateway: Gateway, method: str, path: str, status: int) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        response = await client.request(method, path)
    assert response.status_code == status
    assert path in error_of(response)["message"]
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("request_id", ["has space", "x" * 129, "tab\there"])
async def test_request_id_that_cannot_be_kept(gateway: Gateway, request_id: str) -> None:
    response = await gateway.post({"messages": HELLO}, **{"X-Request-Id": request_id})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "X-Request-Id"


async def test_request_id_comes_back_with_an_error(gateway: Gateway) -> None:
    response = await gateway.post(b"{", **{"X-Request-Id": "mine"})
    assert response.headers["x-request-id"] == "mine"
