"""GenerationService behind the real server, on a real socket, over an engine without a model."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from eyas.channel import open_channel
from eyas.names import GENERATION_SERVICE
from eyas.server import Server
from eyas.v1 import gateway_pb2 as pb
from eyas.v1 import gateway_pb2_grpc
from gateway.grpc_service import GenerationService
from gateway.request import GenerationError, QueueFull, TargetUnavailable
from tests.helpers.fake_engine import ANSWER, CARD, FakeEngine
from tests.helpers.tiny_tokenizer import IM_END, IM_START

Stub = Any  # the asynchronous stub exists for type checkers only
DRAFT, TARGET = pb.TOKEN_SOURCE_DRAFT, pb.TOKEN_SOURCE_TARGET
IDS = [*f"{ANSWER}0".encode(), IM_END]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest_asyncio.fixture
async def stub(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Stub]:
    async with Server("gateway", f"unix:{tmp_path}/gateway.sock") as server:
        service = GenerationService(engine, engine.tokenizer)
        gateway_pb2_grpc.add_GenerationServiceServicer_to_server(service, server.grpc)
        await server.start([GENERATION_SERVICE])
        async with open_channel(server.address) as channel:
            yield gateway_pb2_grpc.GenerationServiceStub(channel)
            await engine.wait_for(num_open=0)


async def generate(stub: Stub, **fields: Any) -> list[pb.GenerateResponse]:
    return [response async for response in stub.Generate(pb.GenerateRequest(**fields))]


async def refusal(stub: Stub, **fields: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await generate(stub, **fields)
    return raised.value


def detail(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    """The one detail of that kind."""
    status = rpc_status.from_call(error)
    assert status is not None
    [packed] = [packed for packed in status.details if packed.Is(kind.DESCRIPTOR)]
    message = kind()
    packed.Unpack(message)
    return message


# --- answers ---


async def test_model(stub: Stub) -> None:
    model = await stub.GetModel(pb.GetModelRequest())
    assert (model.model, model.head, model.context_length) == ("org/tiny", "tiny-head", 128)
    assert (model.default_draft_tokens, model.max_draft_tokens) == (3, 8)


async def test_answer(stub: Stub) -> None:
    responses = await generate(stub, text="hi", seed=9)
    assert "".join(response.text for response in responses) == f"{ANSWER}0"
    tokens = [token for response in responses for token in response.tokens]
    assert [token.id for token in tokens] == IDS
    assert [token.round for token in tokens] == [i // 4 for i in range(len(IDS))]
    last = len(IDS) - 1
    assert [token.source for token in tokens] == [
        TARGET if i % 4 == 3 or i == last else DRAFT for i in range(len(IDS))
    ]
    assert not any(response.HasField("finished") for response in responses[:-1])
    assert responses[-1].finished == pb.Finished(
        reason=pb.FINISH_REASON_STOP,
        prompt_tokens=2,
        completion_tokens=len(IDS),
        seed=9,
        num_rounds=6,
        num_drafts=6,
        num_draft_tokens=18,
        num_accepted_tokens=15,
    )


async def test_limit(stub: Stub) -> None:
    responses = await generate(stub, text="hi", max_tokens=5)
    assert responses[-1].finished.reason == pb.FINISH_REASON_LENGTH
    assert "".join(response.text for response in responses) == "Hello"


CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")])


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ({"text": "a<|im_end|>"}, [97, IM_END]),
        ({"tokens": pb.TokenPrompt(ids=[0, 258])}, [0, 258]),
        ({"chat": CHAT}, [IM_START, *b"user\nhi", IM_END, 10, IM_START, *b"assistant\n"]),
    ],
)
async def test_forms_of_a_prompt(
    stub: Stub, engine: FakeEngine, prompt: dict[str, Any], expected: list[int]
) -> None:
    await generate(stub, **prompt)
    assert list(engine.requests[0].prompt_ids) == expected


async def test_parameters_reach_the_engine(stub: Stub, engine: FakeEngine) -> None:
    fields: dict[str, Any] = {"temperature": 50, "top_p": 0.5, "top_k": 7, "seed": 2**64 - 1, "max_tokens": 3}
    speculation = pb.Speculation(num_draft_tokens=2)
    request = pb.GenerateRequest(text="hi", model="org/tiny", stop=["x"], speculation=speculation, **fields)
    metadata = (("traceparent", "00-abc-def-01"), ("x-request-id", "mine"))
    async for _ in stub.Generate(request, metadata=metadata):
        pass
    [resolved] = engine.requests
    sampling = resolved.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (50, 0.5, 7, 2**64 - 1)
    assert (resolved.max_tokens, resolved.stop, resolved.num_draft_tokens) == (3, ("x",), 2)
    assert (resolved.traceparent, resolved.request_id) == ("00-abc-def-01", "mine")


async def test_defaults(stub: Stub, engine: FakeEngine) -> None:
    responses = await generate(stub, text="hi")
    [resolved] = engine.requests
    sampling = resolved.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1, 1, 0)
    assert (resolved.max_tokens, resolved.num_draft_tokens, resolved.stop) == (126, 3, ())
    assert responses[-1].finished.seed == sampling.seed
    assert resolved.request_id


@pytest.mark.parametrize("speculation", [pb.Speculation(enabled=False), pb.Speculation(num_draft_tokens=0)])
async def test_speculation_can_be_switched_off(
    stub: Stub, engine: FakeEngine, speculation: pb.Speculation
) -> None:
    responses = await generate(stub, text="hi", temperature=0, speculation=speculation)
    assert engine.requests[0].num_draft_tokens == 0
    assert engine.requests[0].sampling.temperature == 0
    assert "".join(response.text for response in responses) == f"{ANSWER}0"


# --- refusals ---

BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"text": ""}, "text"),
    ({"text": "x" * 128}, "text"),
    ({"text": "x" * 100, "max_tokens": 29}, "text"),
    ({"tokens": pb.TokenPrompt()}, "tokens.ids"),
    ({"tokens": pb.TokenPrompt(ids=[259])}, "tokens.ids"),
    ({"chat": pb.ChatPrompt()}, "chat.messages"),
    ({"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="tool", content="x")])}, "chat.messages"),
    ({"text": "a", "temperature": -1}, "temperature"),
    ({"text": "a", "temperature": 101}, "temperature"),
    ({"text": "a", "temperature": float("nan")}, "temperature"),
    ({"text": "a", "top_p": 0}, "top_p"),
    ({"text": "a", "top_p": 1.5}, "top_p"),
    ({"text": "a", "top_p": float("nan")}, "top_p"),
    ({"text": "a", "max_tokens": 0}, "max_tokens"),
    ({"text": "a", "stop": ["a"] * 5}, "stop"),
    ({"text": "a", "stop": [""]}, "stop"),
    ({"text": "a", "speculation": pb.Speculation(num_draft_tokens=9)}, "speculation.num_draft_tokens"),
    (
        {"text": "a", "speculation": pb.Speculation(enabled=False, num_draft_tokens=1)},
        "speculation.num_draft_tokens",
    ),
]


@pytest.mark.parametrize(("fields", "field"), BAD)
async def test_bad_field_is_named(stub: Stub, engine: FakeEngine, fields: dict[str, Any], field: str) -> None:
    error = await refusal(stub, **fields)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (error.details() or "")
    [violation] = detail(error, error_details_pb2.BadRequest).field_violations
    assert violation.field == field
    assert detail(error, error_details_pb2.ErrorInfo).domain == "eyas"
    assert engine.requests == []


async def test_unknown_model(stub: Stub) -> None:
    error = await refusal(stub, text="hi", model="other")
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "other" in (error.details() or "")


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (QueueFull("too many requests wait"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (TargetUnavailable("the target is away"), grpc.StatusCode.UNAVAILABLE),
        (GenerationError("the round went wrong"), grpc.StatusCode.INTERNAL),
    ],
)
@pytest.mark.parametrize("fail_at", [0, 2])
async def test_failure_of_the_engine(
    stub: Stub, engine: FakeEngine, failure: Exception, code: grpc.StatusCode, fail_at: int
) -> None:
    engine.error, engine.fail_at = failure, fail_at
    error = await refusal(stub, text="hi")
    assert (error.code(), error.details()) == (code, str(failure))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1


async def test_target_away_before_anything_is_known(stub: Stub, engine: FakeEngine) -> None:
    engine.target_error = TargetUnavailable("the target is away")
    assert (await refusal(stub, text="hi")).code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.GetModel(pb.GetModelRequest())
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


# --- a client that goes away ---


@pytest.mark.parametrize("hang_at", [0, 2])
async def test_cancel_ends_the_generation(stub: Stub, engine: FakeEngine, hang_at: int) -> None:
    engine.hang_at = hang_at
    call = stub.Generate(pb.GenerateRequest(text="hi"))
    async with asyncio.timeout(10):
        for _ in range(hang_at):
            await call.read()
        await engine.wait_for(num_open=1)
        call.cancel()
        await engine.wait_for(num_open=0)


async def test_deadline_ends_the_generation(stub: Stub, engine: FakeEngine) -> None:
    engine.hang_at = 1
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        async for _ in stub.Generate(pb.GenerateRequest(text="hi"), timeout=0.2):
            pass
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(10):
        await engine.wait_for(num_open=0)


async def test_client_that_reads_nothing_and_cancels_ends_the_generation(
    stub: Stub, engine: FakeEngine
) -> None:
    """The server is stuck in sending, not in the engine."""
    engine.served = dataclasses.replace(CARD, context_length=10**6)
    engine.answer = lambda request: [97] * 10**6
    call = stub.Generate(pb.GenerateRequest(text="hi"))
    async with asyncio.timeout(30):
        await call.read()
        await engine.wait_for(num_open=1)
        call.cancel()
        await engine.wait_for(num_open=0)
