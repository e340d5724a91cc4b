"""Restoring the model: its check, which changes nothing, and its share of the work.

Messages say what differs and on which side: "here" is this process, "the snapshot" the other one.
"""

from __future__ import annotations

from collections.abc import Mapping

from hotswarm.capture.incoming import Incoming, IncomingState, Tree
from hotswarm.capture.naming import NamedTensors
from hotswarm.capture.tensors import spec_of
from hotswarm.capture.work import Work
from hotswarm.errors import Incompatible


def model_promises(
    state: IncomingState, names: NamedTensors, *, from_outer: bool, buffers: bool
) -> dict[str, Incoming]:
    """Live name → promise, for every parameter (and buffer). Incompatible names the first difference.

    From the outer copy come the parameters that it has; frozen ones, which it has not, come from the inner section.
    """
    model = state.section("inner").get("model")
    if not isinstance(model, dict):
        raise Incompatible("the snapshot holds no model")
    _check_names(model, names, buffers=buffers)
    _check_frozen(state, names)
    chosen: dict[str, Incoming] = {name: model[name] for name in names.params}
    if from_outer:
        check_outer(state.section("outer"), names)
        chosen.update(state.section("outer")["params"])
    if buffers:
        chosen.update({name: model[name] for name in names.buffers})
    for name, promise in chosen.items():
        live = names.params.get(name, names.buffers.get(name))
        assert live is not None
        spec = spec_of(live, ("model", name))
        if spec != promise.spec:
            raise Incompatible(f"the model differs: {name} is {spec} here and {promise.spec} in the snapshot")
    return chosen


def _check_names(model: Tree, names: NamedTensors, *, buffers: bool) -> None:
    there = {name for name, promise in model.items() if buffers or promise.role != "buffer"}
    here = set(names.params) | (set(names.buffers) if buffers else set())
    here |= {name for name, first in names.ties.items() if buffers or first in names.params}
    for name in sorted(here ^ there):
        where = "only here" if name in here else "only in the snapshot"
        raise Incompatible(f"the model differs: {name} is {where} ({len(here)} tensors here, {len(there)} there)")
    by_promise: dict[int, str] = {}
    for name in [*names.params, *names.buffers, *names.ties]:
        if name not in there:
            continue
        first = by_promise.setdefault(id(model[name]), name)
        tied_here = names.ties.get(name, name)
        if first != tied_here and not _one_storage(names, first, name):
            pair = sorted({first, name, tied_here})
            raise Incompatible(
                f"the model differs: {' and '.join(pair)} are one tensor on one side and two on the other side"
            )


def _one_storage(names: NamedTensors, first: str, second: str) -> bool:
    # Two parameter objects over the same elements are captured as one tensor, too.
    everything = {**names.params, **names.buffers}
    a, b = everything.get(first), everything.get(second)
    return a is not None and b is not None and a.data_ptr() == b.data_ptr()


def _check_frozen(state: IncomingState, names: NamedTensors) -> None:
    frozen = state.section("inner").get("frozen")
    if frozen is None:  # a dict made by another program
        return
    there = set(frozen)
    for name, param in names.params.items():
        if param.requires_grad == (name in there):
            here, over = ("trained", "frozen") if param.requires_grad else ("frozen", "trained")
            raise Incompatible(f"parameter {name} is {here} here and {over} in the snapshot; set requires_grad alike")


def check_outer(outer: Tree | None, names: NamedTensors) -> None:
    """Incompatible unless outer parameters and momentum belong to the parameters here (their dtype may differ)."""
    for key in ("params", "momentum") if outer is not None else ():
        assert outer is not None
        for name, promise in outer[key].items():
            live = names.params.get(name)
            if live is None:
                raise Incompatible(f"the outer {key} in the snapshot have {name!r}, which the model here has not")
            if tuple(live.shape) != promise.spec.shape:
                here = "x".join(map(str, live.shape)) or "scalar"
                raise Incompatible(f"outer {key}: {name} is {here} here and {promise.spec} in the snapshot")


def model_work(work: Work, chosen: Mapping[str, Incoming], names: NamedTensors) -> None:
    """Read straight into the live parameters: their identities, and with them the optimizer, stay."""
    for name, promise in chosen.items():
        live = names.params.get(name, names.buffers.get(name))
        assert live is not None
        work.reads.append((live, promise))
