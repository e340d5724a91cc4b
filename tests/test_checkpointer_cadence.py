"""When a snapshot is due, with time as an argument."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from hotswarm.cadence import Cadence
from hotswarm.checkpoint_types import CheckpointType

HOT, COLD = CheckpointType.HOT, CheckpointType.COLD


def test_nothing_is_due_before_start_or_after_stop() -> None:
    cadence = Cadence(interval=1.0, cold_interval=10.0)
    assert cadence.due(1e9) is None
    cadence.start(0.0)
    cadence.stop()
    assert cadence.due(1e9) is None
    assert math.isinf(cadence.next_at)


def test_the_first_one_is_due_after_one_interval_not_at_step_zero() -> None:
    cadence = Cadence(interval=120.0, cold_interval=3600.0)
    cadence.start(1000.0)
    assert cadence.due(1119.9) is None
    assert cadence.due(1120.0) is HOT


def test_one_cold_snapshot_serves_for_both_kinds() -> None:
    cadence = Cadence(interval=10.0, cold_interval=30.0)
    cadence.start(0.0)
    assert cadence.due(30.0) is COLD
    cadence.taken(COLD, 30.0, 0.1)
    assert cadence.due(39.9) is None
    assert cadence.due(40.0) is HOT


def test_the_end_of_a_round_makes_one_due_at_once() -> None:
    cadence = Cadence(interval=100.0, cold_interval=1e6)
    cadence.outer_step(5.0)
    assert cadence.due(5.0) is None  # not started
    cadence.start(0.0)
    cadence.outer_step(7.0)
    assert cadence.due(7.0) is HOT


def test_a_failure_is_retried_soon_and_ever_less_often_but_at_least_once_an_interval() -> None:
    cadence = Cadence(interval=8.0, cold_interval=1e6)
    cadence.start(0.0)
    now, waits = 8.0, []
    for _ in range(6):
        cadence.failed(now)
        waits.append(cadence.next_at - now)
        now = cadence.next_at
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    cadence.taken(HOT, now, 0.1)
    cadence.failed(now + 8.0)
    assert cadence.next_at == now + 9.0


def test_a_failed_cold_one_is_still_cold_when_it_is_tried_again() -> None:
    cadence = Cadence(interval=10.0, cold_interval=20.0)
    cadence.start(0.0)
    cadence.failed(20.0)
    assert cadence.due(21.0) is COLD


def test_an_automatic_interval_measures_first_and_then_keeps_the_stall_cheap() -> None:
    cadence = Cadence(interval="auto", cold_interval=1e6, max_overhead=0.01)
    cadence.start(50.0)
    assert cadence.due(50.0) is HOT
    cadence.taken(HOT, 50.0, 0.2)
    assert cadence.interval_s >= 0.2 / 0.01
    assert cadence.next_at == 50.0 + cadence.interval_s


@given(st.lists(st.tuples(st.floats(0.0, 50.0), st.sampled_from(["taken", "failed", "outer", "durable"])), max_size=40))
def test_once_started_something_is_always_due_within_an_interval(events: list[tuple[float, str]]) -> None:
    cadence = Cadence(interval=10.0, cold_interval=25.0)
    now = 0.0
    cadence.start(now)
    for wait, event in events:
        now += wait
        match event:
            case "taken":
                cadence.taken(cadence.due(now) or HOT, now, 0.01)
            case "failed":
                cadence.failed(now)
            case "outer":
                cadence.outer_step(now)
            case "durable":
                cadence.durable(0.5)
        assert cadence.next_at <= now + 10.0
