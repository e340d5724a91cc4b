"""Fetching a neighbour's snapshot without a checkpointer: for rejoin code that wants to look before it restores."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from hotswarm.checkpoint_types import REJOIN, CheckpointConfig, CheckpointMetadata
from hotswarm.errors import ConfigError, HotswarmError, Incompatible, NoSnapshot
from hotswarm.ids import check_run
from hotswarm.link import Link, resolve
from hotswarm.metadata import metadata_of, model_hash, params_in
from hotswarm.snapshot.manifest import Manifest, SectionEntry
from hotswarm.store.base import SnapshotInfo, SnapshotSource
from hotswarm.swarm.control import ControlClient
from hotswarm.swarm.model import RecoverRequest

log = logging.getLogger(__name__)


class Snapshot:
    """A verified snapshot, open for reading: it stays readable whatever its daemon does. Close it, or use `with`."""

    def __init__(self, source: SnapshotSource, info: SnapshotInfo, mode: str) -> None:
        self._source = source
        self._info = info
        self._mode = mode

    @property
    def manifest(self) -> Manifest:
        """Its table of contents."""
        return self._source.manifest

    @property
    def metadata(self) -> CheckpointMetadata:
        """The same in the words of `CheckpointMetadata`; `layer_ids` is empty, because no manifest says them."""
        manifest = self.manifest
        return metadata_of(self._info, model_hash(manifest), num_params=params_in(manifest), layers=[])

    @property
    def sections(self) -> Mapping[str, SectionEntry]:
        """The sections of which something is here, by name. In mode outer `inner` lacks the donor's live parameters."""
        entries = self.manifest.sections
        return {
            name: entry
            for name, entry in entries.items()
            if any(self._source.has_chunk(name, index) for index in range(len(entry.chunk_digests)))
        }

    @property
    def path(self) -> Path:
        """The manifest file in the daemon's state directory; gone by now when that was a temporary one."""
        return self._info.path

    def state_dict(self) -> dict[str, Any]:
        """All of it as a dict with its own tensors on the CPU. In mode outer `model_state_dict` is the outer copy.

        Incompatible when a part was not fetched: `fetch_neighbor_snapshot(mode="clone")` fetches all.
        """
        from hotswarm.capture.exchange import to_dict

        outer = self._mode == "outer" and "outer" in self.manifest.sections
        return to_dict(self._source, kind=self._info.kind, model="outer" if outer else "inner")

    def restore_into(
        self, model: Any, optimizer: Any = None, diloco_trainer: Any = None, mode: str | None = None
    ) -> None:
        """Put it into a trainer, all or nothing; Incompatible names the first difference, and nothing has changed.

        With neither optimizer nor trainer, for a program that only evaluates, the model alone is restored: parameters
        (in mode outer those of the outer copy) and buffers.

        Mode outer begins the donor's round anew: model := outer copy, position 0. `clone` takes the donor's live state,
        `resume` its random states too. `mode` None is the mode that it was fetched with.
        """
        from hotswarm.capture.diloco import Counters, SeedAdapter
        from hotswarm.capture.incoming import incoming_from_source
        from hotswarm.capture.restore import CLONE, MODEL_ALONE, RESUME, Restorer, joining
        from hotswarm.capture.state import TrainingState

        mode = _checked(mode or self._mode)
        adapter = SeedAdapter(diloco_trainer, model) if diloco_trainer is not None else None
        given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer] if optimizer is not None else []
        inner = adapter.inner_optimizer if adapter is not None else None
        optimizers = given if inner is None or any(one is inner for one in given) else [inner]
        state = TrainingState(model, optimizers, scheduler=getattr(diloco_trainer, "scheduler", None), adapter=adapter)
        incoming = incoming_from_source(self._source)
        there = incoming.counters
        if not optimizers and adapter is None:
            outer = mode == "outer" and "outer" in incoming.sections
            parts = dataclasses.replace(MODEL_ALONE, model="outer" if outer else "inner")
        elif mode == "resume":
            parts = RESUME
        elif mode == "clone" or "outer" not in incoming.sections:
            parts = CLONE
        else:
            begin = Counters(there.outer_step, 0, there.training_step - there.inner_step)
            parts = joining("take", begin)
            try:
                Restorer(state).check(incoming, parts)
            except Incompatible:
                parts = joining("empty", begin)  # the donor's moments did not come along
        Restorer(state).apply(incoming, dataclasses.replace(parts, extra=False))

    def close(self) -> None:
        """Let go of its files. Harmless when done twice."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def fetch_neighbor_snapshot(
    peer: str | None = None,
    *,
    run: str | None = None,
    node: Any = None,
    mode: str = "outer",
    timeout: float = 60.0,
) -> Snapshot:
    """Fetch the freshest state from the swarm, or from one `peer` (node id or `host:port`); blocks.

    `node` names the daemon that fetches: a state directory, a control socket, a SwarmNode or NodeConfig; None is the
    one that runs on the configured state directory. Where none runs, one is started for the time of the call (by None
    in a temporary directory, when the configured one is only the default and does not exist).

    `timeout` bounds locating and choosing, and the time without progress, in seconds.

    Raises RecoveryError subclasses, PeerUnavailable, PeerMisbehaved, ConfigError, LocalFailure.
    """
    mode = _checked(mode)
    CheckpointConfig(recovery_timeout=timeout)  # the same rule, the same message
    link = resolve(node)
    if run is not None:
        link.config = link.config.replace(run=check_run(run))
    request = RecoverRequest(mode=mode, inner="adopt", timeout_s=timeout, peer=peer)  # type: ignore[arg-type]
    with contextlib.ExitStack() as until_fetched:
        if node is None and link.is_default and not link.state_dir.exists():
            place = until_fetched.enter_context(tempfile.TemporaryDirectory(prefix="hotswarm-"))
            link.config = link.config.replace(state_dir=Path(place))
        client = until_fetched.enter_context(_daemon(link))
        serves = client.status().get("run")
        if run is not None and serves != run:
            raise ConfigError(f"the daemon at {client.socket} serves run {serves!r}, not {run!r}; name another", "run")
        info = _fetched(client, peer, request)
        source = client.open_snapshot(info.snapshot_id)
    try:
        source.verify()
    except BaseException:
        source.close()
        raise
    return Snapshot(source, info, mode)


async def afetch_neighbor_snapshot(
    peer: str | None = None,
    *,
    run: str | None = None,
    node: Any = None,
    mode: str = "outer",
    timeout: float = 60.0,
) -> Snapshot:
    """`fetch_neighbor_snapshot`, awaitable: the loop goes on meanwhile."""
    return await asyncio.to_thread(fetch_neighbor_snapshot, peer, run=run, node=node, mode=mode, timeout=timeout)


def _fetched(client: ControlClient, peer: str | None, request: RecoverRequest) -> SnapshotInfo:
    if peer is not None:
        return client.fetch(peer, request)
    outcome = client.recover(request)
    if outcome.snapshot_id is None:
        raise NoSnapshot(f"no neighbour offers a snapshot: {outcome.report.reason}")
    found = next((info for info in client.snapshots() if info.snapshot_id == outcome.snapshot_id), None)
    if found is None:
        raise Incompatible(f"snapshot {outcome.snapshot_id} went while it was being opened; try again")
    return found


@contextlib.contextmanager
def _daemon(link: Link) -> Iterator[ControlClient]:
    """The daemon that runs, or one for the time of the call, which ends with it (or with this process)."""
    running = link.find()
    if running is not None or link.socket is not None:
        yield running if running is not None else link.find_or_spawn()
        return
    from hotswarm.swarm.spawn import start_daemon

    started = start_daemon(link.config, owner_pid=os.getpid())
    try:
        yield started.client
    finally:
        try:
            started.client.stop()
        except HotswarmError as error:
            log.warning("the daemon started for a fetch did not take the request to stop: %s", error)
            if started.process is not None:
                started.process.terminate()
        if started.process is not None:
            started.process.wait()


def _checked(mode: str) -> str:
    if mode not in REJOIN:
        raise ConfigError(f"mode must be one of {', '.join(REJOIN)}, not {mode!r}", "mode")
    return mode
