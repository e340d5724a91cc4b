"""Random states: torch (CPU, every CUDA device in use), numpy where it is loaded, and Python's own."""

from __future__ import annotations

import random
import struct
import sys
from typing import Any

import torch
from torch import Tensor

from hotswarm.errors import Incompatible

Tree = dict[str, Any]
_WORDS = struct.Struct("<625I")  # Python's Mersenne twister: 624 words and the position


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
        name, keys, position, has_gauss, cached = numpy.random.get_state()
        if name == "MT19937":
            state["numpy"] = {
                "keys": _bytes_tensor(keys.astype("<u4").tobytes()),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            }
    return state


def check_rng(state: Tree) -> None:
    """Incompatible unless `apply_rng` can take it."""
    try:
        generator = torch.Generator()
        generator.set_state(state["torch"])
        python = state["python"]
        random.Random().setstate((python["version"], _WORDS.unpack(_to_bytes(python["words"])), python["gauss"]))
    except (KeyError, TypeError, ValueError, RuntimeError, struct.error) as error:
        raise Incompatible(f"the snapshot's random state is of another torch or Python: {error}") from error


def apply_rng(state: Tree) -> None:
    """Continue from this state. CUDA devices that are not here, and numpy where it is not loaded, are left out."""
    torch.set_rng_state(state["torch"])
    python = state["python"]
    random.setstate((python["version"], _WORDS.unpack(_to_bytes(python["words"])), python["gauss"]))
    if "cuda" in state and torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        saved = state["numpy"]
        keys = numpy.frombuffer(_to_bytes(saved["keys"]), dtype="<u4").astype(numpy.uint32)
        numpy.random.set_state(("MT19937", keys, saved["position"], saved["has_gauss"], saved["cached"]))
