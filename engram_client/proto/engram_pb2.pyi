from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Output(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_UNSPECIFIED: _ClassVar[Output]
    OUTPUT_NONE: _ClassVar[Output]
    OUTPUT_RESIDUAL: _ClassVar[Output]
    OUTPUT_KV: _ClassVar[Output]
    OUTPUT_ROWS: _ClassVar[Output]
    OUTPUT_HASH_IDS: _ClassVar[Output]
OUTPUT_UNSPECIFIED: Output
OUTPUT_NONE: Output
OUTPUT_RESIDUAL: Output
OUTPUT_KV: Output
OUTPUT_ROWS: Output
OUTPUT_HASH_IDS: Output

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Info(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("session_id", "position", "lookback", "fork_of", "epoch", "owner")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOOKBACK_FIELD_NUMBER: _ClassVar[int]
    FORK_OF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    position: int
    lookback: _containers.RepeatedScalarFieldContainer[int]
    fork_of: int
    epoch: int
    owner: str
    def __init__(self, session_id: _Optional[int] = ..., position: _Optional[int] = ..., lookback: _Optional[_Iterable[int]] = ..., fork_of: _Optional[int] = ..., epoch: _Optional[int] = ..., owner: _Optional[str] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    def __init__(self, session_id: _Optional[int] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id", "owner", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    owner: str
    epoch: int
    def __init__(self, session_id: _Optional[int] = ..., owner: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    def __init__(self, sessions: _Optional[int] = ...) -> None: ...

class RewindRequest(_message.Message):
    __slots__ = ("session_id", "position", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    position: int
    epoch: int
    def __init__(self, session_id: _Optional[int] = ..., position: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("session_id", "position", "token_ids", "mask", "epoch", "truncate", "ahead")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    mask: _containers.RepeatedScalarFieldContainer[bool]
    epoch: int
    truncate: bool
    ahead: bool
    def __init__(self, session_id: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., mask: _Optional[_Iterable[bool]] = ..., epoch: _Optional[int] = ..., truncate: _Optional[bool] = ..., ahead: _Optional[bool] = ...) -> None: ...

class Pushed(_message.Message):
    __slots__ = ("session_id", "length", "base", "epoch", "appended", "removed")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    APPENDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    length: int
    base: int
    epoch: int
    appended: int
    removed: int
    def __init__(self, session_id: _Optional[int] = ..., length: _Optional[int] = ..., base: _Optional[int] = ..., epoch: _Optional[int] = ..., appended: _Optional[int] = ..., removed: _Optional[int] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "length", "base", "epoch", "owner", "compressed_lookback", "expires_in_s", "created")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_LOOKBACK_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    length: int
    base: int
    epoch: int
    owner: str
    compressed_lookback: _containers.RepeatedScalarFieldContainer[int]
    expires_in_s: float
    created: bool
    def __init__(self, session_id: _Optional[int] = ..., length: _Optional[int] = ..., base: _Optional[int] = ..., epoch: _Optional[int] = ..., owner: _Optional[str] = ..., compressed_lookback: _Optional[_Iterable[int]] = ..., expires_in_s: _Optional[float] = ..., created: _Optional[bool] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("request_id", "output", "layers", "stored", "truncate", "wait_ms", "ahead", "tensors")
    class TensorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    output: Output
    layers: _containers.RepeatedScalarFieldContainer[int]
    stored: bool
    truncate: bool
    wait_ms: int
    ahead: bool
    tensors: _containers.MessageMap[str, Tensor]
    def __init__(self, request_id: _Optional[int] = ..., output: _Optional[_Union[Output, str]] = ..., layers: _Optional[_Iterable[int]] = ..., stored: _Optional[bool] = ..., truncate: _Optional[bool] = ..., wait_ms: _Optional[int] = ..., ahead: _Optional[bool] = ..., tensors: _Optional[_Mapping[str, Tensor]] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("request_id", "problem", "tensors")
    class TensorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    problem: Problem
    tensors: _containers.MessageMap[str, Tensor]
    def __init__(self, request_id: _Optional[int] = ..., problem: _Optional[_Union[Problem, _Mapping]] = ..., tensors: _Optional[_Mapping[str, Tensor]] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("code", "grpc_status", "detail", "retry_after_ms", "json")
    CODE_FIELD_NUMBER: _ClassVar[int]
    GRPC_STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    code: str
    grpc_status: str
    detail: str
    retry_after_ms: int
    json: str
    def __init__(self, code: _Optional[str] = ..., grpc_status: _Optional[str] = ..., detail: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., json: _Optional[str] = ...) -> None: ...
