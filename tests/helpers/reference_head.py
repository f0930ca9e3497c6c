"""Slow float32 references of EAGLE-1 and EAGLE-3 heads, straight from the papers' formulas and without a cache.

Notation: tokens x_0, x_1, ...; h_i is the target's feature after x_i; slot i holds the pair (x_{i+1}, h_i), has
position i and predicts x_{i+2}.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class ReferenceHead:
    """A head read from its published files, with the target's embedding (and, for EAGLE-1, its lm_head)."""

    def __init__(self, folder: Path, target_folder: Path, rope_theta: float | None = None) -> None:
        self.config = _flat_config(folder)
        target_config = json.loads((target_folder / "config.json").read_text())
        target = _read_tensors(target_folder)
        self._weights = {
            name.replace("midlayer.", "layers.0."): value for name, value in _read_tensors(folder).items()
        }
        self.is_eagle3 = "layers.0.hidden_norm.weight" in self._weights
        self.taps = _taps(self.config, target_config["num_hidden_layers"]) if self.is_eagle3 else None
        same_width = self.config["hidden_size"] == target_config["hidden_size"]
        target_embed = target["model.embed_tokens.weight"]
        borrows_embed = same_width and not self.config.get("embed_requires_grad")
        self._embed = target_embed if borrows_embed else self._weights["embed_tokens.weight"]
        tied = target_config.get("tie_word_embeddings", False)
        target_head = target_embed if tied or not same_width else target["lm_head.weight"]
        self._lm_head = self._weights.get("lm_head.weight", target_head) if self.is_eagle3 else target_head
        ids = torch.arange(len(self._lm_head))
        self.target_ids = ids + self._weights["d2t"].long() if "d2t" in self._weights else ids
        self._num_heads = self.config["num_attention_heads"]
        self._num_kv_heads = self.config.get("num_key_value_heads") or self._num_heads
        self._head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self._num_heads
        self._rotary = _rotary(self.config, self._head_dim, rope_theta)

    def forward(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """Slots 0..n-1 in one pass.

        tokens x_1..x_n; features h_0..h_{n-1}, float32 [n, feature width] -> outputs [n, H], which stand in for
        the next feature, and logits [n, draft vocabulary].
        """
        outputs = self._layer(tokens, self._fuse(features), first_row=0)
        return outputs, self._logits(outputs)

    def propose(self, tokens: Sequence[int], features: Tensor, k: int) -> list[int]:
        """Target ids of k greedy drafts for x_{n+1}.., from tokens x_1..x_n and features h_0..h_{n-1}.

        Every step computes all keys and values anew, from true hidden states and the head's own outputs behind.
        """
        hidden, known = self._fuse(features), list(tokens)
        drafts: list[int] = []
        while len(drafts) < k:
            output = self._layer(known + drafts, hidden, first_row=len(hidden) - 1)
            drafts.append(int(self.target_ids[self._logits(output)[0].argmax()]))
            next_hidden = self._norm("norm", output) if self.config.get("norm_output") else output
            hidden = torch.cat((hidden, next_hidden))
        return drafts

    def acceptance_run(
        self,
        prompt_ids: Sequence[int],
        generated_ids: Sequence[int],
        features: Tensor,
        k: int,
        max_new_tokens: int | None = None,
    ) -> list[int]:
        """Accepted drafts of every round that drafted, where greedy decoding with k drafts wrote the text.

        `features` are those of the whole text, its last token's may be left out. The first generated token
        comes from the prompt's pass. A round starts behind the newest token x_n, rebuilds the slots 0..n-1 from
        true features, and commits one token more than it accepts. With m tokens left to write it verifies
        min(k, m - 1) drafts, so it never commits more than m; a round without drafts is not counted. m counts
        down from `max_new_tokens`, which is the number of generated tokens unless an end token came before; at
        the end of the text a round accepts no more.
        """
        text = [*prompt_ids, *generated_ids]
        end = len(prompt_ids) + (len(generated_ids) if max_new_tokens is None else max_new_tokens)
        newest = len(prompt_ids)
        counts = []
        while newest < len(text) - 1:
            num_drafts = min(k, end - newest - 2)
            drafts = self.propose(text[1 : newest + 1], features[:newest], num_drafts)
            accepted = _matching(drafts, text[newest + 1 :])
            if num_drafts > 0:
                counts.append(accepted)
            newest += accepted + 1
        return counts

    def _fuse(self, features: Tensor) -> Tensor:
        """The hidden half of a slot: fc's output for EAGLE-3, the feature itself for EAGLE-1."""
        features = features.float()
        if not self.is_eagle3:
            return features
        if "input_norm.weight" in self._weights:
            features = self._norm("input_norm", features)
        if "fc_norm.0.weight" in self._weights:
            taps = enumerate(features.chunk(len(self.taps or ()), -1))
            features = torch.cat([self._norm(f"fc_norm.{i}", tap) for i, tap in taps], -1)
        return self._linear("fc", features)

    def _layer(self, tokens: Sequence[int], hidden: Tensor, first_row: int) -> Tensor:
        """Outputs of the rows from `first_row` on; keys and values are those of all rows."""
        embedding = self._embed[torch.tensor(tokens)]
        if self.is_eagle3:
            normed = self._norm("layers.0.hidden_norm", hidden)
            attention_in = torch.cat((self._norm("layers.0.input_layernorm", embedding), normed), -1)
            residual = normed if self.config.get("norm_before_residual") else hidden
        else:
            attention_in = residual = self._linear("fc", torch.cat((embedding, hidden), -1))
        middle = residual[first_row:] + self._attention(attention_in, first_row)
        x = self._norm("layers.0.post_attention_layernorm", middle)
        gate, up = self._linear("layers.0.mlp.gate_proj", x), self._linear("layers.0.mlp.up_proj", x)
        return middle + self._linear("layers.0.mlp.down_proj", F.silu(gate) * up)

    def _attention(self, x: Tensor, first_row: int) -> Tensor:
        positions, group = torch.arange(len(x)), self._num_heads // self._num_kv_heads
        q = self._heads("layers.0.self_attn.q_proj", x[first_row:], positions[first_row:])
        k = self._heads("layers.0.self_attn.k_proj", x, positions).repeat_interleave(group, 0)
        v = self._heads("layers.0.self_attn.v_proj", x, None).repeat_interleave(group, 0)
        distance = positions[first_row:, None] - positions[None, :]
        window = self.config["sliding_window"] if self.config.get("use_sliding_window") else len(x)
        unseen = (distance < 0) | (distance >= window)
        scores = (q @ k.transpose(1, 2) / self._head_dim**0.5).masked_fill(unseen, -torch.inf)
        mixed = scores.softmax(-1) @ v
        return self._linear("layers.0.self_attn.o_proj", mixed.transpose(0, 1).flatten(1))

    def _heads(self, name: str, x: Tensor, positions: Tensor | None) -> Tensor:
        """x [rows, in] -> [heads, rows, head_dim], rotated to `positions`."""
        heads: Tensor = self._linear(name, x).unflatten(-1, (-1, self._head_dim)).transpose(0, 1)
        if positions is None:
            return heads
        if (norm := name.replace("_proj", "_norm")) + ".weight" in self._weights:
            heads = self._norm(norm, heads)
        cos, sin = self._rotary(heads, positions[None])
        first, second = heads.chunk(2, -1)
        rotated: Tensor = heads * cos + torch.cat((-second, first), -1) * sin
        return rotated

    def _logits(self, outputs: Tensor) -> Tensor:
        return (self._norm("norm", outputs) if self.is_eagle3 else outputs) @ self._lm_head.T

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + float(self.config["rms_norm_eps"])).rsqrt()
        return x * scale * self._weights[f"{name}.weight"]


