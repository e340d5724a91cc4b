"""What a demo run left behind: the trainers' log lines, the orchestrator's own marks, and the daemons' answers.

Pure: built from parsed JSON, written back as JSON. Claims and timeline read nothing else, so a recorded run can be
judged again later, and the judges can be tested on recorded (and on falsified) runs.

An event is one line of a trainer's log: `{"ev": kind, "t": unix seconds, ...}`. A life is one trainer process; a node's
first life is number 1, and a node whose machine was lost goes on in a new life under the same label. Marks are what the
orchestrator did and when; they have the same shape as events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, at unix time `at`."""

    kind: str
    at: float
    data: Mapping[str, Any]

    @classmethod
    def parse(cls, line: str) -> Self | None:
        """The event of one log line; None for a line that a kill cut short."""
        try:
            data = json.loads(line)
            return cls(str(data.pop("ev")), float(data.pop("t")), data)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def to_json(self) -> Json:
        """The log line again, as a dict."""
        return {"ev": self.kind, "t": self.at, **self.data}

    def position(self) -> tuple[int, int, int]:
        """(outer, inner, training) of a step or snapshot; zeros where the line has none."""
        return (self.integer("outer"), self.integer("inner"), self.integer("training"))

    def integer(self, name: str) -> int:
        """A counter of this line, 0 where it is absent."""
        value = self.data.get(name)
        return value if isinstance(value, int) else 0

    def mapping(self, name: str) -> Json:
        """An object of this line, empty where it is absent."""
        value = self.data.get(name)
        return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True)
class Life:
    """One trainer process: its log, and how often torchft's own log said that a heal began."""

    label: str
    number: int
    events: tuple[Event, ...]
    heal_lines: int = 0

    def of(self, *kinds: str) -> list[Event]:
        """This life's events of these kinds, in order."""
        return [event for event in self.events if event.kind in kinds]

    def first(self, kind: str) -> Event | None:
        """The first event of that kind."""
        return next((event for event in self.events if event.kind == kind), None)

    def last(self, kind: str) -> Event | None:
        """The last event of that kind."""
        return next((event for event in reversed(self.events) if event.kind == kind), None)

    def restored(self) -> Event | None:
        """What this life restored before its first step; None when it started fresh, or stepped before it restored."""
        found = None
        for event in self.events:
            if event.kind == "step":
                return found
            if event.kind == "recovered" and event.mapping("report").get("action") != "fresh":
                found = event
        return found


@dataclass(frozen=True, slots=True)
class DaemonView:
    """What a daemon said about itself over its control socket when the run was over."""

    status: Json = field(default_factory=dict)
    snapshots: list[Json] = field(default_factory=list)
    recoveries: list[Json] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Record:
    """A whole run. `nodes` maps swarm node ids to labels; `settings` are the calibrated numbers."""

    began_at: float
    lives: tuple[Life, ...]
    marks: tuple[Event, ...]
    nodes: Mapping[str, str]
    daemons: Mapping[str, DaemonView]
    settings: Mapping[str, float]

    @property
    def labels(self) -> list[str]:
        """The nodes' labels, sorted."""
        return sorted({life.label for life in self.lives})

    def lives_of(self, label: str) -> list[Life]:
        """That node's trainer processes, oldest first."""
        return sorted((life for life in self.lives if life.label == label), key=lambda life: life.number)

    def life(self, label: str, number: int) -> Life:
        """That very life; an empty one when it never began."""
        return next((life for life in self.lives_of(label) if life.number == number), Life(label, number, ()))

    def marked(self, kind: str) -> list[Event]:
        """The orchestrator's marks of that kind, in order."""
        return [mark for mark in self.marks if mark.kind == kind]

    def events(self, *kinds: str) -> Iterator[tuple[Life, Event]]:
        """Every event of these kinds, of all lives, by time."""
        pairs = [(life, event) for life in self.lives for event in life.of(*kinds)]
        yield from sorted(pairs, key=lambda pair: pair[1].at)

    def name_of(self, node_id: str) -> str:
        """The label of a swarm node id, or the id's first digits when it belongs to nobody here."""
        return self.nodes.get(node_id, node_id[:8])

    def to_json(self) -> Json:
        """As plain JSON."""
        return {
            "began_at": self.began_at,
            "settings": dict(self.settings),
            "nodes": dict(self.nodes),
            "marks": [mark.to_json() for mark in self.marks],
            "daemons": {
                label: {"status": view.status, "snapshots": view.snapshots, "recoveries": view.recoveries}
                for label, view in self.daemons.items()
            },
            "lives": [
                {
                    "label": life.label,
                    "number": life.number,
                    "heal_lines": life.heal_lines,
                    "events": [event.to_json() for event in life.events],
                }
                for life in self.lives
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; a record of another version raises KeyError or TypeError."""
        return cls(
            began_at=float(data["began_at"]),
            lives=tuple(
                Life(life["label"], life["number"], parse_lines(life["events"]), life["heal_lines"])
                for life in data["lives"]
            ),
            marks=parse_lines(data["marks"]),
            nodes=dict(data["nodes"]),
            daemons={label: DaemonView(**view) for label, view in data["daemons"].items()},
            settings=dict(data["settings"]),
        )


def parse_lines(lines: Iterable[str | Mapping[str, Any]]) -> tuple[Event, ...]:
    """The events of log lines (or of their parsed objects); cut and empty lines are left out."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    return tuple(event for event in map(Event.parse, texts) if event is not None)
