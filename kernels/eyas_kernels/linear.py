"""Dense layers whose result for a row does not depend on the number of rows."""

import torch
import torch.nn.functional as F

SINGLE_ROW_WIDTH = 1024


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in], weight [out, in], bias [out] -> [rows, out], in x's dtype.

    On the CPU some numbers of rows take a path of their own, with another order of sums: in float32 fewer than
    four rows, and the last rows of an odd number; in the 16-bit types a single wide row. They are padded.
    """
    rows = x.shape[0]
    padding = _padding(rows, x.shape[1], x.dtype) if x.device.type == "cpu" else 0
    if not padding:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, padding)), weight, bias)[:rows]


def _padding(rows: int, width: int, dtype: torch.dtype) -> int:
    if dtype == torch.float32:
        return -rows % 4
    return 1 if rows == 1 and width > SINGLE_ROW_WIDTH else 0
