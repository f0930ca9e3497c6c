"""The draft and its target: attaching, refusing what does not fit, and the target that goes and comes back."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eyas.channel import NotServing, open_channel
from eyas.errors import EyasError
from eyas.names import DRAFT_SERVICE
from eyas.v1 import draft_pb2
from tests.helpers.messages import extend, propose, refused, slots
from tests.helpers.pair import Streams, prompted, streams
from tests.helpers.services import RunningDraft, draft_stub, exchange, running_draft, running_target
from tests.helpers.tiny_models import make_head, make_target

pytest_plugins = ["tests.helpers.draft_fixtures"]
pytestmark = pytest.mark.usefixtures("patient")

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def info_of(draft: RunningDraft) -> draft_pb2.GetDraftInfoResponse:
    async with draft_stub(draft.address) as stub:
        info: draft_pb2.GetDraftInfoResponse = await stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest())
    return info


async def is_serving(draft: RunningDraft) -> bool:
    async with open_channel(draft.address) as channel:
        request = health_pb2.HealthCheckRequest(service=DRAFT_SERVICE)
        reply = await health_pb2_grpc.HealthStub(channel).Check(request)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


async def until_lost(draft: RunningDraft) -> None:
    """Returns once the draft has noticed that its target is gone."""
    while await is_serving(draft):
        await asyncio.sleep(0.005)


# ---- a target that goes away


async def test_without_its_target_it_says_unavailable(folder: Path, head: Path, tmp_path: Path) -> None:
    async with (
        running_target(folder, tmp_path) as target,
        running_draft(head, tmp_path, target.address) as draft,
    ):
        assert await is_serving(draft)
        async with draft_stub(draft.address) as stub:
            stream = stub.Propose()
            await exchange(stream, propose(opens=[slots(1)]))
            leaving = stub.Propose()
            await exchange(leaving, propose(opens=[slots(2)]))
            leaving.cancel()
            await target.server.stop(0)
            await refused(stream.read(), UNAVAILABLE)
            await until_lost(draft)
            error = await refused(stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest()), UNAVAILABLE)
            assert error.details() == f"the draft is not attached to its target at {target.address}"
            await refused(exchange(stub.Propose(), propose()), UNAVAILABLE)
        assert draft.metrics.registry.get_sample_value("eyas_draft_attached") == 0
        assert draft.num_held == 0
        assert not draft.attached.done()


async def test_a_target_that_drains_lets_go_of_an_idle_draft_at_once(
    folder: Path, head: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_target(folder, tmp_path) as target,
        running_draft(head, tmp_path, target.address) as draft,
        draft_stub(draft.address) as stub,
    ):
        stream = stub.Propose()
        await exchange(stream, propose(opens=[slots(1)]))
        await target.server.stop(3600)
        error = await refused(stream.read(), UNAVAILABLE)
        assert error.details() == f"the draft is not attached to its target at {target.address}"
        assert f"the target at {target.address} went away: the target is draining" in caplog.text
        await draft.until_free()


async def test_a_draft_that_drains_lets_go_of_an_idle_gateway_at_once(
    folder: Path, head: Path, tmp_path: Path
) -> None:
    async with (
        running_target(folder, tmp_path) as target,
        running_draft(head, tmp_path, target.address) as draft,
        draft_stub(draft.address) as stub,
    ):
        stream = stub.Propose()
        await exchange(stream, propose(opens=[slots(1)]))
        await draft.server.stop(3600)
        assert (await refused(stream.read(), UNAVAILABLE)).details() == "the draft is draining"
        await draft.until_free()


async def test_a_proposal_that_waits_for_lost_features_ends(folder: Path, head: Path, tmp_path: Path) -> None:
    async with (
        running_target(folder, tmp_path) as target,
        running_draft(head, tmp_path, target.address) as draft,
    ):
        async with draft_stub(draft.address) as stub:
            stream = stub.Propose()
            await exchange(stream, propose(opens=[slots(1)]))
            await stream.write(propose(extend(1, 0, [5], 3)))
            await target.server.stop(0)
            await refused(stream.read(), UNAVAILABLE)
        await draft.until_free()


async def test_the_same_target_comes_back(folder: Path, head: Path, tmp_path: Path, reference: Any) -> None:
    """More than once, and with a new subscription each time."""
    async with running_target(folder, tmp_path) as first, running_draft(head, tmp_path, first.address) as draft:
        seen = {(await info_of(draft)).subscription_id}
        await first.server.stop(0)
        for _ in range(2):
            await until_lost(draft)
            async with running_target(folder, tmp_path) as again:
                await draft.until_serving()
                seen.add((await info_of(draft)).subscription_id)
                async with streams(again, draft) as rounds:
                    pair = await prompted(rounds)
                    assert await pair.draft(3) == reference(pair.text, 3)
                await draft.until_free()
        assert len(seen) == 3


async def test_another_target_comes_back(folder: Path, head: Path, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", seed=3)
    async with running_target(folder, tmp_path) as first, running_draft(head, tmp_path, first.address) as draft:
        await first.server.stop(0)
        await until_lost(draft)
        async with running_target(other, tmp_path):
            with pytest.raises(
                EyasError, match=r"^another target came back at unix:.*: the head must be loaded anew$"
            ):
                await draft.attached


def failing_once(call: Any, code: grpc.StatusCode) -> Any:
    """The call, which fails the first time."""
    failed: list[bool] = []

    async def fail_then_ask(request: Any) -> Any:
        if failed:
            return await call(request)
        failed.append(True)
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "socket closed")

    return fail_then_ask


async def test_a_target_that_goes_away_before_it_is_described(
    folder: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        running_target(folder, tmp_path) as target,
        running_draft(head, tmp_path, target.address, wait=False) as draft,
    ):
        stub = draft.service._link._stub
        monkeypatch.setattr(stub, "GetTargetInfo", failing_once(stub.GetTargetInfo, UNAVAILABLE))
        await draft.until_serving()


async def test_a_target_that_cannot_describe_itself(
    folder: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        running_target(folder, tmp_path) as target,
        running_draft(head, tmp_path, target.address, wait=False) as draft,
    ):
        stub = draft.service._link._stub
        monkeypatch.setattr(stub, "GetTargetInfo", failing_once(stub.GetTargetInfo, grpc.StatusCode.INTERNAL))
        with pytest.raises(EyasError, match=r"^the target at unix:.* does not describe itself: socket closed"):
            await draft.attached


async def test_a_target_that_goes_away_before_it_is_subscribed_to(
    folder: Path, head: Path, tmp_path: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_target(folder, tmp_path) as first:  # noqa: SIM117 (the second target is within both)
        async with running_draft(head, tmp_path, first.address, wait=False) as draft:
            stub, stopped = draft.service._link._stub, asyncio.Event()
            features = stub.Features

            def stop_and_subscribe() -> Any:
                stop = asyncio.ensure_future(first.server.stop(0))
                stop.add_done_callback(lambda _: stopped.set())
                return LateCall(features(), stop)

            monkeypatch.setattr(stub, "Features", stop_and_subscribe)
            await stopped.wait()
            monkeypatch.setattr(stub, "Features", features)
            async with running_target(folder, tmp_path) as second:
                await draft.until_serving()
                async with streams(second, draft) as rounds:
                    pair = await prompted(rounds)
                    assert await pair.draft(3) == reference(pair.text, 3)


class LateCall:
    """A call whose first write waits for something."""

    def __init__(self, call: Any, event: asyncio.Future[None]) -> None:
        self._call, self._event = call, event
        self.read, self.cancel = call.read, call.cancel

    async def write(self, request: Any) -> None:
        await self._event
        await self._call.write(request)


# ---- a target that is not there


async def test_a_target_that_is_not_up_is_waited_for(
    folder: Path, head: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"unix:{tmp_path}/target.sock"
    with caplog.at_level(logging.INFO, "draft_service"):
        async with running_draft(head, tmp_path, address, wait=False) as draft:
            while "waiting for the target at" not in caplog.text:
                await asyncio.sleep(0.005)
            async with draft_stub(draft.address) as stub:
                await refused(stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest()), UNAVAILABLE)
            assert not await is_serving(draft)
            async with running_target(folder, tmp_path):
                await draft.until_serving()
                assert (await info_of(draft)).subscription_id != 0


async def test_a_target_that_never_comes_up_is_an_error(head: Path, tmp_path: Path) -> None:
    with pytest.raises(NotServing, match=r"the target at unix:.*/target\.sock did not come up within 0\.2 s"):
        async with running_draft(head, tmp_path, f"unix:{tmp_path}/target.sock", wait_seconds=0.2):
            pass


# ---- what does not fit


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 32, "heads": 2}, "hidden_size is 64, but the target's is 32"),
        ({"vocab_size": 640}, "vocab_size is 512, but the target's is 640"),
        ({"num_layers": 4}, "means the taps [2, 3, 5], but the target has 4 layers"),
    ],
)
async def test_a_head_made_for_another_target_is_refused_by_file_and_field(
    head: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    other = make_target(tmp_path / "other", **options)
    async with running_target(other, tmp_path) as target:
        with pytest.raises(EyasError) as caught:
            async with running_draft(head, tmp_path, target.address):
                pass
    assert str(caught.value).startswith(f"{head / 'config.json'}: ")
    assert message in str(caught.value)


async def test_a_damaged_head_is_refused_by_file(folder: Path, tmp_path: Path) -> None:
    head = make_head(tmp_path / "head", "eagle3", folder)
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    async with running_target(folder, tmp_path) as target:
        with pytest.raises(EyasError) as caught:
            async with running_draft(head, tmp_path, target.address):
                pass
    assert str(caught.value).startswith(f"{weights}: cut short, damaged")


async def test_what_the_target_says_at_the_handshake_is_passed_on(
    folder: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draft_service.target_link.LAYOUT_VERSION", 7)
    async with running_target(folder, tmp_path) as target:
        with pytest.raises(EyasError) as caught:
            async with running_draft(head, tmp_path, target.address):
                pass
    assert str(caught.value) == "head 'tiny-head' was made for layout_version 7, but the target's is 1"


async def test_the_targets_checkpoint_can_be_elsewhere_on_the_drafts_host(
    folder: Path, head: Path, tmp_path: Path, reference: Any
) -> None:
    here, moved = shutil.copytree(folder, tmp_path / "here"), tmp_path / "moved"
    async with running_target(here, tmp_path) as target:
        here.rename(moved)
        with pytest.raises(EyasError, match=r"^target_checkpoint: the head borrows .*, but .*/here is"):
            async with running_draft(head, tmp_path, target.address):
                pass
        async with (
            running_draft(head, tmp_path, target.address, target_checkpoint=moved) as draft,
            streams(target, draft) as rounds,
        ):
            pair = await prompted(rounds)
            assert await pair.draft(3) == reference(pair.text, 3)


async def test_two_heads_on_one_target(
    folder: Path, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own subscription, and gets the features of its own sequences."""
    async with (
        running_target(folder, tmp_path, num_pages=60) as target,
        running_draft(heads["eagle1"], tmp_path, target.address, socket="one.sock") as one,
        running_draft(heads["eagle3"], tmp_path, target.address, socket="two.sock") as two,
        streams(target, one) as first,
        streams(target, two) as second,
    ):
        assert first.subscription != second.subscription
        both: tuple[Streams, ...] = (first, second)
        pairs = [await prompted(rounds, sequence=i) for i, rounds in enumerate(both)]
        assert [len(await pair.draft(3)) for pair in pairs] == [3, 3]
