"""The shared server, over real sockets: health, reflection, limits, errors as statuses, streams, addresses."""

# ruff: noqa: ASYNC240 (a look at a socket file blocks nobody here)

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from eyas.channel import open_channel
from eyas.errors import describe
from eyas.listen import ListenError
from eyas.server import Server
from eyas.v1 import target_pb2, target_pb2_grpc
from tests.helpers.echo_service import (
    ROUND_BROKEN,
    ROUND_BROKEN_LATER,
    ROUND_HELD,
    ROUND_REFUSED,
    ROUND_STUCK,
    SECRET,
    TARGET_SERVICE,
    EchoServicer,
)

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/target.sock"


@pytest.fixture
def echo() -> EchoServicer:
    return EchoServicer()


@pytest.fixture
async def server(address: str, echo: EchoServicer) -> AsyncIterator[Server]:
    server = Server("target", address)
    target_pb2_grpc.add_TargetServiceServicer_to_server(echo, server.grpc)
    await server.start([TARGET_SERVICE])
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(server.address) as channel:
        yield channel


@pytest.fixture
def target(channel: grpc.aio.Channel) -> target_pb2_grpc.TargetServiceAsyncStub:
    return target_pb2_grpc.TargetServiceStub(channel)


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return int((await health_pb2_grpc.HealthStub(channel).Check(request)).status)


async def until(condition: object) -> None:
    """Waits until the callable is true; the test's own timeout ends a wait that never does."""
    while not condition():  # type: ignore[operator]
        await asyncio.sleep(0.001)


def requests(*rounds: int) -> list[target_pb2.StepRequest]:
    return [target_pb2.StepRequest(round=number) for number in rounds]


