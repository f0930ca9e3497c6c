"""The tensors that a head of a given spec has: their names and shapes, checked against its files."""

from __future__ import annotations

from draft_service.head_spec import HeadSpec, layer_prefix
from eyas_kernels.checkpoint import Checkpoint, CheckpointError

Shapes = dict[str, tuple[int, ...]]


def check_tensors(checkpoint: Checkpoint, spec: HeadSpec) -> None:
    """Raises one CheckpointError with everything that is unknown, missing, mis-shaped or of a wrong type."""
    found = checkpoint.names()
    required, optional = _shapes(spec, layer_prefix(found.keys()))
    known = required | {name: shape for name, shape in optional.items() if name in found}
    problems = problems_of(checkpoint, known)
    problems += [f"{name} in {info.file} is unknown" for name, info in found.items() if name not in known]
    if problems:
        raise CheckpointError(
            f"{checkpoint.folder}: the tensors are not those of config.json: {'; '.join(problems)}"
        )


def problems_of(checkpoint: Checkpoint, expected: Shapes) -> list[str]:
    """What is wrong with these tensors, each said with the file that holds it."""
    found = checkpoint.names()
    problems = []
    for name, shape in expected.items():
        if name not in found:
            problems.append(f"{name} {list(shape)} is missing")
            continue
        info = found[name]
        if info.shape != shape:
            problems.append(f"{name} in {info.file} is {list(info.shape)}, but {list(shape)} is needed")
        if info.dtype.is_floating_point == (name in ("d2t", "t2d")):
            problems.append(f"{name} in {info.file} has dtype {info.dtype}, which does not fit")
    return problems


def fc_norms(spec: HeadSpec) -> Shapes:
    """The norms on what fc reads of the target, in the order of what they are applied to."""
    if spec.norm_before_fc:
        return {"input_norm.weight": (spec.feature_size,)}
    if spec.fc_norm:
        return {f"fc_norm.{i}.weight": (spec.target_hidden_size,) for i in range(len(spec.taps))}
    return {}


def _shapes(spec: HeadSpec, layer: str) -> tuple[Shapes, Shapes]:
    """Shapes of the tensors that a head must have, and of those that it may have, by name."""
    hidden = spec.hidden_size
    required, optional = _layer_shapes(spec, layer)
    optional["fc.bias"] = (hidden,)
    lm_head, embedding = (spec.draft_vocab_size, hidden), (spec.vocab_size, hidden)
    (optional if spec.borrows_lm_head else required)["lm_head.weight"] = lm_head
    (required if spec.owns_embedding else optional)["embed_tokens.weight"] = embedding
    if spec.kind == "eagle1":
        return required | {"fc.weight": (hidden, 2 * hidden)}, optional
    required |= {"fc.weight": (hidden, spec.feature_size), **fc_norms(spec), "norm.weight": (hidden,)}
    optional["t2d"] = (spec.vocab_size,)
    reduced = spec.draft_vocab_size < spec.vocab_size
    (required if reduced else optional)["d2t"] = (spec.draft_vocab_size,)
    return required, optional


def _layer_shapes(spec: HeadSpec, layer: str) -> tuple[Shapes, Shapes]:
    """The same for the decoder layer alone. An EAGLE-3 layer attends to embedding and hidden state side by side,
    each behind a norm of its own."""
    hidden, inner, eagle3 = spec.hidden_size, spec.intermediate_size, spec.kind == "eagle3"
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention_in = 2 * hidden if eagle3 else hidden
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    norms = ["post_attention_layernorm", *(["input_layernorm", "hidden_norm"] if eagle3 else [])]
    required: Shapes = {
        **{f"{layer}self_attn.{name}.weight": (size, attention_in) for name, size in projections.items()},
        f"{layer}self_attn.o_proj.weight": (hidden, queries),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
        **{f"{layer}{name}.weight": (hidden,) for name in norms},
    }
    if spec.attention_bias:
        required |= {f"{layer}self_attn.{name}.bias": (size,) for name, size in projections.items()}
    if spec.attention_norm:
        required |= {f"{layer}self_attn.{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}
    return required, {f"{layer}self_attn.o_proj.bias": (hidden,)}