def acceptance_length(counts: Sequence[int]) -> float:
    """Tokens committed by a round that drafted, the bonus included: 1 + accepted / rounds."""
    return 1 + sum(counts) / len(counts)


@functools.lru_cache(maxsize=2)
def target_model(folder: Path) -> Any:
    """The target as a transformers model, float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def greedy_tokens(folder: Path, prompt_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """What transformers' `generate` appends to the prompt at temperature 0, up to and with an end token."""
    output = target_model(folder).generate(
        torch.tensor([list(prompt_ids)]), max_new_tokens=max_new_tokens, do_sample=False
    )
    return list(map(int, output[0, len(prompt_ids) :]))


@torch.no_grad()
def target_features(folder: Path, ids: Sequence[int], taps: Sequence[int] | None) -> Tensor:
    """Features of every token from one teacher-forced pass, float32 [len(ids), width].

    With `taps` (blocks applied) their hidden states side by side; with None the one behind the final norm.
    """
    model = target_model(folder)
    before_norm: list[Tensor] = []  # transformers shows the state behind the last block only normed
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    states = model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    hook.remove()
    if taps is None:
        return states[-1][0]
    return torch.cat([(*states[:-1], *before_norm)[tap][0] for tap in taps], -1)


def _matching(drafts: Sequence[int], text: Sequence[int]) -> int:
    """Length of the drafts' longest prefix that is also the text's."""
    count = 0
    while count < min(len(drafts), len(text)) and drafts[count] == text[count]:
        count += 1
    return count


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    for file in folder.glob("*.bin"):
        tensors |= torch.load(file, weights_only=True)
    return {name: value.float() if value.is_floating_point() else value for name, value in tensors.items()}


def _flat_config(folder: Path) -> dict[str, Any]:
    """config.json with everything at the top."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for section in ("model", "transformer_layer_config", "eagle_config"):
        config = (config.get(section) or {}) | {
            key: value for key, value in config.items() if value is not None
        }
    config.setdefault("norm_before_residual", "speculators_config" in config)
    return config


def _taps(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    ids = config.get("eagle_aux_hidden_state_layer_ids") or (2, num_layers // 2, num_layers - 3)
    behind = ids[0] == 1 and "speculators_config" not in config
    return tuple(i + 1 for i in ids) if behind else tuple(ids)


def _rotary(config: dict[str, Any], head_dim: int, theta: float | None) -> LlamaRotaryEmbedding:
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_theta"] = theta or rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type", "default")
    return LlamaRotaryEmbedding(
        LlamaConfig(
            head_dim=head_dim, rope_parameters=rope, max_position_embeddings=config["max_position_embeddings"]
        )
    )
