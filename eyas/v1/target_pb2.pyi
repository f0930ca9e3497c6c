from eyas.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class BlockStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_STATUS_UNSPECIFIED: _ClassVar[BlockStatus]
    BLOCK_STATUS_OK: _ClassVar[BlockStatus]
    BLOCK_STATUS_NO_PAGES: _ClassVar[BlockStatus]
    BLOCK_STATUS_UNKNOWN_SEQUENCE: _ClassVar[BlockStatus]
    BLOCK_STATUS_STALE_EPOCH: _ClassVar[BlockStatus]
    BLOCK_STATUS_SKIPPED: _ClassVar[BlockStatus]
BLOCK_STATUS_UNSPECIFIED: BlockStatus
BLOCK_STATUS_OK: BlockStatus
BLOCK_STATUS_NO_PAGES: BlockStatus
BLOCK_STATUS_UNKNOWN_SEQUENCE: BlockStatus
BLOCK_STATUS_STALE_EPOCH: BlockStatus
BLOCK_STATUS_SKIPPED: BlockStatus

class GetTargetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTargetInfoResponse(_message.Message):
    __slots__ = ("model", "architecture", "hidden_size", "num_layers", "vocab_size", "context_length", "scalar_type", "page_size", "num_pages", "max_rows", "eos_token_ids", "tokenizer_sha256", "checkpoint_path", "layout_version", "device")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SCALAR_TYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PATH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    context_length: int
    scalar_type: _common_pb2.ScalarType
    page_size: int
    num_pages: int
    max_rows: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokenizer_sha256: str
    checkpoint_path: str
    layout_version: int
    device: str
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[str] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., scalar_type: _Optional[_Union[_common_pb2.ScalarType, str]] = ..., page_size: _Optional[int] = ..., num_pages: _Optional[int] = ..., max_rows: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., tokenizer_sha256: _Optional[str] = ..., checkpoint_path: _Optional[str] = ..., layout_version: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("round", "blocks", "opens", "closes", "draft_wait_ms")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    round: int
    blocks: _containers.RepeatedCompositeFieldContainer[Block]
    opens: _containers.RepeatedCompositeFieldContainer[OpenSequence]
    closes: _containers.RepeatedCompositeFieldContainer[CloseSequence]
    draft_wait_ms: int
    def __init__(self, round: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Block, _Mapping]]] = ..., opens: _Optional[_Iterable[_Union[OpenSequence, _Mapping]]] = ..., closes: _Optional[_Iterable[_Union[CloseSequence, _Mapping]]] = ..., draft_wait_ms: _Optional[int] = ...) -> None: ...

