"""What a restore has to do, in the order in which it may fail.

    1  allocate        new tensors for what has no place yet          may fail; nothing has changed
    2  loaders         load_state_dict() of the user's objects        may fail; each has a way back
    3  reads, commits  bytes into live tensors, dicts swapped         does not fail

The parts of a restore (into_*.py) put their work in here; `run()` does it.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotswarm.capture.incoming import Incoming, fill_all, is_promise
from hotswarm.capture.tensors import matches, new_tensor
from hotswarm.errors import HalfRestored, Incompatible

log = logging.getLogger(__name__)


class Work:
    """Collected work. `tensor_for` and `rebuilt` are stage 1."""

    def __init__(self) -> None:
        self.reads: list[tuple[Tensor, Incoming]] = []
        self.loaders: list[tuple[str, Callable[[], object], Callable[[], object]]] = []
        """(what it is called, do, undo)"""
        self.commits: list[Callable[[], object]] = []
        self._made: dict[int, Tensor] = {}
        self._used: set[int] = set()

    def tensor_for(
        self,
        promise: Incoming,
        live: object = None,
        device: torch.device | str = "cpu",
        like: Tensor | None = None,
    ) -> Tensor:
        """The tensor that will hold these bytes: `live` when it fits and is on the device, else a new one.

        The same promise is the same tensor each time: what was one object at the donor is one here.
        """
        known = self._made.get(id(promise))
        if known is not None:
            return known
        tensor: Tensor
        if (
            isinstance(live, Tensor)
            and matches(live, promise.spec)
            and live.device == torch.device(device)
            and (not live.numel() or live.data_ptr() not in self._used)
        ):
            tensor = live
        else:
            tensor = new_tensor(promise.spec, device, like)
        self._used.add(tensor.data_ptr())
        self._made[id(promise)] = tensor
        self.reads.append((tensor, promise))
        return tensor

    def rebuilt(
        self,
        node: Any,
        live: Any,
        device: Callable[[Incoming], torch.device | str] = lambda _: "cpu",
        like: Tensor | None = None,
    ) -> Any:
        """The incoming tree with a tensor for each promise, those of `live` where they fit; containers as in `live`."""
        if is_promise(node):
            return self.tensor_for(node, live, device(node), like)
        if type(node) is dict:
            old = live if isinstance(live, dict) else {}
            return same_dict(
                live, {key: self.rebuilt(child, old.get(key), device, like) for key, child in node.items()}
            )
        if type(node) is list or type(node) is tuple:
            olds = list(live) if isinstance(live, list | tuple) else []
            olds += [None] * (len(node) - len(olds))
            items = [self.rebuilt(child, old, device, like) for child, old in zip(node, olds, strict=False)]
            return items if type(node) is list else tuple(items)
        return node

    def run(self) -> int:
        """Do it; the bytes read. Raises what a loader raised, as Incompatible, with everything as it was before."""
        done: list[tuple[str, Callable[[], object]]] = []
        for name, do, undo in self.loaders:
            try:
                do()
            except Exception as error:
                self._undo([(name, undo), *reversed(done)])
                if isinstance(error, Incompatible):
                    raise
                raise Incompatible(
                    f"{name} refused the state in the snapshot: {type(error).__name__}: {error}"
                ) from error
            done.append((name, undo))
        try:
            fill_all(self.reads)
        except Exception as error:
            raise HalfRestored(
                "the snapshot could not be read to its end while it was copied into the model, which holds a mixture "
                f"now: do not train on; restore again, or restart ({error})"
            ) from error
        for commit in self.commits:
            commit()
        return sum(promise.spec.nbytes for _, promise in self.reads)

    @staticmethod
    def _undo(steps: list[tuple[str, Callable[[], object]]]) -> None:
        for name, undo in steps:
            try:
                undo()
            except Exception:
                log.exception("%s did not take its own old state back", name)


def same_dict(live: object, new: dict[Any, Any]) -> dict[Any, Any]:
    """`new` as the kind of dict that `live` is: a Counter stays a Counter (MultiStepLR counts its milestones)."""
    if isinstance(live, defaultdict):
        return defaultdict(live.default_factory, new)
    if type(live) is Counter or type(live) is OrderedDict:
        return type(live)(new)
    return new
