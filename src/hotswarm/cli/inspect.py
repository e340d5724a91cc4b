"""Verbs that look: status, peers, snapshots, verify, healthcheck, top."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotswarm.cli import daemon, exits, output
from hotswarm.cli.options import JsonFlag, node_options
from hotswarm.config import Settings
from hotswarm.errors import (
    ControlError,
    HotswarmError,
    IntegrityError,
    ManifestError,
    NoSnapshot,
    NotAuthorised,
    StoreError,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hotswarm.store.base import SnapshotInfo, SnapshotSource

MIN_PREFIX = 4
Json = dict[str, Any]


@node_options
def status(settings: Settings, as_json: JsonFlag = False) -> None:
    """What this node does: trainer, newest snapshot, work at risk, health."""
    data = daemon.require(settings).status()
    if as_json:
        output.print_json(data)
    else:
        output.console().print(status_table(data))


def status_table(data: Json) -> RenderableType:
    """The status as a table for people."""
    trainer, clock, newest = data["trainer"], data["clock"], data["newest"]
    rows = [
        ("node", f"{data['node']} {data['name']}".rstrip()),
        ("run", data["run"]),
        ("listens on", data["listen"]),
        ("process", f"{data['pid']}, up {output.age(data['uptime_s'])}"),
        ("trainer", "none" if trainer is None else f"process {trainer['pid']} {trainer['label']}".rstrip()),
    ]
    if clock is not None:
        rows.append(("training", _position(clock, clock["round_length"])))
    rows.append(("snapshots", f"{data['snapshots']}"))
    if newest is not None:
        taken = output.age(max(0.0, time.time() - newest["time_ms"] / 1000))
        in_rounds = newest["outer_digest"] is not None
        rows.append(("newest", f"{newest['snapshot_id']}: {_position(newest, in_rounds)}, taken {taken} ago"))
    if data["work_at_risk_s"] is not None:
        rows.append(("work at risk", output.age(data["work_at_risk_s"])))
    rows.append(("health", "; ".join([data["health"]["state"], *data["health"]["reasons"]])))
    return output.pairs(rows)


def _position(at: Json, round_length: int | None) -> str:
    """Where training is. Only what works in rounds has an outer step; `round_length` may be just True."""
    step = f"step {at['training_step']}"
    if not round_length and not at["outer_step"]:
        return step
    length = f" of {round_length}" if round_length and round_length is not True else ""
    return f"outer {at['outer_step']}, inner {at['inner_step']}{length}, {step}"


@node_options
def top(
    settings: Settings, every: Annotated[float, typer.Option("--every", help="Seconds between two looks.")] = 1.0
) -> None:
    """The status, again and again, until Ctrl-C."""
    from rich.live import Live

    client, screen = daemon.require(settings), output.console()
    with Live(console=screen, auto_refresh=False) as live:
        while True:
            table = status_table(client.status())
            if screen.is_terminal:
                live.update(table, refresh=True)
            else:
                screen.print(table)
            time.sleep(max(0.1, every))


@node_options
def peers(
    settings: Settings,
    as_json: JsonFlag = False,
    wait: Annotated[float, typer.Option("--wait", help="Seconds to look for peers when none is known yet.")] = 5.0,
) -> None:
    """The other nodes, and how far they are."""
    runs = daemon.find(settings) is not None
    if not runs and not _anyone_to_ask(settings):
        daemon.require(settings)
    with daemon.running(settings) as client:
        deadline = time.monotonic() + wait
        while not (found := client.peers()) and time.monotonic() < deadline:
            client.clock()  # asks the neighbours, and looks for some when it knows none; NotAuthorised when all refuse
            time.sleep(0.1)
        refused = bool(client.status()["swarm"].get("refused"))
    if as_json:
        output.print_json({"peers": found})
    elif found:
        output.console().print(
            output.table(("node", "name", "address", ">outer", ">inner", "state"), _peer_rows(found))
        )
    else:
        how = "" if runs else "; no daemon runs here, a node was started for this look only"
        output.console().print(f"no peers found{how}")
    if refused:
        raise NotAuthorised("every peer that could be reached refuses this node's swarm key; copy the key of the swarm")


def _anyone_to_ask(settings: Settings) -> bool:
    """Whether a node that is started now would know an address."""
    from hotswarm.swarm.peercache import PeerCache

    config = settings.config
    return bool(config.peers) or config.join_file is not None or bool(PeerCache.load(config.state_dir).peers())


def _peer_rows(found: Iterable[Json]) -> Iterable[tuple[str, ...]]:
    for peer in found:
        clock = peer.get("clock") or {}
        state = peer.get("error") or ("live" if peer.get("live") else "known")
        addresses = peer.get("addresses") or [peer.get("address", "")]
        yield (
            str(peer.get("node") or "-")[:12],
            str(peer.get("name", "")),
            str(addresses[0]) if addresses else "",
            _number(clock.get("outer_step", peer.get("outer_step"))),
            _number(clock.get("inner_step", peer.get("inner_step"))),
            str(state),
        )


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


# ---------------------------------------------------------------- the store


def stored_snapshots(settings: Settings) -> list[SnapshotInfo]:
    """What the daemon lists, or, where none runs, what lies in the state directory. Oldest first."""
    client = daemon.find(settings)
    if client is not None:
        return client.snapshots()
    from hotswarm.store.files import FileStore

    return FileStore(settings.config.state_dir, settings.config.run).snapshots()


def _none_here(settings: Settings) -> str:
    """Why there may be none: the snapshots that are here belong to other runs."""
    folder, run = settings.config.state_dir / "runs", settings.config.run
    others = sorted(path.name for path in folder.iterdir() if path.name != run) if folder.is_dir() else []
    return f"; there are those of {', '.join(map(repr, others))}, to be named with --run" if others else ""


@node_options
def snapshots(settings: Settings, as_json: JsonFlag = False) -> None:
    """The snapshots that this node holds, oldest first."""
    if not settings.config.state_dir.is_dir():
        raise NoSnapshot(
            f"there is no state directory {settings.config.state_dir.absolute()}; name the one meant with --state-dir"
        )
    found = stored_snapshots(settings)
    if as_json:
        from hotswarm.swarm.control import snapshot_to_json

        output.print_json({"snapshots": [snapshot_to_json(info) for info in found]})
        return
    if not found:
        output.console().print(f"no snapshots of run {settings.config.run!r} yet{_none_here(settings)}")
        return
    columns = ("id", "kind", ">outer", ">inner", ">step", ">size", ">on disk", ">age", "")
    output.console().print(output.table(columns, map(_snapshot_row, found)))


def _snapshot_row(info: SnapshotInfo) -> tuple[str, ...]:
    marks = [
        *(["pinned"] if info.pinned else []),
        *([] if info.own else [f"from {info.node[:12]}"]),
        *([] if info.complete else [f"only {', '.join(sorted(info.complete_sections)) or 'parts'}"]),
    ]
    return (
        info.snapshot_id,
        info.kind,
        str(info.outer_step),
        str(info.inner_step),
        str(info.training_step),
        output.size(info.bytes),
        output.size(info.stored_bytes),
        output.age(max(0.0, time.time() - info.time_ms / 1000)),
        ", ".join(marks),
    )


@node_options
def verify(
    settings: Settings,
    snapshot_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="An id or its beginning.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check every digest of one snapshot, or of all."""
    found = stored_snapshots(settings)
    if snapshot_id is not None:
        found = [one_snapshot(found, snapshot_id)]
    if not found:
        raise NoSnapshot(
            f"{settings.config.state_dir} holds no snapshot of run {settings.config.run!r}{_none_here(settings)}"
        )
    results = [_verified(settings, info) for info in found]
    damaged = [result for result in results if result["error"] is not None]
    if as_json:
        output.print_json({"snapshots": results})
    else:
        for result in results:
            output.console().print(f"{result['snapshot_id']}  {result['error'] or 'ok'}")
    if damaged:
        raise IntegrityError(f"{len(damaged)} of {len(results)} snapshots are damaged; recovery skips them")


