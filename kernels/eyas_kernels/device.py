"""Where a service computes, and how much memory its cache may take."""

from __future__ import annotations

import os

import torch

from eyas.errors import EyasError

CPU_CACHE_BYTES = 2**30
CACHE_SHARE = 0.25
"""Most that a cache takes when nobody says: a quarter of the free memory, on the CPU never more than a GiB.
Memory on the CPU is touched only as pages are used."""


class DeviceError(EyasError):
    """A device that is not there."""


def pick_device(name: str) -> torch.device:
    """ "auto" is the first GPU if there is one. Raises DeviceError."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device: {name} is not there ({torch.cuda.device_count()} GPUs are visible)")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def set_up_compute_thread(threads: int) -> None:
    """To be called on the thread that computes: `threads` CPU threads take part, 0 takes every core."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.set_grad_enabled(False)


def pages_that_fit(bytes_per_page: int, device: torch.device) -> int:
    """Pages for a cache on `device`, at least one."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] * CACHE_SHARE
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free = min(available * CACHE_SHARE, CPU_CACHE_BYTES)
    return max(1, int(free // bytes_per_page))
