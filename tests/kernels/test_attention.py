"""Paged attention: against plain softmax attention, and to the bit the same for a row whatever shares the call."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import pytest
import torch

from eyas_kernels.attention import SHORT_BLOCK, BlockRows, StepRows, paged_attention, plan_rows, write_kv
from eyas_kernels.kv_cache import SINK_PAGE
from tests.helpers.cpu import skip_where_rows_interact

DTYPES = (torch.float32, torch.bfloat16)
HEADS = ((4, 2, 16), (9, 3, 64), (8, 1, 128))  # query heads, key heads, head_dim: all grouped


@dataclass(frozen=True)
class Step:
    """Random blocks over a cache whose pages are dealt out in no order."""

    blocks: list[BlockRows]
    cache: torch.Tensor
    query: torch.Tensor
    page_size: int

    @classmethod
    def draw(
        cls,
        shapes: Sequence[tuple[int, int]],
        heads: tuple[int, int, int] = HEADS[0],
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        seed: int = 0,
    ) -> Self:
        """`shapes` are (start, num_rows) of the blocks."""
        num_heads, num_kv_heads, head_dim = heads
        counts = [-(-(start + rows) // page_size) for start, rows in shapes]
        dealt = random.Random(seed).sample(range(1, sum(counts) + 1), sum(counts))
        blocks = [
            BlockRows(*shape, [dealt.pop() for _ in range(n)]) for shape, n in zip(shapes, counts, strict=True)
        ]
        generator = torch.Generator().manual_seed(seed)
        cache = torch.randn(sum(counts) + 1, page_size, 2, num_kv_heads, head_dim, generator=generator)
        query = torch.randn(sum(rows for _, rows in shapes), num_heads, head_dim, generator=generator)
        return cls(blocks, cache.to(dtype), query.to(dtype), page_size)

    def plan(self, window: int | None = None) -> StepRows:
        return plan_rows(self.blocks, self.page_size, "cpu", window)

    def attend(self, window: int | None = None) -> torch.Tensor:
        return paged_attention(self.query, self.cache, self.plan(window))

    def alone(self, index: int, row: int) -> torch.Tensor:
        """One row of one block in a step of its own."""
        block, first = self.blocks[index], sum(block.num_rows for block in self.blocks[:index])
        plan = plan_rows([BlockRows(block.start + row, 1, block.pages)], self.page_size, "cpu")
        return paged_attention(self.query[first + row : first + row + 1], self.cache, plan)[0]


def plain_attention(step: Step, window: int | None = None) -> torch.Tensor:
    """Row by row and head by head in float64, from keys and values laid out one after the other."""
    outputs, rows = [], iter(step.query.double())
    for block in step.blocks:
        keys, values = step.cache[block.pages].double().flatten(0, 1).unbind(1)  # [tokens, kv_heads, head_dim]
        group = step.query.shape[1] // keys.shape[1]
        for position in range(block.start, block.start + block.num_rows):
            begin = 0 if window is None else max(0, position - window + 1)
            seen = slice(begin, position + 1)
            heads = [
                (keys[seen, head // group] @ query / len(query) ** 0.5).softmax(0) @ values[seen, head // group]
                for head, query in enumerate(next(rows))
            ]
            outputs.append(torch.cat(heads))
    return torch.stack(outputs)


SHAPES = {
    "one row": [(0, 1)],
    "one page": [(3, 5)],
    "up to a page's border": [(9, 7), (15, 1)],
    "over a page's border": [(14, 4), (16, 1)],
    "other lengths": [(200, 1), (0, 4), (47, 9), (16, 2)],
    "long blocks": [(0, 40), (5, 17)],
    "short beside long": [(30, 3), (0, SHORT_BLOCK), (8, SHORT_BLOCK + 1), (64, 33)],
    "short behind long": [(0, 33), (20, 2), (21, 3)],
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("heads", [*HEADS, (4, 4, 16)])
@pytest.mark.parametrize("page_size", [16, 5, 1])
def test_it_is_softmax_attention(
    shapes: list[tuple[int, int]], heads: tuple[int, int, int], page_size: int
) -> None:
    step = Step.draw(shapes, heads, page_size=page_size)
    torch.testing.assert_close(step.attend().double(), plain_attention(step), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [1, 7, 16, 40, 1000])
def test_a_window_limits_how_far_back_a_row_looks(shapes: list[tuple[int, int]], window: int) -> None:
    step = Step.draw(shapes)
    torch.testing.assert_close(
        step.attend(window).double(), plain_attention(step, window), atol=1e-5, rtol=1e-5
    )


def test_bfloat16_is_close() -> None:
    step = Step.draw(SHAPES["other lengths"], dtype=torch.bfloat16)
    torch.testing.assert_close(step.attend().double(), plain_attention(step), atol=3e-2, rtol=3e-2)


# ---- what may not matter


def draw_shapes(rng: random.Random, most_rows: int) -> list[tuple[int, int]]:
    starts = (0, rng.randint(1, 15), rng.randint(16, 300), rng.choice((15, 16, 63, 64, 127, 128, 255, 256)))
    return [(rng.choice(starts), rng.randint(1, most_rows)) for _ in range(rng.randint(1, 4))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [16, 8, 5])
def test_a_row_does_not_depend_on_the_step(
    heads: tuple[int, int, int], page_size: int, dtype: torch.dtype
) -> None:
    """In float32 nor does a row of a prompt's chunk, so that a sequence may be computed anew after preemption."""
    skip_where_rows_interact(dtype)
    rng = random.Random(page_size)
    for seed in range(12):
        most_rows = 40 if seed % 2 and dtype == torch.float32 else 9
        step = Step.draw(draw_shapes(rng, most_rows), heads, dtype, page_size, seed)
        rows = iter(step.attend())
        for index, block in enumerate(step.blocks):
            for row in range(block.num_rows):
                where = (block.start, row, [block[:2] for block in step.blocks])
                assert torch.equal(next(rows), step.alone(index, row)), where


