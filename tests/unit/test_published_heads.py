"""Heads in every published layout, on every family of targets: they load as meant, and draft what a slow reference
drafts, however their slots came about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draft_service.engine import Engine, Lease
from draft_service.head import Head
from draft_service.head_spec import TargetShape
from tests.helpers.messages import DRAFTED, extend, propose, slots
from tests.helpers.pair import words
from tests.helpers.published_heads import PUBLISHED, write_published
from tests.helpers.reference_head import ReferenceHead, target_features
from tests.helpers.tiny_models import make_target

TARGETS: dict[str, dict[str, Any]] = {
    "llama 2": {"family": "llama", "kv_heads": 4, "rms_norm_eps": 1e-5},
    "llama 3": {"family": "llama", "rope_theta": 500000.0},
    "llama 3.1": {"family": "llama3"},
    "mistral": {"family": "mistral"},
    "qwen2": {"family": "qwen2", "rope_theta": 1e6},
    "qwen2.5": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3", "head_dim": 24},
}
ON_EVERY_TARGET = ("eagle1 llama 2", "eagle1 qwen2", "eagle3 llama", "eagle3 qwen3", "speculators qwen3")
CASES = [(target, head) for head in ON_EVERY_TARGET for target in TARGETS]
CASES += [("llama 3.1", head) for head in PUBLISHED if head not in ON_EVERY_TARGET]

PAGE_SIZE = 4
SCRIPT = ((9, 3), (3, 1), (1, 4), (6, 5), (2, 2))
"""Slots that a round writes, and the drafts it asks for behind them."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: make_target(tmp_path_factory.mktemp("target"), **options) for name, options in TARGETS.items()
    }


def load(folder: Path, target: Path) -> Engine:
    head = Head(folder, target, TargetShape(hidden_size=64, num_layers=6, vocab_size=512), torch.float32)
    return Engine(head, num_pages=20, page_size=PAGE_SIZE, max_draft_tokens=8)


class Golden:
    """An engine with one sequence, beside a reference that computes everything anew, on one text."""

    def __init__(self, engine: Engine, reference: ReferenceHead, target: Path) -> None:
        self.engine, self.reference = engine, reference
        self.text = words(1 + sum(size for size, _ in SCRIPT))
        self.features = target_features(target, self.text, reference.taps)

    def open(self, sequence: int) -> Lease:
        lease = Lease()
        self.engine.propose(lease, propose(opens=[slots(sequence)]), [])
        return lease

    def draft(self, lease: Lease, begin: int, end: int, k: int) -> list[int]:
        """Writes the slots [begin, end) of the lease's sequence, then drafts."""
        (sequence,) = lease.sequences
        message = propose(extend(sequence, begin, self.text[begin + 1 : end + 1], k))
        (proposal,) = self.engine.propose(lease, message, [self.features[begin:end]])
        assert proposal.status == DRAFTED
        return list(proposal.draft_tokens)

    def expected(self, end: int, k: int) -> list[int]:
        return self.reference.propose(self.text[1 : end + 1], self.features[:end], k)

    def true_slots(self, lease: Lease) -> torch.Tensor:
        (sequence,) = lease.sequences.values()
        return self._cache[sequence.pages].flatten(0, 1)[: sequence.num_slots].clone()

    def poison(self, lease: Lease) -> None:
        """Everything but the true slots becomes nonsense."""
        (sequence,) = lease.sequences.values()
        kept = self.true_slots(lease)
        self._cache.fill_(float("nan"))
        for slot, values in enumerate(kept):
            self._cache[sequence.pages[slot // PAGE_SIZE], slot % PAGE_SIZE] = values

    @property
    def _cache(self) -> torch.Tensor:
        return self.engine._cache.layer(0)


@torch.inference_mode()
@pytest.mark.parametrize(("target", "head"), CASES)
def test_drafts_are_the_references_token_by_token(
    tmp_path: Path, targets: dict[str, Path], target: str, head: str
) -> None:
    """In rounds that each write a few slots, with nonsense in every scratch slot, and in one pass over the whole:
    the same slots, and the same drafts, several of them different from one another."""
    folder = write_published(head, tmp_path, targets[target])
    golden = Golden(load(folder, targets[target]), ReferenceHead(folder, targets[target]), targets[target])
    in_rounds, end, drafted = golden.open(1), 0, set[int]()
    for size, k in SCRIPT:
        golden.poison(in_rounds)
        drafts = golden.draft(in_rounds, end, end + size, k)
        end += size
        assert drafts == golden.expected(end, k)
        drafted.update(drafts)
    assert len(drafted) > 2
    at_once = golden.open(2)
    assert golden.draft(at_once, 0, end, 2) == golden.expected(end, 2)
    torch.testing.assert_close(golden.true_slots(in_rounds), golden.true_slots(at_once), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("head", "facts"),
    [
        ("eagle1 llama 3", {"rope_theta": 5e5, "taps": (), "max_position_embeddings": 2048}),
        ("eagle1 llama 2", {"rope_theta": 1e4, "num_kv_heads": 4}),
        ("eagle1 vicuna", {"num_kv_heads": 4}),
        ("eagle1 mixtral", {"sliding_window": None}),
        ("eagle1 qwen2", {"attention_bias": True, "sliding_window": None}),
        ("eagle1 vllm", {"kind": "eagle1", "num_heads": 4}),
        ("eagle3 llama", {"rope_theta": 1e4, "taps": (2, 3, 3), "norm_before_residual": False}),
        ("eagle3 vicuna", {"draft_vocab_size": 512}),
        ("eagle3 qwen3", {"head_dim": 24, "rope_theta": 1e6}),
        ("eagle3 specforge", {"taps": (2, 3, 5), "owns_embedding": False}),
        ("eagle3 norm before fc", {"taps": (3, 4, 6), "norm_before_fc": True, "fc_norm": False}),
        ("eagle3.1", {"fc_norm": True, "norm_output": True, "norm_before_fc": False}),
        ("eagle3 vllm", {"taps": (2, 3, 5), "draft_vocab_size": 64}),
        ("speculators llama", {"kind": "eagle3", "rope_theta": 5e5, "norm_before_residual": False}),
        ("speculators qwen3", {"rope_theta": 1e6, "taps": (1, 2, 4), "attention_norm": True}),
        ("speculators 3.1", {"fc_norm": True, "norm_output": True, "norm_before_residual": True}),
        ("speculators of four taps", {"taps": (2, 3, 4, 6), "sliding_window": 6, "norm_before_residual": True}),
        ("speculators with an embedding of its own", {"owns_embedding": True}),
    ],
)
def test_config_means_what_its_publisher_meant(
    tmp_path: Path, targets: dict[str, Path], head: str, facts: dict[str, Any]
) -> None:
    target = targets["llama 3.1"]
    spec = load(write_published(head, tmp_path, target), target).head.spec
    assert {name: getattr(spec, name) for name in facts} == facts
