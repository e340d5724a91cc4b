"""What the demo claims, and the check of each claim on the record of a run. Pure: no clock, no files, no processes.

The witnesses are independent of the code under test where there is one: losses are compared as the trainers printed
them, tensors by SHA-256 digests that the trainers take themselves, heals by torchft's own log. What only the daemon can
know (bytes per donor, chunks fetched) comes from its JSON.

A claim about state must hold everywhere. A claim bound to the clock can fail on a machine that is busy with something
else; with `CI=true` it is printed and does not fail the run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hotswarm.demo.record import Event, Life, Record

MIN_REPLAYED_STEPS = 10
MAX_SURVIVOR_GAP_S = 10.0
LIVE_CLOCK_SLACK_STEPS = 2  # between the answer of `Describe` and the joiner's log line the survivors go on stepping


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence, whether it held, and the numbers behind it."""

    sentence: str
    held: bool
    detail: str
    clock_bound: bool = False


def check(record: Record) -> list[Claim]:
    """Every claim of the acts that were played, then the claims about the whole run."""
    claims: list[Claim] = []
    for act in record.marked("act"):
        if act.data["name"] == "lost process":
            claims += [replayed_exactly(record, act), resumed_from_memory(record, act), same_sync(record, act)]
        else:
            claims += [
                outer_state_equal(record, act),
                moments_equal(record, act),
                several_donors(record, act),
                live_round_clock(record, act),
                next_outer_step(record, act),
            ]
            if act.data.get("lost_donor"):
                claims += [donor_lost_in_flight(record, act), nothing_fetched_twice(record, act)]
        claims.append(survivors_kept_going(record, act))
    claims += [no_heals(record), no_discarded_rounds(record), same_state_at_the_end(record), daemons_agree(record)]
    return claims


def passed(claims: Iterable[Claim], lenient_clock: bool) -> bool:
    """Whether the run may exit 0."""
    return all(claim.held or (claim.clock_bound and lenient_clock) for claim in claims)


# ---------------------------------------------------------------- lost process


def replayed_exactly(record: Record, act: Event) -> Claim:
    """The restarted trainer's losses are those that its killed predecessor printed for the same steps."""
    before, after = _lives(record, act)
    printed = {event.position(): event.data.get("loss") for event in before.of("step")}
    again = [event for event in after.of("step") if event.position() in printed]
    wrong = [event.position() for event in again if event.data.get("loss") != printed[event.position()]]
    held = len(again) >= MIN_REPLAYED_STEPS and not wrong
    detail = f"{len(again)} steps replayed"
    if wrong:
        detail += f", {len(wrong)} with another loss, the first at (outer, inner, training) {wrong[0]}"
    return Claim(f"{act.data['label']} replays its last steps with exactly the losses printed before", held, detail)


def resumed_from_memory(record: Record, act: Event) -> Claim:
    """It came back from its own daemon, and what it restored is what its predecessor had captured."""
    before, after = _lives(record, act)
    sentence = f"{act.data['label']} resumes from its own daemon, bit for bit, without the network"
    restored = after.restored()
    if restored is None:
        return Claim(sentence, False, "nothing was restored before the first step")
    report = restored.mapping("report")
    captured = [event for event in before.of("snapshot") if event.position() == restored.position()]
    if not captured:
        return Claim(sentence, False, f"no snapshot was captured at {restored.position()}")
    same = captured[-1].mapping("digests") == restored.mapping("digests") != {}
    moved = report.get("bytes", 0)
    held = same and moved == 0 and report.get("action") == "resume"
    outer, inner, training = restored.position()
    return Claim(
        sentence,
        held,
        f"mode {report.get('action')}, outer {outer}, inner {inner}, step {training}; {moved} bytes from peers; "
        f"digests {'equal' if same else 'differ'}",
    )


