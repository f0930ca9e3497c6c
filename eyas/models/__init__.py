"""Getting models onto the disk: a name becomes a Hugging Face folder. Imports no torch, ever."""

from __future__ import annotations

from eyas.models.errors import ModelError
from eyas.models.resolve import DEFAULT_HEAD, DEFAULT_TARGET, default_home, resolve_head, resolve_target

__all__ = ["DEFAULT_HEAD", "DEFAULT_TARGET", "ModelError", "default_home", "resolve_head", "resolve_target"]
