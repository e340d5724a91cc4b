"""`swarm-node recover`: fetch the freshest state of the swarm into the local store."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotswarm.cli import daemon, exits, output
from hotswarm.cli.options import JsonFlag, node_options
from hotswarm.config import Inner, Mode, Settings, as_enum
from hotswarm.errors import NoSnapshot

if TYPE_CHECKING:
    from hotswarm.swarm.model import RecoverOutcome

Json = dict[str, Any]


@node_options
def recover(
    settings: Settings,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; fetch nothing.")] = False,
    peer: Annotated[str | None, typer.Option("--from", help="Only from this node: id or HOST:PORT.")] = None,
    mode: Annotated[str, typer.Option("--mode", help="auto, resume, outer or clone.")] = "auto",
    inner: Annotated[str, typer.Option("--inner", help="Inner optimizer: auto, adopt, own or fresh.")] = "auto",
    min_agree: Annotated[int | None, typer.Option("--min-agree", help="Nodes that must vouch for the state.")] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds to locate and choose, or without progress.")
    ] = 60.0,
    as_json: JsonFlag = False,
) -> None:
    """Fetch the freshest state into the local store; a trainer that starts here then finds it."""
    from hotswarm.swarm.model import RecoverRequest

    request = RecoverRequest(
        mode=as_enum(Mode, mode, "mode").value,
        inner=as_enum(Inner, inner, "inner").value,
        min_agree=min_agree,
        allow_rollback=settings.config.allow_rollback,
        timeout_s=timeout,
        peer=peer,
        dry_run=dry_run,
    )
    with daemon.running(settings) as client, _progress(shown=not as_json) as on_progress:
        outcome = client.recover(request, on_progress)
    if as_json:
        output.print_json(outcome.to_json())
    else:
        output.console().print(_describe(outcome, dry_run=dry_run))
    if outcome.action == "fresh":
        raise NoSnapshot(outcome.report.reason or "neither this node nor any peer holds a usable snapshot")
    raise typer.Exit(exits.PARTIAL if outcome.report.agreement == "unconfirmed" and min_agree else exits.OK)


def _describe(outcome: RecoverOutcome, *, dry_run: bool) -> Any:
    report = outcome.report
    rows = [
        ("would" if dry_run else "action", outcome.action),
        ("why", report.reason),
        ("snapshot", outcome.snapshot_id or "none"),
        ("at", f"outer {report.outer_step}, inner {report.inner_step}, step {report.training_step}"),
    ]
    if report.agreement is not None:
        rows.append(("agreement", report.agreement))
    for donor, count in sorted(report.donors.items()):
        rows.append(("donor", f"{donor[:12]}: {output.size(count)}"))
    if report.bytes_wasted:
        rows.append(("wasted", output.size(report.bytes_wasted)))
    rows += [("rejected", f"{peer[:40]}: {reason}") for peer, reason in sorted(report.rejected.items())]
    if report.seconds:
        rows.append(("seconds", ", ".join(f"{name} {value:.2f}" for name, value in report.seconds.items())))
    rows += [("plan", line) for line in report.plan]
    return output.pairs(rows)


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[Json], None]]:
    """A bar with rate and time left, on a terminal; a line per phase elsewhere."""
    if not shown or not sys.stderr.isatty():
        yield _phase_lines() if shown else lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("locate", total=None)

        def update(data: Json) -> None:
            if data:
                bar.update(
                    task,
                    description=str(data.get("phase", "")),
                    completed=float(data.get("bytes", 0)),
                    total=float(data["total"]) if data.get("total") else None,
                )

        yield update


def _phase_lines() -> Callable[[Json], None]:
    last = ""

    def update(data: Json) -> None:
        nonlocal last
        phase = str(data.get("phase", ""))
        if phase and phase != last:
            last = phase
            print(f"swarm-node: {phase}", file=sys.stderr, flush=True)

    return update
