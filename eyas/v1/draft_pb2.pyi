from eyas.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProposalStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROPOSAL_STATUS_UNSPECIFIED: _ClassVar[ProposalStatus]
    PROPOSAL_STATUS_OK: _ClassVar[ProposalStatus]
    PROPOSAL_STATUS_NO_PAGES: _ClassVar[ProposalStatus]
    PROPOSAL_STATUS_UNKNOWN_SEQUENCE: _ClassVar[ProposalStatus]
    PROPOSAL_STATUS_STALE_EPOCH: _ClassVar[ProposalStatus]
    PROPOSAL_STATUS_NO_FEATURES: _ClassVar[ProposalStatus]
PROPOSAL_STATUS_UNSPECIFIED: ProposalStatus
PROPOSAL_STATUS_OK: ProposalStatus
PROPOSAL_STATUS_NO_PAGES: ProposalStatus
PROPOSAL_STATUS_UNKNOWN_SEQUENCE: ProposalStatus
PROPOSAL_STATUS_STALE_EPOCH: ProposalStatus
PROPOSAL_STATUS_NO_FEATURES: ProposalStatus

class GetDraftInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftInfoResponse(_message.Message):
    __slots__ = ("head", "kind", "source", "draft_vocab_size", "max_draft_tokens", "subscription_id", "transport", "target_model", "page_size", "num_pages", "device")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODEL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    head: str
    kind: str
    source: _common_pb2.FeatureSource
    draft_vocab_size: int
    max_draft_tokens: int
    subscription_id: int
    transport: _common_pb2.FeatureTransport
    target_model: str
    page_size: int
    num_pages: int
    device: str
    def __init__(self, head: _Optional[str] = ..., kind: _Optional[str] = ..., source: _Optional[_Union[_common_pb2.FeatureSource, _Mapping]] = ..., draft_vocab_size: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., subscription_id: _Optional[int] = ..., transport: _Optional[_Union[_common_pb2.FeatureTransport, str]] = ..., target_model: _Optional[str] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("round", "extends", "opens", "closes")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    EXTENDS_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    round: int
    extends: _containers.RepeatedCompositeFieldContainer[Extend]
    opens: _containers.RepeatedCompositeFieldContainer[OpenSlots]
    closes: _containers.RepeatedCompositeFieldContainer[CloseSlots]
    def __init__(self, round: _Optional[int] = ..., extends: _Optional[_Iterable[_Union[Extend, _Mapping]]] = ..., opens: _Optional[_Iterable[_Union[OpenSlots, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[CloseSlots, _Mapping]]] = ...) -> None: ...

class OpenSlots(_message.Message):
    __slots__ = ("sequence_id", "epoch", "sampling", "traceparent")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    sampling: _common_pb2.SamplingParams
    traceparent: str
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., traceparent: _Optional[str] = ...) -> None: ...

class CloseSlots(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class Extend(_message.Message):
    __slots__ = ("sequence_id", "epoch", "slot", "after_round", "tokens", "feature_round", "num_draft_tokens", "then_committed", "to_target")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    AFTER_ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    THEN_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TO_TARGET_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    slot: int
    after_round: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    feature_round: int
    num_draft_tokens: int
    then_committed: bool
    to_target: bool
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., slot: _Optional[int] = ..., after_round: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., feature_round: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., then_committed: _Optional[bool] = ..., to_target: _Optional[bool] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("round", "proposals", "free_pages", "timing")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    round: int
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    free_pages: int
    timing: _common_pb2.ServiceTiming
    def __init__(self, round: _Optional[int] = ..., proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ..., free_pages: _Optional[int] = ..., timing: _Optional[_Union[_common_pb2.ServiceTiming, _Mapping]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("sequence_id", "epoch", "status", "draft_tokens", "buffer")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    status: ProposalStatus
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    buffer: int
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., status: _Optional[_Union[ProposalStatus, str]] = ..., draft_tokens: _Optional[_Iterable[int]] = ..., buffer: _Optional[int] = ...) -> None: ...
