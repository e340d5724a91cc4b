"""Donors as processes, joiners in this process, and a proxy that counts bytes and strikes at an exact one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Self

import uvloop
from swarm_kit import RUN, Made, fill, open_store

from hotswarm.config import NodeConfig
from hotswarm.store.fileops import FileOps
from hotswarm.store.files import FileStore
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.model import LiveClock, RecoverOutcome, RecoverRequest
from hotswarm.swarm.side import Swarm, build_swarm

HERE = Path(__file__).parent


@dataclasses.dataclass
class Donor:
    node: str
    listen: str
    child: subprocess.Popen[bytes]
    state_dir: Path

    def signal(self, number: int) -> None:
        os.kill(self.child.pid, number)


class Donors:
    """Starts donors under the `processes` fixture."""

    def __init__(self, processes: Any, root: Path) -> None:
        self._processes = processes
        self.root = root

    def start(self, *options: dict[str, Any]) -> list[Donor]:
        """Several at once: they take a second each to import."""
        children = []
        for option in options:
            state_dir = self.root / option["name"]
            made = option.get("made", {"node": option["name"]})
            mades = [
                dataclasses.asdict(m) if isinstance(m, Made) else m
                for m in (made if isinstance(made, list) else [made])
            ]
            text = json.dumps({"state_dir": str(state_dir), **option, "made": mades})
            env = {**os.environ, "PYTHONPATH": str(HERE), "GRPC_VERBOSITY": "NONE"}
            children.append((state_dir, self._processes.start([sys.executable, HERE / "donor.py", text], env=env)))
        return [self._ready(state_dir, child) for state_dir, child in children]

    def _ready(self, state_dir: Path, child: subprocess.Popen[bytes]) -> Donor:
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            for line in self._processes.log_of(child).splitlines():
                if line.startswith('{"node"'):
                    said = json.loads(line)
                    return Donor(said["node"], said["listen"], child, state_dir)
            assert child.poll() is None, self._processes.log_of(child)
            time.sleep(0.02)
        raise AssertionError(self._processes.log_of(child))


@dataclasses.dataclass
class Joiner:
    swarm: Swarm
    store: FileStore
    identity: NodeIdentity
    progress: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    on_progress: Callable[[dict[str, Any]], None] = lambda _: None

    async def recover(self, **request: Any) -> RecoverOutcome:
        request.setdefault("timeout_s", 30.0)
        return await self.swarm.recover(RecoverRequest(**request), self._saw)

    def _saw(self, seen: dict[str, Any]) -> None:
        self.progress.append(seen)
        self.on_progress(seen)


@contextlib.asynccontextmanager
async def joiner(
    state_dir: Path,
    *peers: str,
    live: LiveClock | None = None,
    run: str = RUN,
    listen: str = "127.0.0.1:0",
    ops: FileOps | None = None,
    **config: Any,
) -> AsyncIterator[Joiner]:
    settings = NodeConfig(peers=peers, run=run, listen=listen, state_dir=state_dir, **config)
    identity = NodeIdentity.load_or_create(state_dir)
    with open_store(state_dir, run=run, ops=ops, max_hot=8) as store:
        swarm = build_swarm(settings, identity, store, lambda: live)
        await swarm.start()
        try:
            yield Joiner(swarm, store, identity)
        finally:
            await swarm.stop()


@dataclasses.dataclass
class Here:
    """A donor in this process."""

    node: str
    listen: str
    joined: Joiner


@contextlib.asynccontextmanager
async def donors_here(root: Path, *options: dict[str, Any]) -> AsyncIterator[list[Here]]:
    """Donors in this process, each with its own directory, ports and keys; options as those of donor.py."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for given in options:
            option = dict(given)
            name = option.pop("name")
            made = option.pop("made", Made(name))
            mades = made if isinstance(made, list) else [made]
            live, speed = option.pop("live", True), option.pop("speed", 5.0)
            newest = mades[-1]
            at = LiveClock(
                newest.outer_step, newest.inner_step, newest.outer_step * 100 + newest.inner_step, speed, 100
            )
            identity = NodeIdentity.load_or_create(root / name)
            with open_store(root / name, max_hot=8) as store:
                for one in mades:
                    await asyncio.to_thread(fill, store, identity, one)
            joined = await stack.enter_async_context(
                joiner(root / name, live=at if live else None, name=name, **option)
            )
            found.append(Here(identity.node_id, str(joined.swarm.status()["listen"]), joined))
        yield found


def run(work: Coroutine[Any, Any, Any], limit_s: float = 60.0) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(limit_s):
            return await work

    return uvloop.run(bounded())


async def eventually(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Poll until the condition is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


class StrikingProxy:
    """A TCP proxy that calls `strike` when exactly `at` bytes have come from the server, and forwards no more."""

    def __init__(self, target: str, at: int, strike: Callable[[], None]) -> None:
        self._target = target.rpartition(":")
        self._left = at
        self._strike = strike
        self.struck = False
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._tasks: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            there, here = await asyncio.open_connection(self._target[0], int(self._target[2]))
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, here, counted=False))
                group.create_task(self._pump(there, writer, counted=True))
        except* OSError:
            pass
        finally:
            writer.close()
            here.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool) -> None:
        while data := await reader.read(65536):
            if counted and not self.struck:
                passing = data[: self._left]
                self._left -= len(passing)
                writer.write(passing)
                await writer.drain()
                if self._left == 0:
                    self.struck = True
                    self._strike()
                continue
            if not self.struck:
                writer.write(data)
                await writer.drain()
        if not self.struck or counted:
            writer.close()


def check_outer(joined: Joiner, snapshot_id: str | None, made: Made, roles: set[str]) -> None:
    """The kept snapshot verifies, its outer section is the made one, and of inner it holds chunks of `roles` only."""
    from swarm_kit import make_draft

    assert snapshot_id is not None
    with joined.store.open(snapshot_id) as source:
        source.verify()
        _, streams = make_draft(made)
        if "outer" in source.manifest.sections:
            entry = source.manifest.sections["outer"]
            for index, span in enumerate(entry.layout.chunks):
                assert bytes(source.chunk("outer", index)) == bytes(streams["outer"][span.offset : span.end])
        inner = source.manifest.sections["inner"]
        here = {index for index in range(len(inner.chunk_digests)) if source.has_chunk("inner", index)}
        assert here == set(inner.layout.chunks_of_roles(roles))


MOMENTS = {"exp_avg", "exp_avg_sq", "step"}
__all__ = [
    "MOMENTS",
    "Donor",
    "Donors",
    "Here",
    "Joiner",
    "StrikingProxy",
    "check_outer",
    "donors_here",
    "joiner",
    "run",
    "signal",
]