class TestHealthAndReflection:
    @pytest.mark.parametrize("service", ["", TARGET_SERVICE])
    async def test_serving_only_when_the_service_says_so(
        self, server: Server, channel: grpc.aio.Channel, service: str
    ) -> None:
        assert await health_of(channel, service) == NOT_SERVING
        await server.set_serving(True)
        assert await health_of(channel, service) == SERVING
        await server.set_serving(False)
        assert await health_of(channel, service) == NOT_SERVING

    async def test_draining_is_for_good_and_refuses_new_calls(
        self, server: Server, channel: grpc.aio.Channel, target: target_pb2_grpc.TargetServiceAsyncStub
    ) -> None:
        await server.set_serving(True)
        await server.begin_drain()
        await server.set_serving(True)
        assert await health_of(channel, TARGET_SERVICE) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await target.GetTargetInfo(target_pb2.GetTargetInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert describe(caught.value) == "the target is draining"

    async def test_reflection_lists_the_services(self, channel: grpc.aio.Channel) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for response in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in response.list_services_response.service}
        assert names == {TARGET_SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


class TestErrors:
    async def test_status_error_keeps_its_details(self, target: target_pb2_grpc.TargetServiceAsyncStub) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in target.Step(iter(requests(ROUND_REFUSED)))]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        status = rpc_status.from_call(caught.value)
        info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        assert status.details[0].Unpack(info)
        assert status.details[1].Unpack(bad_request)
        assert (info.domain, info.reason) == ("eyas", "INVALID_FIELD")
        assert bad_request.field_violations[0].field == "blocks[0].tokens"
        assert describe(caught.value) == "blocks[0].tokens: must not be empty"

    async def test_status_error_ends_a_response_stream(
        self, target: target_pb2_grpc.TargetServiceAsyncStub
    ) -> None:
        call = target.GetTokenizer(target_pb2.GetTokenizerRequest())
        part = await call.read()
        # Beyond gRPC's own limit of 4 MiB.
        assert isinstance(part, target_pb2.GetTokenizerResponse)
        assert len(part.data) == 5_000_000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert describe(caught.value) == "no more of it (try again in 1.5 s)"

    async def test_exception_becomes_internal_and_stays_in_the_log(
        self, target: target_pb2_grpc.TargetServiceAsyncStub, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in target.Step(iter(requests(ROUND_BROKEN)))]
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        details = caught.value.details() or ""
        assert SECRET not in details
        assert SECRET in caplog.text
        assert details.rpartition(" ")[2] in caplog.text

    async def test_message_beyond_the_limit_is_refused(
        self, target: target_pb2_grpc.TargetServiceAsyncStub
    ) -> None:
        block = target_pb2.Block(tokens=[2**31] * (14 * 1024 * 1024))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in target.Step(iter([target_pb2.StepRequest(blocks=[block])]))]
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class TestStreams:
    async def test_answers_come_in_order(self, target: target_pb2_grpc.TargetServiceAsyncStub) -> None:
        rounds = list(range(200))
        answers = [response.round async for response in target.Step(iter(requests(*rounds)))]
        assert answers == rounds

    async def test_second_request_is_submitted_while_the_first_is_computed(
        self, target: target_pb2_grpc.TargetServiceAsyncStub, echo: EchoServicer
    ) -> None:
        call = target.Step()
        for request in requests(ROUND_STUCK, 1):
            await call.write(request)
        await until(lambda: echo.submitted == [ROUND_STUCK, 1])
        call.cancel()

    async def test_answers_before_a_failure_arrive(
        self, target: target_pb2_grpc.TargetServiceAsyncStub, echo: EchoServicer
    ) -> None:
        call = target.Step(iter(requests(1, 2, ROUND_BROKEN_LATER, ROUND_STUCK)))
        for number in (1, 2):
            assert await call.read() == target_pb2.StepResponse(round=number)
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        await until(lambda: echo.open_streams == 0)
        assert echo.unfinished == 0

    async def test_cancelled_streams_leave_nothing(
        self,
        target: target_pb2_grpc.TargetServiceAsyncStub,
        echo: EchoServicer,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        for attempt in range(50):
            call = target.Step()
            for number in range(attempt % 5):
                await call.write(target_pb2.StepRequest(round=number))
                if attempt % 2:
                    await call.read()
            if attempt % 3 == 0:
                await call.write(target_pb2.StepRequest(round=ROUND_STUCK))
                await until(lambda: echo.unfinished)
            call.cancel()
            await until(lambda: echo.open_streams == 0)
            assert echo.unfinished == 0
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
        # And the server still answers.
        assert [r.round async for r in target.Step(iter(requests(7)))] == [7]

    async def test_deadline_ends_a_stream(
        self, target: target_pb2_grpc.TargetServiceAsyncStub, echo: EchoServicer
    ) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in target.Step(iter(requests(1, ROUND_STUCK)), timeout=0.2)]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: echo.open_streams == 0)
        assert echo.unfinished == 0

    async def test_closed_connection_ends_a_stream(self, server: Server, echo: EchoServicer) -> None:
        async with open_channel(server.address) as channel:
            call = target_pb2_grpc.TargetServiceStub(channel).Step()
            await call.write(target_pb2.StepRequest(round=ROUND_STUCK))
            await until(lambda: echo.unfinished)
        await until(lambda: echo.open_streams == 0)
        assert echo.unfinished == 0

    async def test_stop_ends_open_streams_and_waits_for_their_cleanup(
        self, server: Server, target: target_pb2_grpc.TargetServiceAsyncStub, echo: EchoServicer
    ) -> None:
        call = target.Step()
        await call.write(target_pb2.StepRequest(round=ROUND_STUCK))
        await until(lambda: echo.unfinished)
        await server.stop(0.05)
        assert (echo.open_streams, echo.unfinished) == (0, 0)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE

    async def test_stop_closes_a_generator_that_waits_for_a_slow_reader(
        self, server: Server, target: target_pb2_grpc.TargetServiceAsyncStub, echo: EchoServicer
    ) -> None:
        call = target.GetTokenizer(target_pb2.GetTokenizerRequest())
        await until(lambda: echo.open_streams == 1)
        await server.stop(0)
        assert echo.open_streams == 0
        call.cancel()

    async def test_drain_ends_an_idle_stream_at_once(
        self, server: Server, target: target_pb2_grpc.TargetServiceAsyncStub
    ) -> None:
        call = target.Step()
        await call.write(target_pb2.StepRequest(round=1))
        await call.read()
        await server.stop(3600)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert describe(caught.value) == "the target is draining"

    async def test_drain_lets_a_busy_stream_finish_what_it_has_taken(
        self,
        server: Server,
        channel: grpc.aio.Channel,
        target: target_pb2_grpc.TargetServiceAsyncStub,
        echo: EchoServicer,
    ) -> None:
        await server.set_serving(True)
        call = target.Step()
        for number in (ROUND_HELD, 2):
            await call.write(target_pb2.StepRequest(round=number))
        await until(lambda: echo.submitted == [ROUND_HELD, 2])
        stopping = asyncio.ensure_future(server.stop(3600))
        while await health_of(channel, TARGET_SERVICE) != NOT_SERVING:
            await asyncio.sleep(0)
        assert not stopping.done()
        echo.gate.set()
        assert [(await call.read()).round for _ in range(2)] == [ROUND_HELD, 2]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert describe(caught.value) == "the target is draining"
        await stopping

    @pytest.mark.parametrize(("reason", "said"), [(None, "the target ended the call"), ("because", "because")])
    async def test_handler_cancelled_from_within_gives_its_client_a_status(
        self,
        target: target_pb2_grpc.TargetServiceAsyncStub,
        echo: EchoServicer,
        reason: str | None,
        said: str,
    ) -> None:
        call = target.Step()
        await call.write(target_pb2.StepRequest(round=ROUND_STUCK))
        await until(lambda: echo.unfinished)
        assert echo.stepping is not None
        echo.stepping.cancel(reason)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert describe(caught.value) == said
        assert echo.unfinished == 0


