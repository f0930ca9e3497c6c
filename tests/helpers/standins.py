"""Drafts whose every proposal is known beforehand: services without a head behind the real contract, which need no
features, and real ones that are made to say what they are told.

A stand-in holds the gateway to the contract too: what it breaks is an error on leaving.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.names import DRAFT_SERVICE
from eyas.server import Server
from eyas.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.helpers.services import RunningDraft

OK = draft_pb2.PROPOSAL_STATUS_OK


@dataclass
class Slots:
    """What a stand-in knows of an open sequence: the tokens x_1 .. x_n of its slots."""

    epoch: int
    sampling: common_pb2.SamplingParams
    traceparent: str
    tokens: list[int] = field(default_factory=list)
    num_proposals: int = 0  # so far, those that were asked for drafts


Policy = Callable[[Slots, int], list[int]]
"""A sequence and k -> its drafts."""

Texts = Iterable[Sequence[int]]
"""Whole texts of the target, prompt and continuation, as token ids."""


def oracle(texts: Texts) -> Policy:
    """Proposes what the target goes on to say: everything is accepted, up to the end of what is known."""
    return lambda slots, k: _continuation(texts, slots.tokens)[:k]


def liar(texts: Texts) -> Policy:
    """Proposes k tokens, the first of which is never the target's."""
    return scripted(texts, [0])


def scripted(texts: Texts, counts: Sequence[int]) -> Policy:
    """Proposes k tokens, of which the i-th time `counts[i]` are accepted, over and over. A count of k or more
    makes it an oracle that time."""

    def propose(slots: Slots, k: int) -> list[int]:
        count = counts[(slots.num_proposals - 1) % len(counts)]
        truth = _continuation(texts, slots.tokens)[:k]
        return [token if i < count else wrong(token) for i, token in enumerate(truth)]

    return propose


def wrong(token: int) -> int:
    """Another token, in any vocabulary."""
    return token - 1 if token else 1


def _continuation(texts: Texts, tokens: Sequence[int]) -> list[int]:
    """What follows x_1 .. x_n in the text that has them."""
    end = len(tokens) + 1
    return next((list(text[end:]) for text in texts if list(text[1:end]) == list(tokens)), [])