class OpenSequence(_message.Message):
    __slots__ = ("sequence_id", "epoch", "sampling", "subscription_id", "traceparent")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    sampling: _common_pb2.SamplingParams
    subscription_id: int
    traceparent: str
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., subscription_id: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class CloseSequence(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    def __init__(self, sequence_id: _Optional[int] = ...) -> None: ...

class Block(_message.Message):
    __slots__ = ("sequence_id", "epoch", "start", "after_round", "tokens", "num_scored", "num_draft_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    AFTER_ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SCORED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    start: int
    after_round: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    num_scored: int
    num_draft_tokens: int
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., start: _Optional[int] = ..., after_round: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., num_scored: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("round", "results", "free_pages", "timing")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    round: int
    results: _containers.RepeatedCompositeFieldContainer[BlockResult]
    free_pages: int
    timing: _common_pb2.ServiceTiming
    def __init__(self, round: _Optional[int] = ..., results: _Optional[_Iterable[_Union[BlockResult, _Mapping]]] = ..., free_pages: _Optional[int] = ..., timing: _Optional[_Union[_common_pb2.ServiceTiming, _Mapping]] = ...) -> None: ...

class BlockResult(_message.Message):
    __slots__ = ("sequence_id", "epoch", "status", "sampled_tokens", "verified_tokens", "num_accepted")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    status: BlockStatus
    sampled_tokens: _containers.RepeatedScalarFieldContainer[int]
    verified_tokens: _containers.RepeatedScalarFieldContainer[int]
    num_accepted: int
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., status: _Optional[_Union[BlockStatus, str]] = ..., sampled_tokens: _Optional[_Iterable[int]] = ..., verified_tokens: _Optional[_Iterable[int]] = ..., num_accepted: _Optional[int] = ...) -> None: ...

class FeaturesRequest(_message.Message):
    __slots__ = ("subscribe", "ack", "proposals")
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    subscribe: FeatureSubscribe
    ack: FeatureAck
    proposals: DraftProposals
    def __init__(self, subscribe: _Optional[_Union[FeatureSubscribe, _Mapping]] = ..., ack: _Optional[_Union[FeatureAck, _Mapping]] = ..., proposals: _Optional[_Union[DraftProposals, _Mapping]] = ...) -> None: ...

class FeatureSubscribe(_message.Message):
    __slots__ = ("head", "source", "hidden_size", "vocab_size", "layout_version", "transports", "device_uuid")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    head: str
    source: _common_pb2.FeatureSource
    hidden_size: int
    vocab_size: int
    layout_version: int
    transports: _containers.RepeatedScalarFieldContainer[_common_pb2.FeatureTransport]
    device_uuid: str
    def __init__(self, head: _Optional[str] = ..., source: _Optional[_Union[_common_pb2.FeatureSource, _Mapping]] = ..., hidden_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., layout_version: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[_common_pb2.FeatureTransport, str]]] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class FeatureAck(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: int
    def __init__(self, batch: _Optional[int] = ...) -> None: ...

class DraftProposals(_message.Message):
    __slots__ = ("proposals",)
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    proposals: _containers.RepeatedCompositeFieldContainer[DraftProposal]
    def __init__(self, proposals: _Optional[_Iterable[_Union[DraftProposal, _Mapping]]] = ...) -> None: ...

class DraftProposal(_message.Message):
    __slots__ = ("sequence_id", "epoch", "after_round", "draft_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    AFTER_ROUND_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    after_round: int
    draft_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., after_round: _Optional[int] = ..., draft_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class FeaturesResponse(_message.Message):
    __slots__ = ("subscribed", "batch", "enqueued")
    SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ENQUEUED_FIELD_NUMBER: _ClassVar[int]
    subscribed: FeatureSubscribed
    batch: FeatureBatch
    enqueued: StepEnqueued
    def __init__(self, subscribed: _Optional[_Union[FeatureSubscribed, _Mapping]] = ..., batch: _Optional[_Union[FeatureBatch, _Mapping]] = ..., enqueued: _Optional[_Union[StepEnqueued, _Mapping]] = ...) -> None: ...

class FeatureSubscribed(_message.Message):
    __slots__ = ("subscription_id", "transport", "feature_width", "scalar_type", "arena")
    SUBSCRIPTION_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    FEATURE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    SCALAR_TYPE_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    subscription_id: int
    transport: _common_pb2.FeatureTransport
    feature_width: int
    scalar_type: _common_pb2.ScalarType
    arena: FeatureArena
    def __init__(self, subscription_id: _Optional[int] = ..., transport: _Optional[_Union[_common_pb2.FeatureTransport, str]] = ..., feature_width: _Optional[int] = ..., scalar_type: _Optional[_Union[_common_pb2.ScalarType, str]] = ..., arena: _Optional[_Union[FeatureArena, _Mapping]] = ...) -> None: ...

class FeatureArena(_message.Message):
    __slots__ = ("num_rows", "memory_handle", "event_handle")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_HANDLE_FIELD_NUMBER: _ClassVar[int]
    EVENT_HANDLE_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    memory_handle: bytes
    event_handle: bytes
    def __init__(self, num_rows: _Optional[int] = ..., memory_handle: _Optional[bytes] = ..., event_handle: _Optional[bytes] = ...) -> None: ...

class StepEnqueued(_message.Message):
    __slots__ = ("round", "spans")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    round: int
    spans: _containers.RepeatedCompositeFieldContainer[FeatureSpan]
    def __init__(self, round: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[FeatureSpan, _Mapping]]] = ...) -> None: ...

class FeatureBatch(_message.Message):
    __slots__ = ("batch", "round", "spans", "rows")
    BATCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    batch: int
    round: int
    spans: _containers.RepeatedCompositeFieldContainer[FeatureSpan]
    rows: _common_pb2.Tensor
    def __init__(self, batch: _Optional[int] = ..., round: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[FeatureSpan, _Mapping]]] = ..., rows: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...

class FeatureSpan(_message.Message):
    __slots__ = ("sequence_id", "epoch", "start", "count", "row", "committed_tokens", "not_run")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NOT_RUN_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    start: int
    count: int
    row: int
    committed_tokens: _containers.RepeatedScalarFieldContainer[int]
    not_run: bool
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., row: _Optional[int] = ..., committed_tokens: _Optional[_Iterable[int]] = ..., not_run: _Optional[bool] = ...) -> None: ...