def one_snapshot(found: list[SnapshotInfo], wanted: str) -> SnapshotInfo:
    """The snapshot with this id, or whose id begins so. NoSnapshot for none or several."""
    matching = [info for info in found if info.snapshot_id.startswith(wanted)] if len(wanted) >= MIN_PREFIX else []
    if len(matching) != 1:
        what = f"{len(matching)} snapshots begin with" if matching else "no snapshot is called"
        raise NoSnapshot(f"{what} {wanted!r}; `swarm-node snapshots` lists them")
    return matching[0]


def open_snapshot(settings: Settings, info: SnapshotInfo) -> SnapshotSource:
    """Open it through the daemon, or, where none runs, from the state directory. StoreError, IntegrityError."""
    client = daemon.find(settings)
    if client is not None:
        return client.open_snapshot(info.snapshot_id)
    from hotswarm.store.files import FileStore

    return FileStore(settings.config.state_dir, settings.config.run).open(info.snapshot_id)


def _verified(settings: Settings, info: SnapshotInfo) -> Json:
    error, client = None, daemon.find(settings)
    try:
        with contextlib.closing(open_snapshot(settings, info)) as source:
            source.verify()
    except (IntegrityError, ManifestError) as failure:
        error = str(failure)
        if client is not None:  # the daemon looks for itself, and puts it into quarantine
            with contextlib.suppress(HotswarmError):
                client.verify(info.snapshot_id)
            error += "; it is in quarantine now, and listed no more"
    except StoreError as failure:
        raise ControlError(f"snapshot {info.snapshot_id} cannot be checked: {failure}") from None
    return {"snapshot_id": info.snapshot_id, "bytes": info.bytes, "error": error}


# ---------------------------------------------------------------- for supervisors


@node_options
def healthcheck(settings: Settings, as_json: JsonFlag = False) -> None:
    """Exit 0 when the node serves. What needs attention is printed, and does not fail it."""
    data = daemon.require(settings).status()
    healthy = bool(data["ready"])
    if as_json:
        output.print_json({"ready": healthy, **data["health"]})
    else:
        reasons = "; ".join(data["health"]["reasons"])
        output.console().print(
            f"{'ready' if healthy else 'not ready'}, {data['health']['state']}{reasons and ': '}{reasons}"
        )
    raise typer.Exit(exits.OK if healthy else exits.FAILED)
