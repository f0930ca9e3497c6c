"""The draft's connection to its target: what the target is, and the stream of features."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import torch

from draft_service.head import Head
from draft_service.head_spec import DEFAULT_ROPE_THETA, Overrides, TargetShape
from eyas.channel import open_channel, wait_until_serving
from eyas.config import DraftConfig
from eyas.errors import EyasError, describe
from eyas.names import TARGET_SERVICE
from eyas.transport import LAYOUT_VERSION, dtype_of
from eyas.v1 import common_pb2, target_pb2, target_pb2_grpc
from eyas_kernels.checkpoint import Config, read_json
from eyas_kernels.device import pick_device

log = logging.getLogger(__name__)


class TargetLost(Exception):
    """The target went away; `str` says how."""


class TargetLink:
    """Knows the target, loads the head that fits it, and subscribes to features."""

    def __init__(self, config: DraftConfig) -> None:
        self._config = config
        self._channel = open_channel(config.target)
        self._stub: Any = target_pb2_grpc.TargetServiceStub(self._channel)
        self._stream: Any = None  # of features, while subscribed
        self._writing = asyncio.Lock()

    async def wait(self, seconds: float) -> target_pb2.GetTargetInfoResponse:
        """The target's description, once it serves. Raises EyasError when it does not within `seconds`."""
        peer = f"the target at {self._config.target}"
        while True:
            await wait_until_serving(self._channel, TARGET_SERVICE, seconds, log.info, peer=peer)
            try:
                info: target_pb2.GetTargetInfoResponse = await self._stub.GetTargetInfo(
                    target_pb2.GetTargetInfoRequest()
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise EyasError(f"{peer} does not describe itself: {describe(error)}") from error
                log.warning("%s went away again: %s", peer, describe(error))
            else:
                return info

    def load_head(self, info: target_pb2.GetTargetInfoResponse) -> Head:
        """Loads the head for this target. Raises EyasError where it does not fit, or cannot be read."""
        config = self._config
        dtype = dtype_of(info.scalar_type) if config.dtype == "auto" else getattr(torch, config.dtype)
        folder = self._folder(info)
        if not folder.is_dir():
            raise EyasError(
                f"target_checkpoint: the head borrows the target's embedding, but {folder} is not on this host;"
                " say where this host has the target's checkpoint"
            )
        shape = TargetShape(info.hidden_size, info.num_layers, info.vocab_size)
        overrides = Overrides(config.rope_theta, config.rope_scaling_fields, config.tap_numbers)
        with torch.inference_mode():
            return Head(config.head, folder, shape, dtype, pick_device(config.device), overrides)

    def target_rope(self, info: target_pb2.GetTargetInfoResponse) -> tuple[float, dict[str, Any] | None]:
        """Base and scaling of the target's own rotary embedding. Raises CheckpointError."""
        file = self._folder(info) / "config.json"
        return Config(read_json(file), file).rope(DEFAULT_ROPE_THETA)

    def _folder(self, info: target_pb2.GetTargetInfoResponse) -> Path:
        return self._config.target_checkpoint or Path(info.checkpoint_path)

    @asynccontextmanager
    async def subscribe(
        self, source: common_pb2.FeatureSource, hidden_size: int, vocab_size: int
    ) -> AsyncIterator[tuple[target_pb2.FeatureSubscribed, Any]]:
        """Opens a feature stream: yields what was agreed, and the stream to read batches from. Raises EyasError
        where the target refuses the head, TargetLost."""
        request = target_pb2.FeatureSubscribe(
            head=self._config.head_name,
            source=source,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            layout_version=LAYOUT_VERSION,
            transports=[common_pb2.FEATURE_TRANSPORT_BYTES],
        )
        stream = self._stub.Features()
        try:
            response = await exchange(stream, target_pb2.FeaturesRequest(subscribe=request))
            self._stream = stream
            yield response.subscribed, stream
        finally:
            self._stream = None
            stream.cancel()

    async def hand_in(self, proposals: target_pb2.DraftProposals) -> None:
        """Proposals on the short way. A target that is gone needs none."""
        async with self._writing:
            if self._stream is not None:
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # reading says why
                    await self._stream.write(target_pb2.FeaturesRequest(proposals=proposals))

    @asynccontextmanager
    async def step_stream(self) -> AsyncIterator[Any]:
        """A round stream; what is opened on it is freed when it ends."""
        stream = self._stub.Step()
        try:
            yield stream
        finally:
            stream.cancel()

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()


def feature_source(head: Head) -> common_pb2.FeatureSource:
    """What the head reads, in the target's terms."""
    return common_pb2.FeatureSource(taps=head.spec.taps, final_norm=not head.spec.taps)


async def exchange(stream: Any, request: Any) -> Any:
    """Sends a message and returns the answer. Raises as `read` does."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # read() says why
        await stream.write(request)
    return await read(stream)


async def read(stream: Any) -> Any:
    """The next message. Raises TargetLost when the stream has ended, EyasError when the target refuses."""
    try:
        response = await stream.read()
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
            raise EyasError(describe(error)) from error
        raise TargetLost(describe(error)) from error
    if response is grpc.aio.EOF:
        raise TargetLost("it ended the stream")
    return response