def same_sync(record: Record, act: Event) -> Claim:
    """Back before the round's quorum closed, it took part in the same outer step as everybody else."""
    _, after = _lives(record, act)
    mine = after.first("sync")
    others = [sync for life in _others(record, act) if (sync := _first_after(life, "sync", act.at)) is not None]
    steps = [sync.integer("outer") for sync in [mine, *others] if sync is not None]
    seats = [sync.integer("participants") for sync in [mine, *others] if sync is not None]
    everybody = len(record.labels)
    held = mine is not None and len(steps) == everybody and len(set(steps)) == 1 and set(seats) == {everybody}
    return Claim(
        f"{act.data['label']} is back before the round's quorum closes",
        held,
        f"first sync after the kill: outer steps {steps}, participants {seats}",
        clock_bound=True,
    )


# ---------------------------------------------------------------- lost machine


def outer_state_equal(record: Record, act: Event) -> Claim:
    """Before its first step the joiner holds the outer parameters and momentum that every survivor had at that step,
    and its model is those parameters.
    """
    sentence = f"{act.data['label']} holds the neighbours' outer parameters and momentum before its first step"
    restored = _lives(record, act)[1].restored()
    if restored is None:
        return Claim(sentence, False, "nothing was restored before the first step")
    step = restored.integer("outer")
    digests = restored.mapping("digests")
    theirs = [
        sync.mapping("digests")
        for life in _others(record, act)
        for sync in life.of("sync")
        if sync.integer("outer") == step
    ]
    wanted = len(record.labels) - 1
    equal = [
        other for other in theirs if all(digests.get(key) and other.get(key) == digests[key] for key in OUTER_DIGESTS)
    ]
    agreement = restored.mapping("report").get("agreement")
    live = digests.get("params") == digests.get("outer")
    return Claim(
        sentence,
        len(theirs) == wanted == len(equal) and agreement == "agreed" and live,
        f"outer step {step}, {agreement}: equal to {len(equal)} of {wanted} neighbours, "
        f"the model {'equal too' if live else 'differs'}",
    )


def moments_equal(record: Record, act: Event) -> Claim:
    """Its AdamW moments are those of a snapshot that its inner donor had captured."""
    sentence = f"{act.data['label']} holds the inner donor's AdamW moments before its first step"
    restored = _lives(record, act)[1].restored()
    if restored is None:
        return Claim(sentence, False, "nothing was restored before the first step")
    donor = record.name_of(str(restored.mapping("report").get("inner_donor", "")))
    digests = restored.mapping("digests")
    matching = [
        snapshot
        for life in record.lives_of(donor)
        for snapshot in life.of("snapshot")
        if all(digests.get(key) and snapshot.mapping("digests").get(key) == digests[key] for key in MOMENT_DIGESTS)
    ]
    if not matching:
        return Claim(sentence, False, f"inner donor {donor or 'unknown'}: no snapshot of it has these moments")
    outer, inner, training = matching[-1].position()
    return Claim(sentence, True, f"inner donor {donor}, its snapshot at outer {outer}, inner {inner}, step {training}")


def several_donors(record: Record, act: Event) -> Claim:
    """The bytes came from every neighbour."""
    restored = _lives(record, act)[1].restored()
    donors = restored.mapping("report").get("donors", {}) if restored else {}
    parts = {record.name_of(node): count for node, count in donors.items() if count}
    told = ", ".join(f"{count / 1e6:.1f} MB from {name}" for name, count in sorted(parts.items()))
    held = set(parts) == set(record.labels) - {act.data["label"]}
    return Claim(f"{act.data['label']} fetched from both neighbours at once", held, told or "no donors")


