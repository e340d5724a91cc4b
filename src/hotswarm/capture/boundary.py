"""When a step is really over.

An optimizer's post-step hook is too early for a snapshot: the scheduler, the scaler, an EMA or the engine's outer copy
may follow. So the hook only notes that a step *happened*, and the next of these events, whichever comes first, is the
boundary of that step:

    explicit()                        the trainer says so (`checkpointer.step()`); once heard, only this counts
    the loader's next `__next__`      before the batch is fetched; when a dataloader is followed
    the root module's next forward    in training mode, when neither of the two is there, and when all optimizers have
                                      stepped: between two of them (a GAN's) there is one, too
    the hook itself, one step later   with none of these; then the capture is marked as not exact

Between two steps of one optimizer there is one boundary, however many micro-batches, further optimizers or evaluation
passes lie there. During an outer step there is none: what is heard then makes the next event a boundary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hotswarm.capture.position import Position

log = logging.getLogger(__name__)

_RATE_MEMORY = 0.1  # weight of the newest step in the moving average of the step time


class Boundary:
    """Turns the signals of a training loop into `on_boundary(exact)`, called on the thread that trains.

    `on_step()` is called for each step of the first optimizer, within its hook: fit for counters, not for captures.
    """

    def __init__(
        self,
        model: object,
        optimizers: Sequence[object],
        position: Position | None,
        on_boundary: Callable[[bool], None],
        *,
        in_outer_step: Callable[[], bool] = lambda: False,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._optimizers = list(optimizers)
        self._position = position
        self._on_boundary = on_boundary
        self._ask_engine = in_outer_step
        self._complained = False
        self._on_step = on_step
        self._handles: list[Any] = []
        self._hooked = 0  # optimizers that tell when they step
        self._stepped: set[int] = set()
        self._explicit = False
        self._inside = False
        self._last_step_at: float | None = None
        self._step_s: float | None = None
        self.steps = 0
        """Steps of the first optimizer since this object was made."""

    @property
    def steps_per_s(self) -> float:
        """A moving average; 0.0 before the second step."""
        return 1.0 / self._step_s if self._step_s else 0.0

    def attach(self) -> None:
        """Install the hooks. Twice is once."""
        if self._handles:
            return
        for number, optimizer in enumerate(self._optimizers):
            register = getattr(optimizer, "register_step_post_hook", None)
            if register is not None:
                self._handles.append(register(self._hook(number)))
        self._hooked = len(self._handles)
        if self._position is not None:
            self._position.attach()
            self._position.on_next = self._next
        elif isinstance(self._model, nn.Module):
            self._handles.append(self._model.register_forward_pre_hook(self._forward))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stepped.clear()
        if self._position is not None:
            self._position.on_next = None
            self._position.detach()

    # ------------------------------------------------------------ signals

    def explicit(self) -> None:
        """The trainer is at a boundary, whether or not an optimizer step was seen. In an outer step (it was called from
        the engine's callback) it is mistaken: the next event is the boundary.
        """
        if self._in_outer_step():
            self._stepped.add(0)
            return
        self._explicit = True
        self._boundary(exact=True)

    def _in_outer_step(self) -> bool:
        try:
            return self._ask_engine()
        except Exception:
            if not self._complained:  # once: this is asked several times in each step
                self._complained = True
                log.exception("the engine does not tell whether it is inside an outer step: no snapshots until it does")
            return True

    def _hook(self, number: int) -> Callable[..., None]:
        def stepped(*_: object) -> None:
            if self._in_outer_step():
                return
            if number in self._stepped and not self._explicit:
                self._boundary(exact=False)  # nothing came since this optimizer's last step: only the hook is there
            self._stepped.add(number)
            if number == 0:
                self._count()

        return stepped

    def _count(self) -> None:
        self.steps += 1
        now = time.monotonic()
        if self._last_step_at is not None:
            took = now - self._last_step_at
            old = self._step_s
            self._step_s = took if old is None else old + _RATE_MEMORY * (took - old)
        self._last_step_at = now
        if self._on_step is not None:
            self._on_step()

    def _next(self) -> None:
        if self._stepped and not self._explicit and not self._in_outer_step():
            self._boundary(exact=True)

    def _forward(self, module: nn.Module, _: object) -> None:
        due = module.training and torch.is_grad_enabled() and self._stepped and len(self._stepped) >= self._hooked
        if due and not self._explicit and not self._in_outer_step():
            self._boundary(exact=True)

    def _boundary(self, *, exact: bool) -> None:
        if self._inside:  # a capture that runs the model or the loader is no boundary of its own
            return
        self._inside = True
        self._stepped.clear()
        try:
            self._on_boundary(exact)
        finally:
            self._inside = False
