"""What this machine's CPU can do, for tests of results that must be equal to the bit."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of the first CPU, as Linux names them; empty where it does not say."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), ()))


def skip_where_rows_interact(dtype: torch.dtype) -> None:
    """Skips the test on a CPU where a row of a 16-bit product depends on how many rows there are.

    With AVX-512 but without its bfloat16 instructions oneDNN widens the operands, and picks the order of sums
    by the number of rows. float32 is not concerned, nor is a CPU without AVX-512.
    """
    if dtype == torch.bfloat16 and "avx512f" in cpu_flags() and "avx512_bf16" not in cpu_flags():
        pytest.skip("oneDNN's bfloat16 products depend on the number of rows on AVX-512 without avx512_bf16")
