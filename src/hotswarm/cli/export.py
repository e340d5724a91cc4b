"""`swarm-node export`: take a snapshot out."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from hotswarm.cli import inspect, output
from hotswarm.cli.options import JsonFlag, node_options
from hotswarm.config import Settings


@node_options
def export(
    settings: Settings,
    snapshot_id: Annotated[str, typer.Argument(metavar="ID", help="An id or its beginning.")],
    to: Annotated[str, typer.Option("--to", metavar="FILE.safetensors|FILE.pt|DIR", help="What to write.")],
    as_json: JsonFlag = False,
) -> None:
    """Take a snapshot out: the model as .safetensors, everything as .pt or as a folder. Digests are checked first."""
    from hotswarm import export as exporting

    exporting.form_of(to)
    info = inspect.one_snapshot(inspect.stored_snapshots(settings), snapshot_id)
    with contextlib.closing(inspect.open_snapshot(settings, info)) as source:
        source.verify()
        done = exporting.export(source, to)
    if as_json:
        output.print_json(
            {
                "snapshot_id": info.snapshot_id,
                "path": str(done.path.absolute()),
                "tensors": done.tensors,
                "bytes": done.nbytes,
                "parameters": done.parameters,
            }
        )
        return
    whose = "" if done.parameters == "live" else " (parameters of the outer copy: the live ones were not fetched)"
    output.console().print(
        f"{done.path}: {done.tensors} tensors, {output.size(done.nbytes)}, of snapshot {info.snapshot_id}{whose}"
    )
