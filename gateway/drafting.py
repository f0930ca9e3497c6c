"""The draft's part of a round: which slots to write, how many tokens to ask for, and what came back."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from eyas.v1 import draft_pb2
from gateway.draft_client import Answer, DraftClient
from gateway.exchange import NOTHING_SENT, Exchange
from gateway.scheduler import Close
from gateway.sequence import Sequence

DRAFTED = draft_pb2.PROPOSAL_STATUS_OK

FALLBACK_MAX_DRAFT_TOKENS = 8
"""What a request may ask for while a configured draft has never been seen."""


class Drafting:
    """Keeps each sequence's slots in step with the target while the draft is attached. A sequence whose slots are
    lost (draft gone, no pages, features missing) goes on plainly: its text does not depend on drafts."""

    def __init__(self, client: DraftClient | None) -> None:
        self._client = client
        self._max_draft_tokens = FALLBACK_MAX_DRAFT_TOKENS if client else 0
        self._sent: dict[int, tuple[Sequence, int, int]] = {}  # sequence, its epoch, slots behind the extend
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

    def subscription_of(self, sequence: Sequence) -> int:
        """The subscription that gets the sequence's features; 0 for none."""
        return (
            self._client.info.subscription_id
            if self._client and self._client.info and self._holds(sequence)
            else 0
        )

    async def propose(self, round_: int, sequences: Seq[Sequence], closes: Iterable[Close]) -> Exchange:
        """Brings the slots up to date and fills `drafts` of the sequences that decode."""
        for sequence in sequences:
            sequence.drafts = []
        self._to_close += (close for close in closes if close.attachment)
        client = self._client
        if client is None:
            return NOTHING_SENT
        if (late := client.take_answer()) is not None:
            self._apply(late)
            for sequence in sequences:
                sequence.drafts = []  # proposed behind tokens that are no longer the last
        if not client.is_ready:
            return NOTHING_SENT
        request = self._request(round_, sequences, client)
        if not (request.extends or request.opens or request.closes):
            return NOTHING_SENT
        answer = await client.propose(request)
        return self._apply(answer) if answer is not None else NOTHING_SENT

    def _holds(self, sequence: Sequence) -> bool:
        return self._client is not None and 0 < sequence.attachment == self._client.attachment

    def _request(self, round_: int, sequences: Seq[Sequence], client: DraftClient) -> draft_pb2.ProposeRequest:
        request = draft_pb2.ProposeRequest(round=round_)
        for close in self._to_close:
            if close.attachment == client.attachment:
                request.closes.add(sequence_id=close.sequence_id)
        self._to_close = []
        self._sent = {}
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
                self._extend(request, sequence)
        return request

    def _extend(self, request: draft_pb2.ProposeRequest, sequence: Sequence) -> None:
        """Slot i takes x_{i+1} and h_i: the slots that can be written are those whose feature is computed."""
        begin, end = sequence.num_slots, sequence.num_computed
        request.extends.add(
            sequence_id=sequence.id,
            epoch=sequence.epoch,
            slot=begin,
            tokens=sequence.tokens[begin + 1 : end + 1],
            feature_round=sequence.feature_round,
            num_draft_tokens=max(0, min(sequence.draft_budget, self.max_draft_tokens)),
        )
        self._sent[sequence.id] = sequence, sequence.epoch, end

    def _apply(self, answer: Answer) -> Exchange:
        response, exchange = answer
        for proposal in response.proposals:
            sequence, epoch, num_slots = self._sent[proposal.sequence_id]
            if sequence.epoch != epoch or not self._holds(sequence):
                continue
            if proposal.status == DRAFTED:
                sequence.num_slots = num_slots
                sequence.drafts = list(proposal.draft_tokens)
            else:
                self._to_close.append(Close(sequence.id, sequence.attachment))
                sequence.attachment = 0
        return exchange
