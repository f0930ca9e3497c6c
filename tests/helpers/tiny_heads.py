"""Random EAGLE heads in their published layouts: tensors and config.json, before they are written anywhere."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

HeadKind = Literal["eagle1", "eagle3"]

EMBEDDING_STD = 0.3
"""Scale of a tiny target's embeddings: small beside what its layers add, or a tied one repeats a token."""


@dataclass(frozen=True)
class HeadLayout:
    """What the tensors of a head look like. A reduced `draft_vocab` takes every other token of the target."""

    kind: HeadKind
    target_hidden: int
    vocab: int
    hidden: int
    draft_vocab: int | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    aux_ids: tuple[int, ...] | None = (2, 3, 5)
    fc_bias: bool = False
    attention_bias: bool = False
    attention_norm: bool = False
    input_norm: bool = False
    fc_norm: bool = False
    embed: bool = False
    layer_name: str | None = None

    @property
    def layer(self) -> str:
        """Prefix of the layer's tensors."""
        return self.layer_name or ("layers.0" if self.kind == "eagle1" else "midlayer")


def head_layout(kind: HeadKind, target_folder: Path, hidden: int | None = None, **options: Any) -> HeadLayout:
    """The layout of a head for the target, as wide as the target unless `hidden` says otherwise."""
    target = json.loads((target_folder / "config.json").read_text())
    width = target["hidden_size"]
    return HeadLayout(kind, width, target["vocab_size"], hidden or width, **options)


def head_tensors(layout: HeadLayout, seed: int = 1) -> dict[str, Tensor]:
    """Random float32 tensors of a head under their published names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, layer = layout.hidden, layout.layer

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / math.sqrt(columns)

    def vector(size: int, mean: float) -> Tensor:
        return mean + 0.2 * torch.randn(size, generator=generator)

    eagle3 = layout.kind == "eagle3"
    queries, keys = layout.heads * layout.head_dim, layout.kv_heads * layout.head_dim
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    norms = ("post_attention_layernorm", *(("input_layernorm", "hidden_norm") if eagle3 else ()))
    num_taps = 3 if layout.aux_ids is None else len(layout.aux_ids)
    tensors = {
        "fc.weight": matrix(hidden, num_taps * layout.target_hidden if eagle3 else 2 * hidden),
        **{
            f"{layer}.self_attn.{name}.weight": matrix(size, hidden * (1 + eagle3))
            for name, size in projections.items()
        },
        f"{layer}.self_attn.o_proj.weight": matrix(hidden, queries),
        f"{layer}.mlp.gate_proj.weight": matrix(2 * hidden, hidden),
        f"{layer}.mlp.up_proj.weight": matrix(2 * hidden, hidden),
        f"{layer}.mlp.down_proj.weight": matrix(hidden, 2 * hidden),
        **{f"{layer}.{name}.weight": vector(hidden, 1) for name in norms},
    }
    if layout.fc_bias:
        tensors["fc.bias"] = vector(hidden, 0)
    if layout.attention_bias:
        tensors |= {f"{layer}.self_attn.{name}.bias": vector(size, 0) for name, size in projections.items()}
    if layout.attention_norm:
        tensors |= {f"{layer}.self_attn.{x}_norm.weight": vector(layout.head_dim, 1) for x in "qk"}
    if layout.input_norm:
        tensors["input_norm.weight"] = vector(num_taps * layout.target_hidden, 1)
    if layout.fc_norm:
        tensors |= {f"fc_norm.{i}.weight": vector(layout.target_hidden, 1) for i in range(num_taps)}
    if layout.embed:
        tensors["embed_tokens.weight"] = matrix(layout.vocab, hidden)
    if eagle3:
        tensors["norm.weight"] = vector(hidden, 1)
        tensors["lm_head.weight"] = matrix(layout.draft_vocab or layout.vocab, hidden)
    if layout.draft_vocab is not None:
        tensors |= vocabulary_map(range(1, 2 * layout.draft_vocab, 2), layout.vocab)
    return tensors


def vocabulary_map(target_ids: Iterable[int], vocab: int) -> dict[str, Tensor]:
    """d2t (offsets, int64) and t2d (mask, bool) of a draft vocabulary given by its target ids, ascending."""
    ids = torch.tensor(list(target_ids))
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": mask}


def head_config(layout: HeadLayout) -> dict[str, Any]:
    """The config.json of a published head with this layout."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if layout.kind == "eagle1" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": layout.hidden,
        "intermediate_size": 2 * layout.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": layout.heads,
        "num_key_value_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20000.0,
        "vocab_size": layout.vocab,
    }
    if layout.kind == "eagle1":
        return {**config, "bias": layout.fc_bias}
    if layout.draft_vocab is not None:
        config["draft_vocab_size"] = layout.draft_vocab
    if layout.hidden != layout.target_hidden:
        config["target_hidden_size"] = layout.target_hidden
    if layout.aux_ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layout.aux_ids)}
    return config


def imitating(tensors: Mapping[str, Tensor], layout: HeadLayout, target_folder: Path) -> dict[str, Tensor]:
    """The tensors with a head built in that maps a token's embedding to the target's logits right after it.

    EAGLE-1: fc passes the embedding on, scaled as the target's final norm would. EAGLE-3: a slot attends to
    itself, reads its embedding and takes off the residual, so that the final norm sees the embedding alone.
    Whatever is not set stays random and weak.
    """
    target = {
        name: value for file in target_folder.glob("*.safetensors") for name, value in load_file(file).items()
    }
    head = target.get("lm_head.weight", target["model.embed_tokens.weight"]).float()
    norm = target["model.norm.weight"].float()
    eye, zero, layer = torch.eye(layout.hidden), torch.zeros(layout.hidden, layout.hidden), layout.layer
    weak = {name: 0.02 * value if value.dim() == 2 else value for name, value in tensors.items()}
    if layout.kind == "eagle1":
        return {**weak, "fc.weight": weak["fc.weight"] + torch.cat((norm.diag(), zero), 1)}
    ids = torch.arange(layout.vocab) if layout.draft_vocab is None else tensors["t2d"].nonzero()[:, 0]
    attention = f"{layer}.self_attn"
    rest = torch.zeros(layout.hidden, tensors["fc.weight"].shape[1] - layout.hidden)
    built = {
        "fc.weight": torch.cat((eye / EMBEDDING_STD, rest), 1),
        f"{attention}.q_proj.weight": torch.cat((4 * eye, zero), 1),
        f"{attention}.k_proj.weight": torch.cat((eye, zero), 1),
        f"{attention}.v_proj.weight": torch.cat((eye, -eye), 1),
        f"{attention}.o_proj.weight": eye,
    }
    norms = {f"{layer}.{name}.weight": torch.ones(layout.hidden) for name in ("input_layernorm", "hidden_norm")}
    own = {"norm.weight": norm, "lm_head.weight": head[ids]}
    return {**weak, **{name: weak[name] + value for name, value in built.items()}, **norms, **own}
