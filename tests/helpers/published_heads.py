"""Every layout in which EAGLE heads are published, at tiny size: the fields of config.json, the tensors, the files.

Sizes are scaled down; which fields are there, what they are called and what they say is as published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.helpers.tiny_heads import HeadKind, HeadLayout, head_layout, head_tensors
from tests.helpers.tiny_models import write_checkpoint

Fields = dict[str, Any]
AUX = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Published:
    """A head as somebody publishes it: `layout` are fields of HeadLayout, `config` makes config.json of one."""

    kind: HeadKind
    config: Callable[[HeadLayout], Fields]
    layout: Mapping[str, Any] = field(default_factory=dict)
    bin: bool = False
    dtype: torch.dtype = torch.float16
    edit: Callable[[dict[str, Tensor]], None] = lambda tensors: None


def write_published(name: str, folder: Path, target_folder: Path) -> Path:
    """Writes the layout of that name, with random tensors, for the target; returns `folder`."""
    published = PUBLISHED[name]
    layout = head_layout(published.kind, target_folder, **published.layout)
    tensors = {
        name: value.to(published.dtype) if value.is_floating_point() else value
        for name, value in head_tensors(layout).items()
    }
    published.edit(tensors)
    write_checkpoint(folder, published.config(layout), tensors, bin=published.bin)
    return folder


# ---- config.json


def _llama(layout: HeadLayout, **more: Any) -> Fields:
    return {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": layout.hidden,
        "initializer_range": 0.02,
        "intermediate_size": 2 * layout.hidden,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": layout.heads,
        "num_key_value_heads": layout.kv_heads,
        "num_hidden_layers": 1,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": layout.vocab,
        **more,
    }


def _without(fields: Fields, *names: str) -> Fields:
    return {name: value for name, value in fields.items() if name not in names}


def _mixtral(layout: HeadLayout) -> Fields:
    more = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": 8}
    return _llama(layout, **more, rope_theta=10000.0, num_local_experts=8, num_experts_per_tok=2)


def _qwen2(layout: HeadLayout) -> Fields:
    more = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "bfloat16"}
    window = {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 28}
    return _llama(layout, **more, **window, rope_theta=1000000.0, bias=False, qkv_bias=True, rms_norm_eps=1e-06)


def _eagle3(layout: HeadLayout, **more: Any) -> Fields:
    return _llama(layout, draft_vocab_size=layout.draft_vocab or layout.vocab, **more)


def _specforge(layout: HeadLayout, **more: Any) -> Fields:
    own = {"architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "head_dim": layout.head_dim}
    return _eagle3(layout, **{**own, "rope_theta": 1000000, "torch_dtype": "bfloat16", **more})


def _wrapped(fields: Fields, architecture: str, **more: Any) -> Fields:
    """vLLM's EAGLEConfig."""
    return {"architectures": [architecture], "model_type": "eagle", "model": fields | more}


def _speculators(layout: HeadLayout, layer: Fields, **more: Any) -> Fields:
    inner = _llama(layout, head_dim=layout.head_dim, attention_bias=False, mlp_bias=False, **layer)
    greedy = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": layout.draft_vocab or layout.vocab,
        "has_no_defaults_at_init": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "a/verifier"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "target_hidden_size": None if layout.hidden == layout.target_hidden else layout.target_hidden,
        "transformer_layer_config": _without(inner, "architectures", "rope_scaling") | layer,
        **more,
    }


NEW_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 6, "use_sliding_window": True}


# ---- the layouts

REDUCED = {"draft_vocab": 64}
SPECULATORS = {"layer_name": "layers.0", "embed": True, **REDUCED}


def _add_lm_head(tensors: dict[str, Tensor]) -> None:
    """A converted head holds its target's lm_head; another one here, so that it would be noticed in its place."""
    tensors["lm_head.weight"] = torch.zeros(512, 64, dtype=torch.float16)


def _add_output_bias(tensors: dict[str, Tensor]) -> None:
    tensors["midlayer.self_attn.o_proj.bias"] = torch.linspace(-1, 1, 64, dtype=torch.float16)


