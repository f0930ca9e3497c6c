"""Makers of tiny random checkpoints on disk: targets through transformers, EAGLE heads as published."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from tests.helpers.tiny_heads import (
    EMBEDDING_STD,
    HeadKind,
    HeadLayout,
    head_config,
    head_layout,
    head_tensors,
    imitating,
)

Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]
Family = Literal["llama", "llama3", "mistral", "qwen2", "qwen3"]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CONFIG_CLASSES = {
    "llama": LlamaConfig,
    "llama3": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def make_target(
    folder: Path,
    family: Family = "llama",
    *,
    vocab_size: int = 512,
    hidden_size: int = 64,
    num_layers: int = 6,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 512,
    tied: bool = False,
    sharded: bool = False,
    layer_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    tokenizer_files: Mapping[str, bytes] | None = None,
    **config: Any,
) -> Path:
    """A random target of a family, saved by transformers; returns `folder`.

    Every tensor is random, norms and biases too, so that none can be left out unnoticed. `layer_scale` weakens
    what the layers add to the residual stream: near 0 the next token depends on the last one alone. `config`
    sets further fields of the transformers config.
    """
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden_size // heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
    }
    if family == "llama3":
        fields["rope_parameters"] = LLAMA3_ROPE
    if family == "mistral":
        fields["sliding_window"] = None
    model = AutoModelForCausalLM.from_config(CONFIG_CLASSES[family](**{**fields, **config}))
    _randomise(model, layer_scale, torch.Generator().manual_seed(seed))
    model.to(dtype).save_pretrained(folder, max_shard_size="100KB" if sharded else "5GB")
    for name, content in (tokenizer_files or {}).items():
        (folder / name).write_bytes(content)
    return folder


@torch.no_grad()
def _randomise(model: torch.nn.Module, layer_scale: float, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1 + 0.2 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.5 * noise)
        elif "embed_tokens" in name:
            parameter.copy_(EMBEDDING_STD * noise)
        else:
            last = layer_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            parameter.copy_(last * noise * 1.5 / math.sqrt(parameter.shape[-1]))


def make_head(
    folder: Path,
    kind: HeadKind,
    target_folder: Path,
    *,
    bin: bool = False,
    sharded: bool = False,
    imitate: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    config: Mapping[str, Any] | None = None,
    edit: Edit | None = None,
    **layout: Any,
) -> Path:
    """A random head for the target; returns `folder`.

    `layout` sets fields of HeadLayout and `config` those of config.json; `edit` changes config and tensors in
    place before they are written. With `imitate` the head knows which token follows which where the target's
    layers count for little (`make_target(layer_scale=0.01)`), so that part of its drafts is accepted. It has as
    many heads of keys as of queries.
    """
    if imitate:
        layout.setdefault("kv_heads", layout.get("heads", HeadLayout.heads))
    shape = head_layout(kind, target_folder, **layout)
    tensors = head_tensors(shape, seed)
    if imitate:
        tensors = imitating(tensors, shape, target_folder)
    tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    fields = {**head_config(shape), **(config or {})}
    if edit is not None:
        edit(fields, tensors)
    write_checkpoint(folder, fields, tensors, bin=bin, sharded=sharded)
    return folder


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    bin: bool = False,
    sharded: bool = False,
) -> None:
    """Writes config.json and the tensors, as safetensors or by torch.save; sharded: two files and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stem, suffix, save = ("pytorch_model", "bin", torch.save) if bin else ("model", "safetensors", save_file)
    if not sharded:
        save(dict(tensors), folder / f"{stem}.{suffix}")
        return
    files = [f"{stem}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
    weight_map = {name: files[i % 2] for i, name in enumerate(tensors)}
    for file in files:
        save({name: tensors[name] for name, place in weight_map.items() if place == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
