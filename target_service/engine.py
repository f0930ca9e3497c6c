"""The target's engine: sequences, their pages, and one step. Runs on the compute thread only; no sockets here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from eyas.acceptance import count_accepted
from eyas.errors import invalid_argument
from eyas.v1 import target_pb2
from eyas_kernels.attention import BlockRows, plan_rows
from eyas_kernels.kv_cache import NoPages, PageAllocator
from eyas_kernels.sampling import SamplingLaw, draw, read_law
from target_service.features import RowSpan, Subscriptions, gather_features, make_batches
from target_service.model import Decoder, Hidden


@dataclass
class TargetSequence:
    """One open sequence. `num_tokens` tokens have KV; `pages` cover them. The last three are for a block that runs
    ahead: the round of the last block that ran, how many tokens it keeps, and the token drawn last behind them."""

    sequence_id: int
    epoch: int
    law: SamplingLaw
    subscription_id: int
    pages: list[int] = field(default_factory=list)
    num_tokens: int = 0
    last_round: int = 0
    num_kept: int = 0
    next_token: int | None = None


@dataclass
class Lease:
    """The sequences of one round stream; released together when the stream ends."""

    sequences: dict[int, TargetSequence] = field(default_factory=dict)


@dataclass(frozen=True)
class _Run:
    """A block that can run: its place in the request, and its sequence. `block` begins at a `start` and has its
    tokens, also where the request's runs ahead."""

    index: int
    sequence: TargetSequence
    block: target_pb2.Block

    @property
    def end(self) -> int:
        """Position behind the block."""
        return self.block.start + len(self.block.tokens)


@dataclass(frozen=True)
class StepOutcome:
    """`results` in the request's order; `batches` are the features by subscription id; `num_rows` went through the
    model."""

    results: list[target_pb2.BlockResult]
    batches: dict[int, list[target_pb2.FeatureBatch]]
    num_rows: int


