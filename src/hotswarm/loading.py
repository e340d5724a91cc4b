"""Snapshots as dicts: loading them, putting them in, fetching a neighbour's, and comparing with the live state."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotswarm.backend import Backend
from hotswarm.capture.diloco import Counters
from hotswarm.capture.exchange import as_outer, from_dict, to_dict
from hotswarm.capture.incoming import IncomingState
from hotswarm.capture.restore import CLONE, RESUME, RestoreParts, joining
from hotswarm.capture.verify import differences
from hotswarm.checkpoint_types import CheckpointType
from hotswarm.config import parse_address
from hotswarm.errors import (
    CaptureError,
    ConfigError,
    Incompatible,
    IntegrityError,
    ManifestError,
    NoSnapshot,
    StoreError,
)
from hotswarm.ids import is_node_id
from hotswarm.legacy import is_legacy, load_legacy, pack_legacy
from hotswarm.p2p import P2PManager, addresses_of
from hotswarm.position import Position, join_position
from hotswarm.reach import Reach
from hotswarm.recovery import Recoverer
from hotswarm.store.base import SnapshotInfo, SnapshotSource

log = logging.getLogger(__name__)

RECOVERY = CheckpointType.RECOVERY.value


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The live state against a manifest. `differences` says in words what is not equal, empty when `ok`."""

    ok: bool
    snapshot_id: str
    sections: tuple[str, ...]
    """The sections that were compared: of a neighbour's snapshot, only the outer one is this trainer's state."""
    differences: tuple[str, ...] = ()


class Loader:
    """Dicts for one trainer."""

    def __init__(self, recoverer: Recoverer) -> None:
        self._recoverer = recoverer
        self._capturer = recoverer.capturer
        self._config = recoverer.config

    # ------------------------------------------------------------ to a dict

    def newest(self, backend: Backend, kinds: Iterable[str] | None = None) -> dict[str, Any] | None:
        """The newest complete snapshot that verifies; a damaged one is quarantined and the next older one taken."""
        arch = None
        with contextlib.suppress(CaptureError):
            arch = self._recoverer.request(None).arch
        infos = sorted(backend.snapshots(), key=lambda info: info.arch == arch)  # those of this model are tried first
        for info in reversed(infos):
            if not info.restorable or (kinds is not None and info.kind not in kinds):
                continue
            try:
                with contextlib.closing(backend.open(info.snapshot_id)) as source:
                    source.verify()
                    return self.as_dict(source, info.kind)
            except (IntegrityError, ManifestError) as error:
                log.warning("snapshot %s is damaged, an older one is used: %s", info.snapshot_id, error)
                backend.quarantine(info.snapshot_id, str(error))
            except (StoreError, NoSnapshot) as error:  # retired meanwhile, or unreadable
                log.warning("snapshot %s is skipped: %s", info.snapshot_id, error)
        return None

    def packed(self, backend: Backend, level: int) -> bytes | None:
        """The newest hot snapshot in the older class's file format; None when there is none."""
        checkpoint = self.newest(backend, kinds=(CheckpointType.HOT.value,))
        return None if checkpoint is None else pack_legacy(checkpoint, level)

    def at(self, path: Path, reach: Reach) -> dict[str, Any]:
        """What a path names: a file of the older class, a manifest, or what ends in a snapshot's id. StoreError."""
        if is_legacy(path):
            return load_legacy(path)
        with contextlib.closing(reach.open_path(path)) as source:
            source.verify()
            return self.as_dict(source, reach.kind_of(source.snapshot_id))

    def as_dict(self, source: SnapshotSource, kind: str | None) -> dict[str, Any]:
        """A verified snapshot as a dict. `kind`: the local one; a neighbour's state is "recovery"."""
        outer = kind == RECOVERY and self._config.rejoin != "clone" and "outer" in source.manifest.sections
        checkpoint = to_dict(source, kind=kind, model="outer" if outer else "inner")
        if checkpoint["checkpoint_type"] == CheckpointType.COLD.value:
            from hotswarm.metadata import layer_ids, model_hash

            checkpoint["model_hash"] = model_hash(source.manifest)
            checkpoint["layer_ids"] = layer_ids(self._capturer.state.model)
        return checkpoint

    def fetch(self, backend: Backend, p2p: P2PManager, peer_id: str) -> dict[str, Any]:
        """One peer's newest state. PeerUnavailable, PeerMisbehaved, RecoveryError, ConfigError."""
        mode = "clone" if self._config.rejoin == "clone" else "outer"
        peer = _address_of(p2p, peer_id)
        request = dataclasses.replace(self._recoverer.request(mode, peer=peer), inner="adopt")
        info = backend.fetch(peer, request)
        with contextlib.closing(backend.open(info.snapshot_id)) as source:
            source.verify()
            return self.as_dict(source, RECOVERY)

    # ------------------------------------------------------------ from a dict

    def apply(self, checkpoint: object, backend: Backend | None = None) -> None:
        """Restore from a dict; run it where the state is whole. Incompatible: nothing has changed.

        `backend` is asked for the swarm's live clock when a neighbour's outer state is put in.
        """
        if not isinstance(checkpoint, Mapping) or not checkpoint:
            raise Incompatible("the checkpoint dict is empty, so there is nothing to restore")
        incoming = from_dict(checkpoint, self._capturer.state)
        restorer = self._recoverer.restorer
        if checkpoint.get("checkpoint_type") != RECOVERY:
            restorer.apply(incoming, self._own_parts(checkpoint, incoming))
            self._capturer.restored_counters(incoming.counters)
            return
        engine = self._capturer.engine
        if engine is None or self._config.rejoin == "clone":
            restorer.apply(incoming, _present(CLONE, checkpoint, incoming))
            self._capturer.restored_counters(incoming.counters)
            return
        asked_at = time.monotonic()
        clock = backend.clock() if backend is not None else None
        there = incoming.counters
        place = Position(there.outer_step, there.inner_step, there.training_step)
        start = join_position(place, clock, engine.round_length, time.monotonic() - asked_at)
        counters = Counters(start.outer_step, start.inner_step, start.training_step)
        restorer.apply(as_outer(incoming), self._joining_parts(checkpoint, incoming, counters))
        self._recoverer.move_scheduler(there.training_step, start.training_step)
        self._capturer.restored_counters(counters)

    def _own_parts(self, checkpoint: Mapping[str, Any], incoming: IncomingState) -> RestoreParts:
        # A dict that hotswarm made has everything that was there; what it lacks is a difference worth refusing.
        return RESUME if "hotswarm" in checkpoint else _present(RESUME, checkpoint, incoming)

    def _joining_parts(
        self, checkpoint: Mapping[str, Any], incoming: IncomingState, counters: Counters
    ) -> RestoreParts:
        has_moments = "optimizer" in incoming.section("inner")
        if self._config.inner == "fresh":
            return _present(joining("empty", counters), checkpoint, incoming)
        take = has_moments and self._config.inner in {"auto", "adopt"}
        return _present(joining("take" if take else "keep", counters), checkpoint, incoming)

    # ------------------------------------------------------------ comparing

    def verify(self, backend: Backend) -> VerifyReport:
        """The live state against the newest snapshot here. Run it where the state is whole. NoSnapshot."""
        newest = next((info for info in reversed(backend.snapshots())), None)
        if newest is None:
            raise NoSnapshot("there is no snapshot to compare the live state with; take one first")
        with contextlib.closing(backend.open(newest.snapshot_id)) as source:
            manifest = source.manifest
        sections = tuple(name for name in _comparable(newest) if name in manifest.sections)
        found = differences(self._capturer.state.collect(), manifest, sections)
        return VerifyReport(not found, newest.snapshot_id, sections, tuple(found))


