"""Texts that the target writes by itself, with its features and its choices: what a head can be tested on without a
client, a tokenizer or a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draft_service.features import FeatureStore, Need
from draft_service.target_link import TargetLink, exchange, read
from eyas.errors import EyasError
from eyas.v1 import common_pb2, target_pb2

NUM_TEXTS = 8
LENGTH = 64
TEMPERATURE = 0.7
"""Low enough for sense, high enough that no text repeats itself."""


class NotSampled(EyasError):
    """The target has no room for the texts now."""


class Steps:
    """A round stream of our own."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._round = stream, 0

    async def step(
        self,
        blocks: Sequence[target_pb2.Block],
        opens: Sequence[target_pb2.OpenSequence] = (),
        closes: Sequence[int] = (),
    ) -> Sequence[target_pb2.BlockResult]:
        """One step's results. Raises NotSampled, TargetLost."""
        self._round += 1
        closing = [target_pb2.CloseSequence(sequence_id=sequence) for sequence in closes]
        request = target_pb2.StepRequest(round=self._round, opens=opens, blocks=blocks, closes=closing)
        response: target_pb2.StepResponse = await exchange(self._stream, request)
        if any(result.status != target_pb2.BLOCK_STATUS_OK for result in response.results):
            raise NotSampled("the target has no free pages for it")
        return response.results


@dataclass(frozen=True)
class Sample:
    """`tokens` and `choices` are int64 [texts, length]: the texts, and the target's most likely token behind each
    token. `features` is [texts, length, taps, target_hidden]; without `taps` it has the final norm's alone."""

    tokens: torch.Tensor
    choices: torch.Tensor
    taps: tuple[int, ...]
    features: torch.Tensor

    def features_at(self, taps: Sequence[int]) -> torch.Tensor:
        """[texts, length, len(taps) * target_hidden] at some of the sample's taps; without taps all there is."""
        if not taps:
            return self.features.flatten(2)
        return self.features[:, :, [self.taps.index(tap) for tap in taps]].flatten(2)


async def take_sample(
    link: TargetLink, info: target_pb2.GetTargetInfoResponse, taps: tuple[int, ...]
) -> Sample:
    """Has the target write the texts, at a temperature, and read them again, as a gateway would. Raises NotSampled,
    TargetLost, and EyasError where the target refuses the taps."""
    source = common_pb2.FeatureSource(taps=taps, final_norm=not taps)
    store, choices, rows = FeatureStore(), [], []
    async with (
        link.subscribe(source, info.hidden_size, info.vocab_size) as (subscribed, features),
        link.step_stream() as stream,
    ):
        steps = Steps(stream)
        texts = await _write(steps, info)
        for sequence, text in enumerate(texts, 1):
            store.open(sequence, 0)
            choices.append(await _read(steps, info, sequence, text, subscribed.subscription_id))
            while (taken := store.take(Need(sequence, 0, 0, len(text), 0))) is None:
                store.add((await read(features)).batch)
            rows.append(taken.rows.unflatten(1, (max(1, len(taps)), -1)))
    return Sample(torch.tensor(texts), torch.tensor(choices), taps, torch.stack(rows))


async def _write(steps: Steps, info: target_pb2.GetTargetInfoResponse) -> list[list[int]]:
    """Texts behind a token that ends others, so that they begin as anything may."""
    first = min(info.eos_token_ids, default=0)
    sequences = range(1, 1 + min(NUM_TEXTS, info.max_rows))
    texts = {sequence: [first] for sequence in sequences}
    laws = [
        common_pb2.SamplingParams(temperature=TEMPERATURE, top_p=1, seed=sequence) for sequence in sequences
    ]
    opens = [
        target_pb2.OpenSequence(sequence_id=sequence, sampling=law)
        for sequence, law in zip(sequences, laws, strict=True)
    ]
    length = min(LENGTH, info.context_length)
    for start in range(length - 1):
        blocks = [_block(sequence, start, text[-1:]) for sequence, text in texts.items()]
        for result in await steps.step(blocks, opens if start == 0 else []):
            texts[result.sequence_id].append(result.sampled_tokens[0])
    await steps.step([], closes=sequences)
    return list(texts.values())


async def _read(
    steps: Steps, info: target_pb2.GetTargetInfoResponse, sequence: int, text: list[int], subscription: int
) -> list[int]:
    """The target's most likely token behind each of the text's."""
    opening = target_pb2.OpenSequence(
        sequence_id=sequence, sampling=common_pb2.SamplingParams(top_p=1), subscription_id=subscription
    )
    choices: list[int] = []
    for start in range(0, len(text), info.max_rows):
        block = _block(sequence, start, text[start : start + info.max_rows])
        (result,) = await steps.step([block], [opening] if start == 0 else [])
        choices += result.sampled_tokens
    await steps.step([], closes=[sequence])
    return choices


def _block(sequence: int, start: int, tokens: Sequence[int]) -> target_pb2.Block:
    return target_pb2.Block(sequence_id=sequence, start=start, tokens=tokens, num_scored=len(tokens))
