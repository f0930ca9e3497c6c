"""A head's config.json, in whichever of its published forms, as one flat object."""

from __future__ import annotations

from eyas_kernels.checkpoint import Checkpoint, CheckpointError, Config

# Where the forms keep fields of the head: vLLM's EAGLEConfig wraps the whole config; the speculators format keeps
# apart what describes the decoder layer; raw EAGLE-3 configs may keep apart what it reads of the target.
SECTIONS = ("model", "transformer_layer_config", "eagle_config")

# Tensors (by prefix) of variants with another forward pass.
FOREIGN_TENSORS = {
    "mask_hidden": "parallel drafting (P-EAGLE)",
    "fusion_fc.": "the old speculators layout",
}
# Flags, and the value of each that asks for another forward pass.
FOREIGN_FLAGS = {
    "parallel_drafting": True,
    "use_aux_hidden_state": False,
}


def read_config(checkpoint: Checkpoint) -> Config:
    """The head's fields, all at the top. Raises CheckpointError, naming file and field, for a head that computes
    something else than an EAGLE-1 or EAGLE-3 head does."""
    config = checkpoint.config
    for section in SECTIONS:
        config = config.lift(section)
    _refuse_foreign_tensors(checkpoint)
    _refuse_foreign_fields(config)
    return config


def is_speculators(config: Config) -> bool:
    """Whether the head is in the speculators format, which has defaults and numbers layers in a way of its own."""
    return config.has("speculators_model_type") or config.has("speculators_config")


def _refuse_foreign_tensors(checkpoint: Checkpoint) -> None:
    for prefix, variant in FOREIGN_TENSORS.items():
        found = next((name for name in checkpoint.names() if name.startswith(prefix)), None)
        if found is not None:
            file = checkpoint.folder / checkpoint.file_of(found)
            raise CheckpointError(f"{file}: {found} belongs to {variant}, which is not supported")


def _refuse_foreign_fields(config: Config) -> None:
    if (algorithm := config.text("speculators_model_type", "eagle3")) != "eagle3":
        raise config.error("speculators_model_type", f"is {algorithm!r}, but only 'eagle3' is supported")
    for key, foreign in FOREIGN_FLAGS.items():
        if config.flag(key, not foreign) == foreign:
            raise config.error(key, f"is {str(foreign).lower()}, which is not supported")
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise config.error("hidden_act", f"is {activation!r}, but only 'silu' is supported")
