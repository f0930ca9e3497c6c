"""The target model: a Llama-family decoder (Llama, Mistral, Qwen2, Qwen3 dense) over a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from eyas_kernels.attention import StepRows
from eyas_kernels.checkpoint import Checkpoint, CheckpointError
from eyas_kernels.kv_cache import PagedKVCache
from eyas_kernels.layers import AttentionWeights, MLPWeights, attention, mlp
from eyas_kernels.linear import linear, pack
from eyas_kernels.norm import rms_norm
from eyas_kernels.rope import make_rope
from target_service.spec import DecoderSpec, read_spec


class Hidden(NamedTuple):
    """What a pass leaves of every row: `final` [rows, hidden] is the residual stream after the final norm;
    `taps[b]` [rows, hidden] is the residual stream after b blocks, not normed."""

    final: torch.Tensor
    taps: dict[int, torch.Tensor]


@dataclass(frozen=True)
class _Block:
    attention_norm: torch.Tensor
    attention: AttentionWeights
    mlp_norm: torch.Tensor
    mlp: MLPWeights


class Decoder:
    """A loaded target model. Its KV lives in the caller's cache, so the model itself has no state."""

    def __init__(
        self, folder: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """Loads a Hugging Face folder; `dtype` None keeps the checkpoint's. Raises CheckpointError."""
        checkpoint = Checkpoint(folder)
        self.spec = read_spec(checkpoint)
        self.dtype = dtype or getattr(torch, self.spec.dtype)
        self.device = torch.device(device)
        loader = _Loader(checkpoint, self.spec, self.dtype, self.device)
        self._embedding = loader.embedding()
        self._lm_head = pack(self._embedding if self.spec.tied_embeddings else loader.lm_head())
        self._final_norm = loader.vector("model.norm.weight", self.spec.hidden_size)
        self._blocks = [loader.block(i) for i in range(self.spec.num_layers)]
        loader.refuse_unknown()
        try:
            self._rope = make_rope(
                self.spec.head_dim, self.spec.rope_theta, self.spec.rope_scaling, self.device
            )
        except ValueError as error:
            raise checkpoint.config.error(checkpoint.config.rope_key, str(error)) from error

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token's keys and values."""
        spec = self.spec
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * self.dtype.itemsize

    def new_cache(self, num_pages: int, page_size: int) -> PagedKVCache:
        """An empty cache for this model."""
        spec = self.spec
        return PagedKVCache(
            spec.num_layers, num_pages, page_size, spec.num_kv_heads, spec.head_dim, self.dtype, self.device
        )

    def forward(
        self, tokens: Sequence[int], step: StepRows, cache: PagedKVCache, taps: frozenset[int] = frozenset()
    ) -> Hidden:
        """Runs tokens [rows], laid out as `step` says, and writes their keys and values into the cache."""
        x = self._embedding[torch.tensor(tokens, dtype=torch.int64, device=self.device)]
        rotation = self._rope.rotation(step.positions, self.dtype)
        eps = self.spec.rms_norm_eps
        tapped = {}
        for index, block in enumerate(self._blocks):
            if index in taps:
                tapped[index] = x
            normed = rms_norm(x, block.attention_norm, eps)
            x = x + attention(normed, block.attention, rotation, cache.layer(index), step)
            x = x + mlp(rms_norm(x, block.mlp_norm, eps), block.mlp)
        if len(self._blocks) in taps:
            tapped[len(self._blocks)] = x
        return Hidden(rms_norm(x, self._final_norm, eps), tapped)

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """final [rows, hidden] -> float32 [rows, vocab]."""
        return linear(final, self._lm_head).float()


class _Loader:
    """Reads, checks and fuses the tensors of a checkpoint, and knows which ones it has read."""

    def __init__(
        self, checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint, self._spec = checkpoint, spec
        self._dtype, self._device = dtype, device
        self._names = checkpoint.names()
        self._read: set[str] = set()

    def embedding(self) -> torch.Tensor:
        return self._load("model.embed_tokens.weight", (self._spec.vocab_size, self._spec.hidden_size))

    def lm_head(self) -> torch.Tensor:
        return self._load("lm_head.weight", (self._spec.vocab_size, self._spec.hidden_size))

    def vector(self, name: str, width: int) -> torch.Tensor:
        return self._load(name, (width,))

    def block(self, index: int) -> _Block:
        spec, prefix = self._spec, f"model.layers.{index}."
        hidden, inner = spec.hidden_size, spec.intermediate_size
        gate_up = [self._load(f"{prefix}mlp.{part}_proj.weight", (inner, hidden)) for part in ("gate", "up")]
        return _Block(
            attention_norm=self.vector(prefix + "input_layernorm.weight", hidden),
            attention=self._attention(prefix + "self_attn."),
            mlp_norm=self.vector(prefix + "post_attention_layernorm.weight", hidden),
            mlp=MLPWeights(
                pack(torch.cat(gate_up)), pack(self._load(prefix + "mlp.down_proj.weight", (hidden, inner)))
            ),
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        spec = self._spec
        widths = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
        widths = {part: heads * spec.head_dim for part, heads in widths.items()}
        biased, normed = prefix + "q_proj.bias" in self._names, prefix + "q_norm.weight" in self._names
        return AttentionWeights(
            qkv=pack(
                torch.cat(
                    [self._load(f"{prefix}{p}_proj.weight", (n, spec.hidden_size)) for p, n in widths.items()]
                )
            ),
            qkv_bias=torch.cat([self.vector(f"{prefix}{p}_proj.bias", width) for p, width in widths.items()])
            if biased
            else None,
            out=pack(self._load(prefix + "o_proj.weight", (spec.hidden_size, widths["q"]))),
            out_bias=self._optional_vector(prefix + "o_proj.bias", spec.hidden_size),
            query_norm=self.vector(prefix + "q_norm.weight", spec.head_dim) if normed else None,
            key_norm=self.vector(prefix + "k_norm.weight", spec.head_dim) if normed else None,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.rms_norm_eps,
        )

    def refuse_unknown(self) -> None:
        """Raises CheckpointError when the checkpoint holds tensors that the model would not use."""
        ignored = {"lm_head.weight"} if self._spec.tied_embeddings else set()
        unknown = [
            name
            for name in self._names
            if name not in self._read | ignored and not name.endswith("rotary_emb.inv_freq")
        ]
        if unknown:
            listed = ", ".join(f"{name} ({self._names[name].file})" for name in sorted(unknown)[:8])
            raise CheckpointError(f"{self._checkpoint.folder}: {len(unknown)} tensors are unknown: {listed}")

    def _optional_vector(self, name: str, width: int) -> torch.Tensor | None:
        return self.vector(name, width) if name in self._names else None

    def _load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._names:
            raise CheckpointError(f"{self._checkpoint.folder}: tensor {name} is missing")
        if (found := self._names[name].shape) != shape:
            file = self._checkpoint.folder / self._names[name].file
            raise CheckpointError(f"{file}: tensor {name} is {found}, config.json asks for {shape}")
        self._read.add(name)
        return self._checkpoint.load(name, dtype=self._dtype, device=self._device)
