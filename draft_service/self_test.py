"""Whether a head suits its target: it drafts behind texts that the target wrote, and is compared with what the target
says itself. A head that does not fit changes no token, so nothing else would tell."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from draft_service.head import Head
from draft_service.sample import Sample
from draft_service.suspects import Suspect
from eyas_kernels.attention import BlockRows, plan_rows

PAGE_SIZE = 16
GAIN = 0.05
"""Nats a slot by which another reading of the head must be better than the one in use ..."""
CERTAINTY = 4.0
"""... and how many standard errors that must be: by chance one in 30,000."""


@dataclass(frozen=True)
class Report:
    """`agreement` is the share of `num_slots` slots whose most likely token is the target's, at first position;
    `fault` what is wrong with the head where that can be told."""

    agreement: float
    num_slots: int
    fault: str = ""

    def complaint(self, floor: float) -> str:
        """What to tell the user; empty for a head that is fit."""
        if self.fault:
            return self.fault
        if self.agreement < floor:
            return f"agreement is below {floor:.0%}, and no single fault explains it: made for another target?"
        return ""


@torch.inference_mode()
def examine(head: Head, sample: Sample, suspects: Iterable[Suspect], floor: float) -> Report:
    """Tries the head, and every other way to read it, on the same slots. Another reading only counts if it reaches
    the floor: among readings that are all nonsense the least confident scores best."""
    agreement, scores = _try(head, sample)
    found, best = "", 0.0
    for suspect in suspects:
        its_agreement, its_scores = _try(suspect.head, sample)
        gains = its_scores - scores
        gain, error = float(gains.mean()), float(gains.std()) / math.sqrt(len(gains))
        if its_agreement >= max(floor, agreement) and gain > max(GAIN, best, CERTAINTY * error):
            found, best = suspect.fault, gain
    return Report(agreement, len(scores), found)


def _try(head: Head, sample: Sample) -> tuple[float, torch.Tensor]:
    """Share of slots that agree with the target, and of every slot the log-probability of the target's choice, at
    least that of a blind guess: a reduced vocabulary lacks some choices. Slot i predicts the choice behind x_{i+1}."""
    num_texts, length = sample.tokens.shape
    pages = -(-(length - 1) // PAGE_SIZE)
    cache = head.new_cache(num_texts * pages, PAGE_SIZE)
    blocks = [BlockRows(0, length - 1, range(1 + i * pages, 1 + (i + 1) * pages)) for i in range(num_texts)]
    step = plan_rows(blocks, PAGE_SIZE, head.device, head.spec.sliding_window)
    features = sample.features_at(head.spec.taps)[:, :-1].flatten(0, 1)
    tokens = sample.tokens[:, 1:].flatten().tolist()
    logits = head.logits(head.forward(tokens, head.hidden_of_features(features), step, cache))
    choices = sample.choices[:, 1:].flatten().to(head.device)
    target_ids = head.target_ids
    if target_ids is None:
        target_ids = torch.arange(logits.shape[1], device=head.device)
    agreement = float((target_ids[logits.argmax(-1)] == choices).float().mean())
    draft_id_of = torch.full((head.spec.vocab_size,), -1, device=head.device)
    draft_id_of[target_ids] = torch.arange(len(target_ids), device=head.device)
    draft_ids = draft_id_of[choices]
    scores = logits.log_softmax(-1).gather(1, draft_ids.clamp(min=0)[:, None])[:, 0]
    blind = -math.log(head.spec.vocab_size)
    return agreement, torch.where(draft_ids < 0, blind, scores.clamp(min=blind)).cpu()
