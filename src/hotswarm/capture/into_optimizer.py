"""Restoring an optimizer: by parameter name, never by position, and with nothing cast.

`Optimizer.load_state_dict` would match by position and turn float32 moments of a bfloat16 parameter into bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotswarm.capture.incoming import Incoming, Tree
from hotswarm.capture.work import Work
from hotswarm.errors import Incompatible

_SHOWN_NAMES = 12


def check_optimizer(tree: Any, optimizer: Any, name_of: Mapping[int, str], what: str) -> list[Tree]:
    """The snapshot's groups in the order of the groups here, or Incompatible."""
    if not isinstance(tree, dict):
        raise Incompatible(f"the snapshot holds no state of {what}")
    here = [[name_of[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    waiting = list(tree["param_groups"])
    ordered: list[Tree] = []
    for group in here:
        found = next((one for one in waiting if set(one["params"]) == set(group)), None)
        if found is None:
            there = [list(one["params"]) for one in tree["param_groups"]]
            raise Incompatible(f"{what} has other parameter groups: {_show(here)} here, {_show(there)} in the snapshot")
        waiting.remove(found)
        ordered.append(found)
    if waiting:
        there = [list(one["params"]) for one in tree["param_groups"]]
        raise Incompatible(f"{what} has other parameter groups: {_show(here)} here, {_show(there)} in the snapshot")
    kind, saved = type(optimizer).__name__, tree.get("class")
    if saved is not None and saved != kind:
        settings = set(getattr(optimizer, "defaults", {}))
        lacking = sorted(key for group in ordered for key in settings - set(group))
        if lacking:
            raise Incompatible(f"{what} is {kind} here and {saved} in the snapshot, which has no {lacking[0]!r}")
    known = {name for group in here for name in group}
    strangers = sorted(set(tree["state"]) - known)
    if strangers:
        raise Incompatible(f"{what} has state for {strangers[0]!r} in the snapshot and does not own it here")
    return ordered


def _show(groups: Sequence[Sequence[str]]) -> str:
    shown = [", ".join(group[:_SHOWN_NAMES]) + (", …" if len(group) > _SHOWN_NAMES else "") for group in groups]
    return " | ".join(f"[{group}]" for group in shown)


def optimizer_work(work: Work, tree: Tree, ordered: Sequence[Tree], optimizer: Any, name_of: Mapping[int, str]) -> None:
    """State by name, without torch's casts; parameters without state in the snapshot lose theirs."""
    for group, saved in zip(optimizer.param_groups, ordered, strict=True):
        for param in group["params"]:
            old = optimizer.state.get(param, {})
            name = name_of[id(param)]
            if name not in tree["state"]:
                work.commits.append(partial(optimizer.state.pop, param, None))
                continue
            new = {
                key: work.rebuilt(value, old.get(key), partial(_device, key, param, saved), param)
                for key, value in tree["state"][name].items()
            }
            work.commits.append(partial(_install, optimizer, param, new))
    for key in [key for key in optimizer.state if not isinstance(key, Tensor)]:
        if key not in tree.get("global", {}):
            work.commits.append(partial(optimizer.state.pop, key, None))
    for key, value in tree.get("global", {}).items():
        rebuilt = work.rebuilt(value, optimizer.state.get(key))
        work.commits.append(partial(optimizer.state.__setitem__, key, rebuilt))
    groups_work(work, ordered, optimizer)


def groups_work(work: Work, ordered: Sequence[Tree], optimizer: Any) -> None:
    """All keys of the groups, types kept: the learning rate first of all. Keys that only exist here stay."""
    for group, saved in zip(optimizer.param_groups, ordered, strict=True):
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        new = {
            key: work.rebuilt(value, group.get(key), partial(_anywhere, device))
            for key, value in saved.items()
            if key != "params"
        }
        work.commits.append(partial(group.update, new))


def empty_optimizer_work(work: Work, optimizer: Any) -> None:
    """All state goes; groups stay."""
    work.commits.append(optimizer.state.clear)


def _device(key: str, param: Tensor, group: Tree, promise: Incoming) -> torch.device | str:
    # torch keeps `step` on the host unless the step is capturable or fused, whatever the parameter's device.
    if key == "step" and promise.spec.shape == () and not (group.get("capturable") or group.get("fused")):
        return "cpu"
    return param.device


def _anywhere(device: torch.device, _: Incoming) -> torch.device:
    return device


def _install(optimizer: Any, param: Tensor, new: Tree) -> None:
    state = optimizer.state[param]  # a defaultdict: made here when there was none
    state.clear()
    state.update(new)