def _comparable(info: SnapshotInfo) -> tuple[str, ...]:
    if info.kind == RECOVERY and "outer" in info.all_sections:
        return ("outer",)
    return ("outer", "inner")


def _present(parts: RestoreParts, checkpoint: Mapping[str, Any], incoming: IncomingState) -> RestoreParts:
    """`parts` without what an older class's dict does not hold: that stays as it is."""
    inner = incoming.section("inner")
    has_optimizer = "optimizer" in inner
    return dataclasses.replace(
        parts,
        optimizer=parts.optimizer if has_optimizer or parts.optimizer != "take" else "keep",
        scheduler=parts.scheduler and has_optimizer and "scheduler" in checkpoint,
        extra=parts.extra and "extra" in inner,
        trainer=parts.trainer and "trainer" in inner,
        outer=parts.outer and ("outer" in incoming.sections or "trainer" in inner or parts.model == "outer"),
    )


def _address_of(p2p: P2PManager, peer_id: str) -> str:
    """A node id or `host:port`, from what the caller knows the peer by."""
    if is_node_id(peer_id):
        return peer_id
    announced = p2p.lookup(peer_id)
    if announced is not None:
        node = announced.get("node")
        found = addresses_of(announced) or ([node] if isinstance(node, str) and is_node_id(node) else [])
        if found:
            return found[0]
    try:
        return str(parse_address(peer_id, "peer_id"))
    except ConfigError as error:
        raise ConfigError(
            f"peer {peer_id!r} is neither a node id (40 hex digits) nor HOST:PORT, and it has announced no snapshot",
            "peer_id",
        ) from error
