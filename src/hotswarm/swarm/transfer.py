"""What a decision names, brought here: manifests, parts of sections, donors that fail on the way, and the commit.

    outer   the whole outer section, from everyone who holds it at once; of the inner section, from one donor, the
            buffers always and everything but the parameters when its moments are adopted: never its live parameters
    clone   the whole inner section from one donor too; chunks that its outer section has already are copied from there

With inner="auto" the outer section comes first, and the rate at which it came decides whether moments are worth it. A
donor that is lost takes nothing with it but its inner section, which begins again at the next donor.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hotswarm.errors import Incompatible, LocalFailure, NotAuthorised, PeerMisbehaved, PeerUnavailable, StoreError
from hotswarm.snapshot.manifest import Manifest, SectionEntry, SignedManifest
from hotswarm.snapshot.sections import ARCH_ROLES, first_difference
from hotswarm.snapshot.tree import Leaf, TensorSpec
from hotswarm.store.base import SnapshotInfo
from hotswarm.store.files import FileStore
from hotswarm.store.partial import PartialSection
from hotswarm.swarm.choose import Decision, OwnState, Source, choose_inner
from hotswarm.swarm.clocks import swarm_clock
from hotswarm.swarm.fetch import DonorsLost, Fetch, Part
from hotswarm.swarm.model import Description, InnerSource, RecoverRequest, SectionReport
from hotswarm.swarm.neighbours import Neighbours
from hotswarm.swarm.plan_types import SectionKey
from hotswarm.swarm.strikes import Strikes

log = logging.getLogger(__name__)

MANIFEST_TIMEOUT_S = 15.0
DISK_MARGIN = 64 << 20  # bytes that stay free
PREFILL_SNAPSHOTS = 3  # newest local ones that are searched for chunks
MAX_OUTER_SHARE = 16  # bytes of an outer section per byte of the model; float32 copy and momentum of bfloat16 take 4
OUTER_SLACK_BYTES = 1 << 20
INNER_ROUNDS = 2  # how often the list of inner donors is gone through
INNER_PAUSE_S = 1.0


@dataclass(slots=True)
class Ledger:
    """What a recovery has cost so far, over all of its attempts."""

    strikes: Strikes
    rejected: dict[str, str] = field(default_factory=dict)  # peer -> reason
    donors: dict[str, int] = field(default_factory=dict)  # node -> verified bytes
    sections: dict[str, SectionReport] = field(default_factory=dict)
    wasted: int = 0
    reused: int = 0
    inner_donor: str = ""


class Transfer:
    """One attempt at fetching what a decision names. `run`, then `close` in any case."""

    def __init__(
        self,
        store: FileStore,
        neighbours: Neighbours,
        request: RecoverRequest,
        ledger: Ledger,
        decision: Decision,
        answers: Sequence[Description],
        own: OwnState,
        progress: Callable[[dict[str, object]], None],
    ) -> None:
        """`answers`: of all nodes that may donate."""
        self._store = store
        self._neighbours = neighbours
        self._request = request
        self._ledger = ledger
        self._decision = decision
        self._answers = answers
        self._own = own
        self._clone = decision.action == "clone"
        self._fetch = Fetch(neighbours.client, timeout_s=request.timeout_s, progress=progress)
        self._outer: PartialSection | None = None
        self._inner: PartialSection | None = None
        self._inner_source: InnerSource = "own" if own.captured and own.captured.has_inner else "fresh"
        self._signed: SignedManifest | None = None
        self._failed_inner: dict[str, str] = {}
        self._inner_tries = 0
        self._copied: list[int] = []  # chunks of inner that are copied from outer
        self._keys: list[SectionKey] = []  # of the inner section's parts

    async def run(self) -> tuple[SignedManifest, InnerSource]:
        """Fetch, keep, and say which snapshot it is and where moments come from."""
        source, signed = await self._first_manifest()
        self._signed = signed
        refuse_other_model(self._request, signed.manifest, source.node)
        adopt = self._decide_inner(signed, None)
        if adopt is not None:
            self._inner_source = adopt
        if self._already_here(signed):
            return signed, self._inner_source
        parts = []
        outer = signed.manifest.sections.get("outer")
        if outer is not None:
            parts.append(await self._outer_part(outer))
        parts += await self._inner_parts(signed, source)
        self._check_disk(parts)
        self._fetch.add(*parts)
        await self._fetch.run(self._on_lost)
        if adopt is None:
            await self._fetch_moments_if_quick()
        return await self._keep(), self._inner_source

    async def close(self) -> None:
        """End streams and threads, note what they cost and who failed. What was verified stays in partial/."""
        await self._fetch.close()
        for partial in (self._outer, self._inner):
            if partial is not None:
                partial.close()
        ledger, fetch = self._ledger, self._fetch
        ledger.wasted += fetch.bytes_wasted
        for node, nbytes in fetch.by_donor.items():
            ledger.donors[node] = ledger.donors.get(node, 0) + nbytes
        ledger.rejected.update({**fetch.problems, **self._failed_inner})
        for node in fetch.misbehaved:
            ledger.strikes.add(node, fetch.problems.get(node, "it misbehaved"))

    # ------------------------------------------------------------ manifests

    async def _first_manifest(self) -> tuple[Source, SignedManifest]:
        candidates = [*self._ranked_inner(), *self._decision.outer_donors]
        for source in candidates:
            signed = await self._manifest(source)
            if signed is not None:
                return source, signed
        raise DonorsLost("outer" if self._decision.outer_donors else "inner", self._failed_inner)

    def _ranked_inner(self) -> list[Source]:
        """Inner donors, those first whose inner section is half here already from an earlier try."""
        begun = {path.name for path in self._store.folders.partial.glob("*")}

        def is_begun(source: Source) -> bool:
            section = source.offer.section("inner")
            return section is not None and section.digest.hex() in begun

        return sorted(self._decision.inner, key=lambda source: not is_begun(source))

    async def _manifest(self, source: Source) -> SignedManifest | None:
        """The manifest of an offer, checked against it; None, with the reason kept, when this donor fails."""
        if source.node in self._failed_inner:
            return None
        offer = source.offer
        try:
            client = self._neighbours.client(source.node)
            signed = await client.manifest(offer.snapshot_id, min(MANIFEST_TIMEOUT_S, self._request.timeout_s))
            manifest = signed.manifest
            state = self._decision.state
            wanted = (offer.outer_step, offer.inner_step, offer.training_step, offer.arch, offer.outer_digest)
            found = (
                manifest.outer_step,
                manifest.inner_step,
                manifest.training_step,
                manifest.arch,
                manifest.outer_digest,
            )
            if found[:4] != wanted[:4] or (state is not None and manifest.outer_digest != state.digest):
                raise PeerMisbehaved(source.node, "its manifest is not what it offered")
        except PeerMisbehaved as error:
            self._failed_inner[source.node] = error.evidence
            self._ledger.strikes.add(source.node, error.evidence)
        except (PeerUnavailable, NotAuthorised) as error:
            self._failed_inner[source.node] = str(error)
        else:
            return signed
        return None

    # ------------------------------------------------------------ what is wanted

    def _decide_inner(self, signed: SignedManifest, rate: float | None) -> InnerSource | None:
        """Where moments come from; None while that depends on a rate that is not known yet."""
        if self._clone:
            return "adopt"
        inner = signed.manifest.sections.get("inner")
        moments = moments_of(inner) if inner is not None else []
        if self._request.inner == "auto" and inner is not None and moments and rate is None:
            return None
        seconds = None
        if inner is not None and rate:
            seconds = sum(inner.layout.chunks[index].length for index in moments) / rate
        has_own = self._own.captured is not None and self._own.captured.has_inner
        donors = sum(1 for source in self._decision.inner if source.node not in self._failed_inner)
        source, why = choose_inner(
            self._request.inner,
            donors=donors,
            has_own=has_own,
            adopt_seconds=seconds,
            round_seconds=self._request.round_seconds or _round_seconds(self._answers),
        )
        log.info("moments: %s (%s)", source, why)
        return source

    async def _outer_part(self, entry: SectionEntry) -> Part:
        partial = await self._open_partial(entry)
        self._outer = partial
        holders = [
            answer.node
            for answer in self._answers
            if any((section := offer.section("outer")) and section.digest == entry.digest for offer in answer.offers)
        ]
        donors = [node for node in holders if node not in self._failed_inner]
        return Part(SectionKey(entry.digest), entry, partial, range(len(entry.chunk_digests)), donors, scan=True)

    async def _inner_parts(self, signed: SignedManifest, source: Source) -> list[Part]:
        """The parts of the inner section that are wanted of its donor now."""
        entry = signed.manifest.sections.get("inner")
        self._inner = None
        self._keys, self._copied = [], []
        if entry is None or source.offer.section("inner") is None:
            return []
        wanted = self._model_chunks(signed)
        if self._clone:
            wanted = list(range(len(entry.chunk_digests)))
        elif self._inner_source == "adopt":
            wanted = sorted({*wanted, *moments_of(entry)})
        if not wanted and self._request.inner != "auto":
            return []
        self._inner = await self._open_partial(entry)
        if self._clone and self._outer is not None:
            have = set(self._outer.entry.chunk_digests)
            self._copied = [index for index in wanted if entry.chunk_digests[index] in have]
            wanted = [index for index in wanted if entry.chunk_digests[index] not in have]
        return [self._inner_part(entry, "inner", wanted, source.node)]

    @staticmethod
    def _model_chunks(signed: SignedManifest) -> list[int]:
        """Of the inner section's model what the outer section cannot give: buffers, and parameters that are frozen."""
        inner, outer = signed.manifest.sections.get("inner"), signed.manifest.sections.get("outer")
        if inner is None:
            return []
        shared = {tensor.path[1:] for tensor in outer.layout.tensors if tensor.role == "param"} if outer else set()
        return inner.layout.chunks_of(
            lambda tensor: tensor.role == "buffer" or (tensor.role == "param" and tensor.path[1:] not in shared)
        )

    def _inner_part(self, entry: SectionEntry, what: str, indexes: Sequence[int], node: str) -> Part:
        assert self._inner is not None
        key = SectionKey(entry.digest + what.encode())
        self._keys.append(key)
        self._fetch.inner_donor = self._ledger.inner_donor = node
        others = any(s.node != node and s.node not in self._failed_inner for s in self._decision.inner)
        return Part(key, entry, self._inner, indexes, [node], replaceable=others)

    async def _open_partial(self, entry: SectionEntry) -> PartialSection:
        """Go on where an earlier fetch was, and take what other snapshots here have."""

        def open_and_fill() -> tuple[PartialSection, int]:
            partial = self._store.partial(entry)
            taken = partial.bytes_here
            for info in reversed(self._store.snapshots()[-PREFILL_SNAPSHOTS:]):
                if not partial.complete:
                    try:
                        with self._store.open(info.snapshot_id) as source:
                            taken += partial.prefill(source)
                    except StoreError as error:
                        log.info("nothing is taken over from snapshot %s: %s", info.snapshot_id, error)
            return partial, taken

        partial, taken = await asyncio.to_thread(open_and_fill)
        self._ledger.reused += taken
        return partial

    def _already_here(self, signed: SignedManifest) -> bool:
        """Whether the store holds that very snapshot with all that is wanted of it."""
        if all(info.snapshot_id != signed.snapshot_id for info in self._store.snapshots()):
            return False
        inner = signed.manifest.sections.get("inner")
        wanted = set(self._model_chunks(signed))
        if inner is not None and (self._clone or self._inner_source == "adopt" or self._request.inner == "auto"):
            wanted |= set(range(len(inner.chunk_digests)) if self._clone else moments_of(inner))
            self._inner_source = "adopt"
        try:
            with self._store.open(signed.snapshot_id) as source:
                outer = signed.manifest.sections.get("outer")
                whole = outer is None or all(source.has_chunk("outer", i) for i in range(len(outer.chunk_digests)))
                return whole and all(source.has_chunk("inner", index) for index in wanted)
        except StoreError:
            return False

    def _check_disk(self, parts: Sequence[Part]) -> None:
        needed = sum(nbytes for part in parts for _, nbytes in part.missing())
        disk = os.statvfs(self._store.root)
        free = disk.f_bavail * disk.f_frsize
        if needed + DISK_MARGIN > free:
            raise LocalFailure(
                f"{self._store.root} has {free >> 20} MiB free, and {needed >> 20} MiB are to be fetched; make room"
            )

    # ------------------------------------------------------------ when donors fail

    async def _on_lost(self, key: SectionKey, reasons: Mapping[str, str]) -> None:
        if key not in self._keys:
            raise DonorsLost("outer", reasons)
        self._failed_inner.update(reasons)
        log.warning("the inner donor is lost (%s); another one is asked", dict(reasons))
        for _ in range(INNER_ROUNDS):
            for source in self._ranked_inner():
                signed = await self._manifest(source)
                if signed is not None:
                    await self._switch_inner(source, signed)
                    return
            await asyncio.sleep(INNER_PAUSE_S)
            barred = self._fetch.misbehaved
            self._failed_inner = {node: why for node, why in self._failed_inner.items() if node in barred}
            self._inner_tries += 1
            if self._inner_tries > INNER_ROUNDS:
                break
        raise DonorsLost("inner", {**reasons, **self._failed_inner})

    async def _switch_inner(self, source: Source, signed: SignedManifest) -> None:
        old, before = list(self._keys), self._inner
        refuse_other_model(self._request, signed.manifest, source.node)
        self._signed = signed
        self._fetch.replace(old, await self._inner_parts(signed, source))
        if before is not None and before is not self._inner:
            before.sync()  # kept for a day: that donor may come back

    # ------------------------------------------------------------ the end

    async def _fetch_moments_if_quick(self) -> None:
        """inner="auto": the rate of what came so far decides."""
        assert self._signed is not None
        node = self._fetch.inner_donor
        rate = self._fetch.rate_of(node) if node else None
        entry = self._signed.manifest.sections.get("inner")
        decided = self._decide_inner(self._signed, rate or float("inf"))
        self._inner_source = decided or "fresh"
        if decided == "adopt" and entry is not None and self._inner is not None:
            self._fetch.add(self._inner_part(entry, "moments", moments_of(entry), node))
            await self._fetch.run(self._on_lost)

    async def _keep(self) -> SignedManifest:
        signed = self._signed
        assert signed is not None
        partials: dict[str, PartialSection] = {}
        if self._outer is not None:
            partials["outer"] = self._outer
        if self._inner is not None:
            partials["inner"] = self._inner
        self._report_sections(partials)

        def keep() -> SnapshotInfo:
            for index in self._copied:
                self._copy_from_outer(index)
            return self._store.add_fetched(signed, partials)

        info = await asyncio.to_thread(keep)
        log.info("kept snapshot %s of outer step %d", info.snapshot_id, info.outer_step)
        return signed

    def _copy_from_outer(self, index: int) -> None:
        assert self._inner is not None
        assert self._outer is not None
        digest = self._inner.entry.chunk_digests[index]
        data = self._outer.chunk(self._outer.entry.chunk_digests.index(digest))
        self._inner.put(index, data)
        self._ledger.reused += len(data)

    def _report_sections(self, partials: Mapping[str, PartialSection]) -> None:
        for name, partial in partials.items():
            tally = self._fetch.tallies.get(name)
            old = self._ledger.sections.get(name)
            self._ledger.sections[name] = SectionReport(
                raw=partial.entry.raw_bytes,
                chunks=len(partial.entry.chunk_digests),
                fetched=(tally.fetched if tally else 0) + (old.fetched if old else 0),
                fetched_chunks=(tally.fetched_chunks if tally else 0) + (old.fetched_chunks if old else 0),
                digest=partial.entry.digest,
            )


