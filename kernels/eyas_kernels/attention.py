"""Attention of a step's rows over the paged KV cache.

The scores of a row are taken over all pages of its group, masked to the row's own past. Padding adds exact
zeros behind the last key, so a row's result does not depend on the rows and sequences that share the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from eyas_kernels.kv_cache import SINK_PAGE

SHORT_BLOCK = 16
"""Blocks of at most this many rows are attended together, padded to the longest; longer ones one by one."""

VECTOR = 16
"""Keys come in whole vectors of the CPU: softmax sums a shorter rest in another order."""

FLOAT32_KEYS = 64
"""Keys that a float32 product on the CPU sums at a time: beyond about 200 its order of sums depends on their number."""


class BlockRows(NamedTuple):
    """Rows of one sequence in a step: `num_rows` tokens at positions start, start + 1, ..."""

    start: int
    num_rows: int
    pages: Sequence[int]


@dataclass(frozen=True)
class _Group:
    """Blocks attended together, padded to `rows` rows and `pages.shape[1]` pages each."""

    pages: torch.Tensor  # int64 [blocks, pages]
    mask: torch.Tensor  # float32 [blocks, 1, rows, 1, keys]: 0 where the row may look, -inf elsewhere
    gather: torch.Tensor | None  # int64 [blocks * rows]: the step's row of each padded row; None: all in place
    scatter: torch.Tensor | None  # int64 [rows in the group]: the padded row of each real row
    unwritten: torch.Tensor  # int64: keys, of all blocks in a row, behind their block's last; somebody's past
    first_row: int
    num_rows: int


@dataclass(frozen=True)
class StepRows:
    """Where the rows of a step lie: made once a step, used by every layer."""

    positions: torch.Tensor  # int64 [rows]
    slots: torch.Tensor  # int64 [rows]: page * page_size + offset of each row's key and value
    groups: tuple[_Group, ...]


def plan_rows(
    blocks: Sequence[BlockRows], page_size: int, device: torch.device | str, window: int | None = None
) -> StepRows:
    """Lays out a step whose rows are those of `blocks`, one block after the other. `window` limits how far back
    a row looks (sliding-window attention), itself included."""
    positions = [block.start + i for block in blocks for i in range(block.num_rows)]
    slots = [
        block.pages[position // page_size] * page_size + position % page_size
        for block in blocks
        for position in range(block.start, block.start + block.num_rows)
    ]
    groups: list[_Group] = []
    row = 0
    while blocks:
        count = 1
        if blocks[0].num_rows <= SHORT_BLOCK:
            while count < len(blocks) and blocks[count].num_rows <= SHORT_BLOCK:
                count += 1
        members, blocks = blocks[:count], blocks[count:]
        groups.append(_plan_group(members, row, page_size, device, window))
        row += groups[-1].num_rows
    return StepRows(
        torch.tensor(positions, dtype=torch.int64, device=device),
        torch.tensor(slots, dtype=torch.int64, device=device),
        tuple(groups),
    )


def _plan_group(
    blocks: Sequence[BlockRows], first_row: int, page_size: int, device: torch.device | str, window: int | None
) -> _Group:
    rows = max(block.num_rows for block in blocks)
    num_pages = max(-(-(block.start + block.num_rows) // page_size) for block in blocks)
    num_pages += -num_pages % (VECTOR // math.gcd(VECTOR, page_size))
    pages = [(list(block.pages[:num_pages]) + [SINK_PAGE] * num_pages)[:num_pages] for block in blocks]
    starts = torch.tensor([block.start for block in blocks], device=device)
    ends = torch.tensor([block.start + block.num_rows for block in blocks], device=device)
    position = (starts[:, None] + torch.arange(rows, device=device))[..., None]  # [blocks, rows, 1]
    key = torch.arange(num_pages * page_size, device=device)
    visible = key <= position
    if window is not None:
        visible &= key > position - window
    mask = torch.zeros(visible.shape, device=device).masked_fill_(~visible, float("-inf"))
    num_rows = sum(block.num_rows for block in blocks)
    gather = scatter = None
    if num_rows != len(blocks) * rows:
        gather_list: list[int] = []
        scatter_list: list[int] = []
        step_row = first_row
        for index, block in enumerate(blocks):
            # Padding repeats the block's last row: valid work whose result nobody reads.
            gather_list += [step_row + min(i, block.num_rows - 1) for i in range(rows)]
            scatter_list += range(index * rows, index * rows + block.num_rows)
            step_row += block.num_rows
        gather = torch.tensor(gather_list, device=device)
        scatter = torch.tensor(scatter_list, device=device)
    return _Group(
        torch.tensor(pages, dtype=torch.int64, device=device),
        mask[:, None, :, None],
        gather,
        scatter,
        (key >= ends[:, None]).view(-1).nonzero()[:, 0],
        first_row,
        num_rows,
    )


def write_kv(cache: torch.Tensor, keys_values: torch.Tensor, step: StepRows) -> None:
    """Writes keys_values [rows, 2 * num_kv_heads * head_dim] (keys first) into one layer's cache."""
    cache.view(-1, keys_values.shape[-1]).index_copy_(0, step.slots, keys_values)


