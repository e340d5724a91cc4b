"""The training state as a tree: what is captured, under which path, and in which section.

    outer    params/<name>  momentum/<name>  hyper/…  outer_step                      what all workers share
    inner    model/<name>   optimizer/state/<name>/<key>  optimizer/param_groups/…    this worker's training
             frozen  scheduler  scaler  extra  trainer  inner_step  training_step
    private  rng  dataloader                                                          nobody else's business

`<name>` is a parameter's clean name (naming.py), in the optimizer too: state follows names, never positions. A second
optimizer is `optimizer_1`. Roles group tensors into chunks: `param`, `buffer`, `momentum`, and in the optimizer the key
itself (`exp_avg`, `step`, …); parameters have the same role and name in `inner` and `outer`, so right after an outer
step they cut into the same chunks.

`collect()` returns references to live tensors. Between two calls most leaves are the same objects (the encoder of the
leaf table and the stager rely on it), so a call costs about a microsecond per leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hotswarm.capture.diloco import Counters, EngineAdapter
from hotswarm.capture.naming import NamedTensors, named_tensors, optimizer_params
from hotswarm.capture.position import Position
from hotswarm.capture.rng import capture_rng
from hotswarm.capture.walk import DICT, Walk
from hotswarm.snapshot.tree import Leaf, Path


@dataclass(frozen=True, slots=True)
class SectionState:
    """The leaves of a section, and the live tensor of each tensor leaf, in the order of the leaves."""

    leaves: tuple[Leaf, ...]
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StateTree:
    """One instant of training. Its tensors are live: copy them before the next step."""

    sections: Mapping[str, SectionState]
    counters: Counters
    engine: str


def optimizer_key(index: int) -> str:
    """The key in `inner` of the optimizer with this index."""
    return "optimizer" if index == 0 else f"optimizer_{index}"


class TrainingState:
    """The objects that a training state is made of. `extra` is a dict of more: objects with state_dict() and
    load_state_dict(), torch.Generators, or trees of the closed set.
    """

    def __init__(
        self,
        model: object,
        optimizers: Sequence[Any] = (),
        *,
        scheduler: Any = None,
        scaler: Any = None,
        position: Position | None = None,
        extra: Any = None,
        adapter: EngineAdapter | None = None,
        rng: bool = True,
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        inner = adapter.inner_optimizer if adapter is not None else None
        if inner is not None and all(inner is not optimizer for optimizer in self.optimizers):
            self.optimizers[:1] = [inner]  # the engine knows better which one trains
        self.scheduler = scheduler
        self.scaler = scaler
        self.position = position
        self.extra = extra
        self.adapter = adapter
        self.rng = rng
        self.counters = Counters(0, 0, 0)
        """Used when there is no adapter: whoever counts the steps sets it."""
        self._known: dict[str, dict[Path, Leaf]] = {}

    def names(self) -> NamedTensors:
        """Parameters and buffers by name, those included that only an optimizer knows."""
        owned = [param for optimizer in self.optimizers for param in optimizer_params(optimizer)]
        return named_tensors(self.model, owned)

    def read_counters(self) -> Counters:
        """From the engine, where there is one."""
        return self.adapter.counters() if self.adapter is not None else self.counters

    # ------------------------------------------------------------ capture

    def collect(self) -> StateTree:
        """All of it, as it is now. CaptureError names path and type of what cannot be captured."""
        counters = self.read_counters()
        names = self.names()
        sections = {}
        outer = self.adapter.outer_tree() if self.adapter is not None else None
        if outer is not None:
            sections["outer"] = self._section("outer", lambda walk: walk.outer(outer))
        sections["inner"] = self._section("inner", lambda walk: self._inner(walk, names, counters))
        if self.rng or self.position is not None:
            sections["private"] = self._section("private", self._private)
        return StateTree(sections, counters, self.adapter.engine if self.adapter is not None else "")

    def _section(self, name: str, fill: Callable[[Walk], None]) -> SectionState:
        walk = Walk(self._known.get(name, {}))
        walk.add((), DICT)
        fill(walk)
        self._known[name] = walk.seen
        return SectionState(tuple(walk.leaves), tuple(walk.tensors))

    def _inner(self, walk: Walk, names: NamedTensors, counters: Counters) -> None:
        walk.model(names)
        walk.tree(("frozen",), [name for name, param in names.params.items() if not param.requires_grad])
        for index, optimizer in enumerate(self.optimizers):
            walk.optimizer((optimizer_key(index),), optimizer, names.name_of)
        if self.scheduler is not None:
            walk.tree(("scheduler",), self.scheduler.state_dict())
        if self.scaler is not None:
            walk.tree(("scaler",), self.scaler.state_dict())
        if self.extra is not None:
            walk.attached(("extra",), self.extra)
        if self.adapter is not None:
            walk.tree(("trainer",), self.adapter.inner_tree())
        walk.tree(("inner_step",), counters.inner_step)
        walk.tree(("training_step",), counters.training_step)

    def _private(self, walk: Walk) -> None:
        if self.rng:
            walk.tree(("rng",), capture_rng(), "rng")
        if self.position is not None:
            walk.tree(("dataloader",), self.position.capture(), "rng")