def refuse_other_model(request: RecoverRequest, manifest: Manifest, node: str) -> None:
    """Incompatible, before a tensor byte moves, when a snapshot is of another model than the one that asks.

    Parsing has made sure that the fingerprint is that of the inner section; the outer one is compared here.
    """
    difference = None
    if request.arch and manifest.arch and request.arch != manifest.arch:
        difference = "the fingerprints differ"
    if request.names is not None:
        mine = [Leaf(("model", n.name), TensorSpec(n.dtype, n.shape), n.role) for n in request.names]
        if difference is not None:
            section = manifest.sections.get("inner") or manifest.sections.get("outer")
            theirs = [leaf for leaf in section.leaves if leaf.role in ARCH_ROLES] if section else []
            difference = first_difference(mine, theirs) or difference
        difference = difference or _outer_difference(mine, manifest)
    if difference is not None:
        raise Incompatible(f"the snapshot of node {node} is of another model: {difference}; nothing was fetched")


def _outer_difference(mine: Sequence[Leaf], manifest: Manifest) -> str | None:
    """Where the outer copy or its momentum cannot be one of this model. Dtypes may differ: an outer copy may be wider
    than the live parameters; and a name that this model lacks may be one of the trainer's own, within bounds.
    """
    outer = manifest.sections.get("outer")
    if outer is None:
        return None
    live = {leaf.path[1]: leaf.what for leaf in mine if type(leaf.what) is TensorSpec}
    for leaf in outer.leaves:
        if type(leaf.what) is TensorSpec and len(leaf.path) == 2:
            here = live.get(leaf.path[1])
            if here is not None and here.shape != leaf.what.shape:
                return f"{leaf.path[1]}: {here} here, {leaf.what} in {leaf.path[0]} of the outer section there"
    most = MAX_OUTER_SHARE * sum(spec.nbytes for spec in live.values()) + OUTER_SLACK_BYTES
    if outer.raw_bytes > most:
        return f"its outer section has {outer.raw_bytes} bytes, and this model's can have {most} at most"
    return None


def moments_of(entry: SectionEntry) -> list[int]:
    """Chunks of an inner section that are neither the live parameters nor buffers."""
    return entry.layout.chunks_of(lambda tensor: tensor.role not in ARCH_ROLES)


def _round_seconds(answers: Sequence[Description]) -> float | None:
    """How long a round takes, by the clocks of those who know."""
    known = (a for a in answers if a.clock is not None and a.clock.round_length > 0 and a.clock.steps_per_s > 0)
    clock = swarm_clock(known)
    return clock.round_length / clock.steps_per_s if clock is not None else None