def _drop_lm_head(tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"]


PUBLISHED: dict[str, Published] = {
    "eagle1 llama 3": Published(
        "eagle1", lambda s: _llama(s, rope_theta=500000.0, bias=False), {"embed": True}, bin=True
    ),
    "eagle1 llama 2": Published(
        "eagle1",
        lambda s: _llama(s, max_position_embeddings=4096, rms_norm_eps=1e-06),
        {"kv_heads": 4, "fc_bias": True, "embed": True},
        bin=True,
    ),
    "eagle1 vicuna": Published(
        "eagle1",
        lambda s: _without(_llama(s, rms_norm_eps=1e-06), "num_key_value_heads"),
        {"kv_heads": 4, "fc_bias": True},
        bin=True,
    ),
    "eagle1 mixtral": Published("eagle1", _mixtral, {"kv_heads": 4, "fc_bias": True}),
    "eagle1 qwen2": Published("eagle1", _qwen2, {"attention_bias": True}, dtype=torch.bfloat16),
    "eagle1 sglang": Published(
        "eagle1", lambda s: _llama(s, architectures=["LlamaForCausalLMEagle"], rope_theta=500000.0, bias=False)
    ),
    "eagle1 vllm": Published(
        "eagle1",
        lambda s: _wrapped(_llama(s, eagle_fc_bias=True), "EagleLlamaForCausalLM"),
        {"kv_heads": 4, "fc_bias": True},
        edit=_add_lm_head,
    ),
    "eagle3 llama": Published("eagle3", _eagle3, {"aux_ids": None, **REDUCED}, bin=True),
    "eagle3 vicuna": Published(
        "eagle3", lambda s: _eagle3(s, num_hidden_layers=40), {"aux_ids": None, "kv_heads": 4}, bin=True
    ),
    "eagle3 qwen3": Published(
        "eagle3",
        lambda s: _eagle3(s, head_dim=s.head_dim, rope_theta=1000000, attention_bias=False, rope_parameters=None),
        {"aux_ids": None, "head_dim": 24, **REDUCED},
        bin=True,
    ),
    "eagle3 qwen2": Published(
        "eagle3",
        lambda s: _specforge(s, attention_bias=True),
        {"attention_bias": True, **REDUCED},
        edit=_add_output_bias,
    ),
    "eagle3 specforge": Published(
        "eagle3",
        lambda s: _specforge(s, eagle_config={AUX: [1, 2, 4], "use_aux_hidden_state": True}),
        {"embed": True, **REDUCED},
        dtype=torch.bfloat16,
    ),
    "eagle3 norm before fc": Published(
        "eagle3",
        lambda s: _specforge(s, eagle_config={AUX: [3, 4, 6]}, norm_before_fc=True),
        {"input_norm": True, **REDUCED},
    ),
    "eagle3.1": Published(
        "eagle3", lambda s: _specforge(s, fc_norm=True, norm_output=True), {"fc_norm": True, **REDUCED}
    ),
    "eagle3 borrows lm_head": Published("eagle3", _specforge, edit=_drop_lm_head),
    "eagle3 of another width": Published(
        "eagle3",
        lambda s: _specforge(s, target_hidden_size=s.target_hidden),
        {"hidden": 32, "embed": True, "heads": 2, **REDUCED},
    ),
    "eagle3 vllm": Published(
        "eagle3", lambda s: _wrapped(_specforge(s, eagle_config={AUX: [2, 3, 5]}), "Eagle3LlamaForCausalLM"), REDUCED
    ),
    "speculators llama": Published(
        "eagle3",
        lambda s: _speculators(s, {"rope_theta": 500000.0}, norm_before_residual=False, speculators_version="0.1.0"),
        SPECULATORS,
    ),
    "speculators qwen3": Published(
        "eagle3",
        lambda s: _speculators(s, {"rope_parameters": NEW_ROPE}, norm_before_residual=True, **{AUX: [1, 2, 4]}),
        {"attention_norm": True, "head_dim": 24, **SPECULATORS},
        dtype=torch.bfloat16,
    ),
    "speculators 3.1": Published(
        "eagle3",
        lambda s: _speculators(s, {}, fc_norm=True, norm_before_fc=False, norm_output=True, norm_before_residual=True),
        {"fc_norm": True, **SPECULATORS},
    ),
    "speculators of four taps": Published(
        "eagle3",
        lambda s: _speculators(s, WINDOW, norm_before_fc=True, norm_output=True, **{AUX: [2, 3, 4, 6]}),
        {"input_norm": True, "aux_ids": (2, 3, 4, 6), **SPECULATORS},
    ),
    "speculators with an embedding of its own": Published(
        "eagle3", lambda s: _speculators(s, {}, embed_requires_grad=True), SPECULATORS
    ),
}  # fmt: skip
