"""Tensors in messages: what goes in comes out, and what contradicts itself is refused."""

from __future__ import annotations

import pytest
import torch

from eyas.transport import TransportError, decode_tensor, encode_tensor
from eyas.v1 import common_pb2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (2, 3, 4), (0, 5), (), (1, 0, 2)])
def test_a_tensor_comes_back_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    message = common_pb2.Tensor.FromString(encode_tensor(tensor).SerializeToString())
    found = decode_tensor(message)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    found += 1  # it owns its memory


def test_any_layout_is_sent_in_c_order() -> None:
    wide = torch.arange(24, dtype=torch.float32).view(4, 6)
    for view in (wide.T, wide[1:3, ::2], wide[2], wide.requires_grad_()):
        assert torch.equal(decode_tensor(encode_tensor(view)), view)
    assert encode_tensor(torch.tensor([1.0, -2.0])).data == bytes.fromhex("0000803f000000c0")
    assert encode_tensor(torch.tensor([1.0, -2.0], dtype=torch.bfloat16)).data == bytes.fromhex("803f00c0")


@pytest.mark.parametrize(
    ("shape", "num_bytes"), [((2, 3), 23), ((2, 3), 25), ((2, 3), 0), ((), 0), ((0,), 4), ((2**31, 2**31), 8)]
)
def test_a_length_that_does_not_fit_is_refused(shape: tuple[int, ...], num_bytes: int) -> None:
    message = common_pb2.Tensor(scalar_type=common_pb2.SCALAR_TYPE_FLOAT32, shape=shape, data=b"\0" * num_bytes)
    with pytest.raises(TransportError, match=f"needs .* bytes of data, not {num_bytes}"):
        decode_tensor(message)


@pytest.mark.parametrize("scalar_type", [common_pb2.SCALAR_TYPE_UNSPECIFIED, 99])
def test_an_unknown_element_type_is_refused(scalar_type: common_pb2.ScalarType) -> None:
    with pytest.raises(TransportError, match=f"scalar_type {scalar_type} is unknown"):
        decode_tensor(common_pb2.Tensor(scalar_type=scalar_type, shape=[1], data=b"\0" * 4))