class Engine:
    """Decides which blocks run, computes them in one pass, then commits their tokens to the sequences."""

    def __init__(
        self, model: Decoder, subscriptions: Subscriptions, num_pages: int, page_size: int, max_rows: int
    ) -> None:
        self.model = model
        self.allocator = PageAllocator(num_pages, page_size)
        self.max_rows = max_rows
        self._cache = model.new_cache(num_pages, page_size)
        self.subscriptions = subscriptions

    @torch.inference_mode()
    def step(
        self, lease: Lease, request: target_pb2.StepRequest, proposed: Mapping[int, Sequence[int]] | None = None
    ) -> StepOutcome:
        """One step: closes, opens, then all blocks in one pass. `proposed` has, by sequence id, the drafts of the
        blocks that run ahead. Raises StatusError for a broken contract."""
        for close in request.closes:
            self._close(lease, close.sequence_id)
        for index, opening in enumerate(request.opens):
            self._open(lease, opening, f"opens[{index}]")
        results, runs = self._plan(lease, request, proposed or {})
        hidden = self._forward(runs) if runs else None
        if hidden is not None:
            self._score(hidden, runs, results)
        batches = self._features(request.round, lease, hidden, runs, results)
        for run in runs:
            _advance(run, request.round, results[run.index].sampled_tokens)
        return StepOutcome(results, batches, sum(len(run.block.tokens) for run in runs))

    def release(self, lease: Lease) -> None:
        """Frees every sequence of a stream that has ended."""
        for sequence_id in list(lease.sequences):
            self._close(lease, sequence_id)

    # ---- decide ---------------------------------------------------------------------------------------------

    def _open(self, lease: Lease, opening: target_pb2.OpenSequence, field_name: str) -> None:
        if opening.sequence_id in lease.sequences:
            raise invalid_argument(f"{field_name}.sequence_id", f"{opening.sequence_id} is open already")
        law = read_law(opening.sampling, f"{field_name}.sampling")
        lease.sequences[opening.sequence_id] = TargetSequence(
            opening.sequence_id, opening.epoch, law, opening.subscription_id
        )

    def _close(self, lease: Lease, sequence_id: int) -> None:
        sequence = lease.sequences.pop(sequence_id, None)
        if sequence is not None:
            self.allocator.release(sequence.pages)

    def _plan(
        self, lease: Lease, request: target_pb2.StepRequest, proposed: Mapping[int, Sequence[int]]
    ) -> tuple[list[target_pb2.BlockResult], list[_Run]]:
        """A result for every block, and the blocks that can run, short ones first (they are attended together)."""
        if sum(len(block.tokens) or 1 + block.num_draft_tokens for block in request.blocks) > self.max_rows:
            raise invalid_argument("blocks", f"hold more than {self.max_rows} tokens")
        if len({block.sequence_id for block in request.blocks}) < len(request.blocks):
            raise invalid_argument("blocks", "name a sequence twice")
        results, runs = [], []
        for index, block in enumerate(request.blocks):
            _check_base(block, f"blocks[{index}]")
            sequence = lease.sequences.get(block.sequence_id)
            result = target_pb2.BlockResult(sequence_id=block.sequence_id, epoch=block.epoch)
            results.append(result)
            if sequence is None:
                result.status = target_pb2.BLOCK_STATUS_UNKNOWN_SEQUENCE
            elif sequence.epoch != block.epoch:
                result.status = target_pb2.BLOCK_STATUS_STALE_EPOCH
            elif block.WhichOneof("base") == "after_round" and sequence.last_round != block.after_round:
                result.status = target_pb2.BLOCK_STATUS_SKIPPED
            else:
                block = self._resolve(sequence, block, proposed, result, f"blocks[{index}]")
                result.status = self._admit(sequence, block, f"blocks[{index}]")
                if result.status == target_pb2.BLOCK_STATUS_OK:
                    runs.append(_Run(index, sequence, block))
        runs.sort(key=lambda run: len(run.block.tokens))
        return results, runs

    def _resolve(
        self,
        sequence: TargetSequence,
        block: target_pb2.Block,
        proposed: Mapping[int, Sequence[int]],
        result: target_pb2.BlockResult,
        field_name: str,
    ) -> target_pb2.Block:
        """The block with its start and its tokens; where it takes the draft's, they are noted in the result. An id
        beyond the vocabulary ends the drafts."""
        if block.WhichOneof("base") != "after_round":
            return block
        resolved = target_pb2.Block(start=sequence.num_kept, tokens=block.tokens, num_scored=block.num_scored)
        if block.tokens:
            return resolved
        if sequence.next_token is None:
            raise invalid_argument(f"{field_name}.tokens", "is empty, and the round before has drawn no token")
        for token in proposed.get(block.sequence_id, ())[: block.num_draft_tokens]:
            if token >= self.model.spec.vocab_size:
                break
            result.verified_tokens.append(token)
        resolved.tokens.extend((sequence.next_token, *result.verified_tokens))
        resolved.num_scored = len(resolved.tokens)
        return resolved

    def _admit(
        self, sequence: TargetSequence, block: target_pb2.Block, field_name: str
    ) -> target_pb2.BlockStatus:
        self._check_block(sequence, block, field_name)
        try:
            self.allocator.extend(sequence.pages, block.start + len(block.tokens))
        except NoPages:
            return target_pb2.BLOCK_STATUS_NO_PAGES
        return target_pb2.BLOCK_STATUS_OK

    def _check_block(self, sequence: TargetSequence, block: target_pb2.Block, field_name: str) -> None:
        spec = self.model.spec
        if not block.tokens:
            raise invalid_argument(f"{field_name}.tokens", "is empty")
        if max(block.tokens) >= spec.vocab_size:
            raise invalid_argument(
                f"{field_name}.tokens", f"holds an id beyond the vocabulary of {spec.vocab_size}"
            )
        if block.num_scored > len(block.tokens):
            raise invalid_argument(f"{field_name}.num_scored", f"is more than the {len(block.tokens)} tokens")
        if block.start > sequence.num_tokens:
            raise invalid_argument(f"{field_name}.start", f"leaves a gap behind position {sequence.num_tokens}")
        if block.start + len(block.tokens) > spec.context_length:
            raise invalid_argument(f"{field_name}.tokens", f"pass the context of {spec.context_length}")

    # ---- compute --------------------------------------------------------------------------------------------

    def _forward(self, runs: Sequence[_Run]) -> Hidden:
        rows = [BlockRows(run.block.start, len(run.block.tokens), run.sequence.pages) for run in runs]
        step = plan_rows(rows, self.allocator.page_size, self.model.device, self.model.spec.sliding_window)
        tokens = [token for run in runs for token in run.block.tokens]
        wanted = [self.subscriptions.get(run.sequence.subscription_id) for run in runs]
        taps = frozenset(tap for subscription in wanted if subscription for tap in subscription.taps)
        return self.model.forward(tokens, step, self._cache, taps)

    def _score(self, hidden: Hidden, runs: Sequence[_Run], results: list[target_pb2.BlockResult]) -> None:
        rows: list[int] = []
        laws: list[SamplingLaw] = []
        positions: list[int] = []
        end = 0
        for run in runs:
            end += len(run.block.tokens)
            num_scored = run.block.num_scored
            rows += range(end - num_scored, end)
            laws += [run.sequence.law] * num_scored
            positions += range(run.end - num_scored + 1, run.end + 1)
        if not rows:
            return
        final = hidden.final if len(rows) == end else hidden.final[torch.tensor(rows, device=self.model.device)]
        sampled = draw(self.model.logits(final), laws, positions)
        for run in runs:
            result = results[run.index]
            result.sampled_tokens.extend(sampled[: run.block.num_scored])
            if result.verified_tokens:
                result.num_accepted = count_accepted(result.verified_tokens, result.sampled_tokens)
            sampled = sampled[run.block.num_scored :]

    def _features(
        self,
        round_: int,
        lease: Lease,
        hidden: Hidden | None,
        runs: Sequence[_Run],
        results: Sequence[target_pb2.BlockResult],
    ) -> dict[int, list[target_pb2.FeatureBatch]]:
        spans: dict[int, list[RowSpan]] = {}
        row = 0
        for run in runs:
            sequence, block = run.sequence, run.block
            committed = _committed(block, results[run.index].sampled_tokens)
            span = RowSpan(sequence.sequence_id, sequence.epoch, block.start, len(block.tokens), row, committed)
            spans.setdefault(sequence.subscription_id, []).append(span)
            row += span.num_rows
        for result in results:
            if result.status in (target_pb2.BLOCK_STATUS_NO_PAGES, target_pb2.BLOCK_STATUS_SKIPPED):
                sequence = lease.sequences[result.sequence_id]
                span = RowSpan(sequence.sequence_id, sequence.epoch, sequence.num_tokens, 0, 0, not_run=True)
                spans.setdefault(sequence.subscription_id, []).append(span)
        return {
            subscription.id: make_batches(
                round_, self._gather(hidden, subscription.taps, spans[subscription.id]), spans[subscription.id]
            )
            for subscription in map(self.subscriptions.get, spans)
            if subscription is not None
        }

    def _gather(self, hidden: Hidden | None, taps: Sequence[int], spans: Sequence[RowSpan]) -> torch.Tensor:
        """All rows of the step, or none where no span has any: then nothing was tapped for them."""
        if hidden is not None and any(span.num_rows for span in spans):
            return gather_features(hidden, taps)
        return torch.empty(0, self.model.spec.hidden_size * (len(taps) or 1), dtype=self.model.dtype)


