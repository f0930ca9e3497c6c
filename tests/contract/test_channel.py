"""Waiting for a service: what is said meanwhile, and when it is given up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from eyas.channel import NotServing, open_channel, wait_until_serving
from eyas.server import Server

SERVICE = "eyas.v1.TargetService"


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/target.sock"


async def test_waits_through_absent_and_loading(address: str) -> None:
    said: list[str] = []
    async with open_channel(address) as channel:
        waiting = asyncio.ensure_future(
            wait_until_serving(channel, SERVICE, 60, said.append, peer="the target")
        )
        while not said:
            await asyncio.sleep(0.01)
        async with Server("target", address) as server:
            await server.start([SERVICE])
            while len(said) < 2:
                await asyncio.sleep(0.01)
            assert not waiting.done()
            await server.set_serving(True)
            await waiting
    assert said[0].startswith("waiting for the target: no connection: ")
    assert said[-1] == "waiting for the target: it is not ready yet"


async def test_gives_up_with_the_reason(address: str) -> None:
    said: list[str] = []
    async with open_channel(address) as channel:
        with pytest.raises(NotServing, match=r"the target did not come up within 0\.3 s: no connection"):
            await wait_until_serving(channel, SERVICE, 0.3, said.append, peer="the target")
    assert len(said) == 1


async def test_another_service_at_the_address_is_said_at_once(address: str) -> None:
    async with Server("draft", address) as server, open_channel(address) as channel:
        await server.start(["eyas.v1.DraftService"])
        await server.set_serving(True)
        with pytest.raises(NotServing, match=rf"the target answers, but does not offer {SERVICE}"):
            await wait_until_serving(channel, SERVICE, 3600, lambda line: None, peer="the target")


async def test_says_nothing_where_it_is_up(address: str) -> None:
    said: list[str] = []
    async with Server("target", address) as server, open_channel(address) as channel:
        await server.start([SERVICE])
        await server.set_serving(True)
        await wait_until_serving(channel, SERVICE, 60, said.append, peer="the target")
    assert said == []