def paged_attention(query: torch.Tensor, cache: torch.Tensor, step: StepRows) -> torch.Tensor:
    """query [rows, num_heads, head_dim], cache [pages, page_size, 2, num_kv_heads, head_dim] of one layer, already
    holding these rows' own keys and values -> [rows, num_heads * head_dim] (grouped-query attention)."""
    parts = [_attend(query, cache, group) for group in step.groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(query: torch.Tensor, cache: torch.Tensor, group: _Group) -> torch.Tensor:
    _, page_size, _, num_kv_heads, head_dim = cache.shape
    blocks, num_pages = group.pages.shape
    rows = group.mask.shape[2]
    queries_per_kv = query.shape[1] // num_kv_heads
    if group.gather is None:
        query = query[group.first_row : group.first_row + group.num_rows]
    else:
        query = query.index_select(0, group.gather)
    num_keys = num_pages * page_size
    keys_values = cache.view(cache.shape[0], -1).index_select(0, group.pages.view(-1))
    # Not even a NaN there may reach the block's rows, as 0 * NaN would.
    keys_values.view(blocks * num_keys, -1).index_fill_(0, group.unwritten, 0)
    keys, values = (
        keys_values.view(blocks, num_keys, 2, num_kv_heads, head_dim)
        .permute(2, 0, 3, 1, 4)
        .reshape(2, blocks * num_kv_heads, num_keys, head_dim)
    )
    mask = group.mask
    if query.dtype == torch.float32 and query.device.type == "cpu" and rows % 4:
        # See linear(): the order of float32 sums must not depend on the number of rows.
        query, mask = _pad_rows(query, blocks, rows), F.pad(mask, (0, 0, 0, 0, 0, -rows % 4))
    padded_rows = mask.shape[2]
    query = (
        query.view(blocks, padded_rows, num_kv_heads, queries_per_kv, head_dim)
        .transpose(1, 2)
        .reshape(blocks * num_kv_heads, padded_rows * queries_per_kv, head_dim)
    )
    scores = torch.bmm(query, keys.transpose(1, 2)).float().mul_(head_dim**-0.5)
    scores = scores.view(blocks, num_kv_heads, padded_rows, queries_per_kv, num_keys).add_(mask)
    weights = scores.softmax(-1).to(query.dtype).view(blocks * num_kv_heads, -1, num_keys)
    out = _weigh(weights, values).view(blocks, num_kv_heads, padded_rows, queries_per_kv, head_dim)
    out = out.transpose(1, 2).reshape(blocks, padded_rows, -1)[:, :rows].reshape(blocks * rows, -1)
    return out if group.scatter is None else out.index_select(0, group.scatter)


def _weigh(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [n, queries, keys] times values [n, keys, head_dim], the keys summed in an order that does not depend
    on how many there are."""
    if weights.dtype != torch.float32 or weights.device.type != "cpu":
        return torch.bmm(weights, values)
    padding = -weights.shape[-1] % FLOAT32_KEYS
    weights, values = F.pad(weights, (0, padding)), F.pad(values, (0, 0, 0, padding))
    parts = zip(weights.split(FLOAT32_KEYS, -1), values.split(FLOAT32_KEYS, 1), strict=True)
    return sum((torch.bmm(*part) for part in parts), start=torch.zeros(()))


def _pad_rows(query: torch.Tensor, blocks: int, rows: int) -> torch.Tensor:
    grouped = query.view(blocks, rows, -1, query.shape[-1])
    return F.pad(grouped, (0, 0, 0, 0, 0, -rows % 4)).view(blocks * (rows + -rows % 4), -1, query.shape[-1])
