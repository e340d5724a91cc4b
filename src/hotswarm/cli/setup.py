"""Verbs around a node's setup: serve, stop, keygen, config show, version."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Annotated

import typer

from hotswarm.cli import daemon, output
from hotswarm.cli.options import JsonFlag, node_options
from hotswarm.config import Settings, parse_address
from hotswarm.errors import ConfigError, ControlError

STOP_TIMEOUT_S = 60.0  # it writes what its trainer handed over, and withdraws for up to 5 s


@node_options
def serve(settings: Settings) -> None:
    """Run the daemon: DHT, gRPC, control socket, health, metrics, dashboard. The default verb."""
    from hotswarm.swarm.daemon import run
    from hotswarm.swarm.logs import setup_logging

    setup_logging(settings.config.log_level, settings.config.log_format)
    raise typer.Exit(run(settings.config))


@node_options
def stop(settings: Settings, as_json: JsonFlag = False) -> None:
    """End the daemon of the state directory, also one that a trainer started. What it was given is on disk then."""
    from hotswarm.swarm.paths import answers

    client = daemon.require(settings)
    pid = client.stop()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while answers(client.socket) or _runs(pid):
        if time.monotonic() > deadline:
            raise ControlError(f"process {pid} was asked to end and is still at it after {STOP_TIMEOUT_S:g} s")
        time.sleep(0.05)
    if as_json:
        output.print_json({"pid": pid})
    else:
        output.line(f"process {pid} has ended")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # a zombie has ended
    except OSError:
        return True


def keygen(
    key: Annotated[Path, typer.Option("--swarm-key", help="Where the key goes; an existing one is kept.")] = Path(
        "swarm.key"
    ),
    join: Annotated[Path | None, typer.Option("--join-file", help="Where the join file goes.")] = None,
    peers: Annotated[list[str] | None, typer.Option("--peers", help="Addresses for the join file, HOST:PORT.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a swarm key and, with --peers, a join file (addresses and key): all that a new machine needs."""
    from hotswarm.swarm.swarmkey import SwarmKey, read_key_file, write_join_file, write_key_file

    addresses = [str(parse_address(part, "peers")) for item in peers or [] for part in item.split(",") if part.strip()]
    if join is not None and not addresses:
        raise ConfigError("a join file needs addresses; give --peers HOST:PORT,…", "peers")
    if addresses and join is None:
        join = key.with_suffix(".join")
    if join is not None and join.exists():
        raise ConfigError(f"{join} exists and is left alone; name another file, or remove it first", "join_file")
    made = not key.exists()
    if made:
        write_key_file(key, SwarmKey.generate())
    if join is not None:
        write_join_file(join, read_key_file(key).keys[0], addresses)
    if as_json:
        output.print_json({"swarm_key": str(key), "made": made, "join_file": None if join is None else str(join)})
        return
    output.line(f"{key}: {'made' if made else 'kept as it was'}; copy it to every member over a safe channel")
    if join is not None:
        output.line(f"{join}: made; on a new machine: swarm-node --join-file {join.name}")


config_app = typer.Typer(no_args_is_help=True, help="Settings.", add_completion=False)


@config_app.command("show")
@node_options
def config_show(
    settings: Settings,
    origin: Annotated[bool, typer.Option("--origin", help="Also say where each value comes from.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """The settings that a node here would run with."""
    values = settings.config.to_json()
    if as_json:
        output.print_json(
            {name: {"value": value, "origin": settings.origins[name]} for name, value in values.items()}
            if origin
            else values
        )
        return
    rows = []
    for name, value in values.items():
        shown = ",".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)
        rows.append((name, shown, settings.origins[name]) if origin else (name, shown))
    output.console().print(output.table(("setting", "value", "origin") if origin else ("setting", "value"), rows))


def version(as_json: JsonFlag = False) -> None:
    """Versions of hotswarm and of what it runs on."""
    versions = {"hotswarm": importlib.metadata.version("hotswarm"), "python": platform.python_version()}
    for package in ("torch", "grpcio", "kademlia", "torchft"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if as_json:
        output.print_json(versions)
    else:
        rest = ", ".join(f"{name} {number}" for name, number in versions.items() if name != "hotswarm")
        output.line(f"swarm-node {versions['hotswarm']} ({rest})")
