"""DiLoCo: the reference trainer, and the outer optimizer that gives the same bits on every host.

The algorithm is Algorithm 1 of Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
Models", arXiv 2311.08105. Every worker i starts round t from the same outer parameters θ(t-1), takes H inner steps of
AdamW on its own data shard to reach θi(t), and the workers average their pseudo-gradients:

    Δ(t) = 1/k · Σi (θ(t-1) - θi(t))          the `average` callback; the all-reduce is not ours
    θ(t) = OuterOpt(θ(t-1), Δ(t))             Nesterov momentum, lr 0.7, momentum 0.9

The inner optimizer's moments stay on their worker and run on through the outer step; the outer parameters and the
outer momentum are the same on all workers. Two special cases follow from the formula and are tests: with one worker,
outer lr 1 and no momentum a round ends at θ(t-1) - (θ(t-1) - θ1(t)), which is plain AdamW up to the rounding of that
one subtraction (and bit for bit wherever no parameter changes by more than a factor of two within a round: Sterbenz);
with k workers it is the average of their parameters.

Rounds, and what an exception leaves behind. `stats.inner_step_count` counts 0 … H, `phase` says where:

    IDLE ──first inner_step──▶ INNER ──H-th inner_step──▶ OUTER ──average, update, callback, refresh──▶ INNER (count 0)

`_lock` is held from the beginning of `inner_step` to its end, outer step included: whoever takes it sees a step
boundary. When `average` raises, the H-th inner step stays done, nothing of the outer step has happened, `phase` stays
OUTER, and `outer_step()` may be tried again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, overload

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hotswarm.errors import ConfigError, HotswarmError

Tensors = dict[str, Tensor]
Average = Callable[[Tensors], Mapping[str, Tensor]]
"""Own pseudo-gradients by parameter name -> their average over all workers. Same names, shapes and dtypes."""


def exact_nesterov_(
    param: Tensor, grad: Tensor, buf: Tensor | None, *, lr: float, momentum: float, weight_decay: float = 0.0
) -> Tensor | None:
    """One Nesterov update of `param`, in place; returns the momentum buffer (None while momentum is 0).

    The formula is that of `torch.optim.SGD(nesterov=True, dampening=0)`, after Sutskever et al. 2013:

        g += weight_decay · θ;   b = momentum · b + g  (b = g at first);   θ -= lr · (g + momentum · b)

    but every operation here is one element-wise multiply, add or subtract, rounded once. A kernel that fuses a
    multiply and an add rounds once where this rounds twice, and whether one does depends on the host's vector unit:
    torch's own SGD gives other bits under AVX2 than without. So: no `alpha=`, no `lerp_`, no `addcmul_`. `grad` is
    left as it was. Extra memory: two tensors of the parameter's size at a time.
    """
    if weight_decay:
        grad = param.mul(weight_decay).add_(grad)
    if momentum:
        buf = grad.clone() if buf is None else buf.mul_(momentum).add_(grad)
        grad = buf.mul(momentum).add_(grad)
    param.sub_(grad.mul(lr))
    return buf


def _check_hyper(lr: float, momentum: float, weight_decay: float) -> None:
    if not lr >= 0.0:
        raise ConfigError(f"outer lr must be at least 0, got {lr}", "lr")
    if not 0.0 <= momentum < 1.0:
        raise ConfigError(f"outer momentum must be in [0, 1), got {momentum}", "momentum")
    if not weight_decay >= 0.0:
        raise ConfigError(f"outer weight decay must be at least 0, got {weight_decay}", "weight_decay")


class ExactNesterov(Optimizer):
    """`torch.optim.SGD(nesterov=True)` in single-rounding operations: the same bits on every host.

    Run on CPUs without vector units, with AVX2 and with AVX512; on CUDA it follows from IEEE 754 and was not run here.

    Use it as the outer optimizer where hosts of different hardware should agree on the outer state digest. Its state
    and its parameter groups have SGD's keys, so that either loads the other's `state_dict()`.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.7,  # the paper's choice, as is the momentum
        momentum: float = 0.9,
        *,
        weight_decay: float = 0.0,
    ) -> None:
        _check_hyper(lr, momentum, weight_decay)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": 0.0,
            "weight_decay": weight_decay,
            "nesterov": True,
            "maximize": False,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `Optimizer.add_param_group`; ConfigError for settings that this update does not implement."""
        super().add_param_group(param_group)
        self._check_group(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `Optimizer.load_state_dict`; takes SGD's too. ConfigError when it was not plain Nesterov SGD."""
        for group in state_dict["param_groups"]:
            self._check_group(group)
        super().load_state_dict(state_dict)

    @staticmethod
    def _check_group(group: dict[str, Any]) -> None:
        _check_hyper(group["lr"], group["momentum"], group.get("weight_decay", 0.0))
        if group.get("dampening", 0.0) != 0.0 or group.get("maximize", False) or not group.get("nesterov", True):
            raise ConfigError("ExactNesterov has no dampening, no maximize and is always nesterov", "param_groups")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient. Sparse gradients are refused (TypeError)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, momentum, decay = group["lr"], group["momentum"], group["weight_decay"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.is_sparse:
                    raise TypeError("ExactNesterov takes no sparse gradients; make the outer pseudo-gradient dense")
                state = self.state[param]
                buf = exact_nesterov_(
                    param, param.grad, state.get("momentum_buffer"), lr=lr, momentum=momentum, weight_decay=decay
                )
                if buf is not None:
                    state["momentum_buffer"] = buf
        return loss


class OuterOptimizer:
    """The same update for tensors known by name, which is how the trainer keeps its outer copy.

    `velocity` holds the momentum buffers; a name appears at its first update, and never while momentum is 0.
    """

    nesterov = True

    def __init__(self, lr: float = 0.7, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        _check_hyper(lr, momentum, weight_decay)
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.velocity: Tensors = {}

    @torch.no_grad()
    def step(self, params: Mapping[str, Tensor], pseudo_gradients: Mapping[str, Tensor]) -> None:
        """Moves `params` in place. KeyError when a pseudo-gradient is missing; nothing has moved then."""
        pairs = [(name, param, pseudo_gradients[name]) for name, param in params.items()]
        for name, param, grad in pairs:
            buf = exact_nesterov_(
                param,
                grad,
                self.velocity.get(name),
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
            )
            if buf is not None:
                self.velocity[name] = buf

    def state_dict(self) -> dict[str, Any]:
        """`{lr, momentum, weight_decay, nesterov, velocity{name: tensor}}`; the tensors are live, not copies."""
        return {
            "lr": self.lr,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "nesterov": self.nesterov,
            "velocity": dict(self.velocity),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes what `state_dict` gave; tensors are copied. ConfigError for bad values; nothing is changed then."""
        lr, momentum = float(state["lr"]), float(state["momentum"])
        decay = float(state.get("weight_decay", self.weight_decay))
        _check_hyper(lr, momentum, decay)
        if not state.get("nesterov", True):
            raise ConfigError("this outer optimizer is always nesterov; the state given was not", "nesterov")
        velocity = {name: buf.detach().clone() for name, buf in state["velocity"].items()}
        self.lr, self.momentum, self.weight_decay, self.velocity = lr, momentum, decay, velocity


class DiLoCoPhase(Enum):
    """Where in a round the trainer stands; the module's head draws the moves."""

    IDLE = "idle"
    INNER = "inner"
    OUTER = "outer"


@dataclass(frozen=True, slots=True)
class DiLoCoConfig:
    """Hyper-parameters of one run; the same on every worker. Numbers not marked are the paper's (section 3)."""

    inner_steps: int = 500  # H
    inner_lr: float = 4e-4
    inner_betas: tuple[float, float] = (0.9, 0.999)
    inner_weight_decay: float = 0.1
    max_grad_norm: float | None = None  # clips the global gradient norm; None (ours): no clipping
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.inner_steps < 1:
            raise ConfigError(f"inner_steps must be at least 1, got {self.inner_steps}", "inner_steps")
        if not self.inner_lr >= 0.0:
            raise ConfigError(f"inner_lr must be at least 0, got {self.inner_lr}", "inner_lr")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0.0:
            raise ConfigError(f"max_grad_norm must be above 0 or None, got {self.max_grad_norm}", "max_grad_norm")
        _check_hyper(self.outer_lr, self.outer_momentum, self.outer_weight_decay)


@dataclass(slots=True)
class DiLoCoStats:
    """Counters, updated in the same instant as the tensors that they describe."""

    inner_step_count: int = 0  # position in this round, 0 … H
    outer_step_count: int = 0  # finished rounds
    total_inner_steps: int = 0  # over all rounds; the training step


class _Scheduler(Protocol):
    def step(self) -> None: ...


class DiLoCoTrainer:
    """A small DiLoCo worker whose averaging is a callback.

    `initial_weights` is the outer copy θ(t-1), {parameter name: tensor}, empty before the first step; it holds every
    parameter that requires a gradient. `average` defaults to the identity: one worker alone. `scheduler`, when given,
    is stepped after every inner step, inside the lock, so that a step boundary always includes it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DiLoCoConfig | None = None,
        inner_optimizer: Optimizer | None = None,
        *,
        outer_optimizer: OuterOptimizer | None = None,
        average: Average | None = None,
        scheduler: _Scheduler | None = None,
    ) -> None:
        self.model = model
        self.config = config or DiLoCoConfig()
        self.inner_optimizer = inner_optimizer or AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=self.config.inner_lr,
            betas=self.config.inner_betas,
            weight_decay=self.config.inner_weight_decay,
        )
        self.outer_optimizer = outer_optimizer or OuterOptimizer(
            self.config.outer_lr, self.config.outer_momentum, self.config.outer_weight_decay
        )
        self.scheduler = scheduler
        self.initial_weights: Tensors = {}
        self.stats = DiLoCoStats()
        self.phase = DiLoCoPhase.IDLE
        self._average = average
        self._lock = threading.RLock()
        self._on_outer_step: Callable[[], object] | None = None

    def set_average(self, average: Average | None) -> None:
        """Replaces the averaging callback; None is the identity."""
        self._average = average

    def set_outer_step_callback(self, callback: Callable[[], object] | None) -> None:
        """One slot. Called, lock held, after the outer update reached the model and the counters, but *before*
        `initial_weights` is refreshed from it, which is why `phase` is OUTER still: whoever snapshots waits for that.
        """
        self._on_outer_step = callback

    def inner_step(self, loss: Tensor) -> bool:
        """Backward, inner optimizer, scheduler; at the H-th step of a round the outer step too.

        Returns whether an outer step happened. `loss` is a scalar with a graph. Raises what `average` raises.
        """
        with self._lock:
            if self.phase is DiLoCoPhase.OUTER:
                raise HotswarmError("this round's outer step has not happened yet; call outer_step() to try it again")
            if not self.initial_weights:
                self._refresh_initial_weights()
            self.phase = DiLoCoPhase.INNER
            self.inner_optimizer.zero_grad()
            loss.backward()
            if self.config.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self._parameters().values(), self.config.max_grad_norm)
            self.inner_optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.stats.inner_step_count += 1
            self.stats.total_inner_steps += 1
            if self.stats.inner_step_count < self.config.inner_steps:
                return False
            self.outer_step()
            return True

    def pseudo_gradients(self) -> Tensors:
        """θ(t-1) - θi, fresh tensors. KeyError when `initial_weights` lacks a parameter."""
        with torch.no_grad():
            return {name: self.initial_weights[name] - param for name, param in self._parameters().items()}

    def outer_step(self) -> None:
        """Averages, moves the outer copy, and puts the model there. Called by `inner_step` at the end of a round."""
        with self._lock:
            if not self.initial_weights:
                raise HotswarmError("no round has begun: call inner_step() before outer_step()")
            self.phase = DiLoCoPhase.OUTER
            own = self.pseudo_gradients()
            averaged = own if self._average is None else self._average(own)
            self._check_averaged(averaged)
            parameters = self._parameters()
            with torch.no_grad():
                for name, param in parameters.items():  # the update is applied to the outer copy, not to moved weights
                    param.copy_(self.initial_weights[name])
                self.outer_optimizer.step({name: param.data for name, param in parameters.items()}, averaged)
            self.stats.outer_step_count += 1
            self.stats.inner_step_count = 0
            try:
                if self._on_outer_step is not None:
                    self._on_outer_step()
            finally:
                self._refresh_initial_weights()
                self.phase = DiLoCoPhase.INNER  # only now do the outer copy, the counters and the model fit together

    def _parameters(self) -> Tensors:
        return {name: param for name, param in self.model.named_parameters() if param.requires_grad}

    def _refresh_initial_weights(self) -> None:
        with torch.no_grad():
            for name, param in self._parameters().items():
                if name in self.initial_weights:
                    self.initial_weights[name].copy_(param)
                else:
                    self.initial_weights[name] = param.detach().clone(memory_format=torch.contiguous_format)

    def _check_averaged(self, averaged: Mapping[str, Tensor]) -> None:
        for name, initial in self.initial_weights.items():
            got = averaged.get(name)
            if got is None:
                raise HotswarmError(f"the average callback returned nothing for {name!r}; it must keep every name")
            if got.shape != initial.shape or got.dtype != initial.dtype:
                raise HotswarmError(
                    f"the average callback returned {tuple(got.shape)} {got.dtype} for {name!r}, "
                    f"which is {tuple(initial.shape)} {initial.dtype}; it must keep shapes and dtypes"
                )
