"""linear: right, and to the bit the same for a row whatever rows share the call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from eyas_kernels.linear import PackedWeight, linear, pack
from tests.helpers.cpu import skip_where_rows_interact

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 33])
@pytest.mark.parametrize("width", [64, 1536])
def test_it_is_a_dense_layer(rows: int, width: int, biased: bool, dtype: torch.dtype) -> None:
    x, weight = random(rows, width, dtype=dtype), random(48, width, dtype=dtype, seed=1) / width**0.5
    bias = random(48, dtype=dtype, seed=2) if biased else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for stored in (weight, pack(weight)):
        found = linear(x, stored, bias)
        assert found.dtype == dtype
        assert found.shape == (rows, 48)
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 1024, 1536, 1728, 4096])
def test_a_row_does_not_depend_on_the_others(width: int, dtype: torch.dtype) -> None:
    """Wide layers and many draws: rounding to the element type hides most differences."""
    skip_where_rows_interact(dtype)
    for trial in range(6):
        size = (48, 259, 576)[trial % 3]
        x = random(33, width, dtype=dtype, seed=trial)
        weight = pack(random(size, width, dtype=dtype, seed=100 + trial) / width**0.5)
        bias = random(size, dtype=dtype, seed=200 + trial) if trial % 2 else None
        alone = torch.cat([linear(x[i : i + 1], weight, bias) for i in range(len(x))])
        for rows in (*range(2, 10), 16, 17, 33):
            assert torch.equal(linear(x[:rows], weight, bias), alone[:rows]), (rows, size)
            assert torch.equal(linear(x[-rows:], weight, bias), alone[-rows:]), (rows, size)


@pytest.mark.parametrize("width", [64, 576, 1536])
def test_packing_changes_no_bit(width: int) -> None:
    skip_where_rows_interact(torch.bfloat16)
    weight = random(259, width, dtype=torch.bfloat16, seed=1)
    for rows in (1, 4, 33):
        x = random(rows, width, dtype=torch.bfloat16)
        assert torch.equal(linear(x, pack(weight)), linear(x, weight))


def test_only_bfloat16_is_packed() -> None:
    weight = random(48, 64, dtype=torch.float32)
    assert pack(weight) is weight
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert isinstance(pack(weight.bfloat16()), PackedWeight)
