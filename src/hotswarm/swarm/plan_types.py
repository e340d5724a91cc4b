"""The planner's vocabulary: events that go in, effects that come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NewType

SectionKey = NewType("SectionKey", bytes)
"""A section's digest: equal on all donors that hold the same section."""

EndKind = Literal[
    "complete",  # the end frame came, and its count is right
    "unavailable",  # the stream broke, was cut, or never began
    "full",  # the donor has no slot now
    "gone",  # the donor does not hold that section any more
    "misbehaved",  # the donor sent what no honest donor sends
]

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class SectionAdded:
    """Chunks of this section are wanted: (index, bytes) of those that are missing here.

    `patience`: how many failures in a row of its only donor are borne before the section is Lost. A section that
    another donor's could replace (the inner one) has little.
    """

    key: SectionKey
    name: str
    missing: tuple[tuple[int, int], ...]
    patience: int = 5


@dataclass(frozen=True, slots=True)
class SectionDropped:
    """The section is not wanted any more; what was verified of it is waste."""

    key: SectionKey


@dataclass(frozen=True, slots=True)
class DonorAdded:
    """This node holds these sections, whole. Known already: it gets another chance, unless it misbehaved."""

    node: str
    sections: frozenset[SectionKey]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A chunk came and matches its digest."""

    request: int
    node: str
    key: SectionKey
    index: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Corrupt:
    """A chunk came and does not match its digest."""

    request: int
    node: str
    key: SectionKey
    index: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A request's stream is over."""

    request: int
    kind: EndKind
    text: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Several events that are one: nothing is concluded or assigned in between."""

    events: tuple[Event, ...]


Event = SectionAdded | SectionDropped | DonorAdded | Arrived | Corrupt | Ended | Tick | Batch

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask that node for these chunks, in this order."""

    request: int
    node: str
    key: SectionKey
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """End that request's stream."""

    request: int
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """Tell that node that it serves a corrupt chunk."""

    node: str
    key: SectionKey
    index: int


@dataclass(frozen=True, slots=True)
class SectionDone:
    """Every wanted chunk of this section is verified."""

    key: SectionKey


@dataclass(frozen=True, slots=True)
class Lost:
    """No donor is left for this section; `reasons` by node. Add donors, drop the section, or give up."""

    key: SectionKey
    reasons: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Blame:
    """So many different donors failed verification that this machine must be at fault."""

    text: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """No verified chunk came for the whole time that may pass without progress."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """All sections are done."""


Effect = Ask | Cancel | Report | SectionDone | Lost | Blame | Stuck | Finished
