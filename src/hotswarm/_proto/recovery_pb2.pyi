from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Value(_message.Message):
    __slots__ = ("none", "boolean", "integer", "real", "text", "raw", "dtype", "size")
    NONE_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    REAL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    none: bool
    boolean: bool
    integer: bytes
    real: int
    text: str
    raw: bytes
    dtype: str
    size: Size
    def __init__(self, none: _Optional[bool] = ..., boolean: _Optional[bool] = ..., integer: _Optional[bytes] = ..., real: _Optional[int] = ..., text: _Optional[str] = ..., raw: _Optional[bytes] = ..., dtype: _Optional[str] = ..., size: _Optional[_Union[Size, _Mapping]] = ...) -> None: ...

class Size(_message.Message):
    __slots__ = ("dims",)
    DIMS_FIELD_NUMBER: _ClassVar[int]
    dims: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dims: _Optional[_Iterable[int]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class Leaf(_message.Message):
    __slots__ = ("path", "role", "tensor", "value", "container", "alias")
    PATH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    path: str
    role: str
    tensor: Tensor
    value: Value
    container: str
    alias: str
    def __init__(self, path: _Optional[str] = ..., role: _Optional[str] = ..., tensor: _Optional[_Union[Tensor, _Mapping]] = ..., value: _Optional[_Union[Value, _Mapping]] = ..., container: _Optional[str] = ..., alias: _Optional[str] = ...) -> None: ...

class Section(_message.Message):
    __slots__ = ("name", "leaves", "chunks", "digest", "stream_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEAVES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    STREAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    leaves: _containers.RepeatedCompositeFieldContainer[Leaf]
    chunks: bytes
    digest: bytes
    stream_bytes: int
    def __init__(self, name: _Optional[str] = ..., leaves: _Optional[_Iterable[_Union[Leaf, _Mapping]]] = ..., chunks: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., stream_bytes: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("format", "run", "node", "label", "kind", "seq", "time_ms", "outer_step", "inner_step", "training_step", "exact", "arch", "sections", "engine")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    TRAINING_STEP_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    format: int
    run: str
    node: str
    label: str
    kind: str
    seq: int
    time_ms: int
    outer_step: int
    inner_step: int
    training_step: int
    exact: bool
    arch: bytes
    sections: _containers.RepeatedCompositeFieldContainer[Section]
    engine: str
    def __init__(self, format: _Optional[int] = ..., run: _Optional[str] = ..., node: _Optional[str] = ..., label: _Optional[str] = ..., kind: _Optional[str] = ..., seq: _Optional[int] = ..., time_ms: _Optional[int] = ..., outer_step: _Optional[int] = ..., inner_step: _Optional[int] = ..., training_step: _Optional[int] = ..., exact: _Optional[bool] = ..., arch: _Optional[bytes] = ..., sections: _Optional[_Iterable[_Union[Section, _Mapping]]] = ..., engine: _Optional[str] = ...) -> None: ...

class SignedManifest(_message.Message):
    __slots__ = ("body", "public_key", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    public_key: bytes
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("section", "pack", "shared_pack", "offsets")
    SECTION_FIELD_NUMBER: _ClassVar[int]
    PACK_FIELD_NUMBER: _ClassVar[int]
    SHARED_PACK_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    section: str
    pack: str
    shared_pack: str
    offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, section: _Optional[str] = ..., pack: _Optional[str] = ..., shared_pack: _Optional[str] = ..., offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class StoredManifest(_message.Message):
    __slots__ = ("signed", "placements", "kind", "local_seq", "stored_ms")
    SIGNED_FIELD_NUMBER: _ClassVar[int]
    PLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SEQ_FIELD_NUMBER: _ClassVar[int]
    STORED_MS_FIELD_NUMBER: _ClassVar[int]
    signed: bytes
    placements: _containers.RepeatedCompositeFieldContainer[Placement]
    kind: str
    local_seq: int
    stored_ms: int
    def __init__(self, signed: _Optional[bytes] = ..., placements: _Optional[_Iterable[_Union[Placement, _Mapping]]] = ..., kind: _Optional[str] = ..., local_seq: _Optional[int] = ..., stored_ms: _Optional[int] = ...) -> None: ...

class SignedRecord(_message.Message):
    __slots__ = ("body", "public_key", "signature", "ttl_left_s")
    BODY_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    TTL_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    public_key: bytes
    signature: bytes
    ttl_left_s: int
    def __init__(self, body: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., ttl_left_s: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("nonce", "run")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    run: str
    def __init__(self, nonce: _Optional[bytes] = ..., run: _Optional[str] = ...) -> None: ...

class Live(_message.Message):
    __slots__ = ("outer_step", "inner_step", "training_step", "steps_per_s", "round_length")
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    TRAINING_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_LENGTH_FIELD_NUMBER: _ClassVar[int]
    outer_step: int
    inner_step: int
    training_step: int
    steps_per_s: float
    round_length: int
    def __init__(self, outer_step: _Optional[int] = ..., inner_step: _Optional[int] = ..., training_step: _Optional[int] = ..., steps_per_s: _Optional[float] = ..., round_length: _Optional[int] = ...) -> None: ...

class SectionOffer(_message.Message):
    __slots__ = ("name", "digest", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    bytes: int
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., bytes: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("snapshot_id", "kind", "outer_step", "inner_step", "training_step", "seq", "age_ms", "arch", "sections", "own")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    INNER_STEP_FIELD_NUMBER: _ClassVar[int]
    TRAINING_STEP_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    ARCH_FIELD_NUMBER: _ClassVar[int]
    SECTIONS_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    kind: str
    outer_step: int
    inner_step: int
    training_step: int
    seq: int
    age_ms: int
    arch: bytes
    sections: _containers.RepeatedCompositeFieldContainer[SectionOffer]
    own: bool
    def __init__(self, snapshot_id: _Optional[str] = ..., kind: _Optional[str] = ..., outer_step: _Optional[int] = ..., inner_step: _Optional[int] = ..., training_step: _Optional[int] = ..., seq: _Optional[int] = ..., age_ms: _Optional[int] = ..., arch: _Optional[bytes] = ..., sections: _Optional[_Iterable[_Union[SectionOffer, _Mapping]]] = ..., own: _Optional[bool] = ...) -> None: ...

class Voucher(_message.Message):
    __slots__ = ("outer_step", "digest", "servable")
    OUTER_STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SERVABLE_FIELD_NUMBER: _ClassVar[int]
    outer_step: int
    digest: bytes
    servable: bool
    def __init__(self, outer_step: _Optional[int] = ..., digest: _Optional[bytes] = ..., servable: _Optional[bool] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("nonce", "node", "name", "run", "live", "clock", "offers", "vouchers", "streams_active", "streams_max", "addresses", "seq")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    VOUCHERS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    STREAMS_MAX_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    node: str
    name: str
    run: str
    live: bool
    clock: Live
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    vouchers: _containers.RepeatedCompositeFieldContainer[Voucher]
    streams_active: int
    streams_max: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    seq: int
    def __init__(self, nonce: _Optional[bytes] = ..., node: _Optional[str] = ..., name: _Optional[str] = ..., run: _Optional[str] = ..., live: _Optional[bool] = ..., clock: _Optional[_Union[Live, _Mapping]] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ..., vouchers: _Optional[_Iterable[_Union[Voucher, _Mapping]]] = ..., streams_active: _Optional[int] = ..., streams_max: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., seq: _Optional[int] = ...) -> None: ...

class SignedDescription(_message.Message):
    __slots__ = ("body", "public_key", "signature")
    BODY_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    public_key: bytes
    signature: bytes
    def __init__(self, body: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("run", "snapshot_id")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    run: str
    snapshot_id: str
    def __init__(self, run: _Optional[str] = ..., snapshot_id: _Optional[str] = ...) -> None: ...

class ManifestPart(_message.Message):
    __slots__ = ("data", "last", "lease_s")
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    last: bool
    lease_s: int
    def __init__(self, data: _Optional[bytes] = ..., last: _Optional[bool] = ..., lease_s: _Optional[int] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("run", "snapshot_id", "section", "section_digest", "ranges", "codecs", "recovering")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    SECTION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    run: str
    snapshot_id: str
    section: str
    section_digest: bytes
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    codecs: _containers.RepeatedScalarFieldContainer[str]
    recovering: bool
    def __init__(self, run: _Optional[str] = ..., snapshot_id: _Optional[str] = ..., section: _Optional[str] = ..., section_digest: _Optional[bytes] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., codecs: _Optional[_Iterable[str]] = ..., recovering: _Optional[bool] = ...) -> None: ...

class SnapshotFrame(_message.Message):
    __slots__ = ("header", "chunk", "end")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    header: FrameHeader
    chunk: Chunk
    end: FrameEnd
    def __init__(self, header: _Optional[_Union[FrameHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., end: _Optional[_Union[FrameEnd, _Mapping]] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("snapshot_id", "section", "section_digest", "chunk_count")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    SECTION_FIELD_NUMBER: _ClassVar[int]
    SECTION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    section: str
    section_digest: bytes
    chunk_count: int
    def __init__(self, snapshot_id: _Optional[str] = ..., section: _Optional[str] = ..., section_digest: _Optional[bytes] = ..., chunk_count: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("index", "codec", "raw_bytes", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    codec: int
    raw_bytes: int
    data: bytes
    def __init__(self, index: _Optional[int] = ..., codec: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class FrameEnd(_message.Message):
    __slots__ = ("chunks_sent",)
    CHUNKS_SENT_FIELD_NUMBER: _ClassVar[int]
    chunks_sent: int
    def __init__(self, chunks_sent: _Optional[int] = ...) -> None: ...

class PeersRequest(_message.Message):
    __slots__ = ("run", "known")
    RUN_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    run: str
    known: _containers.RepeatedCompositeFieldContainer[SignedRecord]
    def __init__(self, run: _Optional[str] = ..., known: _Optional[_Iterable[_Union[SignedRecord, _Mapping]]] = ...) -> None: ...

class PeersReply(_message.Message):
    __slots__ = ("records",)
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[SignedRecord]
    def __init__(self, records: _Optional[_Iterable[_Union[SignedRecord, _Mapping]]] = ...) -> None: ...

class BadChunkReport(_message.Message):
    __slots__ = ("run", "snapshot_id", "section_digest", "index")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    SECTION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    run: str
    snapshot_id: str
    section_digest: bytes
    index: int
    def __init__(self, run: _Optional[str] = ..., snapshot_id: _Optional[str] = ..., section_digest: _Optional[bytes] = ..., index: _Optional[int] = ...) -> None: ...

class BadChunkAnswer(_message.Message):
    __slots__ = ("noted",)
    NOTED_FIELD_NUMBER: _ClassVar[int]
    noted: bool
    def __init__(self, noted: _Optional[bool] = ...) -> None: ...
