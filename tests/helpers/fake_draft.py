"""A draft's client without a draft, and the steps that an engine makes around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from eyas.v1 import draft_pb2
from gateway.commit import CommitState
from gateway.draft_client import Answer
from gateway.drafting import Drafting
from gateway.exchange import Exchange
from gateway.scheduler import Close, Share
from gateway.sequence import Sequence
from gateway.stop_strings import StopStrings
from gateway.text import TextStream, Tokenizer
from tests.helpers.engine import ask
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, tiny_tokenizer_files

OK = draft_pb2.PROPOSAL_STATUS_OK


def info(subscription_id: int) -> draft_pb2.GetDraftInfoResponse:
    return draft_pb2.GetDraftInfoResponse(head="head", max_draft_tokens=5, subscription_id=subscription_id)


@dataclass
class FakeClient:
    """Attached to a draft that proposes 1, 2, .. for everything; while `is_late`, no answer comes."""

    info: draft_pb2.GetDraftInfoResponse | None
    attachment: int = 1
    is_late: bool = False
    status: draft_pb2.ProposalStatus = OK
    asked: list[draft_pb2.ProposeRequest] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    pending: draft_pb2.ProposeResponse | None = None
    on_answer: Callable[[], None] = lambda: None

    @property
    def is_waiting(self) -> bool:
        return self.pending is not None

    @property
    def is_ready(self) -> bool:
        return self.info is not None and (self.pending is None or not self.is_late)

    def send(self, request: draft_pb2.ProposeRequest) -> None:
        assert self.pending is None
        self.asked.append(request)
        proposals = [
            draft_pb2.Proposal(
                sequence_id=extend.sequence_id,
                epoch=extend.epoch,
                status=self.status,
                draft_tokens=range(1, extend.num_draft_tokens + 1) if self.status == OK else (),
            )
            for extend in request.extends
        ]
        self.pending = draft_pb2.ProposeResponse(round=request.round, proposals=proposals)

    async def answer(self) -> Answer | None:
        if self.is_late or self.pending is None:
            return None
        answer, self.pending = self.pending, None
        return answer, Exchange(0.0, 1.0, 1e-9)

    def reject(self, fault: str) -> None:
        self.faults.append(fault)
        self.detach()

    def detach(self) -> None:
        self.info = self.pending = None


def sequence(k: int = 3, max_tokens: int = 20) -> Sequence:
    """A prompt of the tokens 10 .. 13."""
    request = ask(range(10, 14), max_tokens, k=k)
    text = TextStream(Tokenizer(tiny_tokenizer_files()))
    commit = CommitState(max_tokens, frozenset(), StopStrings(()), text)
    return Sequence(request, commit, list(request.prompt_ids), traceparent="t")


def commit(one: Sequence, *tokens: int) -> None:
    """What the engine does once a step has computed everything that there was, and these tokens were committed."""
    one.opened = True
    one.num_computed = len(one.tokens) + len(tokens) - 1
    one.tokens += tokens
    one.commit.completion_tokens += len(tokens)
    one.feature_round += 1


async def propose(
    drafting: Drafting, round_: int, *sequences: Sequence, closes: tuple[Close, ...] = (), room: int = 100
) -> Exchange:
    return await drafting.propose(round_, sequences, closes, room=room, vocab_size=VOCAB_SIZE)


def send_ahead(drafting: Drafting, round_: int, *sequences: Sequence) -> None:
    """With all that is left to compute of each."""
    drafting.send_ahead(round_, [Share(one, one.num_uncomputed) for one in sequences])


async def prompt_round(drafting: Drafting, *sequences: Sequence) -> None:
    """Round 1: the prompts go in, and token 7 comes out."""
    await propose(drafting, 1, *sequences)
    send_ahead(drafting, 1, *sequences)
    for one in sequences:
        commit(one, 7)