def _check_base(block: target_pb2.Block, field_name: str) -> None:
    """Raises StatusError where the base and the other fields contradict each other."""
    base = block.WhichOneof("base")
    if base is None:
        raise invalid_argument(f"{field_name}.base", "is not set")
    if block.num_draft_tokens and (base == "start" or block.tokens):
        raise invalid_argument(
            f"{field_name}.num_draft_tokens", "is for a block without tokens that runs ahead"
        )
    if base == "after_round" and block.num_scored and not block.tokens:
        raise invalid_argument(f"{field_name}.num_scored", "must be 0 where the block has no tokens")


def _advance(run: _Run, round_: int, sampled: Sequence[int]) -> None:
    """Notes what the block has left, for the next one."""
    sequence, committed = run.sequence, _committed(run.block, sampled)
    sequence.num_tokens = run.end
    sequence.last_round = round_
    sequence.num_kept = run.end - max(0, len(sampled) - len(committed))
    sequence.next_token = committed[-1] if committed else None


def _committed(block: target_pb2.Block, sampled: Sequence[int]) -> tuple[int, ...]:
    """The drafts at the end of a block that equal the target's draws, then the target's next draw."""
    if not sampled:
        return ()
    drafts = block.tokens[len(block.tokens) - len(sampled) + 1 :]
    num_accepted = count_accepted(drafts, sampled)
    return (*drafts[:num_accepted], sampled[num_accepted])
