"""Pages are handed out once, and come back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas_kernels.kv_cache import SINK_PAGE, NoPages, PageAllocator, PagedKVCache


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_pages_cover_the_tokens(tokens: int, pages: int) -> None:
    allocator, held = PageAllocator(5, 4), list[int]()
    allocator.extend(held, tokens)
    assert len(held) == pages
    assert allocator.num_free == 5 - pages


def test_what_is_covered_takes_no_page() -> None:
    allocator, held = PageAllocator(5, 4), list[int]()
    allocator.extend(held, 9)
    before = list(held)
    allocator.extend(held, 9)
    allocator.extend(held, 3)
    assert held == before


def test_exhaustion_changes_nothing() -> None:
    allocator, first, second = PageAllocator(3, 4), list[int](), list[int]()
    allocator.extend(first, 5)
    allocator.extend(second, 1)
    before = list(second)
    with pytest.raises(NoPages, match="2 pages needed, 0 free"):
        allocator.extend(second, 12)
    assert second == before
    assert allocator.num_free == 0
    allocator.release(first)
    allocator.extend(second, 12)
    assert len(second) == 3


def test_all_pages_can_be_used_and_the_sink_is_none_of_them() -> None:
    allocator, held = PageAllocator(6, 2), list[int]()
    allocator.extend(held, 12)
    assert sorted(held) == [1, 2, 3, 4, 5, 6]
    assert SINK_PAGE not in held


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=60))
def test_no_page_is_held_twice_or_lost(actions: list[tuple[int, int]]) -> None:
    """Each action grows one of five sequences to a length; a length of 0 gives its pages back."""
    allocator = PageAllocator(12, 4)
    sequences: list[list[int]] = [[] for _ in range(5)]
    for index, length in actions:
        before = [list(pages) for pages in sequences]
        if length == 0:
            allocator.release(sequences[index])
        else:
            try:
                allocator.extend(sequences[index], length)
            except NoPages:
                assert sequences == before
                assert -(-length // 4) - len(before[index]) > allocator.num_free
        held = [page for pages in sequences for page in pages]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(1, 13))
        assert allocator.num_free == 12 - len(held)
        assert sequences[index][: len(before[index])] == (before[index] if length else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_is_zero_and_has_a_page_for_the_sink(dtype: torch.dtype) -> None:
    cache = PagedKVCache(3, 5, 4, 2, 8, dtype, "cpu")
    assert cache.data.shape == (3, 6, 4, 2, 2, 8)
    assert cache.data.dtype == dtype
    assert not cache.data.any()
    cache.layer(1)[2] = 1
    assert int(cache.data.sum()) == 4 * 2 * 2 * 8
    assert cache.data[1, 2].all()
