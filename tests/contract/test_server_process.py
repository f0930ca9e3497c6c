"""The shared server as a process of its own: signals, drain, exit codes, and what is left behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from eyas.channel import open_channel, wait_until_serving
from eyas.v1 import target_pb2, target_pb2_grpc
from tests.helpers.echo_service import ROUND_STUCK, TARGET_SERVICE
from tests.helpers.processes import python, read_until, wait_for

ECHO = ("-m", "tests.helpers.echo_service")


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "target.sock"


def with_serving(socket: Path, then: Callable[[grpc.aio.Channel], Awaitable[None]]) -> None:
    """Runs `then` on a channel to the service, once it serves."""

    async def run() -> None:
        async with open_channel(f"unix:{socket}") as channel:
            await wait_until_serving(channel, TARGET_SERVICE, 60, lambda line: None, peer="the target")
            await then(channel)

    asyncio.run(run())


async def nothing(channel: grpc.aio.Channel) -> None:
    """Being served is enough."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_cleanly(socket: Path, number: signal.Signals) -> None:
    with python(*ECHO, f"unix:{socket}") as process:
        with_serving(socket, nothing)
        process.send_signal(number)
        assert process.wait(60) == 0
    assert not socket.exists()


def test_idle_stream_does_not_hold_the_drain_up(socket: Path) -> None:
    with python(*ECHO, f"unix:{socket}", "--grace", "3600") as process:

        async def be_idle(channel: grpc.aio.Channel) -> None:
            call = target_pb2_grpc.TargetServiceStub(channel).Step()
            await call.write(target_pb2.StepRequest(round=1))
            await call.read()
            process.send_signal(signal.SIGTERM)
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert await call.details() == "the target is draining"

        with_serving(socket, be_idle)
        assert process.wait(60) == 0


async def refuses(target: target_pb2_grpc.TargetServiceAsyncStub) -> grpc.StatusCode:
    """Status of a new call."""
    return await target.GetTargetInfo(target_pb2.GetTargetInfoRequest()).code()


def test_second_signal_ends_it_at_once(socket: Path) -> None:
    with python(*ECHO, f"unix:{socket}", "--grace", "3600") as process:

        async def signal_twice(channel: grpc.aio.Channel) -> None:
            target = target_pb2_grpc.TargetServiceStub(channel)
            call = target.Step()
            await call.write(target_pb2.StepRequest(round=ROUND_STUCK))
            await asyncio.to_thread(read_until, process, "is stuck", process.stderr)
            process.send_signal(signal.SIGTERM)
            while await refuses(target) is not grpc.StatusCode.UNAVAILABLE:
                await asyncio.sleep(0.01)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert await call.code() is grpc.StatusCode.UNAVAILABLE

        with_serving(socket, signal_twice)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not socket.exists()


def test_signal_while_loading_does_not_wait_for_the_load(socket: Path) -> None:
    with python(*ECHO, f"unix:{socket}", "--load", "3600") as process:
        wait_for(socket.exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not socket.exists()


def test_address_in_use_is_found_before_loading(socket: Path) -> None:
    with python(*ECHO, f"unix:{socket}"):
        with_serving(socket, nothing)
        with python(*ECHO, f"unix:{socket}", "--load", "3600") as second:
            _, errors = second.communicate(timeout=60)
            assert second.returncode == 1
            assert "another process listens there" in errors
        with_serving(socket, nothing)


def test_killed_server_is_replaced(socket: Path) -> None:
    with python(*ECHO, f"unix:{socket}") as first:
        with_serving(socket, nothing)
        first.kill()
        first.wait(60)
    assert socket.exists()
    with python(*ECHO, f"unix:{socket}") as second:
        with_serving(socket, nothing)
        assert isinstance(second, subprocess.Popen)
