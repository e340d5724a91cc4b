"""A run for people: what happened when, seconds per phase, bytes per donor, steps lost. Pure but for the drawing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotswarm.demo.claims import Claim
from hotswarm.demo.record import Event, Json, Life, Record

PHASES = ("locate", "choose", "fetch", "verify", "restore")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the timeline: seconds since the run began, the node, what happened, and how it is coloured."""

    at_s: float
    label: str
    what: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Comeback:
    """What one act cost: from the kill to the first step of the life that came back."""

    name: str
    label: str
    mode: str  # what the recovery did: resume, outer, clone, own or fresh
    away_s: float | None  # kill -> first step; None: it never stepped again
    steps_redone: int  # trained before the kill and trained again
    steps_lost: int  # trained before the kill and in nobody's state after
    phases_s: dict[str, float]
    donors: dict[str, int]  # label -> verified bytes
    bytes_wasted: int


def rows(record: Record) -> list[Row]:
    """The run in order of time: marks of the orchestrator, recoveries, outer steps."""
    found = [mark_row(mark, record.began_at) for mark in record.marks]
    for life in record.lives:
        ready = life.first("ready")
        if ready is not None:
            seconds = ready.mapping("seconds")
            told = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if isinstance(value, float))
            found.append(_row(record, ready, life.label, f"ready to train ({told})"))
        restored = life.restored()
        if restored is not None:
            found.append(_row(record, restored, life.label, _recovery_text(record, restored), "green"))
        first = life.first("step")
        if first is not None:
            outer, inner, training = first.position()
            found.append(_row(record, first, life.label, f"first step: outer {outer}, inner {inner}, step {training}"))
        found += [_row(record, heal, life.label, "torchft heal", "red") for heal in life.of("heal")]
    found += _sync_rows(record)
    return sorted(found, key=lambda row: row.at_s)


def mark_row(mark: Event, began_at: float) -> Row:
    """The line of one thing that the orchestrator did."""
    label, what = str(mark.data.get("label", "")), str(mark.data.get("what", ""))
    texts = {
        "kill": (f"kill -9 {what}", "bold red"),
        "delete": ("state directory deleted", "bold red"),
        "start": (f"{what} started", ""),
        "act": (f"{mark.data.get('name', '')}:", "bold"),
        "note": (what, ""),
    }
    text, style = texts.get(mark.kind, (f"{mark.kind} {what}", ""))
    return Row(mark.at - began_at, label, text, style)


def comebacks(record: Record) -> list[Comeback]:
    """What each act cost."""
    found = []
    for act in record.marked("act"):
        label, number = str(act.data["label"]), act.integer("life")
        before, after = record.life(label, number), record.life(label, number + 1)
        restored, first = after.restored(), after.first("step")
        report = restored.mapping("report") if restored else {}
        redone, lost = _steps(before, after)
        found.append(
            Comeback(
                name=str(act.data["name"]),
                label=label,
                mode=str(report.get("action", "fresh")),
                away_s=first.at - act.at if first else None,
                steps_redone=redone,
                steps_lost=lost,
                phases_s={name: float(report.get("seconds", {}).get(name, 0.0)) for name in PHASES},
                donors={record.name_of(node): count for node, count in report.get("donors", {}).items()},
                bytes_wasted=int(report.get("bytes_wasted", 0)),
            )
        )
    return found


def report(record: Record, claims: Iterable[Claim]) -> Json:
    """What `report.json` holds."""
    return {
        "claims": [
            {"claim": claim.sentence, "held": claim.held, "detail": claim.detail, "clock_bound": claim.clock_bound}
            for claim in claims
        ],
        "comebacks": [
            {
                "act": back.name,
                "node": back.label,
                "mode": back.mode,
                "seconds_away": back.away_s,
                "steps_redone": back.steps_redone,
                "steps_lost": back.steps_lost,
                "seconds": back.phases_s,
                "bytes_per_donor": back.donors,
                "bytes_wasted": back.bytes_wasted,
            }
            for back in comebacks(record)
        ],
        "settings": dict(record.settings),
        "timeline": [{"seconds": round(row.at_s, 2), "node": row.label, "what": row.what} for row in rows(record)],
    }


