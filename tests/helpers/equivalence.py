"""What the equivalence tests share: requests, their plain answers, and a gateway with any kind of draft."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from gateway.request import GenerationRequest, Sampling
from tests.helpers.engine import GREEDY, Answer, Gateway, ask, running_gateway
from tests.helpers.services import RunningTarget, running_draft
from tests.helpers.standins import (
    Policy,
    StandIn,
    lead_by_the_nose,
    liar,
    oracle,
    running_stand_in,
    scripted,
)
from tests.helpers.tiny_heads import HeadKind
from tests.helpers.tiny_models import make_head

PROMPTS = ("The eyas", "a", "hunts at dawn, and returns at dusk to its nest.", "two words")
LAWS = {
    "greedy": GREEDY,
    "cool": Sampling(temperature=0.7, top_p=0.9, top_k=0, seed=11),
    "hot": Sampling(temperature=1.5, top_p=1.0, top_k=40, seed=2**64 - 1),
}
HEADS: tuple[HeadKind, ...] = get_args(HeadKind)
STAND_INS = ("oracle", "liar", "scripted")
LED_HEADS = ("oracle head", "liar head", "scripted head")


def requests(law: str, max_tokens: int) -> list[GenerationRequest]:
    """One for every prompt, each with a seed of its own."""
    sampling = LAWS[law]
    return [
        ask(prompt, max_tokens, sampling=replace(sampling, seed=sampling.seed - i if sampling.seed else 0))
        for i, prompt in enumerate(PROMPTS)
    ]


async def plain_answers(target: RunningTarget, asked: Sequence[GenerationRequest]) -> list[Answer]:
    """What plain decoding says, to one request after the other."""
    async with running_gateway(target.address) as gateway:
        return [await gateway.answer(request) for request in asked]


def texts(asked: Sequence[GenerationRequest], answers: Sequence[Answer]) -> list[list[int]]:
    """Prompts with their answers, as token ids."""
    return [[*request.prompt_ids, *answer.ids] for request, answer in zip(asked, answers, strict=True)]


@asynccontextmanager
async def speculating(
    name: str, model: Path, target: RunningTarget, folder: Path, known: Sequence[Sequence[int]], **config: Any
) -> AsyncIterator[Gateway]:
    """A gateway whose draft is the head or stand-in of that name; the draft holds no slots in the end."""
    if name not in STAND_INS:
        kind: HeadKind = "eagle1" if name == "eagle1" else "eagle3"
        head = make_head(folder / "head", kind, model, imitate=True)
        async with running_draft(head, folder, target.address) as draft:
            if name in LED_HEADS:
                lead_by_the_nose(draft, _policy(name.removesuffix(" head"), known))
            async with running_gateway(target.address, draft.address, **config) as gateway:
                yield gateway
                await draft.until_free()
        return
    stand_in = StandIn(_policy(name, known))
    async with (
        running_stand_in(stand_in, folder) as running,
        running_gateway(target.address, running.address, **config) as gateway,
    ):
        yield gateway
        await stand_in.until_free()


def _policy(name: str, known: Sequence[Sequence[int]]) -> Policy:
    if name == "scripted":
        return scripted(known, [2, 0, 1, 5, 0, 8])
    return {"oracle": oracle, "liar": liar}[name](known)


def check_acceptance(name: str, answers: Sequence[Answer]) -> None:
    """That drafts were verified at all, and met the fate that the draft of that name stands for."""
    stats = [answer.stats for answer in answers if answer.stats]
    drafted = sum(s.num_draft_tokens for s in stats)
    accepted = sum(s.num_accepted_tokens for s in stats)
    assert drafted > 0
    if name.startswith("oracle"):
        assert accepted == drafted
    elif name.startswith("liar"):
        assert accepted == 0
    else:
        assert 0 < accepted < drafted