def live_round_clock(record: Record, act: Event) -> Claim:
    """It began where the survivors stood, not where their snapshot did."""
    sentence = f"{act.data['label']} starts at the live round clock"
    first = _lives(record, act)[1].first("step")
    if first is None:
        return Claim(sentence, False, "it never stepped", clock_bound=True)
    live = [
        step.position() for life in _others(record, act) if (step := _last_before(life, "step", first.at)) is not None
    ]
    outer, inner, _ = first.position()
    held = bool(live) and all(
        (outer, inner + LIVE_CLOCK_SLACK_STEPS) >= their[:2] and outer <= their[0] + 1 for their in live
    )
    told = ", ".join(f"{their[0]}/{their[1]}" for their in live)
    return Claim(sentence, held, f"its first step {outer}/{inner}, the survivors at {told} (outer/inner)", True)


def next_outer_step(record: Record, act: Event) -> Claim:
    """It took part, with everybody, in the outer step that closed the round it began in."""
    sentence = f"{act.data['label']} takes part in the next outer step"
    after = _lives(record, act)[1]
    first, sync = after.first("step"), after.first("sync")
    if first is None or sync is None:
        return Claim(sentence, False, "it reached no outer step", clock_bound=True)
    wanted = first.integer("outer") + 1
    held = (
        sync.data.get("committed") is True
        and sync.integer("outer") == wanted
        and sync.integer("participants") == len(record.labels)
    )
    return Claim(
        sentence, held, f"outer step {sync.integer('outer')} with {sync.integer('participants')} participants", True
    )


# ---------------------------------------------------------------- lost donor


def donor_lost_in_flight(record: Record, act: Event) -> Claim:
    """A donor's daemon, not the inner donor's, was killed while bytes were moving; its trainer never noticed."""
    donor = str(act.data.get("lost_donor"))
    sentence = f"the fetch finishes although {donor}'s daemon dies while it runs"
    joiner = _lives(record, act)[1]
    restored = joiner.restored()
    killed = [
        mark
        for mark in record.marked("kill")
        if mark.data.get("what") == "daemon" and mark.data.get("label") == donor and mark.at > act.at
    ]
    if restored is None or not killed:
        return Claim(sentence, False, "nothing was restored" if killed else "no donor was killed")
    began = joiner.first("start")
    in_flight = began is not None and began.at < killed[0].at < restored.at
    inner_donor = record.name_of(str(restored.mapping("report").get("inner_donor", "")))
    trainer = record.lives_of(donor)[-1]
    lives_on = _first_after(trainer, "step", restored.at) is not None and trainer.events[0].at < killed[0].at
    return Claim(
        sentence,
        in_flight and inner_donor != donor and lives_on,
        f"killed {restored.at - killed[0].at:.1f} s before the restore was done; inner donor {inner_donor}; "
        f"{donor}'s trainer {'went on' if lives_on else 'stopped'}",
    )


def nothing_fetched_twice(record: Record, act: Event) -> Claim:
    """No outer chunk that had been verified came over the network again."""
    label = str(act.data["label"])
    sentence = f"{label} fetches no verified outer chunk twice"
    view = record.daemons.get(label)
    outer = [
        section
        for recovery in (view.recoveries if view else [])
        if (section := recovery.get("report", {}).get("sections", {}).get("outer")) is not None
    ]
    if not outer:
        return Claim(sentence, False, "the daemon reports no fetch of an outer section")
    fetched = sum(section["fetched_chunks"] for section in outer)
    there = sum(section["chunks"] for section in outer)
    each = all(section["fetched_chunks"] <= section["chunks"] for section in outer)
    return Claim(sentence, each and fetched > 0, f"{fetched} chunks fetched of {there}")


# ---------------------------------------------------------------- the whole run


def survivors_kept_going(record: Record, act: Event) -> Claim:
    """The longest pause between two steps of those that were not hit, from the kill to the joiner's first sync."""
    sync = _lives(record, act)[1].first("sync")
    until = sync.at + MAX_SURVIVOR_GAP_S if sync else float("inf")
    gaps = [
        (late.at - early.at, life.label)
        for life in _others(record, act)
        for early, late in _pairs(life.of("step"))
        if late.at > act.at and early.at < until
    ]
    gap, label = max(gaps, default=(float("inf"), "nobody"))
    return Claim(
        f"the survivors of the {act.data['name']} never pause for {MAX_SURVIVOR_GAP_S:.0f} s",
        gap < MAX_SURVIVOR_GAP_S,
        f"longest gap between two steps {gap:.1f} s ({label})",
        clock_bound=True,
    )


