from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScalarType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCALAR_TYPE_UNSPECIFIED: _ClassVar[ScalarType]
    SCALAR_TYPE_FLOAT32: _ClassVar[ScalarType]
    SCALAR_TYPE_BFLOAT16: _ClassVar[ScalarType]
    SCALAR_TYPE_FLOAT16: _ClassVar[ScalarType]

class FeatureTransport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_TRANSPORT_UNSPECIFIED: _ClassVar[FeatureTransport]
    FEATURE_TRANSPORT_BYTES: _ClassVar[FeatureTransport]
    FEATURE_TRANSPORT_CUDA_IPC: _ClassVar[FeatureTransport]
SCALAR_TYPE_UNSPECIFIED: ScalarType
SCALAR_TYPE_FLOAT32: ScalarType
SCALAR_TYPE_BFLOAT16: ScalarType
SCALAR_TYPE_FLOAT16: ScalarType
FEATURE_TRANSPORT_UNSPECIFIED: FeatureTransport
FEATURE_TRANSPORT_BYTES: FeatureTransport
FEATURE_TRANSPORT_CUDA_IPC: FeatureTransport

class Tensor(_message.Message):
    __slots__ = ("scalar_type", "shape", "data")
    SCALAR_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    scalar_type: ScalarType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, scalar_type: _Optional[_Union[ScalarType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "choice_index")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice_index: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., choice_index: _Optional[int] = ...) -> None: ...

class FeatureSource(_message.Message):
    __slots__ = ("taps", "final_norm")
    TAPS_FIELD_NUMBER: _ClassVar[int]
    FINAL_NORM_FIELD_NUMBER: _ClassVar[int]
    taps: _containers.RepeatedScalarFieldContainer[int]
    final_norm: bool
    def __init__(self, taps: _Optional[_Iterable[int]] = ..., final_norm: _Optional[bool] = ...) -> None: ...

class ServiceTiming(_message.Message):
    __slots__ = ("queue_us", "compute_us", "total_us")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    TOTAL_US_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    compute_us: int
    total_us: int
    def __init__(self, queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., total_us: _Optional[int] = ...) -> None: ...
