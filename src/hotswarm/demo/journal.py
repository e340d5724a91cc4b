"""What a demo trainer writes down: one JSON object a line, each flushed, so that a kill loses at most one.

Digests are the trainer's own account of its tensors, sha256 by hand: they are what the demo's claims compare, so they
must not come from the code that the claims are about.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Journal:
    """Appends `{"ev": kind, "t": unix seconds, ...}` lines to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        """One line, on disk's way before this returns."""
        self._file.write(json.dumps({"ev": kind, "t": time.time(), **fields}, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        """No line after this."""
        self._file.close()


def process_age_s() -> float:
    """Seconds since this process was started, interpreter and imports included (Linux, whole ticks of 10 ms)."""
    started_ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the tensors sorted by name: name, a zero byte, the raw little-endian bytes. Hex."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(b"\0")
        sha.update(tensors[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def digests(model: nn.Module, inner: Optimizer, outer: Mapping[str, Any] | None) -> dict[str, str]:
    """Of live parameters, outer copy, outer momentum and AdamW's moments.

    `outer` is an engine adapter's `{params{name}, momentum{name}}`; None gives empty strings.
    """
    named = dict(model.named_parameters())
    moments: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
    for name, param in named.items():
        for key, found in moments.items():
            if key in inner.state.get(param, {}):
                found[name] = inner.state[param][key]
    return {
        "params": digest(named),
        "outer": digest(outer["params"]) if outer else "",
        "momentum": digest(outer["momentum"]) if outer else "",
        **{key: digest(found) for key, found in moments.items()},
    }
