"""A snapshot as the plain dict that DiLoCo code passes around, and back.

checkpoint_type timestamp node_id training_step outer_step inner_step
model_state_dict          {name: tensor}
optimizer_state_dict      torch's positional shape
optimizer_param_names     what position i is called: this is what makes matching by name possible
diloco_state              {initial_weights, outer_optimizer, stats, phase}, with a trainer
scheduler scaler rng dataloader extra     where present
hotswarm                  what an exact way back needs besides
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from hotswarm.capture.diloco import Counters
from hotswarm.capture.incoming import (
    FromTensor,
    IncomingState,
    Tree,
    incoming_from_source,
    materialise,
    promise_tensors,
    promises_in,
)
from hotswarm.capture.naming import clean, optimizer_params
from hotswarm.capture.outer import HYPER
from hotswarm.capture.state import TrainingState, optimizer_key
from hotswarm.capture.tensors import spec_of
from hotswarm.errors import Incompatible
from hotswarm.store.base import SnapshotSource

_STATS = ("inner_step_count", "outer_step_count", "total_inner_steps")


# ---------------------------------------------------------------- to a dict


def to_dict(source: SnapshotSource, *, kind: str | None = None, model: Literal["inner", "outer"] = "inner") -> Tree:
    """The snapshot as a dict with its own tensors (a whole copy of the state, on the CPU).

    `kind` replaces the manifest's ("recovery" for one fetched from a peer). With model="outer" the model's parameters
    are the outer copy's, and parts that were not fetched are left out. Raises Incompatible or StoreError.
    """
    manifest = source.manifest
    incoming = incoming_from_source(source)
    sections = dict(incoming.sections)
    if model == "outer":
        sections["inner"] = _with_outer_model(incoming)
    if "private" in sections and not _is_here(incoming, sections["private"]):
        del sections["private"]  # a neighbour's: it never travels
    trees: dict[str, Tree] = materialise(sections)
    inner, outer, private = trees.get("inner", {}), trees.get("outer"), trees.get("private", {})
    weights = dict(inner.get("model", {}))
    result: Tree = {
        "checkpoint_type": kind or manifest.kind,
        "timestamp": manifest.time_ms / 1000,
        "node_id": manifest.label or manifest.node,
        "model_state_dict": weights,
        "training_step": manifest.training_step,
        "outer_step": manifest.outer_step,
        "inner_step": manifest.inner_step,
    }
    count = 0
    others = []
    while (tree := inner.get(optimizer_key(count))) is not None:
        positional, names = _positional(tree)
        if count == 0:
            result["optimizer_state_dict"], result["optimizer_param_names"] = positional, names
        else:
            others.append({"state_dict": positional, "param_names": names, "class": tree["class"]})
        count += 1
    if outer is not None or "trainer" in inner:
        result["diloco_state"] = _diloco_state(outer, inner.get("trainer", {}), incoming.counters)
    for key in ("scheduler", "scaler", "extra"):
        if key in inner:
            result[key] = inner[key]
    result.update(private)
    result["hotswarm"] = {
        "engine": manifest.engine,
        "frozen": inner.get("frozen", []),
        "optimizer_class": inner.get("optimizer", {}).get("class"),
        "optimizers": others,
        "trainer": inner.get("trainer"),
        "outer_hyper": outer["hyper"] if outer is not None else None,
        "global": inner.get("optimizer", {}).get("global", {}),
    }
    return result


def _with_outer_model(incoming: IncomingState) -> Tree:
    """The inner section with the outer copy as its model, and without optimizer state that was not fetched: a joiner
    fetches neither the donor's live parameters nor, when it starts afresh, the moments.
    """
    inner = dict(incoming.section("inner"))
    outer, live = incoming.section("outer")["params"], inner["model"]
    moved = {id(live[name]): promise for name, promise in outer.items() if name in live}  # tied names go along
    inner["model"] = {name: moved.get(id(promise), promise) for name, promise in live.items()}
    for key in [key for key in inner if key.startswith("optimizer")]:
        if not _is_here(incoming, inner[key]):
            del inner[key]
    return inner


def _is_here(incoming: IncomingState, tree: Tree) -> bool:
    try:
        incoming.check_present(promises_in(tree))
    except Incompatible:
        return False
    return True


def _positional(tree: Tree) -> tuple[Tree, list[str]]:
    names = [name for group in tree["param_groups"] for name in group["params"]]
    index = {name: position for position, name in enumerate(names)}
    state = {index[name]: value for name, value in tree["state"].items()}
    groups = [{**group, "params": [index[name] for name in group["params"]]} for group in tree["param_groups"]]
    return {"state": state, "param_groups": groups}, names


def _diloco_state(outer: Tree | None, trainer: Tree, counters: Counters) -> Tree:
    numbers = dict(zip(_STATS, (counters.inner_step, counters.outer_step, counters.training_step), strict=True))
    stats = trainer.get("stats", {})
    outer = outer or {"params": {}, "momentum": {}, "hyper": {}}
    return {
        "initial_weights": outer["params"],
        "outer_optimizer": {**outer["hyper"], "velocity": outer["momentum"]},
        "stats": {name: stats.get(name, numbers[name]) for name in _STATS},
        "phase": trainer.get("phase", "inner" if outer["params"] else "idle"),
    }


# ---------------------------------------------------------------- from a dict


def from_dict(checkpoint: Mapping[str, Any], state: TrainingState) -> IncomingState:
    """The dict as something that a Restorer takes; its tensors are not copied. Raises Incompatible, naming the key.

    Dicts of the older class, without names, are matched by position, as they always were.
    """
    try:
        return _from_dict(checkpoint, state)
    except Incompatible:
        raise
    except Exception as error:  # whatever a foreign value answers when it is asked as if it were ours
        raise Incompatible(
            f"the checkpoint dict is not of the known shape ({type(error).__name__}: {error})"
        ) from error


def _from_dict(checkpoint: Mapping[str, Any], state: TrainingState) -> IncomingState:
    model = checkpoint.get("model_state_dict")
    if not isinstance(model, Mapping):
        what = "no model_state_dict" if model is None else f"a {type(model).__name__} as its model_state_dict"
        raise Incompatible(f"the checkpoint dict has {what}, so there is nothing to restore")
    if not model:
        raise Incompatible("the model_state_dict of the checkpoint dict is empty, so there is nothing to restore")
    own = checkpoint.get("hotswarm") or {}
    counters = Counters(*(int(checkpoint.get(key, 0)) for key in ("outer_step", "inner_step", "training_step")))
    inner: Tree = {"model": _model(checkpoint["model_state_dict"], state)}
    if "frozen" in own:
        inner["frozen"] = own["frozen"]
    if "optimizer_state_dict" in checkpoint:
        names = checkpoint.get("optimizer_param_names") or _live_names(state)
        inner["optimizer"] = _by_name(checkpoint["optimizer_state_dict"], names, own.get("optimizer_class"))
        inner["optimizer"]["global"] = promise_tensors(own.get("global", {}))
    for number, other in enumerate(own.get("optimizers", []), start=1):
        inner[optimizer_key(number)] = _by_name(other["state_dict"], other["param_names"], other["class"])
    for key in ("scheduler", "scaler", "extra"):
        if key in checkpoint:
            inner[key] = promise_tensors(checkpoint[key])
    sections: dict[str, Tree] = {"inner": inner}
    engine = own.get("engine", "")
    diloco = checkpoint.get("diloco_state")
    if diloco is not None:
        engine = engine or "diloco"
        inner["trainer"] = own.get("trainer") or {"stats": dict(diloco["stats"]), "phase": diloco["phase"]}
        if diloco["initial_weights"]:
            sections["outer"] = _outer(diloco, counters)
            if own.get("outer_hyper") is not None:
                sections["outer"]["hyper"] = own["outer_hyper"]
    private = {key: promise_tensors(checkpoint[key]) for key in ("rng", "dataloader") if key in checkpoint}
    if private:
        sections["private"] = private
    return IncomingState(sections, counters, engine)


def _model(given: Mapping[str, Any], state: TrainingState) -> Tree:
    names = state.names()
    model: Tree = {}
    for raw, tensor in given.items():
        if not isinstance(tensor, Tensor):
            continue  # extra state of modules: not part of what hotswarm restores
        name = clean(raw)
        role = "buffer" if name in names.buffers else "param"
        model[name] = FromTensor(tensor, spec_of(tensor, ("model_state_dict", name)), role)
    for name, first in names.ties.items():
        here, there = model.get(name), model.get(first)
        if here is None and there is not None:  # listed once, as named_parameters() does
            model[name] = there
        elif here is not None and there is not None and _same_bits(here.tensor, there.tensor):
            model[name] = there  # a state_dict lists a tied tensor under each name
    return model


def _same_bits(a: Tensor, b: Tensor) -> bool:
    same_place = a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
    return same_place or (a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b)))


def _live_names(state: TrainingState) -> list[str]:
    if not state.optimizers:
        return []
    name_of = state.names().name_of
    return [name_of[id(param)] for param in optimizer_params(state.optimizers[0])]


def _by_name(positional: Mapping[str, Any], names: list[str], kind: str | None) -> Tree:
    count = sum(len(group["params"]) for group in positional["param_groups"])
    if count != len(names):
        raise Incompatible(f"the optimizer has {len(names)} parameters here and {count} in the checkpoint dict")
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in positional["param_groups"]]
    state = {names[index]: promise_tensors(value) for index, value in positional["state"].items()}
    tree: Tree = {"state": state, "param_groups": promise_tensors(groups), "global": {}}
    if kind is not None:
        tree["class"] = kind
    return tree


def _outer(diloco: Mapping[str, Any], counters: Counters) -> Tree:
    saved = diloco["outer_optimizer"]
    weights = {clean(name): tensor for name, tensor in diloco["initial_weights"].items()}
    if "param_groups" in saved:  # a torch optimizer: positions are those of the outer copy
        order = list(weights)
        buffers = {
            order[index]: value["momentum_buffer"]
            for index, value in saved["state"].items()
            if value.get("momentum_buffer") is not None
        }
        settings = saved["param_groups"][0]
    else:
        sets = (
            [saved["velocity"]] if "velocity" in saved else [one for one in saved.values() if isinstance(one, Mapping)]
        )
        buffers = dict(sets[0]) if sets else {}
        settings = saved
    return {
        "params": promise_tensors(weights, "param"),
        "momentum": promise_tensors({clean(name): tensor for name, tensor in buffers.items()}, "momentum"),
        "hyper": {key: settings[key] for key in HYPER if key in settings},
        "outer_step": diloco["stats"].get("outer_step_count", counters.outer_step),
    }


def as_outer(incoming: IncomingState) -> IncomingState:
    """A dict without `diloco_state` whose model is an outer copy: its parameters become the outer section's."""
    if "outer" in incoming.sections:
        return incoming
    model = incoming.section("inner")["model"]
    first = {id(promise): name for name, promise in reversed(model.items())}  # of tied names the first
    params = {name: one for name, one in model.items() if one.role == "param" and first[id(one)] == name}
    outer = {"params": params, "momentum": {}, "hyper": {}, "outer_step": incoming.counters.outer_step}
    return replace(incoming, sections={**incoming.sections, "outer": outer})
