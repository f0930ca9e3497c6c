"""The draft's engine: sequences, their slots, and one proposal. Runs on the compute thread only; no sockets here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draft_service.head import Head
from eyas.errors import invalid_argument
from eyas.v1 import draft_pb2
from eyas_kernels.attention import BlockRows, plan_rows
from eyas_kernels.kv_cache import NoPages, PageAllocator
from eyas_kernels.sampling import SamplingLaw, draw, read_law


@dataclass
class DraftSequence:
    """One open sequence. `num_slots` slots hold true features; what lies behind them is scratch."""

    sequence_id: int
    epoch: int
    law: SamplingLaw
    pages: list[int] = field(default_factory=list)
    num_slots: int = 0


@dataclass
class Lease:
    """The sequences of one round stream; released together when the stream ends."""

    sequences: dict[int, DraftSequence] = field(default_factory=dict)


@dataclass
class _Run:
    """An extend that can run, and what it has drafted so far (draft ids)."""

    index: int
    sequence: DraftSequence
    extend: draft_pb2.Extend
    features: torch.Tensor
    drafts: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Slots behind the extend."""
        return self.extend.slot + len(self.extend.tokens)


class Engine:
    """Writes slots from true features, then drafts behind them from the head's own outputs."""

    def __init__(self, head: Head, num_pages: int, page_size: int, max_draft_tokens: int) -> None:
        self.head = head
        self.allocator = PageAllocator(num_pages, page_size)
        self.max_draft_tokens = max_draft_tokens
        self._cache = head.new_cache(num_pages, page_size)
        self._target_id_of: list[int] | None = None if head.target_ids is None else head.target_ids.tolist()

    @torch.inference_mode()
    def propose(
        self, lease: Lease, request: draft_pb2.ProposeRequest, features: Sequence[torch.Tensor | None]
    ) -> list[draft_pb2.Proposal]:
        """One round: closes, opens, extends with their features (None where they are missing) -> a proposal for
        every extend, in order. Raises StatusError for a broken contract."""
        for close in request.closes:
            self._close(lease, close.sequence_id)
        for index, opening in enumerate(request.opens):
            self._open(lease, opening, f"opens[{index}]")
        proposals, runs = self._plan(lease, request, features)
        if runs:
            self._draft(runs)
        for run in runs:
            run.sequence.num_slots = run.end
            proposals[run.index].draft_tokens.extend(self._target_ids(run.drafts))
        return proposals

    def release(self, lease: Lease) -> None:
        """Frees every sequence of a stream that has ended."""
        for sequence_id in list(lease.sequences):
            self._close(lease, sequence_id)

    # ---- decide ---------------------------------------------------------------------------------------------

    def _open(self, lease: Lease, opening: draft_pb2.OpenSlots, field_name: str) -> None:
        if opening.sequence_id in lease.sequences:
            raise invalid_argument(f"{field_name}.sequence_id", f"{opening.sequence_id} is open already")
        law = read_law(opening.sampling, f"{field_name}.sampling")
        lease.sequences[opening.sequence_id] = DraftSequence(opening.sequence_id, opening.epoch, law)

    def _close(self, lease: Lease, sequence_id: int) -> None:
        sequence = lease.sequences.pop(sequence_id, None)
        if sequence is not None:
            self.allocator.release(sequence.pages)

    def _plan(
        self, lease: Lease, request: draft_pb2.ProposeRequest, features: Sequence[torch.Tensor | None]
    ) -> tuple[list[draft_pb2.Proposal], list[_Run]]:
        """A proposal for every extend, and the extends that can run, short ones first (attended together)."""
        if len({extend.sequence_id for extend in request.extends}) < len(request.extends):
            raise invalid_argument("extends", "name a sequence twice")
        proposals, runs = [], []
        for index, (extend, rows) in enumerate(zip(request.extends, features, strict=True)):
            sequence = lease.sequences.get(extend.sequence_id)
            status = self._admit(sequence, extend, rows, f"extends[{index}]")
            proposals.append(
                draft_pb2.Proposal(sequence_id=extend.sequence_id, epoch=extend.epoch, status=status)
            )
            if sequence is not None and rows is not None and status == draft_pb2.PROPOSAL_STATUS_OK:
                runs.append(_Run(index, sequence, extend, rows))
        runs.sort(key=lambda run: len(run.extend.tokens))
        return proposals, runs

    def _admit(
        self,
        sequence: DraftSequence | None,
        extend: draft_pb2.Extend,
        rows: torch.Tensor | None,
        field_name: str,
    ) -> draft_pb2.ProposalStatus:
        if sequence is None:
            return draft_pb2.PROPOSAL_STATUS_UNKNOWN_SEQUENCE
        if sequence.epoch != extend.epoch:
            return draft_pb2.PROPOSAL_STATUS_STALE_EPOCH
        self._check_extend(sequence, extend, field_name)
        if rows is None:
            return draft_pb2.PROPOSAL_STATUS_NO_FEATURES
        scratch = max(0, extend.num_draft_tokens - 1)
        try:
            self.allocator.extend(sequence.pages, extend.slot + len(extend.tokens) + scratch)
        except NoPages:
            return draft_pb2.PROPOSAL_STATUS_NO_PAGES
        return draft_pb2.PROPOSAL_STATUS_OK

    def _check_extend(self, sequence: DraftSequence, extend: draft_pb2.Extend, field_name: str) -> None:
        if extend.WhichOneof("base") != "slot":
            raise invalid_argument(f"{field_name}.base", "must be `slot`: this draft does not run ahead")
        if not (extend.tokens or extend.then_committed):
            raise invalid_argument(f"{field_name}.tokens", "is empty")
        if max(extend.tokens, default=0) >= self.head.spec.vocab_size:
            raise invalid_argument(
                f"{field_name}.tokens", f"holds an id beyond the vocabulary of {self.head.spec.vocab_size}"
            )
        if extend.to_target and not extend.then_committed:
            raise invalid_argument(f"{field_name}.to_target", "needs then_committed")
        if extend.slot > sequence.num_slots:
            raise invalid_argument(f"{field_name}.slot", f"leaves a gap behind slot {sequence.num_slots}")
        if extend.num_draft_tokens > self.max_draft_tokens:
            raise invalid_argument(f"{field_name}.num_draft_tokens", f"is above {self.max_draft_tokens}")

    # ---- compute --------------------------------------------------------------------------------------------

    def _draft(self, runs: Sequence[_Run]) -> None:
        """Fills `drafts`: one pass over the true slots, then one row a sequence and step over scratch slots."""
        hidden = self.head.hidden_of_features(torch.cat([run.features for run in runs]))
        tokens = [token for run in runs for token in run.extend.tokens]
        blocks = [BlockRows(run.extend.slot, len(run.extend.tokens), run.sequence.pages) for run in runs]
        outputs = self._forward(tokens, hidden, blocks)
        last_rows = (
            torch.tensor([len(run.extend.tokens) for run in runs], device=self.head.device).cumsum(0) - 1
        )
        outputs = outputs[last_rows]
        depth = 0
        while True:
            going = [i for i, run in enumerate(runs) if run.extend.num_draft_tokens > depth]
            if not going:
                return
            if len(going) < len(runs):
                runs, outputs = [runs[i] for i in going], outputs[torch.tensor(going, device=self.head.device)]
            if depth > 0:
                blocks = [BlockRows(run.end - 1 + depth, 1, run.sequence.pages) for run in runs]
                tokens = self._target_ids([run.drafts[-1] for run in runs])
                outputs = self._forward(tokens, outputs, blocks)
            # Slot i predicts x_{i+2}, and the last slot written is end - 1 + depth.
            drawn = draw(
                self.head.logits(outputs),
                [run.sequence.law for run in runs],
                [run.end + 1 + depth for run in runs],
                self.head.target_ids,
            )
            for run, draft_id in zip(runs, drawn, strict=True):
                run.drafts.append(draft_id)
            depth += 1

    def _forward(
        self, tokens: Sequence[int], hidden: torch.Tensor, blocks: Sequence[BlockRows]
    ) -> torch.Tensor:
        step = plan_rows(blocks, self.allocator.page_size, self.head.device, self.head.spec.sliding_window)
        return self.head.forward(tokens, hidden, step, self._cache)

    def _target_ids(self, draft_ids: list[int]) -> list[int]:
        return draft_ids if self._target_id_of is None else [self._target_id_of[i] for i in draft_ids]
