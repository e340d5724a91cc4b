"""What a checkpoint needs of torchft's DiLoCo: its outer state by name, its position, and when both fit together.

The engine adapter behind `hotswarm.torchft`, whose docstring tells how torchft works as far as this leans on it.
"""

# ruff: noqa: SLF001  # torchft 0.2.0 publishes none of what a checkpoint needs; only this file and torchft.py reach in

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hotswarm.capture.diloco import Counters
from hotswarm.capture.naming import named_tensors
from hotswarm.capture.outer import TorchOuterState, Tree
from hotswarm.errors import ConfigError, Incompatible

try:
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
except ImportError as error:
    raise ImportError("hotswarm.torchft needs torchft; install the extra: pip install 'hotswarm[torchft]'") from error


class _NamedOuter:
    """One of DiLoCo's outer optimizers (there may be one per fragment), and the names of its parameters."""

    def __init__(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.names = {names[id(param)] for param in params if id(param) in names}
        self.state = TorchOuterState(optimizer, lambda: names)


class _StepLock:
    """Held by the trainer's thread through `inner.step()`, outer step included; re-entrant.

    During a heal the trainer's thread waits, lock held, for the Manager's: `stand_in` lets that one in meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.stand_in: int | None = None

    def stands_in(self) -> bool:
        """Whether this thread acts for the trainer's."""
        return self.stand_in == threading.get_ident()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self.stands_in() or self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        if not self.stands_in():
            self._lock.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class TorchftAdapter:
    """The engine adapter for torchft's DiLoCo, one fragment or several.

    The trainer's thread holds `lock()` while `inner.step()` runs, outer step included; whoever takes it sees a moment
    between two steps. During a heal the Manager's thread may enter it as well: the trainer's is then waiting for it.
    """

    engine = "torchft"

    def __init__(self, manager: Manager, diloco: DiLoCo, model: nn.Module) -> None:
        if not isinstance(diloco, DiLoCo):
            raise ConfigError(f"attach needs a torchft.local_sgd.DiLoCo, got {type(diloco).__name__}", "diloco")
        if diloco._manager is not manager:
            raise ConfigError(
                "this DiLoCo was built on another Manager; attach the pair that belongs together", "manager"
            )
        self._manager = manager
        self._diloco = diloco
        self._names = named_tensors(model).name_of
        self._originals()  # finds a parameter that has no name now, not at the first snapshot
        optimizers = {id(fragment._outer_optimizer): fragment._outer_optimizer for fragment in diloco._fragments}
        self._outer = [_NamedOuter(optimizer, self._names) for optimizer in optimizers.values()]
        self._lock = _StepLock()
        self._stepping = False  # the trainer's thread is inside inner.step() and holds the lock
        self._training_step = 0
        self._outer_seen = manager.current_step()
        self._listeners: list[Callable[[], object]] = []
        self._handles = [
            self.inner_optimizer.register_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),  # global ones run after all of the optimizer's own
        ]

    @property
    def inner_optimizer(self) -> Optimizer:
        """The optimizer whose `step()` drives DiLoCo."""
        optimizer: Optimizer = self._diloco._local_optimizer
        return optimizer

    @property
    def round_length(self) -> int:
        """Inner steps between two outer steps (of any fragment)."""
        return int(self._diloco._sync_every)

    def detach(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    # ------------------------------------------------------------------ capture

    def counters(self) -> Counters:
        """Where training stands: the Manager's step, the position in the round, inner steps since the very first."""
        return Counters(self._manager.current_step(), int(self._diloco._local_step), self._training_step)

    def in_outer_step(self) -> bool:
        """Whether an all-reduce is in flight or the outer update is under way, so that nothing may be captured."""
        if self._lock.stands_in():
            return False  # quorum time: before the all-reduce, and the trainer's thread waits
        if any(fragment._allreduce_work for fragment in self._diloco._fragments):
            return True
        return int(self._diloco._local_step) >= self.round_length

    def outer_tree(self) -> Tree:
        """`{params{name}, momentum{name}, hyper, outer_step}`; the tensors are live.

        CaptureError for an outer optimizer that keeps more than momentum.
        """
        momentum: dict[str, Tensor] = {}
        for outer in self._outer:
            momentum.update(outer.state.momentum())
        hyper = [outer.state.hyper() for outer in self._outer]
        return {
            "params": self._originals(),
            "momentum": momentum,
            "hyper": hyper[0] if len(hyper) == 1 else {f"fragment.{i}": each for i, each in enumerate(hyper)},
            "outer_step": self._manager.current_step(),
        }

    def inner_tree(self) -> Tree:
        """The counters, and what the Manager counts beside its step."""
        here = self.counters()
        return {
            "step": here.outer_step,
            "local_step": here.inner_step,
            "training_step": here.training_step,
            "batches_committed": self._manager.batches_committed(),
        }

    def lock(self) -> _StepLock:
        """Held: the trainer's thread is between two inner steps, or waits inside a heal."""
        return self._lock

    def on_outer_step(self, callback: Callable[[], object]) -> None:
        """Calls `callback` on the trainer's thread after each committed outer step, originals refreshed."""
        self._listeners.append(callback)

    # ------------------------------------------------------------------ restore

    def load_outer(self, tree: Tree | None) -> None:
        """Installs tensors by reference; momentum that the tree lacks is dropped. Incompatible: nothing is changed."""
        if tree is None:
            raise Incompatible("the snapshot has no outer state, and torchft's DiLoCo cannot train without one")
        have, params = self._originals(), tree["params"]
        for name, original in have.items():
            if name not in params:
                raise Incompatible(f"the snapshot's outer copy lacks {name!r}")
            if params[name].shape != original.shape or params[name].dtype != original.dtype:
                raise Incompatible(
                    f"{name}: {tuple(params[name].shape)} {params[name].dtype} in the snapshot's outer copy, "
                    f"{tuple(original.shape)} {original.dtype} here"
                )
        unknown = sorted(set(params) - set(have)) + sorted(set(tree["momentum"]) - set(have))
        if unknown:
            raise Incompatible(f"the snapshot's outer state has {unknown[0]!r}, which no DiLoCo fragment has")
        before = self.outer_tree()
        try:
            self._install_optimizers(tree)
        except Incompatible:
            self._install_optimizers(before)
            raise
        for fragment in self._diloco._fragments:
            for name, param in fragment._model_fragment.named_parameters():
                fragment.original_parameters[name] = params[self._name_of(param)]

    def commit_outer(self) -> None:
        """Nothing is left to do: the tensors were installed by reference."""

    def load_inner(self, tree: Tree) -> None:
        """Takes what `inner_tree` gave."""
        try:
            step, local_step, training_step, batches = (
                int(tree[name]) for name in ("step", "local_step", "training_step", "batches_committed")
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Incompatible(f"the snapshot's trainer is not torchft's DiLoCo: {error!r}") from error
        self._manager.load_state_dict({"step": step, "batches_committed": batches})
        self.set_counters(Counters(step, local_step, training_step))

    def set_counters(self, counters: Counters) -> None:
        """Stands at these counters. The position is kept below the step that prepares the next sync, which must run.

        During a heal the position in the round stays: the sync is what runs.
        """
        batches = self._manager.batches_committed()
        self._manager.load_state_dict({"step": counters.outer_step, "batches_committed": batches})
        self._outer_seen = counters.outer_step
        self._training_step = counters.training_step
        if self._lock.stand_in is None:
            last = self.round_length - int(self._diloco._fragment_sync_delay) - 1
            self._diloco._local_step = max(0, min(counters.inner_step, last))

    # ------------------------------------------------------------------ inside

    def _install_optimizers(self, tree: Tree) -> None:
        hyper = tree["hyper"]
        single = len(self._outer) == 1
        settings = [hyper] if single else [hyper.get(f"fragment.{i}") for i in range(len(self._outer))]
        if None in settings or (single and "fragment.0" in hyper):
            raise Incompatible("the snapshot's outer optimizers are of another number than here")
        for outer, each in zip(self._outer, settings, strict=True):
            outer.state.install({name: buf for name, buf in tree["momentum"].items() if name in outer.names}, each)

    def _originals(self) -> dict[str, Tensor]:
        originals = {}
        for fragment in self._diloco._fragments:
            for name, param in fragment._model_fragment.named_parameters():
                originals[self._name_of(param)] = fragment.original_parameters[name]
        return originals

    def _name_of(self, param: Tensor) -> str:
        name = self._names.get(id(param))
        if name is None:
            raise ConfigError(
                "a DiLoCo fragment has a parameter that is not in the checkpointer's model; "
                "build the checkpointer on the whole model",
                "model",
            )
        return name

    def _before_step(self, *_: object) -> None:
        if not self._stepping:  # still set after a step that raised: the lock is then held already
            self._lock.acquire()
            self._stepping = True

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if optimizer is not self.inner_optimizer or not self._stepping:
            return
        self._training_step += 1
        committed = self._manager.current_step() != self._outer_seen
        self._outer_seen = self._manager.current_step()
        self._stepping = False
        self._lock.release()
        if committed:
            for callback in self._listeners:
                callback()

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Within, this thread stands in for the trainer's, which waits for it."""
        self._lock.stand_in = threading.get_ident()
        try:
            yield
        finally:
            self._lock.stand_in = None
