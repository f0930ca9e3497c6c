"""The EAGLE head: one decoder layer that predicts the token after next from a token and a feature."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from draft_service.checkpoint import TargetShape, read_borrowed, read_head
from eyas_kernels.attention import StepRows
from eyas_kernels.checkpoint import CheckpointError
from eyas_kernels.kv_cache import PagedKVCache
from eyas_kernels.layers import AttentionWeights, MLPWeights, attention, mlp
from eyas_kernels.linear import linear
from eyas_kernels.norm import rms_norm
from eyas_kernels.rope import make_rope


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
        rope_theta: float | None = None,
    ) -> None:
        """Loads a head and what it borrows from its target. Raises CheckpointError."""
        loaded = read_head(folder, target, rope_theta, dtype=dtype, device=device)
        self.spec, self._weights = loaded.spec, loaded.weights
        self.dtype, self.device = dtype, torch.device(device)
        spec, weights = self.spec, self._weights
        embed, lm_head = weights.embed, weights.lm_head
        if embed is None or lm_head is None:
            borrowed = read_borrowed(target_folder, lm_head is None, dtype, device)
            embed = borrowed[0] if embed is None else embed
            lm_head = borrowed[1] if lm_head is None else lm_head
        assert lm_head is not None
        self._embed, self._lm_head = embed, lm_head
        self._attention = AttentionWeights(
            qkv=weights.qkv,
            qkv_bias=weights.qkv_bias,
            out=weights.out,
            out_bias=None,
            query_norm=None,
            key_norm=None,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.rms_norm_eps,
        )
        self._mlp = MLPWeights(weights.gate_up, weights.down)
        try:
            self._rope = make_rope(spec.head_dim, spec.rope_theta, spec.rope_scaling, self.device)
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{folder / 'config.json'}: rope_scaling {error}") from error

    @property
    def target_ids(self) -> torch.Tensor | None:
        """int64 [draft_vocab]: target id of every draft id; None where they are the same."""
        return self._weights.target_ids

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
        return linear(features, self._weights.fc, self._weights.fc_bias) if self.spec.taps else features

    def forward(
        self, tokens: Sequence[int], hidden: torch.Tensor, step: StepRows, cache: PagedKVCache
    ) -> torch.Tensor:
        """tokens [rows] and hidden [rows, hidden], laid out in slots as `step` says -> outputs [rows, hidden]."""
        weights, eps = self._weights, self.spec.rms_norm_eps
        embedded = self._embed[torch.tensor(tokens, dtype=torch.int64, device=self.device)]
        if weights.input_layernorm is not None and weights.hidden_norm is not None:
            normed = rms_norm(hidden, weights.hidden_norm, eps)
            x = torch.cat((rms_norm(embedded, weights.input_layernorm, eps), normed), dim=-1)
            residual = normed if self.spec.norm_before_residual else hidden
        else:
            x = residual = linear(torch.cat((embedded, hidden), dim=-1), weights.fc, weights.fc_bias)
        rotation = self._rope.rotation(step.positions, self.dtype)
        x = residual + attention(x, self._attention, rotation, cache.layer(0), step)
        return x + mlp(rms_norm(x, weights.post_attention_layernorm, eps), self._mlp)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """outputs [rows, hidden] -> float32 [rows, draft_vocab]."""
        norm = self._weights.norm
        normed = outputs if norm is None else rms_norm(outputs, norm, self.spec.rms_norm_eps)
        return linear(normed, self._lm_head).float()
