"""The default target for tests that need a real language model."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from eyas.models import DEFAULT_TARGET, default_home, resolve_target


@functools.cache
def default_target() -> Path:
    """Its Hugging Face folder in the user's EYAS_HOME; the first test run on a machine fetches it."""
    return resolve_target(DEFAULT_TARGET, default_home(os.environ))
