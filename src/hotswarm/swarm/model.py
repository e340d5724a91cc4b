"""What the parts of the swarm say to each other: requests, answers, offers. Plain values, no I/O.

Each class turns into JSON and back (`to_json`, `from_json`), because they travel over the control socket between the
daemon and a trainer. Bytes are hex. Reading is strict about types and forgiving about names: a field that this version
does not know is ignored, a missing one takes its default, a value of another type is a ControlError.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from hotswarm.errors import ControlError

ModeName = Literal["auto", "resume", "outer", "clone"]
InnerName = Literal["auto", "adopt", "own", "fresh"]
ActionName = Literal["resume", "outer", "clone", "own", "fresh"]
InnerSource = Literal["adopt", "own", "fresh"]
AgreementName = Literal["agreed", "divergent", "unconfirmed", "forked"]

Json = dict[str, Any]


def _encode(value: Any) -> Any:
    if isinstance(value, Jsonable):
        return value.to_json()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, str):
        return str(value)  # an enum member of a StrEnum becomes its plain text
    return value


def _decode(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is Literal:
        if value in typing.get_args(hint):
            return value
        raise ControlError(f"{where}: {value!r} is none of {typing.get_args(hint)}")
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if value is None else _decode(options[0], value, where)
    if origin is tuple and isinstance(value, list):
        kinds = typing.get_args(hint)
        if len(kinds) == 2 and kinds[1] is Ellipsis:
            return tuple(_decode(kinds[0], item, where) for item in value)
        if len(kinds) == len(value):
            return tuple(_decode(kind, item, where) for kind, item in zip(kinds, value, strict=True))
    if origin is dict and isinstance(value, dict):
        key_hint, value_hint = typing.get_args(hint)
        return {key_hint(key): _decode(value_hint, item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Jsonable) and isinstance(value, dict):
        return hint.from_json(value)
    if hint is bytes and isinstance(value, str):
        try:
            return bytes.fromhex(value)
        except ValueError as error:
            raise ControlError(f"{where}: not hexadecimal: {value[:20]!r}") from error
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise ControlError(f"{where}: {type(value).__name__} where {hint} was expected; is the daemon of another version?")


class Jsonable:
    """Mixin for the dataclasses of this module."""

    __slots__ = ()

    def to_json(self) -> Json:
        """This value as something that `json.dumps` takes."""
        return {item.name: _encode(getattr(self, item.name)) for item in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_json(cls, data: Json) -> Self:
        """The inverse of `to_json`. Raises ControlError, naming the field."""
        if not isinstance(data, dict):
            raise ControlError(f"{cls.__name__}: an object was expected, not {type(data).__name__}")
        hints = typing.get_type_hints(cls)
        known: Json = {}
        for item in dataclasses.fields(cls):  # type: ignore[arg-type]
            if item.name in data:
                known[item.name] = _decode(hints[item.name], data[item.name], f"{cls.__name__}.{item.name}")
        try:
            return cls(**known)
        except TypeError as error:
            raise ControlError(f"{cls.__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class LiveClock(Jsonable):
    """Where a trainer is now: the counters of the arena's header, or those of a peer's `Describe`."""

    outer_step: int
    inner_step: int
    training_step: int = 0
    steps_per_s: float = 0.0
    round_length: int = 0  # H, inner steps; 0 when unknown
    peer: str = ""  # node id of who said so; empty for this node


@dataclass(frozen=True, slots=True)
class SectionOffer(Jsonable):
    """A section that a node can serve whole."""

    name: str
    digest: bytes
    nbytes: int  # sum of the chunk lengths


@dataclass(frozen=True, slots=True)
class Offer(Jsonable):
    """A snapshot that a node can serve."""

    snapshot_id: str
    kind: str
    outer_step: int
    inner_step: int
    training_step: int
    seq: int
    age_ms: int
    arch: bytes
    sections: tuple[SectionOffer, ...]
    own: bool = True  # captured on that node, not fetched from another

    def section(self, name: str) -> SectionOffer | None:
        """The section of that name, or None when it is not complete there."""
        return next((section for section in self.sections if section.name == name), None)

    @property
    def outer_digest(self) -> bytes | None:
        """Digest of the outer section, None without one."""
        section = self.section("outer")
        return section.digest if section else None

    @property
    def order_key(self) -> tuple[int, int, int]:
        """(outer_step, training_step, seq): a failed commit repeats a round, so the inner step is no order."""
        return (self.outer_step, self.training_step, self.seq)


@dataclass(frozen=True, slots=True)
class Voucher(Jsonable):
    """A node's word that it held this outer digest at this outer step."""

    outer_step: int
    digest: bytes
    servable: bool = False


