"""Which snapshots go. Pure: it is told what there is and says what is to be deleted.

Kept are the `max_hot`, `max_cold` and `max_recovery` snapshots of each kind that were captured last: a training that
begins again in an old folder keeps its new snapshots, though the old ones have larger steps. Whatever counts and bytes
say, never deleted are the newest snapshot that can be restored, the newest such one of this node's own, the one that
was captured last, and what the caller protects: pinned snapshots, those that are being read or served, and one just
fetched.

Kept besides, as long as the bytes allow, is the newest snapshot with the outer section of the round before, where none
of the others has it: neighbours that are one round behind can then still be served.

All of that holds for each model (arch fingerprint) by itself. A run with another model in the same folder, which is
often a mistake, takes nothing away from the one before, and is not pushed out by counters that were further on there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hotswarm.ids import SnapshotId
from hotswarm.store.base import SnapshotInfo


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
        kept: set[SnapshotId] = set()
        for model in _by_model(snapshots):
            kept |= {info.snapshot_id for kind in ("hot", "cold", "recovery") for info in self._newest(model, kind)}
            kept |= _round_before(model, kept | safe)
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
        restorable = _by_model([info for info in snapshots if info.restorable])
        own = _by_model([info for group in restorable for info in group if info.own])
        captured_last = sorted((info for group in own for info in group), key=_captured)
        return {group[-1].snapshot_id for group in (*restorable, *own, captured_last) if group}

    def _newest(self, snapshots: Sequence[SnapshotInfo], kind: str) -> list[SnapshotInfo]:
        count = {"hot": self.max_hot, "cold": self.max_cold, "recovery": self.max_recovery}[kind]
        of_kind = sorted((info for info in snapshots if info.kind == kind), key=_captured)
        return of_kind[max(len(of_kind) - count, 0) :]


def _by_model(snapshots: Iterable[SnapshotInfo]) -> list[list[SnapshotInfo]]:
    """The listing taken apart by arch fingerprint, each in its order."""
    models: dict[bytes, list[SnapshotInfo]] = {}
    for info in snapshots:
        models.setdefault(info.arch, []).append(info)
    return list(models.values())


def _captured(info: SnapshotInfo) -> tuple[int, int, int]:
    """Own snapshots in the order of their capture; fetched ones, whose sequence is their donor's, by steps."""
    return (info.seq, 0, 0) if info.own else info.order_key


def _round_before(snapshots: Sequence[SnapshotInfo], kept: Collection[SnapshotId]) -> set[SnapshotId]:
    """The newest snapshot with the outer section of the newest round but one, unless one of those kept has it."""
    whole = [info for info in snapshots if info.outer_digest is not None and "outer" in info.complete_sections]
    before = [info for info in whole if info.outer_step < whole[-1].outer_step]
    if not before or any(info.outer_step == before[-1].outer_step and info.snapshot_id in kept for info in before):
        return set()
    return {before[-1].snapshot_id}


def _union_bytes(packs: Mapping[SnapshotId, Mapping[str, int]], ids: Sequence[SnapshotId]) -> int:
    union: dict[str, int] = {}
    for snapshot_id in ids:
        union.update(packs[snapshot_id])
    return sum(union.values())
