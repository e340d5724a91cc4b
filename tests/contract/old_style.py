"""A DiLoCo trainer of the shape that existing code has, written anew: what the checkpointer must recognise.

It differs from the reference trainer where existing ones do: the outer update is added to weights that have already
moved, the outer optimizer's weight decay is an attribute that its `state_dict()` leaves out, the callback gets the
statistics and runs before `initial_weights` is refreshed, and the inner optimizer is the trainer's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn


class Phase(Enum):
    IDLE = "idle"
    INNER_LOOP = "inner_loop"
    OUTER_STEP = "outer_step"


@dataclass
class Stats:
    inner_step_count: int = 0
    outer_step_count: int = 0
    total_inner_steps: int = 0


class Outer:
    def __init__(self, lr: float = 0.7, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.velocity: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, model: nn.Module, deltas: dict[str, Tensor]) -> None:
        for name, param in model.named_parameters():
            if name not in deltas:
                continue
            delta = deltas[name] + self.weight_decay * param
            velocity = self.velocity.setdefault(name, torch.zeros_like(param))
            velocity.mul_(self.momentum).add_(delta)
            param.add_(self.lr * (self.momentum * velocity + delta))

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.lr, "momentum": self.momentum, "velocity": {k: v.clone() for k, v in self.velocity.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lr, self.momentum = state["lr"], state["momentum"]
        self.velocity = {k: v.clone() for k, v in state["velocity"].items()}


class OldTrainer:
    """`inner_step(loss)` until `should_sync()`, then `apply_outer_update(compute_pseudo_gradient())`."""

    def __init__(self, model: nn.Module, inner_steps: int = 5, weight_decay: float = 0.0) -> None:
        self.model = model
        self.inner_steps = inner_steps
        self.inner_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
        self.outer_optimizer = Outer(weight_decay=weight_decay)
        self.initial_weights: dict[str, Tensor] = {}
        self.stats = Stats()
        self.phase = Phase.IDLE
        self._lock = threading.RLock()
        self._callback: Callable[..., object] | None = None

    def set_outer_step_callback(self, callback: Callable[..., object]) -> None:
        self._callback = callback

    def start_inner_loop(self) -> None:
        with self._lock:
            self.initial_weights = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}
            self.stats.inner_step_count = 0
            self.phase = Phase.INNER_LOOP

    def inner_step(self, loss: Tensor) -> float:
        with self._lock:
            if self.phase is Phase.IDLE:
                self.start_inner_loop()
            loss.backward()
            self.inner_optimizer.step()
            self.inner_optimizer.zero_grad()
            self.stats.inner_step_count += 1
            self.stats.total_inner_steps += 1
            return loss.item()

    def should_sync(self) -> bool:
        return self.stats.inner_step_count >= self.inner_steps

    def compute_pseudo_gradient(self) -> dict[str, Tensor]:
        with self._lock, torch.no_grad():
            return {n: p - self.initial_weights[n] for n, p in self.model.named_parameters()}

    def apply_outer_update(self, deltas: dict[str, Tensor]) -> None:
        with self._lock:
            self.phase = Phase.OUTER_STEP
            self.outer_optimizer.step(self.model, deltas)
            self.stats.outer_step_count += 1
            if self._callback:
                self._callback(self.stats)
            self.start_inner_loop()

    def train(self, steps: int, seed: int = 0) -> list[float]:
        """That many inner steps on data that depends on the step alone, outer steps included where they fall."""
        losses = []
        width = next(self.model.parameters()).shape[1]
        for _ in range(steps):
            generator = torch.Generator().manual_seed(seed * 100_003 + self.stats.total_inner_steps)
            x = torch.rand(8, width, generator=generator)
            losses.append(self.inner_step(self.model(x).square().mean()))
            if self.should_sync():
                self.apply_outer_update(self.compute_pseudo_gradient())
        return losses


class SmallNet(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 128)
        self.fc2 = nn.Linear(128, 32)
        self.my_layer_ids = [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))
