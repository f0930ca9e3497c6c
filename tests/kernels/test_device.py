"""Where a service computes, and how large a cache becomes by itself."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from eyas_kernels.device import CPU_CACHE_BYTES, DeviceError, pages_that_fit, pick_device, set_up_compute_thread


def test_the_device_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == torch.device("cuda:0")
    assert pick_device("cuda") == torch.device("cuda:0")
    assert pick_device("cuda:1") == torch.device("cuda:1")


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match=r"^device: cuda:1 is not there \(1 GPUs are visible\)$"):
        pick_device("cuda:1")


def test_a_cache_takes_a_share_of_the_free_memory_and_never_more_than_the_limit() -> None:
    cpu = torch.device("cpu")
    page = 2**16
    assert 0 < pages_that_fit(page, cpu) * page <= CPU_CACHE_BYTES
    assert pages_that_fit(2**62, cpu) == 1


@pytest.mark.parametrize(("asked", "expected"), [(2, 2), (0, len(os.sched_getaffinity(0)))])
def test_a_compute_thread_has_its_threads_and_no_gradients(asked: int, expected: int) -> None:
    before, found = torch.get_num_threads(), list[object]()

    def compute() -> None:
        set_up_compute_thread(asked)
        found.extend((torch.get_num_threads(), torch.is_grad_enabled()))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert found == [expected, False]
