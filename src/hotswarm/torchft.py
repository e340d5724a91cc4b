"""hotswarm under torchft: capture and restore of `torchft.local_sgd.DiLoCo`, and healing without pickle.

    manager = Manager(...)                      # use_async_quorum=False; init_sync=False when all are seeded alike
    diloco = DiLoCo(manager, [model], inner, outer, sync_every=H)
    checkpointer = SpeculativeCheckpointer(model, inner, scheduler=...)
    attach(manager, diloco, checkpointer)
    checkpointer.start()                        # recovers first
    with diloco:
        ...

How torchft 0.2.0 works, as far as this module leans on it. `inner.step()` drives everything: DiLoCo's post-step hook
counts `_local_step`, and at `sync_every` it asks the lighthouse for a quorum (on a thread of the Manager, while the
trainer's thread waits), all-reduces the pseudo-gradients, commits (`current_step()` grows), runs the outer optimizer on
the live parameters from `original_parameters`, copies the result back there, and sets `_local_step` to 0. A round that
does not commit leaves the originals and the step number as they were and begins again. What is ours:

- the **outer state** of a snapshot is `original_parameters` and the outer momentum, by parameter name, at
  `outer_step = current_step()`; the position in the round is `_local_step`. It is consistent at every moment but from
  the all-reduce to the end of the outer step, and then `in_outer_step()` says so;
- **restoring** writes originals, momentum, step and `_local_step`; the live parameters and the inner optimizer are
  restored as for any trainer. With the swarm's current step torchft sees nothing to heal;
- **healing**: torchft's answer to a replica with an old step is to have a peer send the live weights of its running
  round, pickled. `attach` replaces that transport. The donor only makes sure that a snapshot of the step in question
  is there to be served; the joiner pulls the *outer* state of that step from the swarm as in any recovery: verified,
  by agreement, and with a pseudo-gradient of zero instead of the donor's progress counted twice;
- a joiner that cannot heal in time **leaves**: it raises RecoveryError out of `inner.step()` and its Manager is shut
  down. Asking for another quorum in an old state would make every healthy replica discard a further round.
"""

# ruff: noqa: SLF001  # torchft 0.2.0 publishes none of what a checkpoint needs; only this file reaches in

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hotswarm.capture.diloco import Counters, TorchOuterState, Tree
from hotswarm.capture.naming import named_tensors
from hotswarm.errors import ConfigError, HotswarmError, Incompatible, RecoveryError
from hotswarm.ids import is_node_id

try:
    from torchft.checkpointing.transport import CheckpointTransport
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
except ImportError as error:
    raise ImportError("hotswarm.torchft needs torchft; install the extra: pip install 'hotswarm[torchft]'") from error

if TYPE_CHECKING:
    from hotswarm.checkpointer import SpeculativeCheckpointer

log = logging.getLogger(__name__)


def attach(manager: Manager, diloco: DiLoCo, checkpointer: SpeculativeCheckpointer) -> TorchftAdapter:
    """Makes `checkpointer` capture and restore `diloco`, and installs the safe transport in `manager`.

    Call it after DiLoCo is constructed and before `checkpointer.start()`. State that only the Manager's own
    `state_dict` function knows is not captured: give it to the checkpointer as `extra`. ConfigError when the objects
    are not what torchft's DiLoCo needs.
    """
    adapter = TorchftAdapter(manager, diloco, checkpointer.model)
    old = manager._checkpoint_transport
    transport = adapter.transport = old if isinstance(old, SwarmCheckpointTransport) else adapter.transport
    transport.bind(adapter, checkpointer)
    manager._checkpoint_transport = transport
    if old is not transport:
        old.shutdown(wait=False)  # it listens on every interface and serves pickles
    checkpointer.set_engine(adapter)
    return adapter


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
        self.transport = SwarmCheckpointTransport()
        """The one that the Manager uses; it counts heals."""
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
    def _healing(self) -> Iterator[None]:
        """This thread stands in for the trainer's, which waits for it."""
        self._lock.stand_in = threading.get_ident()
        try:
            yield
        finally:
            self._lock.stand_in = None