def no_heals(record: Record) -> Claim:
    """Recovery was ours each time: torchft never healed anybody."""
    events = sum(len(life.of("heal")) for life in record.lives)
    lines = sum(life.heal_lines for life in record.lives)
    return Claim("torchft had nothing to heal", events == lines == 0, f"{events} heals seen, {lines} in torchft's log")


def no_discarded_rounds(record: Record) -> Claim:
    """Every outer step that was tried was committed, and each life's outer steps follow one another."""
    tried = [(life.label, sync) for life, sync in record.events("sync")]
    discarded = [label for label, sync in tried if sync.data.get("committed") is not True]
    skipped = [
        life.label
        for life in record.lives
        for early, late in _pairs(life.of("sync"))
        if late.integer("outer") != early.integer("outer") + 1
    ]
    held = bool(tried) and not discarded and not skipped
    detail = f"{len(tried)} outer steps tried, {len(discarded)} discarded, {len(skipped)} out of order"
    return Claim("no round was discarded", held, detail)


def same_state_at_the_end(record: Record) -> Claim:
    """By the trainers' own SHA-256: outer parameters and momentum are the same on all nodes after the last sync."""
    last = {label: record.lives_of(label)[-1].last("sync") for label in record.labels}
    states = {
        (sync.integer("outer"), *(sync.mapping("digests").get(key) for key in OUTER_DIGESTS))
        for sync in last.values()
        if sync is not None
    }
    complete = all(sync is not None for sync in last.values()) and all(None not in state for state in states)
    steps = {label: sync.integer("outer") if sync else None for label, sync in last.items()}
    return Claim(
        "all nodes end with the same outer parameters and momentum",
        complete and len(states) == 1,
        f"last outer step by node {steps}; {len(states)} state(s)",
    )


def daemons_agree(record: Record) -> Claim:
    """By the daemons' content digests: the newest snapshots' outer sections are one."""
    newest = {}
    for label in record.labels:
        view = record.daemons.get(label)
        mine = [snapshot for snapshot in (view.snapshots if view else []) if snapshot.get("outer_digest")]
        best = max(mine, key=lambda snapshot: (snapshot["outer_step"], snapshot["training_step"]), default={})
        newest[label] = (best.get("outer_step"), best.get("outer_digest"))
    told = ", ".join(f"{label}: {step} {str(digest)[:12]}" for label, (step, digest) in newest.items())
    held = len(set(newest.values())) == 1 and None not in next(iter(newest.values()), (None,))
    return Claim("all daemons end with the same outer digest", held, told)


OUTER_DIGESTS = ("outer", "momentum")
MOMENT_DIGESTS = ("exp_avg", "exp_avg_sq")


def _lives(record: Record, act: Event) -> tuple[Life, Life]:
    """The life that ended in this act, and the one that came after."""
    label, number = str(act.data["label"]), act.integer("life")
    return record.life(label, number), record.life(label, number + 1)


def _others(record: Record, act: Event) -> list[Life]:
    """Each other node's life at the time of the act."""
    found = []
    for label in record.labels:
        if label != act.data["label"]:
            living = [life for life in record.lives_of(label) if life.events and life.events[0].at < act.at]
            found += living[-1:]
    return found


def _first_after(life: Life, kind: str, at: float) -> Event | None:
    return next((event for event in life.of(kind) if event.at > at), None)


def _last_before(life: Life, kind: str, at: float) -> Event | None:
    return next((event for event in reversed(life.of(kind)) if event.at <= at), None)


def _pairs(events: list[Event]) -> Iterator[tuple[Event, Event]]:
    return itertools.pairwise(events)
