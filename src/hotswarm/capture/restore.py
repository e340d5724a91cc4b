"""Restoring a training state: validate everything, then allocate, load, and copy last.

    restorer = Restorer(training_state)
    incoming = incoming_from_source(source)        # or from_dict(…)
    restorer.check(incoming, RESUME)               # raises Incompatible; nothing has changed
    restorer.apply(incoming, RESUME)

`apply` changes nothing until all that can fail has succeeded; the copies into live tensors come last. Parameters keep
their identity, so optimizers, hooks and compiled code stay valid. Both copies of the parameters are restored, live and
outer. Nothing holds the state a second time: bytes go from the source straight into the tensors.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from hotswarm.capture.diloco import Counters
from hotswarm.capture.incoming import Incoming, IncomingState, Tree, materialise, promises_in
from hotswarm.capture.into_model import check_outer, model_promises, model_work
from hotswarm.capture.into_objects import attached_work, check_attached, check_loadable, loader_work
from hotswarm.capture.into_optimizer import check_optimizer, empty_optimizer_work, groups_work, optimizer_work
from hotswarm.capture.plausible import (
    check_alike,
    check_group_values,
    check_optimizer_values,
    check_outer_values,
    check_own_kind,
    check_steps,
)
from hotswarm.capture.rng import apply_rng, check_rng
from hotswarm.capture.state import TrainingState, optimizer_key
from hotswarm.capture.work import Work
from hotswarm.errors import HotswarmError, Incompatible


@dataclass(frozen=True, slots=True)
class RestoreParts:
    """What of a snapshot to take."""

    model: Literal["inner", "outer"] | None = "inner"
    """The live parameters: as they were, or set to the outer copy; None leaves them."""
    buffers: bool = True
    optimizer: Literal["take", "keep", "empty"] = "take"
    """The inner optimizers' moments and step counts: the snapshot's, one's own, or none."""
    scheduler: bool = True
    """LR scheduler, GradScaler, and the parameter groups' settings, the learning rate among them."""
    outer: bool = True
    trainer: bool = True
    """The engine's own small state: phase, statistics, position in the round."""
    extra: bool = True
    private: bool = True
    """Random states and data position."""
    counters: Counters | Literal["snapshot"] | None = "snapshot"
    """Where training goes on. A joiner gives the swarm's live clock here."""


RESUME = RestoreParts()
"""Everything: the node's own snapshot."""

CLONE = RestoreParts(private=False)
"""Everything but what is the donor's own business."""

JOIN = RestoreParts(model="outer", trainer=False, extra=False, private=False, counters=None)
"""A neighbour's outer state: the model becomes the outer copy; optimizer state is adopted."""

MODEL_ALONE = RestoreParts(
    optimizer="keep", scheduler=False, outer=False, trainer=False, extra=False, private=False, counters=None
)
"""For a program that does not train."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did."""

    nbytes: int
    seconds: float


