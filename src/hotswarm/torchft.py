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

# ruff: noqa: SLF001  # torchft 0.2.0 publishes none of what a checkpoint needs; see torchft_engine.py

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torchft.checkpointing.transport import CheckpointTransport
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager

from hotswarm.errors import HotswarmError, Incompatible, RecoveryError
from hotswarm.ids import is_node_id
from hotswarm.torchft_engine import TorchftAdapter

if TYPE_CHECKING:
    from hotswarm.checkpointer import SpeculativeCheckpointer

__all__ = ["SwarmCheckpointTransport", "TorchftAdapter", "attach"]

log = logging.getLogger(__name__)

HEAL_SHARE = 0.8  # of the Manager's timeout: the donors' all-reduce waits for the joiner no longer than all of it
RETRY_S = 0.2  # between two tries to heal; the donor's snapshot of the step may be on its way to the disk


def attach(manager: Manager, diloco: DiLoCo, checkpointer: SpeculativeCheckpointer) -> TorchftAdapter:
    """Makes `checkpointer` capture and restore `diloco`, and installs the safe transport in `manager`.

    Call it after DiLoCo is constructed and before `checkpointer.start()`. State that only the Manager's own
    `state_dict` function knows is not captured: give it to the checkpointer as `extra`. ConfigError when the objects
    are not what torchft's DiLoCo needs.
    """
    adapter = TorchftAdapter(manager, diloco, checkpointer.model)
    old = manager._checkpoint_transport
    if isinstance(old, SwarmCheckpointTransport):
        old.bind(adapter, checkpointer)
    else:
        manager._checkpoint_transport = SwarmCheckpointTransport()
        manager._checkpoint_transport.bind(adapter, checkpointer)
        _end(old)
    checkpointer.set_engine(adapter)
    return adapter


def _end(transport: CheckpointTransport[Any]) -> None:
    """torchft's own transport listens on every interface and serves pickles; its `shutdown` leaves the port open."""
    transport.shutdown(wait=True)
    server = getattr(transport, "_server", None)
    if server is not None:
        server.server_close()


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
        """Copies a snapshot of outer step `step` for the joiners, who fetch it once it is written.

        Neither waits for a disk or a daemon nor raises: that would make this healthy replica discard its own round.
        """
        self.sent += 1
        log.info("replicas %s are to be healed to step %d", dst_ranks, step)
        try:
            adapter, checkpointer = self._bound()
            with adapter.standing_in():
                handle = checkpointer.snapshot()
            if handle.done:  # already: it failed, or the disk was quick
                handle.result()
        except Exception as error:  # noqa: BLE001 - see above
            log.warning("no snapshot of step %d for the joiners: %s", step, error)

    def disallow_checkpoint(self) -> None:
        """Nothing to do: snapshots are copies."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        """Restores this replica's outer state at `step` from the swarm, on the Manager's thread.

        Returns what makes torchft go on with the state just restored; after a failure, what makes it raise
        RecoveryError on the trainer's thread.
        """
        adapter, _ = self._bound()
        self.received += 1
        healed = _Healed(adapter, step_before=adapter.counters().outer_step)
        # Before the first outer step replicas may have been initialised differently, and torchft's word is that the
        # source it chose is right: take that one's. Later the outer state is a matter of agreement.
        peer = self._peer(metadata) if step == 0 else None
        try:
            deadline_at = time.monotonic() + HEAL_SHARE * timeout.total_seconds()
            with adapter.standing_in(), self._until(deadline_at):
                while not self._recovered_to(step, peer, deadline_at):
                    time.sleep(RETRY_S)
        except HotswarmError as error:
            log.warning("cannot heal to step %d: %s", step, error)
            healed.failure = error
        healed.guard_load_functions()
        batches = adapter._manager.batches_committed()
        return {"user": healed, "torchft": {"step": step, "batches_committed": batches}}

    def _recovered_to(self, step: int, peer: str | None, deadline_at: float) -> bool:
        """One try; False when another may succeed. RecoveryError when none will, or none in time."""
        adapter, checkpointer = self._bound()
        left_s = deadline_at - time.monotonic()
        try:
            report = checkpointer.recover_from(peer, mode="outer", timeout_s=max(left_s, RETRY_S))
        except Incompatible:
            raise
        except HotswarmError as error:
            if time.monotonic() + RETRY_S < deadline_at:
                return False
            raise RecoveryError(f"no state of step {step} could be had in time: {error}") from error
        reached = adapter.counters().outer_step
        if report.restored and reached == step:
            return True
        if time.monotonic() + RETRY_S >= deadline_at:
            raise RecoveryError(f"the newest state that the swarm offers is of step {reached}, not {step}")
        return False

    @contextmanager
    def _until(self, deadline_at: float) -> Iterator[None]:
        """A fetch that makes progress, but not enough of it, ends at the deadline as well."""
        _, checkpointer = self._bound()
        before = checkpointer.on_progress

        def watch(progress: dict[str, Any]) -> None:
            if time.monotonic() > deadline_at:
                raise RecoveryError("the fetch would take longer than the Manager's timeout")
            if before is not None:
                before(progress)

        checkpointer.on_progress = watch
        try:
            yield
        finally:
            checkpointer.on_progress = before

    def _peer(self, metadata: str) -> str | None:
        node = metadata.removeprefix(self.PREFIX)
        return node if metadata.startswith(self.PREFIX) and is_node_id(node) else None


class _Healed:
    """Stands where torchft expects the peer's user state: the state is restored already, or could not be.

    torchft hands `user[key]` to every registered load function on the trainer's thread; ours, put around them, know
    this object and ignore it, or raise there what went wrong.
    """

    def __init__(self, adapter: TorchftAdapter, step_before: int) -> None:
        self._manager = adapter._manager
        self._step_before = step_before
        self.failure: HotswarmError | None = None

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
        self._manager._step = self._step_before
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