@dataclass(frozen=True, slots=True)
class Description(Jsonable):
    """A node's signed answer to `Describe`."""

    node: str
    name: str
    run: str
    live: bool
    clock: LiveClock | None
    offers: tuple[Offer, ...]  # newest first
    vouchers: tuple[Voucher, ...]
    streams_active: int = 0
    streams_max: int = 0
    addresses: tuple[str, ...] = ()
    seq: int = 0
    nonce: bytes = b""

    def voucher_at(self, outer_step: int) -> Voucher | None:
        """What this node vouches for at that step."""
        return next((voucher for voucher in self.vouchers if voucher.outer_step == outer_step), None)


@dataclass(frozen=True, slots=True)
class TensorName(Jsonable):
    """A parameter or buffer of the live model, as far as its architecture goes."""

    name: str
    role: str  # "param" or "buffer"
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RecoverRequest(Jsonable):
    """What a trainer (or `swarm-node recover`) asks of the daemon."""

    mode: ModeName = "auto"
    inner: InnerName = "auto"
    min_agree: int | None = None  # None: 2 wanted, fewer reported as unconfirmed; a number: fewer is an error
    allow_rollback: bool = False
    arch: bytes | None = None  # fingerprint of the live model; None: any model is taken
    names: tuple[TensorName, ...] | None = None  # the live model, for naming the first difference
    own_outer_step: int | None = None  # the outer step that this trainer knows it had; None: what the store says
    timeout_s: float = 60.0  # bounds locating and choosing, and the time without progress
    round_seconds: float | None = None  # how long a round takes; None: from the live clock
    peer: str | None = None  # only from this peer: node id or host:port
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class SectionReport(Jsonable):
    """What one section cost. `fetched` and `fetched_chunks` count verified arrivals, duplicates too."""

    raw: int  # bytes of the whole section
    chunks: int  # of the whole section
    fetched: int  # bytes
    fetched_chunks: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ReportData(Jsonable):
    """What happened in a recovery, and why. The trainer adds its own phases (verify, restore) to `seconds`."""

    mode: str = "auto"
    reason: str = ""
    donors: dict[str, int] = field(default_factory=dict)  # node id -> verified bytes from it
    bytes: int = 0  # verified bytes that came over the network
    bytes_wasted: int = 0  # bytes that came and were not used: duplicates, corrupt ones, an inner section given up
    bytes_reused: int = 0  # bytes that were on this machine already
    seconds: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)  # peer -> reason
    agreement: AgreementName | None = None
    inner_donor: str = ""
    snapshot_id: str | None = None
    outer_step: int = 0
    inner_step: int = 0
    training_step: int = 0
    sections: dict[str, SectionReport] = field(default_factory=dict)
    plan: tuple[str, ...] = ()  # the plan in words, for --dry-run


@dataclass(frozen=True, slots=True)
class RecoverOutcome(Jsonable):
    """What the trainer is to do. `resume` and `own` restore `snapshot_id` whole, `fresh` restores nothing."""

    action: ActionName
    snapshot_id: str | None = None
    inner_source: InnerSource = "own"
    private_from: str | None = None  # own snapshot that RNG, data position (and inner="own" moments) come from
    report: ReportData = field(default_factory=ReportData)
