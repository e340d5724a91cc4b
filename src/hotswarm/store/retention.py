"""Which snapshots go. Pure: it is told what there is and says what is to be deleted.

Kept are the newest `max_hot`, `max_cold` and `max_recovery` of each kind. Whatever counts and bytes say, never deleted
are the newest snapshot that can be restored, the newest such one of this node's own, and what the caller protects:
pinned snapshots, those that are being read or served, and one just fetched.

Kept besides, as long as the bytes allow, is the newest snapshot with the outer section of the round before, where none
of the others has it: neighbours that are one round behind can then still be served. And the last state of the other
two models that were trained here most recently: a run with another model in the same folder is often a mistake.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hotswarm.ids import SnapshotId
from hotswarm.store.base import SnapshotInfo

OTHER_MODELS = 2


@dataclass(frozen=True, slots=True)
class Retention:
    """How much to keep. `max_bytes` counts each pack once, however many snapshots share it; None is no limit."""

    max_hot: int = 5
    max_cold: int = 3
    max_recovery: int = 2  # the one being restored, and the one before, should that turn out damaged
    max_bytes: int | None = None

    def doomed(
        self,
        snapshots: Sequence[SnapshotInfo],
        protected: Collection[SnapshotId],
        packs: Mapping[SnapshotId, Mapping[str, int]],
    ) -> list[SnapshotId]:
        """Ids to delete, oldest first. `snapshots` oldest first; `packs`: the bytes of each pack a snapshot needs."""
        safe = set(protected) | self._never(snapshots)
        kept = {info.snapshot_id for kind in ("hot", "cold", "recovery") for info in self._newest(snapshots, kind)}
        kept |= _round_before(snapshots, kept | safe) | _other_models(snapshots)
        gone = [info.snapshot_id for info in snapshots if info.snapshot_id not in kept | safe]
        if self.max_bytes is not None:
            left = [info.snapshot_id for info in snapshots if info.snapshot_id not in gone]
            for candidate in list(left):
                if _union_bytes(packs, left) <= self.max_bytes:
                    break
                if candidate not in safe:
                    left.remove(candidate)
                    gone.append(candidate)
        return gone

    def _never(self, snapshots: Sequence[SnapshotInfo]) -> set[SnapshotId]:
        restorable = [info for info in snapshots if info.restorable]
        own = [info for info in restorable if info.own]
        return {group[-1].snapshot_id for group in (restorable, own) if group}

    def _newest(self, snapshots: Sequence[SnapshotInfo], kind: str) -> list[SnapshotInfo]:
        count = {"hot": self.max_hot, "cold": self.max_cold, "recovery": self.max_recovery}[kind]
        of_kind = [info for info in snapshots if info.kind == kind]
        return of_kind[max(len(of_kind) - count, 0) :]


def _round_before(snapshots: Sequence[SnapshotInfo], kept: Collection[SnapshotId]) -> set[SnapshotId]:
    """The newest snapshot with the outer section of the newest round but one, unless one of those kept has it."""
    whole = [info for info in snapshots if info.outer_digest is not None and "outer" in info.complete_sections]
    before = [info for info in whole if info.outer_step < whole[-1].outer_step]
    if not before or any(info.outer_step == before[-1].outer_step and info.snapshot_id in kept for info in before):
        return set()
    return {before[-1].snapshot_id}


def _other_models(snapshots: Sequence[SnapshotInfo]) -> set[SnapshotId]:
    """The newest own snapshot of each model but the one that was captured last, of two such models at most."""
    newest = {info.arch: info for info in snapshots if info.own and info.restorable}
    by_time = sorted(newest.values(), key=lambda info: (info.time_ms, info.seq))
    return {info.snapshot_id for info in by_time[-1 - OTHER_MODELS : -1]}


def _union_bytes(packs: Mapping[SnapshotId, Mapping[str, int]], ids: Sequence[SnapshotId]) -> int:
    union: dict[str, int] = {}
    for snapshot_id in ids:
        union.update(packs[snapshot_id])
    return sum(union.values())
