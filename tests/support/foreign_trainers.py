"""DiLoCo trainers of the well-known shape whose `phase` says "inner" all through the outer step.

They differ in what a checkpointer could go by: whether there is a lock, how `initial_weights` is refreshed after the
callback, and when the position in the round is set back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

H = 3


class Phase(Enum):
    IDLE = "idle"
    INNER = "inner"


class Outer:
    """Heavy-ball momentum; its buffers lie open."""

    def __init__(self) -> None:
        self.lr, self.momentum = 0.7, 0.9
        self.velocity: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.lr, "momentum": self.momentum, "velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lr, self.momentum, self.velocity = state["lr"], state["momentum"], dict(state["velocity"])


def replaced(trainer: ForeignTrainer) -> None:
    trainer.initial_weights = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}


def filled(trainer: ForeignTrainer) -> None:
    trainer.initial_weights = {}
    for name, param in trainer.model.named_parameters():
        trainer.between()
        trainer.initial_weights[name] = param.detach().clone()


@torch.no_grad()
def copied(trainer: ForeignTrainer) -> None:
    for name, param in trainer.model.named_parameters():
        trainer.between()
        trainer.initial_weights[name].copy_(param)


@torch.no_grad()
def unseen(trainer: ForeignTrainer) -> None:
    """Through an alias, so that torch does not count it as a write."""
    for name, param in trainer.model.named_parameters():
        trainer.between()
        trainer.initial_weights[name].data.copy_(param)


REFRESHES = {function.__name__: function for function in (replaced, filled, copied, unseen)}


class ForeignTrainer:
    """`between` is called at moments in which nobody may look."""

    def __init__(
        self, model: nn.Module, *, lock: bool = True, refresh: str = "copied", reset_late: bool = False
    ) -> None:
        self.model = model
        self.config = SimpleNamespace(inner_steps=H)
        self.inner_optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.outer_optimizer = Outer()
        self.initial_weights: dict[str, Tensor] = {}
        self.stats = SimpleNamespace(inner_step_count=0, outer_step_count=0, total_inner_steps=0)
        self.phase = Phase.IDLE
        if lock:
            self._lock = threading.RLock()
        self.between: Callable[[], object] = lambda: None
        self._refresh = REFRESHES[refresh]
        self._reset_late = reset_late
        self._callback: Callable[[], object] | None = None

    def set_outer_step_callback(self, callback: Callable[[], object] | None) -> None:
        self._callback = callback

    def inner_step(self, loss: Tensor) -> None:
        with getattr(self, "_lock", None) or contextlib.nullcontext():
            if not self.initial_weights:
                replaced(self)
            self.phase = Phase.INNER
            self.inner_optimizer.zero_grad()
            loss.backward()
            self.inner_optimizer.step()
            self.stats.inner_step_count += 1
            self.stats.total_inner_steps += 1
            if self.stats.inner_step_count == H:
                self._outer_step()

    @torch.no_grad()
    def _outer_step(self) -> None:
        outer = self.outer_optimizer
        for name, param in self.model.named_parameters():
            delta = param - self.initial_weights[name]
            velocity = outer.velocity.setdefault(name, torch.zeros_like(delta))
            velocity.mul_(outer.momentum).add_(delta)
            param.copy_(self.initial_weights[name] + outer.lr * velocity)
        self.stats.outer_step_count += 1
        if not self._reset_late:
            self.stats.inner_step_count = 0
        if self._callback is not None:
            self._callback()
        self.between()
        self._refresh(self)
        self.stats.inner_step_count = 0