class Restorer:
    """Puts snapshots into the objects of a TrainingState."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state

    # ------------------------------------------------------------ check

    def check(self, incoming: IncomingState, parts: RestoreParts = RESUME) -> None:
        """Raises Incompatible, naming the first difference, unless `apply` would find all that it needs, and training
        could go on from it. Changes nothing and reads no tensor bytes but those of random states and step counts.
        """
        with _foreign_shapes():
            self._check_all(incoming, parts)

    def needs(self, incoming: IncomingState, parts: RestoreParts = RESUME) -> list[Incoming]:
        """The tensors that `apply` would read. Raises as `check` does."""
        with _foreign_shapes():
            return self._check(incoming, parts)

    def _check_all(self, incoming: IncomingState, parts: RestoreParts) -> None:
        incoming.check_present(self._check(incoming, parts))
        for index in range(len(self._state.optimizers) if parts.optimizer == "take" else 0):
            check_steps(incoming.section("inner")[optimizer_key(index)])

    def _check(self, incoming: IncomingState, parts: RestoreParts) -> list[Incoming]:
        state = self._state
        names = state.names()
        inner = incoming.section("inner")
        needed: list[Incoming] = []
        if parts.model is not None:
            chosen = model_promises(incoming, names, from_outer=parts.model == "outer", buffers=parts.buffers)
            needed += chosen.values()
        if parts.optimizer == "take" or parts.scheduler:
            self._check_optimizers(inner, parts, needed)
        if parts.scheduler:
            for key, thing in (("scheduler", state.scheduler), ("scaler", state.scaler)):
                if thing is not None:
                    check_loadable(inner.get(key), thing, key)
                    check_own_kind(inner[key], thing, key)
                    needed += promises_in(inner[key])
        if parts.extra and state.extra is not None:
            check_attached(inner.get("extra"), state.extra, "extra")
            needed += promises_in(inner["extra"])
        if parts.trainer and state.adapter is not None:
            if incoming.engine != state.adapter.engine or "trainer" not in inner:
                there = incoming.engine or "no engine"
                raise Incompatible(f"the snapshot is of {there}, and this trainer is {state.adapter.engine}")
            check_alike(inner["trainer"], state.adapter.inner_tree(), "the trainer's state", finite=True)
            needed += promises_in(inner["trainer"])
        if parts.outer and state.adapter is not None:
            outer = incoming.sections.get("outer")
            if outer is None and parts.model == "outer":
                raise Incompatible("the snapshot has no outer section, which this restore is about")
            check_outer(outer, names)
            if outer is not None:
                trained = [name for name, param in names.params.items() if param.requires_grad]
                check_outer_values(outer, state.adapter.outer_tree(), trained)
            needed += promises_in(outer)
        if parts.private:
            self._check_private(incoming.sections.get("private", {}), needed)
        return needed

    def _check_optimizers(self, inner: Tree, parts: RestoreParts, needed: list[Incoming]) -> None:
        name_of = self._state.names().name_of
        count = len(self._state.optimizers)
        for index, optimizer in enumerate(self._state.optimizers):
            key = optimizer_key(index)
            ordered = check_optimizer(inner.get(key), optimizer, name_of, key.replace("_", " "))
            if parts.optimizer == "take":
                check_optimizer_values(inner[key], ordered, optimizer, name_of)
            else:
                check_group_values(ordered, optimizer)
            taken = inner[key] if parts.optimizer == "take" else inner[key]["param_groups"]
            needed += promises_in(taken)
        if optimizer_key(count) in inner:
            raise Incompatible(f"there are {count} optimizers here and more in the snapshot")

    def _check_private(self, private: Tree, needed: list[Incoming]) -> None:
        if self._state.rng and "rng" in private:
            needed += promises_in(private["rng"])
            check_rng(materialise(private["rng"]))
        if self._state.position is not None and "dataloader" in private:
            needed += promises_in(private["dataloader"])
            self._state.position.check(private["dataloader"])

    # ------------------------------------------------------------ apply

    def apply(self, incoming: IncomingState, parts: RestoreParts = RESUME) -> Restored:
        """Restore. Incompatible: nothing has changed. LocalFailure: the source failed in the middle of the last copies
        (its message says so), which a verified local source does not do.
        """
        start = time.perf_counter()
        with _foreign_shapes():
            self._check_all(incoming, parts)
            work = self._work(incoming, parts)
        nbytes = work.run()
        return Restored(nbytes, time.perf_counter() - start)

    def _work(self, incoming: IncomingState, parts: RestoreParts) -> Work:
        state, work = self._state, Work()
        names = state.names()
        inner = incoming.section("inner")
        if parts.model is not None:
            chosen = model_promises(incoming, names, from_outer=parts.model == "outer", buffers=parts.buffers)
            model_work(work, chosen, names)
        for index, optimizer in enumerate(state.optimizers):
            tree = inner.get(optimizer_key(index), {})
            if parts.optimizer == "empty":
                empty_optimizer_work(work, optimizer)
            if parts.optimizer == "take" or parts.scheduler:
                ordered = check_optimizer(tree, optimizer, names.name_of, "optimizer")
                if parts.optimizer == "take":
                    optimizer_work(work, tree, ordered, optimizer, names.name_of)
                else:
                    groups_work(work, ordered, optimizer)
        if parts.scheduler:
            for key, thing in (("scheduler", state.scheduler), ("scaler", state.scaler)):
                if thing is not None:
                    loader_work(work, inner[key], thing, key)
        if parts.extra and state.extra is not None:
            attached_work(work, inner["extra"], state.extra, "extra")
        self._engine_work(work, incoming, parts)
        if parts.private:
            self._private_work(work, incoming.sections.get("private", {}))
        return work

    def _engine_work(self, work: Work, incoming: IncomingState, parts: RestoreParts) -> None:
        adapter = self._state.adapter
        counters = incoming.counters if parts.counters == "snapshot" else parts.counters
        if adapter is None:
            if counters is not None:
                work.commits.append(lambda: setattr(self._state, "counters", counters))
            return
        if parts.outer:
            old, outer = adapter.outer_tree(), incoming.sections.get("outer")
            new = None if outer is None else work.rebuilt(outer, old or {}, self._outer_device())
            work.loaders.append(
                ("the outer optimizer", lambda: adapter.load_outer(new), lambda: adapter.load_outer(old))
            )
            work.commits.append(adapter.commit_outer)
        if parts.trainer:
            before, trainer = adapter.inner_tree(), materialise(incoming.section("inner")["trainer"])
            work.loaders.append(
                ("the trainer", lambda: adapter.load_inner(trainer), lambda: adapter.load_inner(before))
            )
        if counters is not None and (parts.counters != "snapshot" or not parts.trainer):
            work.commits.append(lambda: adapter.set_counters(counters))

    def _outer_device(self) -> Any:
        old = self._state.adapter.outer_tree() if self._state.adapter is not None else None
        tensors: Iterable[Any] = (old or {}).get("params", {}).values() or self._state.names().params.values()
        device = next((tensor.device for tensor in tensors), "cpu")
        return lambda _: device

    def _private_work(self, work: Work, private: Tree) -> None:
        rng = materialise(private["rng"]) if self._state.rng and "rng" in private else None
        position = self._state.position
        if position is not None and "dataloader" in private:
            tree = materialise(private["dataloader"])
            work.commits.append(lambda: position.restore(tree, rng))
        if rng is not None:
            work.commits.append(lambda: apply_rng(rng))

    # ------------------------------------------------------------ afterwards

    def fast_forward(self, steps: int) -> None:
        """Move the LR scheduler on by `steps` (0 and less: nothing), as if that many optimizer steps had been made: a
        joiner starts where the swarm is, not where the donor was at its snapshot.
        """
        scheduler = self._state.scheduler
        if scheduler is None or steps <= 0:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "step() before optimizer.step()": meant so here
            for _ in range(steps):
                scheduler.step()


def joining(optimizer: Literal["take", "keep", "empty"], counters: Counters) -> RestoreParts:
    """JOIN with the inner optimizer adopted, one's own, or fresh, and the swarm's live clock."""
    return replace(JOIN, optimizer=optimizer, counters=counters)


@contextmanager
def _foreign_shapes() -> Iterator[None]:
    """Turns what a tree of another shape causes (another program's, or damaged before it was signed) into a reason."""
    try:
        yield
    except HotswarmError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise Incompatible(f"the snapshot's tree does not have the shape that hotswarm writes ({text})") from error
