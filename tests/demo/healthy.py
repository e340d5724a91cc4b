"""A made-up run in which everything goes well, small enough to falsify one line at a time.

Three nodes, rounds of 40 steps of 0.1 s. b is killed in round 1 at step 24 and resumes from its snapshot at step 10;
c's machine is lost in round 2 at step 5, and a's daemon is killed while c's new node fetches.
"""

from __future__ import annotations

import copy

from hotswarm.demo.record import Json, Record

H = 40
STEP_S = 0.1
NODE = {"a": "aa" * 20, "b": "bb" * 20, "c": "c1" * 20, "c2": "c2" * 20}


def _digests(outer: int, label: str, training: int) -> dict[str, str]:
    return {
        "params": f"params {label} {training}",
        "outer": f"outer {outer}",
        "momentum": f"momentum {outer}",
        "exp_avg": f"exp_avg {label} {training}",
        "exp_avg_sq": f"exp_avg_sq {label} {training}",
    }


def _steps(label: str, outer: int, first: int, last: int, began: float) -> list[Json]:
    return [
        {
            "ev": "step",
            "t": began + (inner - first) * STEP_S,
            "outer": outer,
            "inner": inner,
            "training": outer * H + inner,
            "loss": float(100 - outer * H - inner + len(label)).hex(),
        }
        for inner in range(first, last + 1)
    ]


def _snapshot(label: str, outer: int, inner: int, at: float) -> Json:
    training = outer * H + inner
    digests = _digests(outer, label, training)
    return {"ev": "snapshot", "t": at, "outer": outer, "inner": inner, "training": training, "digests": digests}


def _sync(label: str, outer: int, at: float) -> Json:
    digests = _digests(outer, label, outer * H)
    return {"ev": "sync", "t": at, "outer": outer, "committed": True, "participants": 3, "digests": digests}


def _round(label: str, outer: int, began: float) -> list[Json]:
    lines = _steps(label, outer, 1, H, began)
    lines.insert(10, _snapshot(label, outer, 10, began + 1.0))
    return [*lines, _sync(label, outer + 1, began + 5.0), _snapshot(label, outer + 1, 0, began + 5.01)]


def _start(at: float) -> list[Json]:
    seconds = {"import": 2.0, "build": 0.2, "recover": 0.0}
    ready = {"ev": "ready", "t": at + 2.5, "outer": 0, "inner": 0, "training": 0, "seconds": seconds}
    return [{"ev": "start", "t": at, "pid": 1}, ready]


def _recovered(at: float, outer: int, inner: int, digests: dict[str, str], **report: object) -> Json:
    whole = {"bytes": 0, "donors": {}, "seconds": {"restore": 0.1}, "inner_donor": "", "agreement": None, **report}
    position = {"outer": outer, "inner": inner, "training": outer * H + inner}
    return {"ev": "recovered", "t": at, **position, "report": whole, "digests": digests}


def healthy() -> Json:
    """The run as the JSON that `Record.from_json` reads; a fresh copy each time."""
    end = [{"ev": "end", "t": 23.0, "reason": "done"}]
    lives: list[Json] = []

    def life(label: str, number: int, *parts: list[Json]) -> None:
        lives.append({"label": label, "number": number, "heal_lines": 0, "events": [e for part in parts for e in part]})

    life("a", 1, _start(-3.0), *(_round("a", outer, outer * 5.5) for outer in range(4)), end)
    killed = _steps("b", 1, 1, 24, 5.5)
    killed.insert(10, _snapshot("b", 1, 10, 6.5))
    life("b", 1, _start(-3.0), _round("b", 0, 0.0), killed)
    resumed = _recovered(9.6, 1, 10, _digests(1, "b", H + 10), mode="auto", action="resume")
    back = [*_steps("b", 1, 11, H, 9.7), _sync("b", 2, 10.5), _snapshot("b", 2, 0, 10.51)]
    life("b", 2, _start(8.0), [resumed], back, _round("b", 2, 11.0), _round("b", 3, 16.5), end)
    life("c", 1, _start(-3.0), _round("c", 0, 0.0), _round("c", 1, 5.5), _steps("c", 2, 1, 5, 11.0))
    donors = {NODE["a"]: 6_000_000, NODE["b"]: 14_000_000}
    joined = _recovered(
        14.0,
        2,
        0,
        {**_digests(2, "b", 2 * H + 10), "params": "outer 2"},
        mode="auto",
        action="outer",
        donors=donors,
        bytes=20_000_000,
    )
    joined["report"] |= {"inner_donor": NODE["b"], "agreement": "agreed"}
    first = _steps("c", 2, 36, H, 14.4)
    life(
        "c",
        2,
        _start(11.5),
        [joined],
        first,
        [_sync("c", 3, 16.0), _snapshot("c", 3, 0, 16.1)],
        _round("c", 3, 16.5),
        end,
    )

    def daemon(label: str, recoveries: list[Json]) -> Json:
        snapshots = [
            {
                "outer_step": step,
                "training_step": step * H,
                "outer_digest": f"{step:064x}",
                "snapshot_id": f"{label}{step}",
            }
            for step in (3, 4)
        ]
        return {"status": {}, "snapshots": snapshots, "recoveries": recoveries}

    sections = {"outer": {"chunks": 11, "fetched_chunks": 11}, "inner": {"chunks": 11, "fetched_chunks": 11}}
    return copy.deepcopy(
        {
            "began_at": 0.0,
            "settings": {"round_length": H, "step_s": STEP_S},
            "nodes": {NODE["a"]: "a", NODE["b"]: "b", NODE["c"]: "c", NODE["c2"]: "c"},
            "marks": [
                {"ev": "act", "t": 7.9, "name": "lost process", "label": "b", "life": 1},
                {"ev": "kill", "t": 7.91, "what": "trainer", "label": "b"},
                {"ev": "act", "t": 11.4, "name": "lost machine and donor", "label": "c", "life": 1, "lost_donor": "a"},
                {"ev": "kill", "t": 11.41, "what": "trainer", "label": "c"},
                {"ev": "kill", "t": 11.42, "what": "daemon", "label": "c"},
                {"ev": "delete", "t": 11.43, "what": "state", "label": "c"},
                {"ev": "kill", "t": 13.0, "what": "daemon", "label": "a"},
            ],
            "daemons": {
                "a": daemon("a", []),
                "b": daemon("b", []),
                "c": daemon("c", [{"report": {"sections": sections}, "finished_ms": 14000}]),
            },
            "lives": lives,
        }
    )


def record(data: Json | None = None) -> Record:
    """The healthy run, or a falsified one, as a Record."""
    return Record.from_json(healthy() if data is None else data)


def events(data: Json, label: str, number: int, kind: str) -> list[Json]:
    """The raw log lines of that kind in that life, to be falsified in place."""
    life = next(life for life in data["lives"] if (life["label"], life["number"]) == (label, number))
    return [event for event in life["events"] if event["ev"] == kind]
