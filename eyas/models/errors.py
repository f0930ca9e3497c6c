"""What goes wrong on the way from a model's name to a folder on the disk."""

from __future__ import annotations

from eyas.errors import EyasError


class ModelError(EyasError):
    """A model that cannot be had; the text names it and says what to do."""
