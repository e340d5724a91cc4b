"""The demo's data: the source text of Python's own standard library, which every machine with Python has.

Files are dealt to nodes round-robin by name, so that shards are disjoint and the same on every start. Within a shard
windows are visited in an order shuffled anew each epoch by a generator of its own: the data position is two integers,
and neither the model's random numbers nor anyone else's move it.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from hotswarm.errors import ConfigError

SHARD_BYTES = 1_000_000  # enough that a demo never sees a window twice; read in a few milliseconds


def library_text(shard: int, shards: int, limit_bytes: int = SHARD_BYTES) -> bytes:
    """The concatenated top-level modules of shard `shard` of `shards`, at most `limit_bytes` of them."""
    if not 0 <= shard < shards:
        raise ConfigError(f"shard {shard} of {shards} does not exist: shards count from 0", "shard")
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(root.glob("*.py"))[shard::shards]:
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    if not text:
        raise ConfigError(f"no *.py under {root}: this Python has no readable standard library to learn from", "shard")
    return bytes(text[:limit_bytes])


class Batches:
    """Endless (batch, context + 1) int64 windows, shuffled; `state_dict` is the position, for all iterators at once."""

    def __init__(self, text: bytes, *, batch: int, context: int, seed: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._batch = batch
        self._window = context + 1
        self._windows = len(text) // self._window
        if self._windows < batch:
            raise ConfigError(
                f"{len(text)} bytes make {self._windows} windows, fewer than one batch of {batch}", "batch"
            )
        self._seed = seed
        self._epoch = 0
        self._taken = 0  # batches of this epoch that were handed out
        self._order = self._shuffled()

    def _shuffled(self) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        return torch.randperm(self._windows, generator=generator)

    def __iter__(self) -> Iterator[Tensor]:
        """Goes on wherever the position is when the next batch is asked for."""
        while True:
            yield self._next_batch()

    def _next_batch(self) -> Tensor:
        if (self._taken + 1) * self._batch > self._windows:
            self._epoch, self._taken = self._epoch + 1, 0
            self._order = self._shuffled()
        picked = self._order[self._taken * self._batch : (self._taken + 1) * self._batch]
        self._taken += 1
        return torch.stack([self._text[i * self._window : (i + 1) * self._window] for i in picked.tolist()])

    def state_dict(self) -> dict[str, int]:
        """The position: which epoch, and how many of its batches were handed out."""
        return {"epoch": self._epoch, "taken": self._taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes to a position that `state_dict` gave."""
        self._epoch, self._taken = int(state["epoch"]), int(state["taken"])
        self._order = self._shuffled()
