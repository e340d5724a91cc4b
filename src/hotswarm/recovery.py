"""Bringing a trainer back: locate → choose → fetch → verify → restore → take one's place in the round.

The first three are the backend's (the daemon asks the swarm; a local store knows only itself). What comes back is an
outcome: which snapshot, and what of it to take:

    resume, own   all of the node's own snapshot, random states and data position included
    outer         the swarm's outer state; the model becomes the outer copy; moments adopted, one's own, or none;
                  random states and data position one's own
    clone         a donor's live state too, but nothing private of it
    fresh         nothing: there is nothing newer than the live state

A snapshot is verified and checked against the live model before anything changes. A damaged one is reported to its
store and the next best is asked for. After an outer state is in, the swarm's live clock says where in the round to
start; when the swarm has finished the round meanwhile, what changed is fetched and the state is put in again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hotswarm.backend import Backend, Progress
from hotswarm.capture.diloco import Counters
from hotswarm.capture.incoming import IncomingState, find_nan, incoming_from_source
from hotswarm.capture.restore import CLONE, RESUME, RestoreParts, Restorer, joining
from hotswarm.capturing import Capturer
from hotswarm.checkpoint_types import REJOIN, CheckpointConfig
from hotswarm.errors import (
    ConfigError,
    HalfRestored,
    HotswarmError,
    Incompatible,
    IntegrityError,
    NoSnapshot,
    RecoveryError,
    StoreError,
)
from hotswarm.position import Position, join_position
from hotswarm.snapshot.sections import arch_fingerprint, first_difference
from hotswarm.snapshot.tree import TensorSpec
from hotswarm.store.base import SnapshotSource
from hotswarm.swarm.model import LiveClock, RecoverOutcome, RecoverRequest, ReportData, TensorName

log = logging.getLogger(__name__)

MAX_CHASES = 5  # rounds that the swarm may finish while this node restores; more means that it cannot keep up
MAX_DAMAGED = 10
PHASES = ("locate", "choose", "fetch", "verify", "restore")

ONLY_OWN_INNER = RestoreParts(
    model=None,
    buffers=False,
    optimizer="take",
    scheduler=False,
    outer=False,
    trainer=False,
    extra=False,
    private=True,
    counters=None,
)
"""From the own snapshot, before a neighbour's outer state: moments, random states and data position."""

ONLY_PRIVATE = dataclasses.replace(ONLY_OWN_INNER, optimizer="keep")


@dataclass(slots=True)
class RecoveryReport:
    """What a recovery did, and why. Steps are those of the state that was restored; `seconds` by phase."""

    mode: str = "auto"
    action: str = ""
    """resume, own, outer, clone or fresh; "kept" when the live state was newer than anything found."""
    reason: str = ""
    donors: dict[str, int] = field(default_factory=dict)
    """node id → verified bytes that it sent"""
    bytes: int = 0
    bytes_wasted: int = 0
    bytes_reused: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    rejected: dict[str, str] = field(default_factory=dict)
    """peer → why nothing was taken from it"""
    agreement: str | None = None
    snapshot_id: str | None = None
    outer_step: int = 0
    inner_step: int = 0
    training_step: int = 0
    inner_source: str = ""
    """Where the inner optimizer's moments came from: adopt, own, fresh."""
    inner_donor: str = ""
    started_at: dict[str, int] = field(default_factory=dict)
    """outer_step, inner_step, training_step that training goes on from: an outer state's place in the live round"""
    plan: tuple[str, ...] = ()
    restored: bool = False
    warning: str = ""
    """What the user should know before training on: the snapshots here are of another model, say."""

    def add(self, data: ReportData) -> None:
        """Take over what the backend reported, adding up over several rounds of it."""
        for node, count in data.donors.items():
            self.donors[node] = self.donors.get(node, 0) + count
        self.bytes += data.bytes
        self.bytes_wasted += data.bytes_wasted
        self.bytes_reused += data.bytes_reused
        for phase, seconds in data.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self.rejected.update(data.rejected)
        self.reason, self.agreement, self.plan = data.reason, data.agreement, tuple(data.plan)
        self.snapshot_id, self.inner_donor = data.snapshot_id, data.inner_donor
        self.outer_step, self.inner_step = data.outer_step, data.inner_step
        self.training_step = data.training_step

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    def summary(self) -> str:
        """One line for the log."""
        where = f"outer {self.outer_step}, inner {self.inner_step}, training {self.training_step}"
        took = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items() if seconds >= 0.005)
        agreed = f", {self.agreement}" if self.agreement else ""
        return f"{self.action} at {where}{agreed}: {self.reason}{f' ({took})' if took else ''}"


