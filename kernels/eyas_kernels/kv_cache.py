"""The paged KV cache: memory by pages, and who holds which page."""

from __future__ import annotations

import numpy as np
import torch

SINK_PAGE = 0
"""Page that padding refers to; never given to a sequence, so padded rows cannot touch anybody's state."""


class NoPages(Exception):
    """Fewer pages are free than a sequence needs."""


class PagedKVCache:
    """Keys and values of every layer: `data` is [num_layers, num_pages + 1, page_size, 2, num_kv_heads, head_dim].

    A token's key and value lie side by side, so one copy writes both and one gather reads both.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, num_pages + 1, page_size, 2, num_kv_heads, head_dim)
        self.data = _zeros(shape, dtype, torch.device(device))
        self.page_size = page_size

    def layer(self, index: int) -> torch.Tensor:
        """[num_pages + 1, page_size, 2, num_kv_heads, head_dim], a view."""
        return self.data[index]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On the CPU, memory that the system hands out zeroed on first touch: pages never used cost nothing."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


class PageAllocator:
    """Hands out pages 1 .. num_pages."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages, SINK_PAGE, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def extend(self, pages: list[int], num_tokens: int) -> None:
        """Grows `pages` in place until it covers `num_tokens`. Raises NoPages, and then changes nothing."""
        missing = -(-num_tokens // self.page_size) - len(pages)
        if missing > len(self._free):
            raise NoPages(f"{missing} pages needed, {len(self._free)} free")
        for _ in range(missing):
            pages.append(self._free.pop())

    def release(self, pages: list[int]) -> None:
        """Takes all of `pages` back and empties it."""
        self._free.extend(reversed(pages))
        pages.clear()