class StandIn(draft_pb2_grpc.DraftServiceServicer):
    """Drafts by `policy`.

    Every answer takes `delay` seconds. While `gate` is not set, answers are held back, and `held` is set once one
    is; `hold_at` closes the gate at the request of that number. `spoil` may change an answer in place, or raise,
    which ends the stream.
    """

    def __init__(self, policy: Policy, *, name: str = "stand-in", max_draft_tokens: int = 8) -> None:
        self.policy = policy
        self.delay = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.held = asyncio.Event()
        self.hold_at = 0
        self.spoil: Callable[[draft_pb2.ProposeResponse], None] = lambda response: None
        self.open: dict[int, Slots] = {}  # of all streams
        self.num_streams = 0
        self.requests: list[draft_pb2.ProposeRequest] = []
        self.broken: list[str] = []  # what gateways did against the contract
        self._info = draft_pb2.GetDraftInfoResponse(
            head=name,
            kind="eagle3",
            max_draft_tokens=max_draft_tokens,
            target_model="tiny",
            transport=common_pb2.FEATURE_TRANSPORT_BYTES,
        )

    async def GetDraftInfo(
        self, request: draft_pb2.GetDraftInfoRequest, context: Any
    ) -> draft_pb2.GetDraftInfoResponse:
        return self._info

    async def Propose(
        self, request_iterator: AsyncIterable[draft_pb2.ProposeRequest], context: Any
    ) -> AsyncIterator[draft_pb2.ProposeResponse]:
        lease: set[int] = set()
        round_ = 0
        self.num_streams += 1
        try:
            async for request in request_iterator:
                self._expect(request.round > round_, f"round {request.round} follows round {round_}")
                round_ = request.round
                self.requests.append(request)
                response = self._answer(lease, request)
                self.spoil(response)
                if len(self.requests) == self.hold_at:
                    self.gate.clear()
                if not self.gate.is_set():
                    self.held.set()
                await asyncio.sleep(self.delay)
                await self.gate.wait()
                yield response
        finally:
            for sequence_id in lease:
                del self.open[sequence_id]

    async def until_free(self) -> None:
        """Returns once no sequence is open; the test's own limit ends a wait that never does."""
        while self.open:
            await asyncio.sleep(0.005)

    def _answer(self, lease: set[int], request: draft_pb2.ProposeRequest) -> draft_pb2.ProposeResponse:
        for close in request.closes:
            if close.sequence_id in lease:
                lease.remove(close.sequence_id)
                del self.open[close.sequence_id]
        for opening in request.opens:
            self._expect(opening.sequence_id not in lease, "a sequence is opened twice")
            lease.add(opening.sequence_id)
            self.open[opening.sequence_id] = Slots(opening.epoch, opening.sampling, opening.traceparent)
        ids = [extend.sequence_id for extend in request.extends]
        self._expect(len(set(ids)) == len(ids), "extends name a sequence twice")
        return draft_pb2.ProposeResponse(
            round=request.round, proposals=[self._propose(lease, extend) for extend in request.extends]
        )

    def _propose(self, lease: set[int], extend: draft_pb2.Extend) -> draft_pb2.Proposal:
        slots, k = self.open.get(extend.sequence_id), extend.num_draft_tokens
        if slots is None or extend.sequence_id not in lease:
            self._expect(False, "an extend names a sequence that is not open")
            return draft_pb2.Proposal(status=draft_pb2.PROPOSAL_STATUS_UNKNOWN_SEQUENCE)
        self._expect(extend.epoch == slots.epoch, f"epoch {extend.epoch} is not {slots.epoch}")
        self._expect(
            extend.slot <= len(slots.tokens), f"slot {extend.slot} is behind {len(slots.tokens)} slots"
        )
        self._expect(len(extend.tokens) > 0, "an extend has no tokens")
        self._expect(k <= self._info.max_draft_tokens, f"{k} drafts are too many")
        slots.tokens[extend.slot :] = extend.tokens
        slots.num_proposals += k > 0
        drafts = self.policy(slots, k) if k else []
        return draft_pb2.Proposal(
            sequence_id=extend.sequence_id, epoch=extend.epoch, status=OK, draft_tokens=drafts
        )

    def _expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.broken.append(otherwise)


@dataclass(frozen=True)
class RunningStandIn:
    """A stand-in that serves."""

    address: str
    stand_in: StandIn
    server: Server

    async def kill(self) -> None:
        """Ends it with its streams, as when its process dies."""
        await self.server.stop(0)


@asynccontextmanager
async def running_stand_in(
    stand_in: StandIn, folder: Path, socket: str = "draft.sock"
) -> AsyncIterator[RunningStandIn]:
    """Serves the stand-in on a socket in `folder`."""
    async with Server("draft", f"unix:{folder}/{socket}") as server:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(stand_in, server.grpc)
        await server.start([DRAFT_SERVICE])
        await server.set_serving(True)
        try:
            yield RunningStandIn(server.address, stand_in, server)
        finally:
            stand_in.gate.set()
            await server.stop(0)
    assert not stand_in.broken


def lead_by_the_nose(
    draft: RunningDraft, policy: Policy, spoil: Callable[[draft_pb2.ProposeResponse], None] = lambda _: None
) -> None:
    """Has a real draft propose what the policy says. It reads its features and writes its slots all the same.
    `spoil` is that of a stand-in."""
    slots: dict[int, Slots] = {}
    service: Any = draft.service
    propose = service._propose

    async def as_told(engine: Any, lease: Any, held: Any, request: draft_pb2.ProposeRequest) -> Any:
        response = await propose(engine, lease, held, request)
        for opening in request.opens:
            slots[opening.sequence_id] = Slots(opening.epoch, opening.sampling, opening.traceparent)
        for extend, proposal in zip(request.extends, response.proposals, strict=True):
            if proposal.status == OK:
                known, k = slots[extend.sequence_id], extend.num_draft_tokens
                known.tokens[extend.slot :] = extend.tokens  # the committed ones have been added
                known.num_proposals += k > 0
                proposal.draft_tokens[:] = policy(known, k) if k else []
        spoil(response)
        return response

    service._propose = as_told