@dataclass(slots=True)
class _Opened:
    """A snapshot that verified, with what of it is to be put in."""

    source: SnapshotSource
    incoming: IncomingState
    parts: RestoreParts


class Recoverer:
    """Restores one trainer. `prepare` touches nothing of it; `Prepared.finish` runs where the state is whole."""

    def __init__(
        self, capturer: Capturer, config: CheckpointConfig, on_progress: Callable[[], Progress | None]
    ) -> None:
        self.capturer = capturer
        self.config = config
        self.on_progress = on_progress

    @property
    def restorer(self) -> Restorer:
        """For the objects as they are now."""
        return Restorer(self.capturer.state)

    def move_scheduler(self, taken_at: int, start_at: int) -> None:
        """Bring the LR scheduler from the training step of its snapshot to the one that training starts at.

        A scheduler that does not count training steps (one step per epoch, say) is where it belongs already.
        """
        scheduler = self.capturer.state.scheduler
        position = getattr(scheduler, "last_epoch", None)
        if not isinstance(position, int) or abs(position - taken_at) > 1 or start_at == taken_at:
            return
        try:
            if start_at > taken_at:
                self.restorer.fast_forward(start_at - taken_at)
                return
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch wants nobody to name an epoch; there is no other way back
                scheduler.step(position + start_at - taken_at)
        except Exception as error:  # noqa: BLE001 - a foreign object: plateau schedulers want a metric, others end
            log.warning(
                "the LR scheduler (%s) cannot be moved from step %d to %d, so it goes on from %s: %s",
                type(scheduler).__name__, taken_at, start_at, getattr(scheduler, "last_epoch", position), error,
            )  # fmt: skip

    def request(
        self, mode: str | None, *, peer: str | None = None, timeout_s: float | None = None, dry_run: bool = False
    ) -> RecoverRequest:
        """What to ask the backend for. ConfigError for an unknown mode."""
        mode = self.config.rejoin if mode is None else str(mode)
        if mode not in REJOIN:
            raise ConfigError(f"mode must be one of {', '.join(REJOIN)}, not {mode!r}", "mode")
        live = self.capturer.counters()
        leaves = self.capturer.state.collect().sections["inner"].leaves
        names = [
            TensorName(".".join(map(str, leaf.path[1:])), leaf.role, leaf.what.dtype, leaf.what.shape)
            for leaf in leaves
            if type(leaf.what) is TensorSpec and leaf.role in {"param", "buffer"}
        ]
        return RecoverRequest(
            mode=mode,  # type: ignore[arg-type]
            inner=self.config.inner,  # type: ignore[arg-type]
            min_agree=self.config.min_agree,
            arch=arch_fingerprint(leaves),
            names=tuple(names),
            own_outer_step=live.outer_step if live.training_step or live.outer_step else None,
            timeout_s=self.config.recovery_timeout if timeout_s is None else timeout_s,
            peer=peer,
            dry_run=dry_run,
        )

    def prepare(
        self,
        backend: Backend,
        mode: str | None = None,
        *,
        peer: str | None = None,
        timeout_s: float | None = None,
        dry_run: bool = False,
        keep_newer: bool = False,
    ) -> Prepared:
        """Locate, choose, fetch and verify. RecoveryError subclasses, ControlError."""
        request = self.request(mode, peer=peer, timeout_s=timeout_s, dry_run=dry_run)
        prepared = Prepared(self, backend, request, keep_newer=keep_newer)
        try:
            prepared.ask()
        except BaseException:
            prepared.close()
            raise
        return prepared


