"""Random states: torch (CPU, every CUDA device in use), numpy where it is loaded, and Python's own."""

from __future__ import annotations

import logging
import random
import struct
import sys
from typing import Any

import torch
from torch import Tensor

from hotswarm.errors import Incompatible

log = logging.getLogger(__name__)

Tree = dict[str, Any]
_WORDS = struct.Struct("<625I")  # Python's Mersenne twister: 624 words and the position
_MT_WORDS = 624


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())


def capture_rng() -> Tree:
    """All global random states of this process, as a tree of the closed set. Some 10 KiB, some 30 microseconds."""
    version, words, gauss = random.getstate()
    state: Tree = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": _bytes_tensor(_WORDS.pack(*words)), "gauss": gauss},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = list(torch.cuda.get_rng_state_all())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = _numpy_tree(numpy.random.get_state(legacy=False))
    return state


def check_rng(state: Tree) -> None:
    """Incompatible unless `apply_rng` can take it."""
    try:
        generator = torch.Generator()
        generator.set_state(state["torch"])
        python = state["python"]
        random.Random().setstate((python["version"], _WORDS.unpack(_to_bytes(python["words"])), python["gauss"]))
        for device, one in enumerate(_cuda_states(state)):
            torch.Generator(f"cuda:{device}").set_state(one)
        if "numpy" in state:
            _check_numpy(state["numpy"])
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise Incompatible(f"the snapshot's random state is of another torch, numpy or Python: {text}") from error


def _check_numpy(tree: Any) -> None:
    """Raises whatever a generator like this process's own raises when it is given that state."""
    numpy: Any = sys.modules.get("numpy")
    kind = tree["bit_generator"]
    if not isinstance(kind, str):
        raise TypeError(f"numpy's generator is called {kind!r}")
    if numpy is None or numpy.random.get_state(legacy=False)["bit_generator"] != kind:
        return  # left out by apply_rng
    state = _numpy_state(tree, numpy)
    if kind == "MT19937" and not 0 <= int(state["state"]["pos"]) <= _MT_WORDS:
        raise ValueError(f"position {state['state']['pos']} of {_MT_WORDS}")  # numpy would read beyond its words
    numpy.random.RandomState(getattr(numpy.random, kind)()).set_state(state)


def _cuda_states(state: Tree) -> list[Tensor]:
    if "cuda" not in state or not torch.cuda.is_available():
        return []
    return list(state["cuda"][: torch.cuda.device_count()])


def apply_rng(state: Tree) -> None:
    """Continue from this state. CUDA devices that are not here, and numpy where it is not loaded, are left out."""
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], _WORDS.unpack(_to_bytes(python["words"])), python["gauss"]))
    for device, one in enumerate(_cuda_states(state)):
        torch.cuda.set_rng_state(one, device)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        here, saved = numpy.random.get_state(legacy=False)["bit_generator"], state["numpy"]["bit_generator"]
        if here == saved:
            numpy.random.set_state(_numpy_state(state["numpy"], numpy))
        else:
            log.warning("numpy's generator is %s here and %s in the snapshot: its state stays as it is", here, saved)


def _numpy_tree(node: Any) -> Any:
    """numpy's own dict of its generator's state, whichever generator that is; arrays as their bytes."""
    if isinstance(node, dict):
        return {key: _numpy_tree(value) for key, value in node.items()}
    if hasattr(node, "tobytes"):  # arrays, and numpy's integers
        little = node.astype(node.dtype.newbyteorder("<"))
        return {"dtype": little.dtype.str, "shape": list(little.shape), "bytes": _bytes_tensor(little.tobytes())}
    return node


def _numpy_state(tree: Any, numpy: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if set(tree) == {"dtype", "shape", "bytes"}:
        array = numpy.frombuffer(_to_bytes(tree["bytes"]), dtype=tree["dtype"]).reshape(tree["shape"])
        return array.astype(array.dtype.newbyteorder("="))
    return {key: _numpy_state(value, numpy) for key, value in tree.items()}
