"""The EAGLE head: one decoder layer that predicts the token after next from a token and a feature."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch

from draft_service.checkpoint import NO_OVERRIDES, HeadWeights, read_borrowed, read_head
from draft_service.head_spec import HeadSpec, Overrides, TargetShape
from eyas_kernels.attention import StepRows
from eyas_kernels.checkpoint import CheckpointError
from eyas_kernels.kv_cache import PagedKVCache
from eyas_kernels.layers import AttentionWeights, MLPWeights, attention, mlp
from eyas_kernels.linear import linear, pack, unpack
from eyas_kernels.norm import rms_norm
from eyas_kernels.rope import Rope, make_rope


class Head:
    """A loaded head. Slot i takes token x_{i+1} and the hidden state of position i, and its output predicts x_{i+2};
    the slots' KV lives in the caller's cache."""

    def __init__(
        self,
        folder: Path,
        target_folder: Path,
        target: TargetShape,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        overrides: Overrides = NO_OVERRIDES,
    ) -> None:
        """Loads a head and what it borrows from its target. Raises CheckpointError."""
        loaded = read_head(folder, target, overrides, dtype=dtype, device=device)
        self.spec, weights = loaded.spec, loaded.weights
        self.dtype, self.device = dtype, torch.device(device)
        self._embed, lm_head = _own_or_borrowed(weights, target_folder, dtype, device)
        self._lm_head = pack(lm_head)
        self._fc, self._fc_bias = pack(weights.fc), weights.fc_bias
        self._fc_norms = weights.fc_norms
        self._embed_norm, self._hidden_norm = weights.input_layernorm, weights.hidden_norm
        self._attention = AttentionWeights(
            qkv=pack(weights.qkv),
            qkv_bias=weights.qkv_bias,
            out=pack(weights.out),
            out_bias=weights.out_bias,
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            eps=self.spec.rms_norm_eps,
        )
        self._mlp_norm = weights.post_attention_layernorm
        self._mlp = MLPWeights(pack(weights.gate_up), pack(weights.down))
        self._final_norm = weights.norm
        self.target_ids = weights.target_ids
        """int64 [draft_vocab]: target id of every draft id; None where they are the same."""
        try:
            self._rope = self._make_rope()
        except ValueError as error:
            raise CheckpointError(f"{folder / 'config.json'}: rope_scaling {error}") from error

    def _make_rope(self) -> Rope:
        return make_rope(self.spec.head_dim, self.spec.rope_theta, self.spec.rope_scaling, self.device)

    def reread(self, spec: HeadSpec, target_ids: torch.Tensor | None = None, swap_fc: bool = False) -> Head:
        """The same tensors taken to mean something else: another spec of the same shapes, other target ids, or fc
        with the two halves of its input swapped. Raises ValueError for a rope scaling that is not implemented."""
        head = copy.copy(self)
        head.spec = spec
        head._rope = head._make_rope()
        if target_ids is not None:
            head.target_ids = target_ids
        if swap_fc:
            head._fc = pack(torch.cat(unpack(self._fc).chunk(2, dim=1)[::-1], dim=1))
        return head

    @property
    def bytes_per_slot(self) -> int:
        """Memory of one slot's key and value."""
        return 2 * self.spec.num_kv_heads * self.spec.head_dim * self.dtype.itemsize

    def new_cache(self, num_pages: int, page_size: int) -> PagedKVCache:
        """An empty cache for slots."""
        spec = self.spec
        return PagedKVCache(1, num_pages, page_size, spec.num_kv_heads, spec.head_dim, self.dtype, self.device)

    def hidden_of_features(self, features: torch.Tensor) -> torch.Tensor:
        """features [rows, feature_size] of the target -> the hidden states [rows, hidden] that `forward` takes. Its
        own outputs take the features' place in later steps as they are."""
        features = features.to(device=self.device, dtype=self.dtype)
        if self._fc_norms:
            parts = zip(features.chunk(len(self._fc_norms), dim=-1), self._fc_norms, strict=True)
            features = torch.cat([rms_norm(part, norm, self.spec.rms_norm_eps) for part, norm in parts], dim=-1)
        return linear(features, self._fc, self._fc_bias) if self.spec.taps else features

    def forward(
        self, tokens: Sequence[int], hidden: torch.Tensor, step: StepRows, cache: PagedKVCache
    ) -> torch.Tensor:
        """tokens [rows] and hidden [rows, hidden], laid out in slots as `step` says -> outputs [rows, hidden]."""
        eps = self.spec.rms_norm_eps
        embedded = self._embed[torch.tensor(tokens, dtype=torch.int64, device=self.device)]
        if self._embed_norm is not None and self._hidden_norm is not None:
            normed = rms_norm(hidden, self._hidden_norm, eps)
            x = torch.cat((rms_norm(embedded, self._embed_norm, eps), normed), dim=-1)
            residual = normed if self.spec.norm_before_residual else hidden
        else:
            x = residual = linear(torch.cat((embedded, hidden), dim=-1), self._fc, self._fc_bias)
        rotation = self._rope.rotation(step.positions, self.dtype)
        x = residual + attention(x, self._attention, rotation, cache.layer(0), step)
        x = x + mlp(rms_norm(x, self._mlp_norm, eps), self._mlp)
        return self._normed(x) if self.spec.norm_output else x

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """outputs [rows, hidden] -> float32 [rows, draft_vocab]."""
        normed = outputs if self.spec.norm_output else self._normed(outputs)
        return linear(normed, self._lm_head).float()

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._final_norm is None else rms_norm(x, self._final_norm, self.spec.rms_norm_eps)


def _own_or_borrowed(
    weights: HeadWeights, target_folder: Path, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embedding and lm_head: the head's own where it has them, otherwise the target's."""
    embed, lm_head = weights.embed, weights.lm_head
    if embed is None or lm_head is None:
        target_embed, target_lm_head = read_borrowed(target_folder, lm_head is None, dtype, device)
        embed = target_embed if embed is None else embed
        lm_head = target_lm_head if lm_head is None else lm_head
    assert lm_head is not None
    return embed, lm_head