class Prepared:
    """A recovery whose bytes are here and verified. Finish it once, or close it."""

    def __init__(self, owner: Recoverer, backend: Backend, request: RecoverRequest, *, keep_newer: bool) -> None:
        self._owner = owner
        self._backend = backend
        self._request = request
        self._keep_newer = keep_newer
        self._opened: list[_Opened] = []
        self.report = RecoveryReport(mode=request.mode)

    # ------------------------------------------------------------ what needs no trainer

    def ask(self) -> None:
        """Ask the backend until it names a snapshot that verifies."""
        for _ in range(MAX_DAMAGED):
            outcome = self._backend.recover(self._request, self._owner.on_progress())
            self.report.add(outcome.report)
            self.report.action, self.report.inner_source = outcome.action, outcome.inner_source
            if outcome.action == "fresh":
                self._note_other_model()
            if self._request.dry_run or outcome.action == "fresh":
                return
            try:
                self._open(outcome)
            except IntegrityError as error:
                self.close()
                log.warning("snapshot %s is damaged: %s; another one is asked for", outcome.snapshot_id, error)
                self._backend.quarantine(str(outcome.snapshot_id), str(error))
                continue
            return
        raise RecoveryError(f"{MAX_DAMAGED} snapshots in a row were damaged: the disk of this machine needs looking at")

    def _note_other_model(self) -> None:
        """A fresh start beside snapshots of another model is often a mistake: say what differs."""
        arch = self._request.arch
        with contextlib.suppress(HotswarmError):  # damaged, or retired meanwhile: it is only for a warning
            infos = [info for info in self._backend.snapshots() if info.own and info.restorable]
            if not infos or any(info.arch == arch for info in infos):
                return
            newest = max(infos, key=lambda info: (info.time_ms, info.seq))
            with contextlib.closing(self._backend.open(newest.snapshot_id)) as source:
                theirs = source.manifest.sections["inner"].leaves
            mine = self._owner.capturer.state.collect().sections["inner"].leaves
            self.report.warning = (
                f"the snapshots in {newest.path.parent.parent} are of another model: {first_difference(mine, theirs)}; "
                "starting fresh, and they stay; give each model a directory of its own"
            )

    def _open(self, outcome: RecoverOutcome) -> None:
        assert outcome.snapshot_id is not None
        own_inner = outcome.action == "outer" and outcome.inner_source == "own"
        if outcome.action in {"outer", "clone"} and outcome.private_from not in {None, outcome.snapshot_id}:
            self._add_own(str(outcome.private_from), ONLY_OWN_INNER if own_inner else ONLY_PRIVATE)
        incoming = self._add(outcome.snapshot_id, RESUME)
        counters = incoming.counters
        self._opened[-1].parts = self._available(incoming, _parts(outcome, counters))
        self.report.outer_step, self.report.inner_step = counters.outer_step, counters.inner_step
        self.report.training_step, self.report.snapshot_id = counters.training_step, outcome.snapshot_id
        if outcome.action in {"outer", "clone"} and "outer" in incoming.sections:
            poisoned = find_nan(incoming)
            if poisoned is not None:
                raise RecoveryError(
                    f"the outer state of snapshot {outcome.snapshot_id} has a NaN in {poisoned}: nothing was restored; "
                    "look at the donors' losses, or go back with allow_rollback"
                )

    def _add_own(self, snapshot_id: str, parts: RestoreParts) -> None:
        """The node's own random states and position (and moments): good to have, and no reason to give up without."""
        try:
            self._add(snapshot_id, parts)
        except IntegrityError as error:
            log.warning("the own snapshot %s is damaged, so nothing of it is kept: %s", snapshot_id, error)
            self._backend.quarantine(snapshot_id, str(error))
        except (NoSnapshot, StoreError) as error:
            log.warning("the own snapshot %s is gone, so nothing of it is kept: %s", snapshot_id, error)

    def _available(self, incoming: IncomingState, parts: RestoreParts) -> RestoreParts:
        """Without moments where they did not come along: a fetch that was cut, kept by a store without a daemon."""
        if parts.model != "outer" or parts.optimizer != "take":
            return parts
        try:
            self._owner.restorer.check(incoming, parts)
        except Incompatible:  # if it is for another reason, the check before restoring says so
            self.report.inner_source = "fresh"
            return dataclasses.replace(parts, optimizer="empty")
        return parts

    def _add(self, snapshot_id: str, parts: RestoreParts) -> IncomingState:
        began = time.perf_counter()
        source = self._backend.open(snapshot_id)
        try:
            source.verify()
            incoming = incoming_from_source(source)
        except BaseException:
            source.close()
            raise
        finally:
            self.report.seconds["verify"] += time.perf_counter() - began
        self._opened.append(_Opened(source, incoming, parts))
        return incoming

    def close(self) -> None:
        """Let go of the snapshots."""
        opened, self._opened = self._opened, []
        for one in opened:
            one.source.close()

    # ------------------------------------------------------------ where the state is whole

    def finish(self) -> RecoveryReport:
        """Restore, and take a place in the round. Raises with nothing changed."""
        report = self.report
        try:
            if not self._opened:
                return report
            if self._keep_newer and self._live_is_newer():
                report.action = "kept"
                report.reason = f"the live state is newer than what was found ({report.reason})"
                return report
            self._restore()
            report.restored = True
            if report.action == "outer":
                self._join_the_round()
            return report
        finally:
            self.close()

    def _live_is_newer(self) -> bool:
        live = self._owner.capturer.counters()
        if not live.training_step and not live.outer_step:
            return False
        if self.report.action == "outer":
            return live.outer_step >= self.report.outer_step
        return (live.outer_step, live.training_step) >= (self.report.outer_step, self.report.training_step)

    def _restore(self) -> None:
        began = time.perf_counter()
        restorer = self._owner.restorer
        for one in self._opened:
            restorer.check(one.incoming, one.parts)
        for one in self._opened:
            restorer.apply(one.incoming, one.parts)
        last = self._opened[-1]
        self._owner.capturer.restored_counters(
            last.incoming.counters
            if isinstance(last.parts.counters, str) or last.parts.counters is None
            else last.parts.counters
        )
        self.report.seconds["restore"] += time.perf_counter() - began
        counters = self._owner.capturer.counters()
        self.report.started_at = dataclasses.asdict(counters)

    def _join_the_round(self) -> None:
        """The state is in, so nothing but HalfRestored may be raised from here on: a place that cannot be found is the
        round's beginning.
        """
        try:
            for _ in range(MAX_CHASES):
                if not self._take_place():
                    return
        except HalfRestored:
            raise
        except Exception:
            log.exception("the state is restored, but not moved to the swarm's place in the round")
            self.report.reason += "; its place in the live round could not be taken"

    def _clock(self) -> LiveClock | None:
        try:
            return self._backend.clock()
        except HotswarmError as error:
            log.warning("nobody says where the swarm is in its round: %s; starting at its beginning", error)
            return None

    def _take_place(self) -> bool:
        """Start where the swarm is now; True when it has finished this round, and its newer state is in by now."""
        asked_at = time.monotonic()
        clock = self._clock()
        report = self.report
        if clock is not None and clock.outer_step > report.outer_step and self._fetch_what_changed():
            return True
        engine = self._owner.capturer.engine
        length = engine.round_length if engine is not None else 0
        place = Position(report.outer_step, report.inner_step, report.training_step)
        start = join_position(place, clock, length, time.monotonic() - asked_at)
        counters = Counters(start.outer_step, start.inner_step, start.training_step)
        self._owner.move_scheduler(report.training_step, start.training_step)
        if engine is not None:
            engine.set_counters(counters)
        self._owner.capturer.restored_counters(counters)
        report.started_at = dataclasses.asdict(self._owner.capturer.counters())
        return False

    def _fetch_what_changed(self) -> bool:
        """The swarm's newer outer state, put in; False when it cannot be had, and the one that is in has to do."""
        before = self.report.outer_step
        self._request = dataclasses.replace(self._request, own_outer_step=before)
        self.close()
        try:
            self.ask()
            if self.report.action != "outer" or self.report.outer_step <= before:
                return False
            self._restore()
        except HalfRestored:
            raise
        except HotswarmError as error:
            log.warning("the swarm has finished round %d, and its state could not be had: %s", before, error)
            return False
        return True


def _parts(outcome: RecoverOutcome, counters: Counters) -> RestoreParts:
    """What of the outcome's snapshot is taken. A joiner begins at its round's beginning; the live clock moves it on."""
    if outcome.action in {"resume", "own"}:
        return RESUME
    if outcome.action == "clone":
        return CLONE
    begin = Counters(counters.outer_step, 0, counters.training_step - counters.inner_step)
    match outcome.inner_source:
        case "adopt":
            return joining("take", begin)
        case "own":
            return joining("keep", begin)
    return joining("empty", begin)