class SwarmCheckpointTransport(CheckpointTransport[Any]):  # type: ignore[misc]  # torchft publishes no types
    """torchft's healing, done by the swarm: nothing is unpickled, and nothing but verified snapshots is applied.

    Give it to `Manager(checkpoint_transport=…)`, or let `attach` install it. `metadata` names this node and no more;
    what peers send as theirs is used as a hint whom to ask, after a check of its form.
    """

    PREFIX = "hotswarm:"

    def __init__(self) -> None:
        self._adapter: TorchftAdapter | None = None
        self._checkpointer: SpeculativeCheckpointer | None = None
        self.sent = 0  # heals in which this node was the donor
        self.received = 0  # heals of this node

    def bind(self, adapter: TorchftAdapter, checkpointer: SpeculativeCheckpointer) -> None:
        """Tells it what to serve from and restore into; `attach` calls this."""
        self._adapter = adapter
        self._checkpointer = checkpointer

    def _bound(self) -> tuple[TorchftAdapter, SpeculativeCheckpointer]:
        if self._adapter is None or self._checkpointer is None:
            raise RecoveryError("SwarmCheckpointTransport is not attached; call hotswarm.torchft.attach first")
        return self._adapter, self._checkpointer

    def metadata(self) -> str:
        """`hotswarm:` and this node's swarm id (nothing when it is in no swarm)."""
        node = "" if self._checkpointer is None else self._checkpointer.swarm_node_id
        return self.PREFIX + node

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Makes sure that a snapshot of outer step `step` is there for the joiners; they fetch it themselves.

        A failure is logged, not raised: raising would make this healthy replica discard its own round as well.
        """
        adapter, checkpointer = self._bound()
        self.sent += 1
        log.info("replicas %s are to be healed to step %d", dst_ranks, step)
        if checkpointer.hot_snapshots and checkpointer.hot_snapshots[-1].outer_step == step:
            return
        with adapter._healing():
            if checkpointer.force_snapshot() is None:
                log.warning("no snapshot of step %d for the joiners: %s", step, checkpointer.last_error)

    def disallow_checkpoint(self) -> None:
        """Nothing to do: snapshots are copies."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Restores this replica's outer state at `step` from the swarm, on the Manager's thread.

        Returns what makes torchft go on with the state just restored; after a failure, what makes it raise
        RecoveryError on the trainer's thread.
        """
        adapter, checkpointer = self._bound()
        self.received += 1
        before = adapter.counters()
        began = time.monotonic()
        healed = _Healed(adapter)
        try:
            with adapter._healing():
                self._recover(checkpointer, step, self._peer(metadata), timeout)
                reached = adapter.counters().outer_step
                if reached != step:
                    raise RecoveryError(f"the swarm's newest state is of step {reached}, not {step}")
                if time.monotonic() - began > timeout.total_seconds():
                    raise RecoveryError(f"healing took longer than the Manager's timeout of {timeout}")
        except HotswarmError as error:
            log.warning("cannot heal to step %d: %s", step, error)
            healed.failure, healed.step_before = error, before.outer_step
        healed.guard_load_functions()
        batches = adapter._manager.batches_committed()
        return {"user": healed, "torchft": {"step": step, "batches_committed": batches}}

    def _recover(self, checkpointer: SpeculativeCheckpointer, step: int, peer: str | None, timeout: timedelta) -> None:
        # Before the first outer step replicas may have been initialised differently, and torchft's word is that the
        # source it chose is right: take that one's. Later the outer state is a matter of agreement.
        checkpointer.recover_from(peer if step == 0 else None, mode="outer", timeout_s=timeout.total_seconds())

    def _peer(self, metadata: str) -> str | None:
        node = metadata.removeprefix(self.PREFIX)
        return node if metadata.startswith(self.PREFIX) and is_node_id(node) else None


class _Healed:
    """Stands where torchft expects the peer's user state: the state is restored already, or could not be.

    torchft hands `user[key]` to every registered load function on the trainer's thread; ours, put around them, know
    this object and ignore it, or raise there what went wrong.
    """

    def __init__(self, adapter: TorchftAdapter) -> None:
        self._manager = adapter._manager
        self.failure: HotswarmError | None = None
        self.step_before = 0

    def __getitem__(self, key: str) -> _Healed:
        return self

    def guard_load_functions(self) -> None:
        functions = self._manager._load_state_dict_fns
        for key, load in list(functions.items()):
            if not isinstance(load, _GuardedLoad):
                functions[key] = _GuardedLoad(load)

    def finish(self) -> None:
        """On the trainer's thread. RecoveryError when healing failed; the Manager is shut down then."""
        if self.failure is None:
            return
        self._manager._step = self.step_before
        self._manager.shutdown(wait=False)
        raise RecoveryError(
            f"this replica is behind its swarm and could not be healed, so it leaves: {self.failure}"
        ) from self.failure


class _GuardedLoad:
    def __init__(self, load: Callable[[Any], None]) -> None:
        self._load = load

    def __call__(self, state: Any) -> None:
        if isinstance(state, _Healed):
            state.finish()
        else:
            self._load(state)
