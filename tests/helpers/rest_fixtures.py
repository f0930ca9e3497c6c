"""Fixtures `gateway`, the REST API on a real socket, and `client`, OpenAI's own.

A test module names this one in `pytest_plugins`, and runs its tests in the module's event loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import openai
import pytest
import pytest_asyncio
import uvicorn

from gateway.rest.app import create_app
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.rest_gateway import MAX_BODY_BYTES, Gateway


class _Server(uvicorn.Server):
    """Leaves the process's signals to pytest."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    app = create_app(
        gateway,
        gateway.tokenizer,
        is_healthy=lambda: gateway.healthy,
        metrics=lambda: b"eyas_rounds_total 7.0\n",
        version="1.2.3",
        max_body_bytes=MAX_BODY_BYTES,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gateway.port = listener.getsockname()[1]
        config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        web = _Server(config)
        serving = asyncio.create_task(web.serve(sockets=[listener]))
        yield gateway
        web.should_exit = True
        await serving


@pytest.fixture
def gateway(server: Gateway) -> Iterator[Gateway]:
    server.engine, server.healthy = FakeEngine(), True
    yield server
    assert server.engine.num_open == 0


@pytest.fixture
def client(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
