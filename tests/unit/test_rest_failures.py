"""The REST API when the engine fails, and when the client hangs up."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from typing import Any

import openai
import pytest

from gateway.request import QueueFull, TargetUnavailable
from tests.helpers.fake_engine import CARD, FakeEngine
from tests.helpers.rest_gateway import HELLO, Gateway, error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
pytest_plugins = ["tests.helpers.rest_fixtures"]

# --- failures of the engine ---

FAILURES: list[tuple[Exception, type[openai.APIStatusError], int, str]] = [
    (QueueFull("too many requests wait"), openai.RateLimitError, 429, "too many requests wait"),
    (TargetUnavailable("the target is away"), openai.InternalServerError, 503, "the target is away"),
    (RuntimeError("secret"), openai.InternalServerError, 500, "internal error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "expected", "status", "message"), FAILURES)
async def test_failure_before_the_first_delta_has_a_status(
    gateway: Gateway,
    client: openai.AsyncOpenAI,
    error: Exception,
    expected: type[openai.APIStatusError],
    status: int,
    message: str,
    stream: bool,
) -> None:
    gateway.engine = FakeEngine(error=error, fail_at=0)
    with pytest.raises(expected, match=message) as raised:
        await client.chat.completions.create(model="org/tiny", messages=HELLO, n=2, stream=stream)
    assert raised.value.status_code == status
    assert "secret" not in str(raised.value)
    assert ("retry-after" in raised.value.response.headers) == (status == 429)
    assert raised.value.response.headers["x-request-id"]
    await gateway.engine.wait_for(num_open=0)


async def test_target_away_before_anything_is_known(gateway: Gateway) -> None:
    gateway.engine = FakeEngine(target_error=TargetUnavailable("the target is away"))
    for response in (await gateway.post({"messages": HELLO}), await gateway.get("/v1/models")):
        assert response.status_code == 503
        assert error_of(response)["message"] == "the target is away"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TargetUnavailable("the target is away"), "the target is away"),
        (RuntimeError("secret"), "internal error"),
    ],
)
async def test_failure_in_a_stream_is_an_event(
    gateway: Gateway,
    client: openai.AsyncOpenAI,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    message: str,
) -> None:
    gateway.engine = FakeEngine(error=error, fail_at=2)
    stream = await client.chat.completions.create(model="org/tiny", messages=HELLO, n=2, stream=True)
    with caplog.at_level(logging.ERROR), pytest.raises(openai.APIError, match=message) as raised:
        _ = [chunk async for chunk in stream]
    assert "secret" not in str(raised.value)
    assert ("secret" in caplog.text) == isinstance(error, RuntimeError)
    response = await gateway.post({"messages": HELLO, "stream": True})
    assert "Hell" in response.text
    assert response.text.endswith("}}\n\n")
    assert "[DONE]" not in response.text


# --- a client that hangs up ---


async def hang_up(gateway: Gateway, body: dict[str, Any], until: bytes | None) -> None:
    """Sends a request, reads up to `until`, and closes the connection once every choice is open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
    if until is not None:
        await reader.readuntil(until)
    await gateway.engine.wait_for(num_open=body.get("n", 1))
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("fields", "hang_at", "until"),
    [
        ({"stream": False}, 0, None),
        ({"stream": False}, 3, None),
        ({"stream": False, "n": 3}, 1, None),
        ({"stream": True}, 0, None),
        ({"stream": True}, 2, b"Hell"),
        ({"stream": True, "n": 3}, 2, b"Hell"),
    ],
)
async def test_hang_up_ends_the_generation(
    gateway: Gateway, fields: dict[str, Any], hang_at: int, until: bytes | None
) -> None:
    gateway.engine = FakeEngine(hang_at=hang_at)
    async with asyncio.timeout(10):
        await hang_up(gateway, {"messages": HELLO} | fields, until)
        await gateway.engine.wait_for(num_open=0)


async def test_slow_reader_that_hangs_up_ends_the_generation(gateway: Gateway) -> None:
    """The server is stuck in sending, not in the engine."""
    card = dataclasses.replace(CARD, context_length=10**6, default_draft_tokens=0)
    gateway.engine = FakeEngine(answer=lambda request: [97] * 10**6, served=card)
    async with asyncio.timeout(30):
        await hang_up(gateway, {"messages": HELLO, "stream": True}, b"data: ")
        await gateway.engine.wait_for(num_open=0)


async def test_openai_client_that_closes_its_stream_ends_the_generation(
    gateway: Gateway, client: openai.AsyncOpenAI
) -> None:
    gateway.engine = FakeEngine(hang_at=2)
    async with asyncio.timeout(10):
        stream = await client.chat.completions.create(model="org/tiny", messages=HELLO, stream=True)
        await anext(stream)
        assert gateway.engine.num_open == 1
        await stream.close()
        await gateway.engine.wait_for(num_open=0)