class TestAddresses:
    async def test_unix_socket_is_private_and_goes_with_the_server(self, address: str) -> None:
        path = address.removeprefix("unix:")
        async with Server("target", address):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert not os.path.lexists(path)

    async def test_stale_socket_file_is_replaced(self, address: str) -> None:
        path = address.removeprefix("unix:")
        with socket.socket(socket.AF_UNIX) as crashed:
            crashed.bind(path)
        async with Server("target", address) as server:
            await server.start([])
            async with open_channel(address) as channel:
                assert await health_of(channel, "") == NOT_SERVING

    async def test_socket_in_use_is_refused_and_left_alone(
        self, server: Server, channel: grpc.aio.Channel
    ) -> None:
        with pytest.raises(ListenError, match="another process listens there"):
            Server("target", server.address)
        assert await health_of(channel, "") == NOT_SERVING

    async def test_other_file_is_never_removed(self) -> None:
        with pytest.raises(ListenError, match="no socket"):
            Server("target", f"unix:{__file__}")
        assert os.path.getsize(__file__) > 0

    async def test_missing_folder_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ListenError, match=f"the folder {tmp_path}/missing does not exist"):
            Server("target", f"unix:{tmp_path}/missing/target.sock")

    async def test_port_in_use_is_refused(self) -> None:
        async with Server("target", "127.0.0.1:0") as first:
            await first.start([])
            assert not first.address.endswith(":0")
            with pytest.raises(ListenError, match=rf"{first.address}: Address already in use"):
                Server("target", first.address)

    async def test_port_of_a_server_that_never_started_is_free_again(self) -> None:
        async with Server("target", "127.0.0.1:0") as first:
            address = first.address
        async with Server("target", address) as second:
            assert second.address == address

    async def test_unknown_host_is_named(self) -> None:
        with pytest.raises(ListenError, match=r"host\.invalid:1"):
            Server("target", "host.invalid:1")
