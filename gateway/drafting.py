"""The draft's part of a round: which slots to write, how many tokens to ask for, and what came back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from eyas.v1 import draft_pb2
from gateway.draft_client import Answer, DraftClient
from gateway.exchange import NOTHING_SENT, Exchange
from gateway.scheduler import Close, Share
from gateway.sequence import Sequence

DRAFTED = draft_pb2.PROPOSAL_STATUS_OK

FALLBACK_MAX_DRAFT_TOKENS = 8
"""What a request may ask for while a configured draft has never been seen."""


@dataclass
class _Sent:
    """An extend that is under way."""

    sequence: Sequence
    epoch: int
    num_drafts: int  # asked for
    num_slots: int | None  # behind it; None until the step that it was sent ahead of is committed
    num_computed: int  # of the sequence, when it was sent
    is_void: bool = False  # that step did not run the sequence's block

    def settle(self) -> None:
        """Called once the step is committed."""
        if self.num_slots is None:
            self.num_slots = self.sequence.num_computed
            self.is_void = self.num_slots == self.num_computed

    def fault(self, proposal: draft_pb2.Proposal, vocab_size: int) -> str:
        """What is wrong with the answer; empty where nothing is."""
        if (proposal.sequence_id, proposal.epoch) != (self.sequence.id, self.epoch):
            return "a proposal is not for the sequence that was asked for"
        if len(proposal.draft_tokens) > self.num_drafts:
            return f"{len(proposal.draft_tokens)} draft tokens instead of {self.num_drafts}"
        if max(proposal.draft_tokens, default=0) >= vocab_size:
            return f"draft token {max(proposal.draft_tokens)} is beyond the vocabulary of {vocab_size}"
        return ""


class Drafting:
    """Keeps each sequence's slots in step with the target while the draft is attached. A sequence whose slots are
    lost (draft gone, no pages, features missing) goes on plainly: its text does not depend on drafts."""

    def __init__(self, client: DraftClient | None) -> None:
        self._client = client
        self._max_draft_tokens = FALLBACK_MAX_DRAFT_TOKENS if client else 0
        self._sent: list[_Sent] = []  # by the last message
        self._sent_round = 0
        self._to_close: list[Close] = []

    @property
    def head(self) -> str:
        """Name of the attached head; empty while there is none."""
        return self._client.info.head if self._client and self._client.info else ""

    @property
    def max_draft_tokens(self) -> int:
        """Largest k of a request; 0 where no draft is configured."""
        if self._client and self._client.info:
            self._max_draft_tokens = self._client.info.max_draft_tokens
        return self._max_draft_tokens

    @property
    def has_work(self) -> bool:
        """Whether the draft holds slots of ended sequences, and can be told so."""
        return bool(self._to_close) and self._client is not None and self._client.is_ready

    def on_answer(self, call: Callable[[], None]) -> None:
        """Has `call` called when an answer has come."""
        if self._client is not None:
            self._client.on_answer = call

    def subscription_of(self, sequence: Sequence) -> int:
        """The subscription that gets the sequence's features; 0 for none."""
        return (
            self._client.info.subscription_id
            if self._client and self._client.info and self._holds(sequence)
            else 0
        )

    async def propose(
        self, round_: int, sequences: Seq[Sequence], closes: Iterable[Close], *, room: int, vocab_size: int
    ) -> Exchange:
        """Brings the slots up to date and fills `drafts` of the sequences that decode, with `room` tokens in all.

        Mostly that is the answer to the message that was sent ahead. What it does not cover (new sequences, slots
        that have fallen behind, a draft that reads no features) is sent now and waited for. Returns what of it the
        round has waited for. A draft that answers what it was not asked, or tokens beyond the vocabulary, is
        detached.
        """
        for sequence in sequences:
            sequence.drafts = []
        self._to_close += (close for close in closes if close.attachment)
        client = self._client
        if client is None:
            return NOTHING_SENT
        began, compute = time.perf_counter(), 0.0
        has_asked = client.is_waiting
        if has_asked:
            for sent in self._sent:
                sent.settle()
            compute += self._apply(await client.answer(), vocab_size)
        if client.is_ready and (request := self._request_now(round_, sequences, client, room)) is not None:
            has_asked = True
            client.send(request)
            compute += self._apply(await client.answer(), vocab_size)
        if not has_asked:
            return NOTHING_SENT
        for sequence in sequences:
            del sequence.drafts[max(0, min(sequence.draft_budget, room)) :]
            room -= len(sequence.drafts)
        waited = time.perf_counter() - began
        return Exchange(began, waited, min(compute, waited))

    def send_ahead(self, round_: int, shares: Seq[Share]) -> None:
        """Called when step `round_` is on its way: tells the draft what to do as soon as that step's features, and
        the tokens that it commits, have come. So the draft does not wait for the gateway, and works while it
        commits. Proposals behind a sequence that ends meanwhile are for nothing."""
        client = self._client
        if client is None or client.info is None or client.is_waiting or not client.info.subscription_id:
            return
        request = self._new_request(round_, client)
        for share in shares:
            if self._holds(share.sequence):
                self._extend_ahead(request, round_, share)
        if request.extends or request.closes:
            client.send(request)

    def step_failed(self) -> None:
        """Called when a step came to nothing: a message that was sent ahead of it would wait for its features."""
        if self._client is not None and self._client.is_waiting:
            self._client.detach()

    def _holds(self, sequence: Sequence) -> bool:
        return self._client is not None and 0 < sequence.attachment == self._client.attachment

    def _request_now(
        self, round_: int, sequences: Seq[Sequence], client: DraftClient, room: int
    ) -> draft_pb2.ProposeRequest | None:
        """What cannot wait for the next message that is sent ahead."""
        opening = [s for s in sequences if not s.opened and s.request.num_draft_tokens]
        behind = [s for s in sequences if self._holds(s) and s.num_computed > s.num_slots]
        if not (opening or behind or (self._to_close and not sequences)):
            return None
        request = self._new_request(round_, client)
        for sequence in opening:
            sequence.attachment = client.attachment
            request.opens.add(
                sequence_id=sequence.id,
                epoch=sequence.epoch,
                sampling=sequence.sampling(),
                traceparent=sequence.traceparent,
            )
        for sequence in behind:
            room -= self._extend_now(request, sequence, room)
        return request

    def _new_request(self, round_: int, client: DraftClient) -> draft_pb2.ProposeRequest:
        request = draft_pb2.ProposeRequest(round=round_)
        for close in self._to_close:
            if close.attachment == client.attachment:
                request.closes.add(sequence_id=close.sequence_id)
        self._to_close = []
        self._sent, self._sent_round = [], round_
        return request

    def _extend_now(self, request: draft_pb2.ProposeRequest, sequence: Sequence, room: int) -> int:
        """The slots whose features are computed. Returns how many tokens are asked for."""
        num_drafts = max(0, min(sequence.draft_budget, self.max_draft_tokens, room))
        end = sequence.num_computed
        self._extend(request, sequence, end, num_drafts, num_slots=end, feature_round=sequence.feature_round)
        return num_drafts

    def _extend_ahead(self, request: draft_pb2.ProposeRequest, round_: int, share: Share) -> None:
        """The slots whose features the step on its way computes. Where it scores the last row, their last tokens
        are those that it commits."""
        sequence, scored = share.sequence, share.is_last_chunk
        num_drafts = min(sequence.next_draft_budget, self.max_draft_tokens) if scored else 0
        end = sequence.num_computed + share.num_fed
        self._extend(
            request, sequence, end, num_drafts, num_slots=None, feature_round=round_, then_committed=scored
        )

    def _extend(
        self,
        request: draft_pb2.ProposeRequest,
        sequence: Sequence,
        end: int,
        num_drafts: int,
        *,
        num_slots: int | None,
        feature_round: int,
        then_committed: bool = False,
    ) -> None:
        """Slot i takes x_{i+1} and h_i: asks for those up to `end`, as far as their tokens are known."""
        begin = sequence.num_slots
        request.extends.add(
            sequence_id=sequence.id,
            epoch=sequence.epoch,
            slot=begin,
            tokens=sequence.tokens[begin + 1 : end + 1],
            feature_round=feature_round,
            num_draft_tokens=num_drafts,
            then_committed=then_committed,
        )
        self._sent.append(_Sent(sequence, sequence.epoch, num_drafts, num_slots, sequence.num_computed))

    def _apply(self, answer: Answer | None, vocab_size: int) -> float:
        """Notes slots, and drafts unless more has been computed meanwhile. Returns the draft's seconds."""
        if answer is None:
            return 0.0
        response, exchange = answer
        if (fault := self._fault(response, vocab_size)) and self._client is not None:
            self._client.reject(fault)
            return exchange.compute
        for sent, proposal in zip(self._sent, response.proposals, strict=True):
            sequence = sent.sequence
            if sequence.epoch != sent.epoch or not self._holds(sequence) or sent.is_void:
                continue
            if proposal.status == DRAFTED and sent.num_slots is not None:
                sequence.num_slots = sent.num_slots
                is_late = sent.num_slots < sequence.num_computed
                sequence.drafts = [] if is_late else list(proposal.draft_tokens)
            else:
                self._to_close.append(Close(sequence.id, sequence.attachment))
                sequence.attachment = 0
        return exchange.compute

    def _fault(self, response: draft_pb2.ProposeResponse, vocab_size: int) -> str:
        if response.round != self._sent_round:
            return f"an answer to round {response.round} instead of {self._sent_round}"
        if len(response.proposals) != len(self._sent):
            return f"{len(response.proposals)} proposals instead of {len(self._sent)}"
        faults = (
            sent.fault(proposal, vocab_size)
            for sent, proposal in zip(self._sent, response.proposals, strict=True)
        )
        return next(filter(None, faults), "")
