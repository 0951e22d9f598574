from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_ROWS: _ClassVar[Kind]
    KIND_BLOCK: _ClassVar[Kind]
    KIND_TIME: _ClassVar[Kind]
KIND_ROWS: Kind
KIND_BLOCK: Kind
KIND_TIME: Kind

class GetRequest(_message.Message):
    __slots__ = ("table", "key", "declared_key")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DECLARED_KEY_FIELD_NUMBER: _ClassVar[int]
    table: str
    key: bytes
    declared_key: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, table: _Optional[str] = ..., key: _Optional[bytes] = ..., declared_key: _Optional[_Iterable[str]] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("row",)
    ROW_FIELD_NUMBER: _ClassVar[int]
    row: bytes
    def __init__(self, row: _Optional[bytes] = ...) -> None: ...

class Rows(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, rows: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetManyRequest(_message.Message):
    __slots__ = ("reads",)
    READS_FIELD_NUMBER: _ClassVar[int]
    reads: _containers.RepeatedCompositeFieldContainer[KeysRead]
    def __init__(self, reads: _Optional[_Iterable[_Union[KeysRead, _Mapping]]] = ...) -> None: ...

class KeysRead(_message.Message):
    __slots__ = ("table", "keys", "declared_key")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DECLARED_KEY_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    declared_key: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., declared_key: _Optional[_Iterable[str]] = ...) -> None: ...

class GetManyReply(_message.Message):
    __slots__ = ("replies",)
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    replies: _containers.RepeatedCompositeFieldContainer[KeysReply]
    def __init__(self, replies: _Optional[_Iterable[_Union[KeysReply, _Mapping]]] = ...) -> None: ...

class KeysReply(_message.Message):
    __slots__ = ("rows", "failure", "again")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    failure: Failure
    again: bool
    def __init__(self, rows: _Optional[_Iterable[bytes]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., again: _Optional[bool] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StateAtRequest(_message.Message):
    __slots__ = ("table", "kind", "key", "at", "declared_key")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    DECLARED_KEY_FIELD_NUMBER: _ClassVar[int]
    table: str
    kind: Kind
    key: bytes
    at: bytes
    declared_key: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, table: _Optional[str] = ..., kind: _Optional[_Union[Kind, str]] = ..., key: _Optional[bytes] = ..., at: _Optional[bytes] = ..., declared_key: _Optional[_Iterable[str]] = ...) -> None: ...

class HistoryRequest(_message.Message):
    __slots__ = ("table", "kind", "key", "first", "last", "limit", "declared_key")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DECLARED_KEY_FIELD_NUMBER: _ClassVar[int]
    table: str
    kind: Kind
    key: bytes
    first: bytes
    last: bytes
    limit: int
    declared_key: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, table: _Optional[str] = ..., kind: _Optional[_Union[Kind, str]] = ..., key: _Optional[bytes] = ..., first: _Optional[bytes] = ..., last: _Optional[bytes] = ..., limit: _Optional[int] = ..., declared_key: _Optional[_Iterable[str]] = ...) -> None: ...

class ScanRequest(_message.Message):
    __slots__ = ("table", "prefix", "limit")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    table: str
    prefix: bytes
    limit: int
    def __init__(self, table: _Optional[str] = ..., prefix: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class UpsertRequest(_message.Message):
    __slots__ = ("table", "kind", "rows", "declared_key")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DECLARED_KEY_FIELD_NUMBER: _ClassVar[int]
    table: str
    kind: Kind
    rows: _containers.RepeatedScalarFieldContainer[bytes]
    declared_key: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, table: _Optional[str] = ..., kind: _Optional[_Union[Kind, str]] = ..., rows: _Optional[_Iterable[bytes]] = ..., declared_key: _Optional[_Iterable[str]] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("table", "keys")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    table: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, table: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Written(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
