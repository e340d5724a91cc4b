"""Where a joiner starts in a round that is under way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswarm.position import LONGEST_ROUND, Position, join_position
from hotswarm.swarm.model import LiveClock

SNAPSHOT = Position(outer_step=7, inner_step=3, training_step=703)  # H = 100


def test_a_joiner_starts_where_the_swarm_is_now_and_a_little_ahead() -> None:
    clock = LiveClock(outer_step=7, inner_step=40, training_step=740, steps_per_s=10.0, round_length=100)
    assert join_position(SNAPSHOT, clock, 100, elapsed_s=1.0, margin_s=0.5) == Position(7, 55, 755)


def test_it_never_starts_at_or_beyond_the_sync() -> None:
    clock = LiveClock(outer_step=7, inner_step=99, training_step=799, steps_per_s=10.0, round_length=100)
    assert join_position(SNAPSHOT, clock, 100, elapsed_s=30.0) == Position(7, 99, 799)


def test_without_a_live_swarm_the_round_starts_at_its_beginning() -> None:
    assert join_position(SNAPSHOT, None, 100, 0.0) == Position(7, 0, 700)


def test_a_swarm_that_is_still_in_the_round_before_is_waited_for_at_the_beginning() -> None:
    clock = LiveClock(outer_step=6, inner_step=98, training_step=698, steps_per_s=10.0, round_length=100)
    assert join_position(SNAPSHOT, clock, 100, 1.0) == Position(7, 0, 700)


def test_a_swarm_that_is_past_this_round_leaves_only_the_sync() -> None:
    clock = LiveClock(outer_step=8, inner_step=4, training_step=804, steps_per_s=10.0, round_length=100)
    assert join_position(SNAPSHOT, clock, 100, 1.0) == Position(7, 99, 799)


def test_the_clocks_own_round_length_serves_where_the_engine_knows_none() -> None:
    clock = LiveClock(outer_step=7, inner_step=98, training_step=798, steps_per_s=100.0, round_length=100)
    assert join_position(SNAPSHOT, clock, 0, 5.0) == Position(7, 99, 799)


@pytest.mark.parametrize("length", [100, 0])
@pytest.mark.parametrize(
    "clock",
    [
        LiveClock(7, 4, 4_000_000_000_000_000, 1.0, 5),
        LiveClock(7, 1 << 62, 1 << 62, 1.0, 1 << 62),
        LiveClock(7, 4, 704, 1e308, 100),
        LiveClock(7, 4, 704, float("inf"), 100),
        LiveClock(7, 4, 704, float("nan"), 100),
        LiveClock(7, 4, 704, -1e308, 100),
        LiveClock(7, -(1 << 62), 0, 1.0, -5),
        LiveClock(1 << 62, 4, 0, 1.0, 1 << 62),
    ],
)
def test_a_clock_that_lies_moves_nobody_out_of_the_round(clock: LiveClock, length: int) -> None:
    start = join_position(SNAPSHOT, clock, length, 1.0)
    assert start.outer_step == 7
    assert 0 <= start.inner_step < (length or LONGEST_ROUND)
    assert start.training_step == 700 + start.inner_step


@given(
    inner=st.integers(0, 200),
    rate=st.floats(0.0, 1e4),
    elapsed=st.floats(-1.0, 100.0),
    length=st.integers(1, 200),
    outer=st.integers(5, 9),
)
def test_the_position_always_lies_in_the_round(
    inner: int, rate: float, elapsed: float, length: int, outer: int
) -> None:
    clock = LiveClock(outer, inner, outer * length + inner, rate, length)
    start = join_position(Position(7, 0, 7 * length), clock, length, elapsed)
    assert start.outer_step == 7
    assert 0 <= start.inner_step < length
    assert start.training_step == 7 * length + start.inner_step
    if outer == 7:
        assert start.inner_step >= min(inner + 1, length - 1)
