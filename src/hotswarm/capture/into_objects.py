"""Restoring objects that load themselves (scheduler, scaler) and whatever the user added as `extra`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hotswarm.capture.incoming import Incoming, is_promise, materialise
from hotswarm.capture.tensors import spec_of
from hotswarm.capture.walk import is_stateful
from hotswarm.capture.work import Work, same_dict
from hotswarm.errors import Incompatible


def check_loadable(tree: Any, thing: Any, what: str) -> None:
    """Incompatible unless an object and what was captured of it have the same keys."""
    if tree is None:
        raise Incompatible(f"there is a {what} here and none in the snapshot; leave it out, or take another snapshot")
    here = thing.state_dict()
    if isinstance(here, dict) and isinstance(tree, dict) and set(here) != set(tree):
        key = min(map(str, set(here) ^ set(tree)))
        where = "only here" if key in set(map(str, here)) else "only in the snapshot"
        raise Incompatible(f"the {what} ({type(thing).__qualname__}) differs: {key!r} is {where}")


def loader_work(work: Work, tree: Any, thing: Any, what: str) -> None:
    """`load_state_dict`, with its old state kept for putting back."""
    if tree == {} and thing.state_dict() == {}:  # a disabled GradScaler refuses even its own empty state
        return
    old = copy.deepcopy(thing.state_dict())
    new = as_live(materialise(tree), old)
    work.loaders.append((what, lambda: thing.load_state_dict(new), lambda: thing.load_state_dict(old)))


def as_live(node: Any, live: Any) -> Any:
    """The tree with dicts of the kinds that `live` has at the same places."""
    if type(node) is dict:
        old = live if isinstance(live, dict) else {}
        return same_dict(live, {key: as_live(child, old.get(key)) for key, child in node.items()})
    if type(node) is list and isinstance(live, list):
        olds = [*live, *[None] * len(node)]
        return [as_live(child, old) for child, old in zip(node, olds, strict=False)]
    return node


def check_attached(tree: Any, thing: Any, path: str) -> None:
    """Incompatible unless every object in `thing` that saves itself has its state in the snapshot."""
    if isinstance(thing, torch.Generator):
        if not is_promise(tree) or tree.spec != spec_of(thing.get_state(), (path,)):
            raise Incompatible(f"{path} is a torch.Generator here and something else in the snapshot")
    elif isinstance(thing, dict):
        if not isinstance(tree, dict):
            raise Incompatible(f"{path} is a dict here and something else in the snapshot")
        for key, child in thing.items():
            if key in tree:
                check_attached(tree[key], child, f"{path}/{key}")
            elif _saves_itself(child):
                raise Incompatible(f"{path}/{key} ({type(child).__qualname__}) is not in the snapshot")
    elif isinstance(thing, list | tuple) and any(map(_saves_itself, thing)):
        if not isinstance(tree, list | tuple) or len(tree) != len(thing):
            raise Incompatible(f"{path} has {len(thing)} items here and another number in the snapshot")
        for index, child in enumerate(thing):
            check_attached(tree[index], child, f"{path}/{index}")
    elif is_stateful(thing):
        check_loadable(tree, thing, path)
        if isinstance(thing, nn.Module):
            _module_targets(tree, thing, path)


def _saves_itself(thing: object) -> bool:
    return isinstance(thing, torch.Generator) or is_stateful(thing)


def attached_work(work: Work, tree: Any, thing: Any, path: str) -> Any:
    """What belongs in the place of `thing`: itself where it can be filled or loaded, else a new tree."""
    if isinstance(thing, torch.Generator):
        old, new = thing.get_state(), materialise(tree)
        work.loaders.append((path, lambda: thing.set_state(new), lambda: thing.set_state(old)))
        return thing
    if isinstance(thing, dict):
        new = {key: attached_work(work, child, thing.get(key), f"{path}/{key}") for key, child in tree.items()}
        work.commits.append(lambda: thing.update(new))
        return thing
    if isinstance(thing, list) and isinstance(tree, list):
        olds = [*thing, *[None] * len(tree)]
        items = [
            attached_work(work, child, old, f"{path}/{i}")
            for i, (child, old) in enumerate(zip(tree, olds, strict=False))
        ]
        work.commits.append(lambda: thing.__setitem__(slice(None), items))
        return thing
    if isinstance(thing, tuple) and isinstance(tree, tuple) and len(thing) == len(tree):
        pairs = enumerate(zip(tree, thing, strict=True))
        return tuple(attached_work(work, child, old, f"{path}/{i}") for i, (child, old) in pairs)
    if is_stateful(thing):
        targets = _module_targets(tree, thing, path) if isinstance(thing, nn.Module) else None
        if targets is None:
            loader_work(work, tree, thing, path)
        else:
            work.reads.extend(targets)
        return thing
    return work.rebuilt(tree, thing)


def _module_targets(tree: Any, module: nn.Module, path: str) -> list[tuple[Tensor, Incoming]] | None:
    """The module's own tensors with their promises; None when it has state that is no tensor."""
    live = module.state_dict()
    if any(not isinstance(tensor, Tensor) for tensor in live.values()) or not all(map(is_promise, tree.values())):
        return None
    targets: dict[int, tuple[Tensor, Incoming]] = {}
    for name, tensor in live.items():
        spec = spec_of(tensor, (path, name))
        if spec != tree[name].spec:
            raise Incompatible(f"{path}/{name} is {spec} here and {tree[name].spec} in the snapshot")
        targets[tensor.data_ptr() if tensor.numel() else id(tensor)] = (tensor, tree[name])
    return list(targets.values())
