"""The draft's part of a round: which slots to write, how many tokens to ask for, and what came back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from eyas.v1 import draft_pb2
from gateway.draft_client import Answer, DraftClient
from gateway.exchange import NOTHING_SENT, Exchange
from gateway.scheduler import Close
from gateway.sequence import Sequence

DRAFTED = draft_pb2.PROPOSAL_STATUS_OK

FALLBACK_MAX_DRAFT_TOKENS = 8
"""What a request may ask for while a configured draft has never been seen."""


class _Sent(NamedTuple):
    """An extend that is under way."""

    sequence: Sequence
    epoch: int
    num_slots: int  # behind it
    num_drafts: int  # asked for

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

    def on_late_answer(self, call: Callable[[], None]) -> None:
        """Has `call` called when an answer comes for which no round has waited."""
        if self._client is not None:
            self._client.on_late_answer = call

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
        A draft that answers what it was not asked, or tokens beyond the vocabulary, is detached."""
        for sequence in sequences:
            sequence.drafts = []
        self._to_close += (close for close in closes if close.attachment)
        client = self._client
        if client is None:
            return NOTHING_SENT
        if (late := client.take_answer()) is not None:
            self._apply(late, vocab_size)
            for sequence in sequences:
                sequence.drafts = []  # proposed behind tokens that are no longer the last
        if not client.is_ready:
            return NOTHING_SENT
        request = self._request(round_, sequences, client, room)
        if not (request.extends or request.opens or request.closes):
            return NOTHING_SENT
        began = time.perf_counter()
        answer = await client.propose(request)
        if answer is None:
            return Exchange(began, time.perf_counter() - began)
        self._apply(answer, vocab_size)
        return answer[1]

    def _holds(self, sequence: Sequence) -> bool:
        return self._client is not None and 0 < sequence.attachment == self._client.attachment

    def _request(
        self, round_: int, sequences: Seq[Sequence], client: DraftClient, room: int
    ) -> draft_pb2.ProposeRequest:
        request = draft_pb2.ProposeRequest(round=round_)
        for close in self._to_close:
            if close.attachment == client.attachment:
                request.closes.add(sequence_id=close.sequence_id)
        self._to_close = []
        self._sent, self._sent_round = [], round_
        for sequence in sequences:
            if not sequence.opened and sequence.request.num_draft_tokens:
                sequence.attachment = client.attachment
                request.opens.add(
                    sequence_id=sequence.id,
                    epoch=sequence.epoch,
                    sampling=sequence.sampling(),
                    traceparent=sequence.traceparent,
                )
            if self._holds(sequence) and sequence.num_computed > sequence.num_slots:
                room -= self._extend(request, sequence, room)
        return request

    def _extend(self, request: draft_pb2.ProposeRequest, sequence: Sequence, room: int) -> int:
        """Slot i takes x_{i+1} and h_i: the slots that can be written are those whose feature is computed.
        Returns how many tokens are asked for."""
        begin, end = sequence.num_slots, sequence.num_computed
        num_drafts = max(0, min(sequence.draft_budget, self.max_draft_tokens, room))
        request.extends.add(
            sequence_id=sequence.id,
            epoch=sequence.epoch,
            slot=begin,
            tokens=sequence.tokens[begin + 1 : end + 1],
            feature_round=sequence.feature_round,
            num_draft_tokens=num_drafts,
        )
        self._sent.append(_Sent(sequence, sequence.epoch, end, num_drafts))
        return num_drafts

    def _apply(self, answer: Answer, vocab_size: int) -> None:
        response, _ = answer
        if (fault := self._fault(response, vocab_size)) and self._client is not None:
            self._client.reject(fault)
            return
        for sent, proposal in zip(self._sent, response.proposals, strict=True):
            sequence = sent.sequence
            if sequence.epoch != sent.epoch or not self._holds(sequence):
                continue
            if proposal.status == DRAFTED:
                sequence.num_slots = sent.num_slots
                sequence.drafts = list(proposal.draft_tokens)
            else:
                self._to_close.append(Close(sequence.id, sequence.attachment))
                sequence.attachment = 0

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
