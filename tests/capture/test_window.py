"""The outer step of trainers whose phase does not tell of it: from the callback to the end of the refresh."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from hotswarm.capture.diloco import SeedAdapter
from support.foreign_trainers import REFRESHES, ForeignTrainer, H

KINDS = [
    {"lock": lock, "refresh": refresh, "reset_late": late}
    for lock in (True, False)
    for refresh in REFRESHES
    for late in (True, False)
]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def step(trainer: ForeignTrainer, count: int = 1) -> None:
    for _ in range(count):
        trainer.inner_step(trainer.model(torch.ones(2, 4)).square().mean())


def asked_elsewhere(adapter: SeedAdapter) -> bool:
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(adapter.in_outer_step()))
    thread.start()
    thread.join()
    return got[0]


def chained(kind: dict[str, Any], callback: Any = None) -> tuple[ForeignTrainer, SeedAdapter]:
    trainer = ForeignTrainer(net(), **kind)
    adapter = SeedAdapter(trainer)
    trainer.set_outer_step_callback(callback or (lambda: None))
    adapter.on_outer_step(lambda: None)
    return trainer, adapter


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: " ".join(map(str, kind.values())))
def test_from_the_callback_to_the_end_of_the_refresh_it_is_an_outer_step(kind: dict[str, Any]) -> None:
    seen: list[tuple[str, bool, bool]] = []

    def look(where: str) -> None:
        seen.append((where, adapter.in_outer_step(), asked_elsewhere(adapter)))

    trainer, adapter = chained(kind, lambda: look("callback"))
    trainer.between = lambda: look("between")
    nothing_shows = kind["refresh"] == "unseen" and not kind["lock"]
    while trainer.stats.outer_step_count < 3:
        step(trainer)
        if nothing_shows and trainer.stats.inner_step_count == 0:
            assert adapter.in_outer_step()  # until the next step
        else:
            assert not adapter.in_outer_step()
            assert not asked_elsewhere(adapter)
    assert {where for where, _, _ in seen} == {"callback", "between"}
    assert all(here and there for _, here, there in seen)


def test_whoever_takes_the_lock_after_the_step_stands_at_a_boundary() -> None:
    trainer, adapter = chained({"refresh": "unseen"})
    step(trainer, H)
    with adapter.lock():
        assert not adapter.in_outer_step()
    got: list[bool] = []

    def other() -> None:
        with adapter.lock():
            got.append(adapter.in_outer_step())

    step(trainer, H)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert got == [False]


def test_a_caller_who_took_the_trainers_lock_itself_is_not_taken_for_its_callback() -> None:
    trainer, adapter = chained({})
    step(trainer, H)
    with trainer._lock:
        assert not adapter.in_outer_step()
    unchained = SeedAdapter(trainer)
    with trainer._lock, unchained.lock():
        assert not unchained.in_outer_step()


@pytest.mark.parametrize("reset_late", [True, False])
def test_not_chained_in_the_outer_copy_itself_tells_inside_the_trainers_lock(reset_late: bool) -> None:
    trainer = ForeignTrainer(net(), refresh="unseen", reset_late=reset_late)
    adapter, seen = SeedAdapter(trainer), []

    def look() -> None:
        with adapter.lock():
            seen.append(adapter.in_outer_step())

    trainer.set_outer_step_callback(look)
    for _ in range(2 * H):
        step(trainer)
        assert not adapter.in_outer_step()
    assert seen == [True, True]
    with torch.no_grad():  # the caller's own doing, at the beginning of a round
        trainer.model[0].weight.zero_()
    with adapter.lock():
        assert not adapter.in_outer_step()


def test_a_callback_set_later_is_chained_in_and_one_that_is_taken_away_stays_away() -> None:
    heard: list[str] = []
    trainer = ForeignTrainer(net())
    adapter = SeedAdapter(trainer)
    trainer.set_outer_step_callback(lambda: heard.append("first"))
    adapter.on_outer_step(lambda: heard.append("ours"))
    adapter.on_outer_step(lambda: heard.append("ours too"))
    step(trainer, H)
    assert heard == ["first", "ours", "ours too"]
    trainer.set_outer_step_callback(lambda: heard.append(f"second {adapter.in_outer_step()}"))
    assert not adapter.in_outer_step()  # asked at each step
    heard.clear()
    step(trainer, H)
    assert heard == ["second True", "ours", "ours too"]
    trainer.set_outer_step_callback(None)
    assert not adapter.in_outer_step()
    heard.clear()
    step(trainer, H)
    assert heard == ["ours", "ours too"]


def test_a_callback_that_raises_leaves_no_open_window_behind() -> None:
    def broken() -> None:
        raise ValueError("a user's bug")

    trainer, adapter = chained({"refresh": "replaced"}, broken)
    step(trainer, H - 1)
    with pytest.raises(ValueError, match="bug"):
        step(trainer)
    assert not adapter.in_outer_step()


class Wrapping(ForeignTrainer):
    """Its setter keeps something else than it is given."""

    def set_outer_step_callback(self, callback: Any) -> None:
        super().set_outer_step_callback(None if callback is None else lambda: [callback()])


class Slotted(ForeignTrainer):
    """Its callback does not lie in its `__dict__`."""

    __slots__ = ("held",)

    def set_outer_step_callback(self, callback: Any) -> None:
        self.held = callback
        super().set_outer_step_callback(self._call)

    def _call(self) -> None:
        if self.held is not None:
            self.held()


@pytest.mark.parametrize("kind", [Wrapping, Slotted])
def test_the_users_callback_is_kept_however_the_trainer_keeps_it(kind: type[ForeignTrainer]) -> None:
    heard: list[str] = []
    trainer = kind(net())
    adapter = SeedAdapter(trainer)
    trainer.set_outer_step_callback(lambda: heard.append("first"))
    adapter.on_outer_step(lambda: heard.append("ours"))
    for _ in range(H):
        assert not adapter.in_outer_step()
        step(trainer)
    assert heard == ["first", "ours"]
    trainer.set_outer_step_callback(lambda: heard.append("second"))
    heard.clear()
    for _ in range(H):
        assert not adapter.in_outer_step()
        step(trainer)
    assert heard == ["second", "ours"]
