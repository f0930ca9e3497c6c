"""Dense layers whose result for a row does not depend on the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

SINGLE_ROW_WIDTH = 1024
ROWS_HINT = 4


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in] laid out for oneDNN: few rows stream it about twice as fast. Same results, to the bit."""

    data: torch.Tensor


Weight = torch.Tensor | PackedWeight


def pack(weight: torch.Tensor) -> Weight:
    """weight [out, in] in the layout that `linear` reads fastest; the plain one where there is no better."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not _packs_bfloat16():
        return weight
    return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT))


def unpack(weight: Weight) -> torch.Tensor:
    """The weight [out, in] that `pack` was given."""
    return weight.data.to_dense() if isinstance(weight, PackedWeight) else weight


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in], weight [out, in], bias [out] -> [rows, out], in x's dtype.

    On the CPU some numbers of rows take a path of their own, with another order of sums: in float32 fewer than
    four rows, and the last rows of an odd number; in the 16-bit types a single wide row. They are padded.
    """
    rows = x.shape[0]
    padding = _padding(rows, x.shape[1], x.dtype) if x.device.type == "cpu" else 0
    if not padding:
        return _product(x, weight, bias)
    return _product(F.pad(x, (0, 0, 0, padding)), weight, bias)[:rows]


def _product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, PackedWeight):
        # The operator behind torch.compile's linear layers: (input, weight, bias, activation, its parameters).
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.data, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def _padding(rows: int, width: int, dtype: torch.dtype) -> int:
    if dtype == torch.float32:
        return -rows % 4
    return 1 if rows == 1 and width > SINGLE_ROW_WIDTH else 0


def _packs_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
