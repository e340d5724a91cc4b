"""The copy: from live tensors into an arena slot, as fast as memory goes, with the trainer standing still.

Where each tensor goes is worked out once per shape of the state tree (names, dtypes, shapes) and remembered. A snapshot
is then one pass of plain memory copies, shared by this thread and a helper, without the GIL and without new memory.
Tensors that are not flat (strided, expanded, on an accelerator) are copied by torch into a view of the slot.
"""

from __future__ import annotations

import operator
import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from hotswarm.capture.diloco import Counters
from hotswarm.capture.state import StateTree
from hotswarm.capture.tensors import copy_elements, is_flat
from hotswarm.errors import CaptureError, ManifestError
from hotswarm.snapshot.chunks import GROUP_ALIGN, layout
from hotswarm.snapshot.draft import DraftEncoder, DraftManifest
from hotswarm.snapshot.sections import SectionDraft, arch_fingerprint
from hotswarm.snapshot.tree import Leaf, TensorSpec
from hotswarm.store.arena import Arena, Slot
from hotswarm.store.mapping import memmove

_PIECE_BYTES = 4 << 20  # of one copy call: long enough that taking the GIL in between costs nothing
_HELPED_BYTES = 8 << 20  # below this a helper thread gains nothing (1 thread: 13 GB/s, 2: 23)
_PROBE_EVERY = 16  # captures between two tries of the slower way
_TABLE_SLACK = 2  # the leaf table may grow (a scheduler's lists) before a larger arena is needed