@pytest.mark.parametrize("length", [16, 17, 100, 192, 193, 208, 256, 300, 511, 700])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_a_longer_neighbour(length: int, dtype: torch.dtype) -> None:
    """The neighbour decides how many keys both are padded to, and so where the sums could be split."""
    skip_where_rows_interact(dtype)
    for seed, longer in enumerate((length + 1, length + 16, 2 * length, 1000)):
        step = Step.draw([(length - 1, 1), (longer - 1, 1)], HEADS[1], dtype, seed=seed)
        assert torch.equal(step.attend()[0], step.alone(0, 0))


@pytest.mark.parametrize("garbage", [1e4, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_behind_a_block_does_not_matter(dtype: torch.dtype, garbage: float) -> None:
    """Pages come back from other sequences, and rejected tokens leave keys and values behind."""
    shapes = [(5, 3), (0, 1), (16, 2), (40, 4), (0, 20)]
    step = Step.draw(shapes, dtype=dtype)
    expected = step.attend()
    for block in step.blocks:
        end = block.start + block.num_rows
        for offset in range(end, len(block.pages) * step.page_size):
            step.cache[block.pages[offset // step.page_size], offset % step.page_size] = garbage
    step.cache[SINK_PAGE] = garbage
    assert torch.equal(step.attend(), expected)


def test_pages_held_behind_a_block_do_not_matter() -> None:
    """A sequence that was rolled back keeps its pages."""
    step = Step.draw([(3, 2), (50, 1)])
    expected = step.attend()
    blocks = [BlockRows(block.start, block.num_rows, [*block.pages, 1, 2]) for block in step.blocks]
    found = paged_attention(step.query, step.cache, plan_rows(blocks, step.page_size, "cpu"))
    assert torch.equal(found, expected)


# ---- where things lie


def test_keys_and_values_go_to_their_slots_alone() -> None:
    step = Step.draw([(14, 4), (0, 1), (33, 2)])
    new = torch.arange(7.0)[:, None] * torch.ones(2 * 2 * 16) + 100
    before = step.cache.clone()
    write_kv(step.cache, new, step.plan())
    written = [
        (block.pages, i) for block in step.blocks for i in range(block.start, block.start + block.num_rows)
    ]
    for row, (pages, position) in zip(new, written, strict=True):
        found = step.cache[pages[position // 16], position % 16]
        assert torch.equal(found.flatten(), row)
        before[pages[position // 16], position % 16] = found
    assert torch.equal(step.cache, before)


def test_positions_are_those_of_the_blocks() -> None:
    assert Step.draw([(14, 4), (0, 1), (33, 2)]).plan().positions.tolist() == [14, 15, 16, 17, 0, 33, 34]


def test_short_blocks_are_attended_together_and_long_ones_alone() -> None:
    plan = Step.draw([(30, 3), (0, SHORT_BLOCK), (8, SHORT_BLOCK + 1), (64, 33), (2, 1)]).plan()
    assert [len(group.pages) for group in plan.groups] == [2, 1, 1, 1]
    assert [group.num_rows for group in plan.groups] == [19, 17, 33, 1]


def test_padding_refers_to_the_sink_page_and_to_nobodys() -> None:
    step = Step.draw([(100, 1), (3, 4), (40, 2)])
    (group,) = step.plan().groups
    for block, pages in zip(step.blocks, group.pages.tolist(), strict=True):
        own = len(block.pages)
        assert pages[:own] == block.pages
        assert set(pages[own:]) <= {SINK_PAGE}
    assert set(step.plan().slots.tolist()).isdisjoint(range(step.page_size))
