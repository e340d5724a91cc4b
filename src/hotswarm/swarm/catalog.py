"""What this node can serve now: offers and vouchers, read from the store and kept until something changes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hotswarm.errors import HotswarmError
from hotswarm.store.base import SnapshotInfo
from hotswarm.store.files import FileStore
from hotswarm.swarm.agreement import VOUCHERS_KEPT
from hotswarm.swarm.choose import LocalSnapshot
from hotswarm.swarm.describe import MAX_OFFERS
from hotswarm.swarm.model import Offer, SectionOffer, Voucher
from hotswarm.swarm.vouchers import FILE, VoucherBook

FRESH_S = 1.0  # retention may have deleted something; whoever asks for it is told, so a second old is good enough


@dataclass(frozen=True, slots=True)
class Held:
    """A snapshot here, and its sections that are complete."""

    info: SnapshotInfo
    sections: Mapping[str, SectionOffer]


class Catalog:
    """The store, seen from outside. Thread-safe."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._held: tuple[Held, ...] = ()
        self._known: dict[str, Mapping[str, SectionOffer]] = {}
        self._read_at = float("-inf")
        self._book: VoucherBook | None = None

    async def refresh(self, *, max_age_s: float = 0.0) -> None:
        """Look into the store, off the loop, unless that was done within `max_age_s`."""
        if time.monotonic() - self._read_at > max_age_s:
            await asyncio.to_thread(self.refresh_now)

    def refresh_now(self) -> None:
        """Look into the store. Reads files: not for the loop."""
        with self._lock:
            if self._book is None:
                self._book = VoucherBook(self._store.folders.base / FILE)
            abandoned = self._book.abandoned
            infos = [info for info in self._store.snapshots() if info.snapshot_id not in abandoned]
            held = []
            for info in infos:
                sections = self._sections(info)
                if sections is not None:
                    held.append(Held(info, sections))
            self._known = {h.info.snapshot_id + str(sorted(h.sections)): h.sections for h in held}
            self._held = tuple(held)
            outer = {h.info.outer_step: h.sections["outer"].digest for h in held if "outer" in h.sections}
            self._book.note(outer)
            self._read_at = time.monotonic()

    def go_back(self, outer_step: int) -> None:
        """This node was told to go back to that outer step: what it holds beyond is abandoned. Writes a file."""
        self.refresh_now()
        with self._lock:
            ahead = [held.info.snapshot_id for held in self._held if held.info.outer_step > outer_step]
            if self._book is not None and ahead:
                self._book.go_back(outer_step, ahead)
        self.refresh_now()

    def _sections(self, info: SnapshotInfo) -> Mapping[str, SectionOffer] | None:
        """None when the snapshot went away, or was found damaged, in this very moment."""
        known = self._known.get(info.snapshot_id + str(sorted(info.complete_sections)))
        if known is not None:
            return known
        try:
            manifest = self._store.signed(info.snapshot_id).manifest
        except HotswarmError:
            return None
        return {
            name: SectionOffer(name, manifest.sections[name].digest, manifest.sections[name].raw_bytes)
            for name in sorted(info.complete_sections)
        }

    @property
    def held(self) -> tuple[Held, ...]:
        """What is here, oldest first."""
        return self._held

    @property
    def voucher_digests(self) -> Mapping[int, bytes]:
        """This node's outer history: digests by step."""
        return self._book.held if self._book is not None else {}

    def offers(self) -> tuple[Offer, ...]:
        """What can be served, newest first. `private` is never offered: it is nobody else's."""
        now_ms = time.time_ns() // 1_000_000
        found = []
        for held in reversed(self._held[-MAX_OFFERS:]):
            sections = tuple(section for name, section in held.sections.items() if name != "private")
            info = held.info
            if sections:
                offer = Offer(
                    snapshot_id=info.snapshot_id,
                    kind=info.kind,
                    outer_step=info.outer_step,
                    inner_step=info.inner_step,
                    training_step=info.training_step,
                    seq=info.seq,
                    age_ms=max(0, now_ms - info.time_ms),
                    arch=info.arch,
                    sections=sections,
                    own=info.own,
                )
                found.append(offer)
        return tuple(found)

    def vouchers(self) -> tuple[Voucher, ...]:
        """This node's word on its last 16 outer steps, newest first."""
        servable = {held.sections["outer"].digest for held in self._held if "outer" in held.sections}
        steps = sorted(self.voucher_digests.items(), reverse=True)[:VOUCHERS_KEPT]
        return tuple(Voucher(step, digest, digest in servable) for step, digest in steps)

    def find(self, section_digest: bytes) -> tuple[SnapshotInfo, str] | None:
        """The newest snapshot here with that section complete, and the section's name."""
        for held in reversed(self._held):
            for name, section in held.sections.items():
                if section.digest == section_digest:
                    return held.info, name
        return None

    def local(self, arch: bytes | None) -> tuple[LocalSnapshot, ...]:
        """What could be restored here without any peer: for a model of this architecture, or for any."""
        return tuple(
            LocalSnapshot(
                snapshot_id=held.info.snapshot_id,
                outer_step=held.info.outer_step,
                inner_step=held.info.inner_step,
                training_step=held.info.training_step,
                seq=held.info.seq,
                outer_digest=held.info.outer_digest,
                has_inner="inner" in held.sections,
                own=held.info.own,
            )
            for held in self._held
            if held.info.restorable and (not arch or not held.info.arch or held.info.arch == arch)
        )