def show(record: Record, claims: Iterable[Claim], console: Console, lenient_clock: bool = False) -> None:
    """Draws timeline, costs and claims."""
    timeline = Table(title="What happened", title_justify="left", box=None, pad_edge=False)
    timeline.add_column("s", justify="right")
    timeline.add_column("node")
    timeline.add_column("what", overflow="fold")
    for row in rows(record):
        timeline.add_row(f"{row.at_s:.1f}", row.label, Text(row.what, style=row.style))
    console.print(timeline)

    console.print("\n[italic]What each loss cost[/italic]")
    for back in comebacks(record):
        away = "never came back" if back.away_s is None else f"trains again after {back.away_s:.1f} s"
        console.print(Text(f"{back.label}, {back.name}: {away}, mode {back.mode}", style="bold"))
        console.print("    " + ", ".join(f"{name} {back.phases_s[name]:.2f} s" for name in PHASES))
        donors = ", ".join(f"{count / 1e6:.1f} MB from {name}" for name, count in sorted(back.donors.items()))
        console.print(
            f"    {back.steps_redone} steps replayed, {back.steps_lost} lost; {donors or 'nothing came from peers'}"
            + (f", {back.bytes_wasted / 1e6:.1f} MB wasted" if back.bytes_wasted else "")
        )

    console.print("\n[italic]Claims[/italic]")
    for claim in claims:
        late = claim.clock_bound and lenient_clock
        word, style = ("held", "green") if claim.held else ("LATE", "yellow") if late else ("FAILED", "bold red")
        console.print(Text(f"{word:>6} ", style=style).append(claim.sentence, style="default"))
        console.print(Text(f"       {claim.detail}", style="dim"))


def _row(record: Record, event: Event, label: str, what: str, style: str = "") -> Row:
    return Row(event.at - record.began_at, label, what, style)


def _recovery_text(record: Record, restored: Event) -> str:
    told = restored.mapping("report")
    text = f"restored, mode {told.get('action')}"
    if told.get("donors"):
        parts = [f"{count / 1e6:.1f} MB from {record.name_of(node)}" for node, count in told["donors"].items()]
        text += ", " + " and ".join(sorted(parts)) + f", {told.get('agreement')}"
    outer, inner, training = restored.position()
    return f"{text}: outer {outer}, inner {inner}, step {training}"


def _sync_rows(record: Record) -> list[Row]:
    """One line for each outer step, at the time when the last node had it."""
    by_step: dict[int, list[tuple[Life, Event]]] = {}
    for life, sync in record.events("sync"):
        by_step.setdefault(sync.integer("outer"), []).append((life, sync))
    found = []
    for step, group in by_step.items():
        labels = ",".join(sorted({life.label for life, _ in group}))
        good = all(sync.data.get("committed") is True for _, sync in group)
        digests = {sync.mapping("digests").get("outer") for _, sync in group}
        told = "one state" if len(digests) == 1 else f"{len(digests)} states"
        text = f"outer step {step}" + (f" committed, {told}" if good else " discarded")
        found.append(_row(record, group[-1][1], labels, text, "" if good else "red"))
    return found


def _steps(before: Life, after: Life) -> tuple[int, int]:
    """(steps trained twice, steps trained for nothing) of a life that ended and the one that followed it."""
    trained = {event.position() for event in before.of("step")}
    restored = after.restored()
    redone = len(trained & {event.position() for event in after.of("step")})
    if restored is not None and restored.mapping("report").get("action") == "resume":
        return redone, 0
    last_sync = before.last("sync")
    kept = last_sync.integer("outer") if last_sync else 0
    return 0, sum(1 for outer, _, _ in trained if outer >= kept)
