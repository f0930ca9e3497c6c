"""Messages to the target and the draft, said briefly, and what a refusal names."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from eyas.v1 import common_pb2, draft_pb2, target_pb2

OK = target_pb2.BLOCK_STATUS_OK
DRAFTED = draft_pb2.PROPOSAL_STATUS_OK


def sampling(**fields: Any) -> common_pb2.SamplingParams:
    """Greedy unless `fields` say otherwise."""
    return common_pb2.SamplingParams(**{"temperature": 0, "top_p": 1, **fields})


# ---- to the target


def opening(sequence: int, epoch: int = 0, subscription: int = 0, **law: Any) -> target_pb2.OpenSequence:
    return target_pb2.OpenSequence(
        sequence_id=sequence, epoch=epoch, sampling=sampling(**law), subscription_id=subscription
    )


def block(
    sequence: int, start: int, tokens: Sequence[int], num_scored: int = 0, epoch: int = 0
) -> target_pb2.Block:
    return target_pb2.Block(
        sequence_id=sequence, epoch=epoch, start=start, tokens=tokens, num_scored=num_scored
    )


def step(
    *blocks: target_pb2.Block,
    round: int = 1,
    opens: Sequence[target_pb2.OpenSequence] = (),
    closes: Sequence[int] = (),
) -> target_pb2.StepRequest:
    closing = [target_pb2.CloseSequence(sequence_id=sequence) for sequence in closes]
    return target_pb2.StepRequest(round=round, blocks=blocks, opens=opens, closes=closing)


# ---- to the draft


def slots(sequence: int, epoch: int = 0, **law: Any) -> draft_pb2.OpenSlots:
    return draft_pb2.OpenSlots(sequence_id=sequence, epoch=epoch, sampling=sampling(**law))


def extend(
    sequence: int,
    slot: int,
    tokens: Sequence[int],
    k: int = 0,
    feature_round: int = 1,
    epoch: int = 0,
    then_committed: bool = False,
) -> draft_pb2.Extend:
    return draft_pb2.Extend(
        sequence_id=sequence,
        epoch=epoch,
        slot=slot,
        tokens=tokens,
        num_draft_tokens=k,
        feature_round=feature_round,
        then_committed=then_committed,
    )


def propose(
    *extends: draft_pb2.Extend,
    round: int = 1,
    opens: Sequence[draft_pb2.OpenSlots] = (),
    closes: Sequence[int] = (),
) -> draft_pb2.ProposeRequest:
    closing = [draft_pb2.CloseSlots(sequence_id=sequence) for sequence in closes]
    return draft_pb2.ProposeRequest(round=round, extends=extends, opens=opens, closes=closing)


# ---- what comes back instead of an answer


async def refused(call: Awaitable[Any], code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    """The error with which the call ends; it must have that code."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code, caught.value.details()
    return caught.value


async def refused_field(call: Awaitable[Any]) -> str:
    """Field that the call is refused for with INVALID_ARGUMENT."""
    status = rpc_status.from_call(await refused(call, grpc.StatusCode.INVALID_ARGUMENT))
    assert status is not None
    details = error_details_pb2.BadRequest()
    assert any(detail.Unpack(details) for detail in status.details)
    (violation,) = details.field_violations
    assert status.message.startswith(f"{violation.field}: ")
    return str(violation.field)
