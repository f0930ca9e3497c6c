"""Tensors between processes. Today they travel in the messages; the module is the one place that knows how.

Imports torch, and so only the target and draft services import this module.
"""

from __future__ import annotations

import torch

from eyas.errors import EyasError
from eyas.v1 import common_pb2

LAYOUT_VERSION = 1
"""Version of the feature layout: row order, tap order, element order."""

MAX_PAYLOAD_BYTES = 8 * 2**20
"""Largest tensor in one message; larger ones are cut by rows. Well under the message limit."""

_DTYPES = {
    common_pb2.SCALAR_TYPE_FLOAT32: torch.float32,
    common_pb2.SCALAR_TYPE_BFLOAT16: torch.bfloat16,
    common_pb2.SCALAR_TYPE_FLOAT16: torch.float16,
}
_SCALAR_TYPES = {dtype: scalar_type for scalar_type, dtype in _DTYPES.items()}


class TransportError(EyasError):
    """A tensor message that contradicts itself."""


def scalar_type_of(dtype: torch.dtype) -> common_pb2.ScalarType:
    """The wire's name of a dtype."""
    return _SCALAR_TYPES[dtype]


def dtype_of(scalar_type: common_pb2.ScalarType) -> torch.dtype:
    """The dtype of that name. Raises TransportError for one that is unknown."""
    if scalar_type not in _DTYPES:
        raise TransportError(f"scalar_type {scalar_type} is unknown")
    return _DTYPES[scalar_type]


def encode_tensor(tensor: torch.Tensor) -> common_pb2.Tensor:
    """Any device, any layout -> little-endian bytes in C order."""
    data = tensor.detach().to("cpu").contiguous()
    return common_pb2.Tensor(
        scalar_type=scalar_type_of(data.dtype),
        shape=data.shape,
        data=data.reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def decode_tensor(message: common_pb2.Tensor) -> torch.Tensor:
    """A tensor on the CPU. Raises TransportError when type, shape and length do not fit together."""
    dtype = dtype_of(message.scalar_type)
    data = message.data  # each read of a bytes field copies it
    shape = tuple(message.shape)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if num_bytes != len(data):
        raise TransportError(f"tensor: shape {shape} needs {num_bytes} bytes of data, not {len(data)}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    # A bytearray, so that torch gets memory it may write to.
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