_Job = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one slot must have."""

    slot_bytes: int
    table_bytes: int


class ArenaTooSmallError(CaptureError):
    """The state has outgrown the arena (an optimizer's first step makes its moments). `need` says by how much."""

    def __init__(self, need: Need) -> None:
        super().__init__(
            f"the training state needs {need.slot_bytes} bytes per slot and the arena has less; attach a larger one"
        )
        self.need = need


@dataclass(frozen=True, slots=True)
class Label:
    """What the manifest says beyond the state itself. `kind` is "hot" or "cold"."""

    run: str
    label: str
    kind: str = "hot"
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Staged:
    """A snapshot that lies READY in its slot."""

    slot: Slot
    seq: int
    draft: DraftManifest
    nbytes: int
    stall_s: float

    @property
    def counters(self) -> Counters:
        """Read in the same instant as the tensors."""
        return Counters(self.draft.outer_step, self.draft.inner_step, self.draft.training_step)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the tensors of one tree shape go: in tree order, section by section."""

    leaves: tuple[Leaf, ...]  # tensors and aliases: what the plan depends on
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sections: dict[str, tuple[int, int]]
    slot_bytes: int
    nbytes: int
    arch: bytes


class Stager:
    """Copies states into an arena. One per trainer; used by one thread at a time."""

    def __init__(self) -> None:
        self._plan: _Plan | None = None
        self._encoder = DraftEncoder()
        self._bases: dict[int, Tensor] = {}
        self._bases_of: Arena | None = None
        self._helper: ThreadPoolExecutor | None = None
        self._pace = _Pace()
        self._pid = os.getpid()

    def need(self, state: StateTree) -> Need:
        """What an arena must offer for this state."""
        plan = self._plan_for(state)
        table = len(self._encoder.encode(self._draft(state, plan, Label("x" * 64, "", "recovery"), seq=2**62)))
        return Need(plan.slot_bytes, _TABLE_SLACK * table + 65536)

    def stage(self, state: StateTree, arena: Arena, label: Label, seq: int) -> Staged | None:
        """Copy `state` into a slot and mark it READY. None when no slot may be written now.

        Raises ArenaTooSmallError, and CaptureError for what cannot be encoded; the arena is as before then.
        """
        start = time.perf_counter()
        plan = self._plan_for(state)
        draft = self._draft(state, plan, label, seq)
        table = self._encoder.encode(draft)
        if plan.slot_bytes > arena.slot_bytes or len(table) > arena.table_bytes:
            raise ArenaTooSmallError(Need(plan.slot_bytes, _TABLE_SLACK * len(table) + 65536))
        slot = arena.writable()
        if slot is None:
            return None
        slot.begin(seq)
        try:
            self._copy(state, plan, self._base(arena, slot))
            slot.commit(table, plan.sections)
        except BaseException:
            slot.abandon()
            raise
        return Staged(slot, seq, draft, plan.nbytes, time.perf_counter() - start)

    def close(self) -> None:
        """End the helper thread."""
        if self._helper is not None:
            self._helper.shutdown(wait=False)
            self._helper = None
        self._bases.clear()
        self._bases_of = None

    # ------------------------------------------------------------ plan

    def _plan_for(self, state: StateTree) -> _Plan:
        leaves = [leaf for section in state.sections.values() for leaf in section.leaves if leaf.role]
        plan = self._plan
        if plan is None or len(plan.leaves) != len(leaves) or not all(map(operator.is_, plan.leaves, leaves)):
            plan = self._plan = _make_plan(state, tuple(leaves))
        return plan

    @staticmethod
    def _draft(state: StateTree, plan: _Plan, label: Label, seq: int) -> DraftManifest:
        counters = state.counters
        return DraftManifest(
            run=label.run,
            label=label.label,
            kind=label.kind,
            seq=seq,
            time_ms=time.time_ns() // 1_000_000,
            outer_step=counters.outer_step,
            inner_step=counters.inner_step,
            training_step=counters.training_step,
            exact=label.exact,
            arch=plan.arch,
            sections={name: SectionDraft(name, section.leaves) for name, section in state.sections.items()},
            engine=state.engine,
        )

    # ------------------------------------------------------------ copy

    def _base(self, arena: Arena, slot: Slot) -> Tensor:
        if self._bases_of is not arena:
            self._bases.clear()
            self._bases_of = arena
        base = self._bases.get(slot.index)
        if base is None:
            base = self._bases[slot.index] = torch.frombuffer(slot.data, dtype=torch.uint8)
        return base

    def _copy(self, state: StateTree, plan: _Plan, base: Tensor) -> None:
        address = base.data_ptr()
        jobs: deque[_Job] = deque()
        tensors = [tensor for section in state.sections.values() for tensor in section.tensors]
        helper = self._helper_for(plan.nbytes)
        start = time.perf_counter()
        shaped: list[tuple[Tensor, int, int]] = []
        for tensor, offset, size in zip(tensors, plan.offsets, plan.sizes, strict=True):
            if size == 0:
                continue
            if not is_flat(tensor):
                shaped.append((tensor, offset, size))
                continue
            target, source = address + offset, tensor.data_ptr()
            for start in range(0, size, _PIECE_BYTES):
                jobs.append((target + start, source + start, min(_PIECE_BYTES, size - start)))
        other = helper.submit(_drain, jobs) if helper is not None else None
        try:
            for tensor, offset, size in shaped:
                view = base[offset : offset + size].view(tensor.dtype).view(tensor.shape)
                copy_elements(view, tensor)
            _drain(jobs)
        finally:
            jobs.clear()
            if other is not None:
                other.result()  # it must not copy into a slot that is somebody else's by then
        self._pace.note(helper is not None, plan.nbytes, time.perf_counter() - start)

    def _helper_for(self, nbytes: int) -> ThreadPoolExecutor | None:
        if nbytes < _HELPED_BYTES or _cores() < 2 or not self._pace.helped():
            return None
        if self._helper is None or self._pid != os.getpid():  # a forked child has not inherited the thread
            self._helper = ThreadPoolExecutor(1, thread_name_prefix="hotswarm-copy")
            self._pid = os.getpid()
        return self._helper


class _Pace:
    """Whether the helper helps. On a free core it nearly doubles the speed; where every core is busy it only delays,
    because the last piece waits for its turn. Measured, and the slower way is tried again now and then.
    """

    def __init__(self) -> None:
        self._s_per_byte: dict[bool, float] = {}
        self._count = 0

    def helped(self) -> bool:
        """Which way to copy next."""
        self._count += 1
        if len(self._s_per_byte) < 2:
            return True not in self._s_per_byte
        faster = min(self._s_per_byte, key=self._s_per_byte.__getitem__)
        return faster != (self._count % _PROBE_EVERY == 0)

    def note(self, helped: bool, nbytes: int, seconds: float) -> None:
        """How long a copy took."""
        if nbytes >= _HELPED_BYTES:
            self._s_per_byte[helped] = seconds / nbytes


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _drain(jobs: deque[_Job]) -> None:
    while True:
        try:
            target, source, nbytes = jobs.popleft()
        except IndexError:
            return
        memmove(target, source, nbytes)


def _make_plan(state: StateTree, leaves: tuple[Leaf, ...]) -> _Plan:
    offsets: list[int] = []
    sizes: list[int] = []
    sections: dict[str, tuple[int, int]] = {}
    start = nbytes = 0
    for name, section in state.sections.items():
        try:
            where = layout(section.leaves)
        except ManifestError as error:
            raise CaptureError(f"section {name} cannot be captured: {error}") from error
        for leaf in section.leaves:
            if type(leaf.what) is TensorSpec:
                placed = where.by_path[leaf.path]
                offsets.append(start + placed.offset)
                sizes.append(placed.nbytes)
        sections[name] = (start, where.stream_bytes)
        nbytes += where.raw_bytes
        start += -(-where.stream_bytes // GROUP_ALIGN) * GROUP_ALIGN
    inner = state.sections["inner"].leaves
    return _Plan(leaves, tuple(offsets), tuple(sizes), sections, start, nbytes, arch_fingerprint(inner))
