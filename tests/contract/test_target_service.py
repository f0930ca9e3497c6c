"""The target's contract over a real socket: leases, pages, statuses, refusals."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eyas.errors import EyasError
from eyas.transport import LAYOUT_VERSION
from eyas.v1 import common_pb2, target_pb2
from eyas_kernels.sampling import SamplingLaw, draw
from target_service import service
from tests.helpers.messages import OK, block, opening, step
from tests.helpers.reference_head import greedy_tokens, target_model
from tests.helpers.services import RunningTarget, exchange, running_target, target_stub
from tests.helpers.tiny_models import make_target
from tests.helpers.tiny_tokenizer import END_OF_TEXT, IM_END, tiny_tokenizer_files

NO_PAGES = target_pb2.BLOCK_STATUS_NO_PAGES
UNKNOWN = target_pb2.BLOCK_STATUS_UNKNOWN_SEQUENCE
STALE = target_pb2.BLOCK_STATUS_STALE_EPOCH

TEXT = [*range(40, 90)]
NUM_PAGES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = {**tiny_tokenizer_files(), "chat_template.jinja": b"{{ messages }}"}
    return make_target(tmp_path_factory.mktemp("target"), tokenizer_files=files, eos_token_id=IM_END)


@pytest.fixture
async def target(folder: Path, tmp_path: Path) -> AsyncIterator[RunningTarget]:
    async with running_target(folder, tmp_path, num_pages=NUM_PAGES, max_rows=64) as target:
        yield target


@pytest.fixture
async def stub(target: RunningTarget) -> AsyncIterator[Any]:
    async with target_stub(target.address) as stub:
        yield stub


def logits_of(folder: Path, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = target_model(folder)(torch.tensor([tokens])).logits[0]
    return logits


def argmaxes(folder: Path, tokens: list[int]) -> list[int]:
    return list(logits_of(folder, tokens).argmax(-1).tolist())


# ---- what the target is


async def test_the_description(folder: Path, target: RunningTarget, stub: Any) -> None:
    info = await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest())
    assert info == target_pb2.GetTargetInfoResponse(
        model="tiny",
        architecture="LlamaForCausalLM",
        hidden_size=64,
        num_layers=6,
        vocab_size=512,
        context_length=512,
        scalar_type=common_pb2.SCALAR_TYPE_FLOAT32,
        page_size=16,
        num_pages=NUM_PAGES,
        max_rows=64,
        eos_token_ids=sorted([IM_END, END_OF_TEXT]),
        tokenizer_sha256=hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest(),
        checkpoint_path=str(folder),
        layout_version=LAYOUT_VERSION,
        device="cpu",
    )


async def test_the_tokenizers_files_are_those_on_disk(
    folder: Path, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FILE_PART_BYTES", 1000)
    parts = [part async for part in stub.GetTokenizer(target_pb2.GetTokenizerRequest())]
    assert all(0 < len(part.data) <= 1000 for part in parts)
    files: dict[str, bytes] = {}
    for part in parts:
        files[part.name] = files.get(part.name, b"") + part.data
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    assert files == {name: (folder / name).read_bytes() for name in names}


async def test_a_checkpoint_without_tokenizer_sends_none(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "bare")
    (folder / "generation_config.json").unlink(missing_ok=True)
    async with running_target(folder, tmp_path, num_pages=4) as target, target_stub(target.address) as stub:
        assert not [part async for part in stub.GetTokenizer(target_pb2.GetTokenizerRequest())]
        assert (await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest())).tokenizer_sha256 == ""


@pytest.mark.parametrize(
    "limits", [{"num_pages": 1}, {"max_rows": 1}, {"context_length": 2}, {"page_size": 1, "num_pages": 3}]
)
async def test_it_starts_with_tight_limits(folder: Path, tmp_path: Path, limits: dict[str, Any]) -> None:
    async with (
        running_target(folder, tmp_path, **{"num_pages": 4, **limits}) as target,
        target_stub(target.address) as stub,
    ):
        info = await stub.GetTargetInfo(target_pb2.GetTargetInfoRequest())
        assert {name: getattr(info, name) for name in limits} == limits
        response = await exchange(stub.Step(), step(block(1, 0, [40], 1), opens=[opening(1)]))
        assert response.results[0].sampled_tokens == argmaxes(folder, [40])


async def test_a_context_beyond_the_models_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"^context_length: 513 is beyond the model's 512$"):
        async with running_target(folder, tmp_path, context_length=513):
            pass


# ---- steps


async def test_a_sequence_from_open_to_close(folder: Path, target: RunningTarget, stub: Any) -> None:
    """A prompt in two chunks, then a verify with every row scored; rejected rows are overwritten."""
    expected = greedy_tokens(folder, TEXT[:20], 6)
    stream = stub.Step()
    first = await exchange(stream, step(block(7, 0, TEXT[:12]), round=3, opens=[opening(7)]))
    assert (first.round, first.free_pages) == (3, NUM_PAGES - 1)
    assert [(r.sequence_id, r.epoch, r.status, list(r.sampled_tokens)) for r in first.results] == [
        (7, 0, OK, [])
    ]
    second = await exchange(stream, step(block(7, 12, TEXT[12:20], 1), round=4))
    assert list(second.results[0].sampled_tokens) == expected[:1]
    assert second.free_pages == NUM_PAGES - 2
    drafts = [expected[1], 0, 1]
    third = await exchange(stream, step(block(7, 20, [expected[0], *drafts], 4), round=5))
    assert list(third.results[0].sampled_tokens) == argmaxes(folder, [*TEXT[:20], expected[0], *drafts])[20:]
    assert list(third.results[0].sampled_tokens)[:2] == expected[1:3]
    fourth = await exchange(stream, step(block(7, 22, [expected[2]], 1), round=6))
    assert list(fourth.results[0].sampled_tokens) == [expected[3]]
    last = await exchange(stream, step(round=7, closes=[7, 99]))
    assert (last.round, last.free_pages, list(last.results)) == (7, NUM_PAGES, [])
    assert target.used_pages == 0


async def test_times_are_reported(stub: Any) -> None:
    timing = (await exchange(stub.Step(), step(block(1, 0, TEXT, 1), opens=[opening(1)]))).timing
    assert timing.compute_us > 0
    assert timing.total_us >= timing.compute_us + timing.queue_us - 2


async def test_only_the_last_rows_are_scored(folder: Path, stub: Any) -> None:
    response = await exchange(stub.Step(), step(block(1, 0, TEXT[:9], 4), opens=[opening(1)]))
    assert list(response.results[0].sampled_tokens) == argmaxes(folder, TEXT[:9])[5:]


async def test_results_come_in_the_order_of_the_blocks(folder: Path, stub: Any) -> None:
    """Whatever the lengths, and with blocks that cannot run in between."""
    blocks = [
        block(1, 0, TEXT[:30], 2),
        block(9, 0, [1]),
        block(2, 0, TEXT[5:7], 1),
        block(3, 0, TEXT[9:14], 5),
    ]
    opens = [opening(i) for i in (3, 2, 1)]
    results = (await exchange(stub.Step(), step(*blocks, opens=opens))).results
    assert [(result.sequence_id, result.status) for result in results] == [
        (1, OK),
        (9, UNKNOWN),
        (2, OK),
        (3, OK),
    ]
    assert list(results[0].sampled_tokens) == argmaxes(folder, TEXT[:30])[-2:]
    assert list(results[2].sampled_tokens) == argmaxes(folder, TEXT[5:7])[-1:]
    assert list(results[3].sampled_tokens) == argmaxes(folder, TEXT[9:14])


async def test_a_token_is_drawn_with_the_noise_of_its_own_position(folder: Path, stub: Any) -> None:
    """The row at position i draws the token for position i + 1."""
    law: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "top_k": 200, "seed": 2**64 - 1, "choice_index": 2}
    response = await exchange(stub.Step(), step(block(1, 0, TEXT[:12], 4), opens=[opening(1, **law)]))
    rows = logits_of(folder, TEXT[:12])[-4:]
    expected = draw(rows, [SamplingLaw(1.5, float(np.float32(0.9)), 200, 2**64 - 1, 2)] * 4, range(9, 13))
    assert list(response.results[0].sampled_tokens) == expected


async def test_sampled_tokens_depend_on_seed_choice_and_position_alone(stub: Any) -> None:
    """A verify of several rows draws what single steps draw, whatever steps along."""
    law: dict[str, Any] = {"temperature": 1.5, "top_p": 0.9, "top_k": 200, "seed": 11, "choice_index": 2}
    stream = stub.Step()
    await exchange(stream, step(block(1, 0, TEXT[:10]), opens=[opening(1, **law)]))
    singly = [
        (await exchange(stream, step(block(1, i, TEXT[i : i + 1], 1)))).results[0].sampled_tokens[0]
        for i in range(10, 16)
    ]
    opens = [opening(2, **law), opening(3, **{**law, "seed": 12}), opening(4, **{**law, "choice_index": 3})]
    blocks = [block(i, 0, TEXT[:16], 6) for i in (2, 3, 4)]
    together = [
        list(result.sampled_tokens) for result in (await exchange(stream, step(*blocks, opens=opens))).results
    ]
    assert together[0] == singly
    assert len({tuple(tokens) for tokens in together}) == 3


async def test_steps_may_be_sent_ahead(folder: Path, stub: Any) -> None:
    stream = stub.Step()
    await stream.write(step(block(1, 0, TEXT[:5]), round=1, opens=[opening(1)]))
    for i in range(5, 15):
        await stream.write(step(block(1, i, TEXT[i : i + 1], 1), round=i))
    rounds = [(await stream.read()).round for _ in range(10)]
    assert rounds == [1, *range(5, 14)]
    last = await stream.read()
    assert list(last.results[0].sampled_tokens) == argmaxes(folder, TEXT[:15])[-1:]


# ---- sequences and epochs


async def test_unknown_sequences_and_stale_epochs(target: RunningTarget, stub: Any) -> None:
    stream = stub.Step()
    opens = [opening(1, epoch=2)]
    blocks = [block(1, 0, TEXT[:3], 1, epoch=1), block(2, 0, TEXT[:3], 1)]
    results = (await exchange(stream, step(*blocks, opens=opens))).results
    assert [(r.sequence_id, r.epoch, r.status) for r in results] == [(1, 1, STALE), (2, 0, UNKNOWN)]
    assert not any(result.sampled_tokens for result in results)
    assert target.used_pages == 0
    assert (await exchange(stream, step(block(1, 0, TEXT[:3], epoch=2)))).results[0].status == OK


async def test_closes_come_first_then_opens_then_blocks(folder: Path, target: RunningTarget, stub: Any) -> None:
    """A preempted sequence is opened again under the next epoch by one message."""
    stream = stub.Step()
    await exchange(stream, step(block(1, 0, TEXT[:40]), opens=[opening(1)]))
    again = step(block(1, 0, TEXT[:3], 1, epoch=1), opens=[opening(1, epoch=1)], closes=[1])
    response = await exchange(stream, again)
    assert list(response.results[0].sampled_tokens) == argmaxes(folder, TEXT[:3])[-1:]
    assert target.used_pages == 1


async def test_gateways_do_not_see_each_others_sequences(folder: Path, target: RunningTarget) -> None:
    """Even under the same id; and one that leaves takes only its own along."""
    async with target_stub(target.address) as one, target_stub(target.address) as other:
        first, second = one.Step(), other.Step()
        for stream, text in ((first, TEXT[:20]), (second, TEXT[20:35])):
            await exchange(stream, step(block(1, 0, text), opens=[opening(1)]))
        for i in range(3):
            for stream, text in ((first, TEXT[:24]), (second, TEXT[20:39])):
                at = len(text) - 4 + i
                answer = await exchange(stream, step(block(1, at, text[at : at + 1], 1)))
                assert list(answer.results[0].sampled_tokens) == argmaxes(folder, text[: at + 1])[-1:]
        await exchange(second, step(block(9, 0, [1]), opens=[opening(9)]))
        assert (await exchange(first, step(block(9, 0, [1])))).results[0].status == UNKNOWN
        used = target.used_pages
        first.cancel()
        while target.used_pages == used:
            await asyncio.sleep(0.005)
        answer = await exchange(second, step(block(1, 18, TEXT[38:39], 1)))
        assert list(answer.results[0].sampled_tokens) == argmaxes(folder, TEXT[20:39])[-1:]


# ---- pages


async def test_no_pages_leaves_the_sequence_as_it_was(folder: Path, stub: Any) -> None:
    stream = stub.Step()
    opens = [opening(1), opening(2)]
    blocks = [block(1, 0, TEXT[:50]), block(2, 0, TEXT[:14])]
    await exchange(stream, step(*blocks, opens=opens))
    filling = [block(10 + i, 0, TEXT[: 16 * n]) for i, n in enumerate((3, 3, 1))]
    for filler in filling:
        await exchange(stream, step(filler, opens=[opening(filler.sequence_id)]))
    asks = block(2, 14, TEXT[14:20], 3)
    small = block(1, 50, [5], 1)
    full = await exchange(stream, step(asks, small))
    assert [result.status for result in full.results] == [NO_PAGES, OK]
    assert not full.results[0].sampled_tokens
    assert full.free_pages == 0
    still = await exchange(stream, step(block(2, 14, TEXT[14:16], 1)))
    assert list(still.results[0].sampled_tokens) == argmaxes(folder, TEXT[:16])[-1:]
    retried = await exchange(stream, step(asks, closes=[10]))
    assert retried.results[0].status == OK
    assert list(retried.results[0].sampled_tokens) == argmaxes(folder, TEXT[:20])[-3:]
    assert retried.free_pages == 2


async def test_a_new_sequence_without_pages_can_be_tried_again(folder: Path, stub: Any) -> None:
    stream = stub.Step()
    await exchange(stream, step(*(block(i, 0, [3] * 32) for i in (1, 2)), opens=[opening(1), opening(2)]))
    await exchange(stream, step(*(block(i, 32, [3] * 32) for i in (1, 2))))
    await exchange(stream, step(*(block(i, 64, [3] * 32) for i in (1, 2))))
    first = await exchange(stream, step(block(3, 0, TEXT[:17], 1), opens=[opening(3)]))
    assert (first.results[0].status, first.free_pages) == (NO_PAGES, 0)
    second = await exchange(stream, step(block(3, 0, TEXT[:17], 1), closes=[2]))
    assert list(second.results[0].sampled_tokens) == argmaxes(folder, TEXT[:17])[-1:]
