"""`swarm-node doctor`: what on this machine would keep a node from working, each with what to do about it."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal

import typer

from hotswarm.cli import daemon, exits, output
from hotswarm.cli.options import JsonFlag, node_options
from hotswarm.config import NodeConfig, Settings, parse_address
from hotswarm.errors import HotswarmError

LOW_DISK_BYTES = 2 << 30
CONNECT_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's result."""

    check: str
    state: Literal["ok", "warning", "failed"]
    detail: str


def _state_dir(config: NodeConfig) -> Iterator[Finding]:
    folder = config.state_dir.absolute()
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield Finding("state directory", "failed", f"{existing} cannot be written: {error.strerror}; choose another")
        return
    free = shutil.disk_usage(existing).free
    state: Literal["ok", "warning"] = "warning" if free < LOW_DISK_BYTES else "ok"
    yield Finding("state directory", state, f"{folder}, {output.size(free)} free")


def _kernel(_: NodeConfig) -> Iterator[Finding]:
    try:
        os.close(os.pidfd_open(os.getpid()))
        os.close(os.memfd_create("doctor"))
    except (OSError, AttributeError) as error:
        yield Finding("kernel", "failed", f"no pidfd or memfd: {error}; Linux 5.3 or newer is needed")
        return
    yield Finding("kernel", "ok", f"{os.uname().sysname} {os.uname().release}, Python {sys.version.split()[0]}")


def _sockets(config: NodeConfig) -> Iterator[Finding]:
    from hotswarm.swarm.paths import socket_path

    try:
        yield Finding("control socket", "ok", str(socket_path(config.state_dir)))
    except HotswarmError as error:
        yield Finding("control socket", "failed", str(error))


def _memory(_: NodeConfig) -> Iterator[Finding]:
    from hotswarm.store.arena import available_bytes

    room = available_bytes()
    if room is None:
        yield Finding("memory", "warning", "cannot tell how much is left")
    else:
        yield Finding(
            "memory", "ok", f"{output.size(room)} left; a snapshot arena takes the size of the training state"
        )


def _membership(config: NodeConfig) -> Iterator[Finding]:
    from hotswarm.swarm.swarmkey import keys_or_loopback, read_key_file

    path = config.swarm_key or config.join_file
    try:
        if path is not None:
            read_key_file(path)
            yield Finding("swarm key", "ok", str(path))
        else:
            addresses = [config.listen, *config.peers, *([config.advertise] if config.advertise else [])]
            keys_or_loopback((), addresses)
            yield Finding("swarm key", "warning", "none: the public one is used, on loopback only")
    except HotswarmError as error:
        yield Finding("swarm key", "failed", str(error))


def _port(config: NodeConfig) -> Iterator[Finding]:
    address = parse_address(config.listen, "listen", port_zero=True)
    for kind, name in ((socket.SOCK_STREAM, "TCP"), (socket.SOCK_DGRAM, "UDP")):
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with socket.socket(family, kind) as sock:
            try:
                sock.bind((address.host, address.port))
            except OSError as error:
                why = "in use" if error.errno == errno.EADDRINUSE else error.strerror
                yield Finding(f"{name} port", "failed", f"{address} is {why}; choose another with --listen")
            else:
                yield Finding(f"{name} port", "ok", f"{address} is free")


def _peers(config: NodeConfig) -> Iterator[Finding]:
    for peer in config.peers:
        address = parse_address(peer, "peers")
        try:
            socket.create_connection((address.host, address.port), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            detail = f"{peer} does not accept connections: {error}; is it up, and its port open for TCP and UDP?"
            yield Finding("peer", "warning", detail)
        else:
            yield Finding("peer", "ok", f"{peer} accepts TCP connections")


CHECKS: tuple[Callable[[NodeConfig], Iterator[Finding]], ...] = (
    _kernel,
    _memory,
    _state_dir,
    _sockets,
    _membership,
    _peers,
)


@node_options
def doctor(settings: Settings, as_json: JsonFlag = False) -> None:
    """Check this machine and these settings; exit 1 when a node could not run."""
    running = daemon.find(settings)
    found = [finding for check in CHECKS for finding in check(settings.config)]
    if running is None:
        found += _port(settings.config)
    else:
        found.append(Finding("daemon", "ok", f"process {running.status()['pid']} serves this state directory"))
    failed = any(finding.state == "failed" for finding in found)
    if as_json:
        output.print_json({"ok": not failed, "findings": [asdict(finding) for finding in found]})
    else:
        rows = [(finding.state, finding.check, finding.detail) for finding in found]
        output.console().print(output.table(("state", "check", "detail"), rows))
    raise typer.Exit(exits.FAILED if failed else exits.OK)
