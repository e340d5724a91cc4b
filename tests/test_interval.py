"""The snapshot interval against Daly's published values and against brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswarm.interval import MAX_INTERVAL_S, MIN_INTERVAL_S, Observed, automatic, daly, young

MINUTE = 60.0
HOUR = 3600.0


@pytest.mark.parametrize(("mtbf_s", "minutes"), [(24 * HOUR, 117.0), (6 * HOUR, 57.0), (15 * MINUTE, 9.1)])
def test_daly_gives_the_published_values_for_a_five_minute_dump(mtbf_s: float, minutes: float) -> None:
    """J. T. Daly 2006, table of optimum intervals for a dump time of 5 minutes."""
    assert daly(5 * MINUTE, mtbf_s) / MINUTE == pytest.approx(minutes, abs=0.5)


def test_young_is_the_square_root_law() -> None:
    assert young(5 * MINUTE, 24 * HOUR) / MINUTE == pytest.approx(120.0)


def test_a_dump_longer_than_twice_the_mtbf_gives_the_mtbf() -> None:
    assert daly(2 * HOUR, HOUR) == HOUR
    assert daly(3 * HOUR, HOUR) == HOUR


def expected_time(work_s: float, interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Daly's complete model without restart time: exponential failures, each segment repeated until it succeeds."""
    return mtbf_s * (math.exp((interval_s + cost_s) / mtbf_s) - 1.0) * work_s / interval_s


@given(cost_s=st.floats(0.01, 600.0), mtbf_s=st.floats(1800.0, 30 * 86400.0))
def test_daly_is_within_a_thousandth_of_the_best_interval_found_by_search(cost_s: float, mtbf_s: float) -> None:
    chosen = expected_time(1.0, daly(cost_s, mtbf_s), cost_s, mtbf_s)
    searched = min(
        expected_time(1.0, young(cost_s, mtbf_s) * factor / 200.0, cost_s, mtbf_s) for factor in range(100, 300)
    )
    assert chosen <= searched * 1.001


def test_automatic_keeps_the_stall_under_the_allowed_overhead() -> None:
    assert automatic(Observed(stall_s=2.0, mtbf_s=HOUR), max_overhead=0.01) >= 200.0
    assert automatic(Observed(stall_s=60.0, mtbf_s=HOUR), max_overhead=0.01) >= 6000.0


def test_automatic_stays_inside_its_bounds() -> None:
    assert automatic(Observed(stall_s=0.0), max_overhead=0.01) == MIN_INTERVAL_S
    assert automatic(Observed(stall_s=5.0, mtbf_s=1e9), max_overhead=0.01) == MAX_INTERVAL_S
    assert automatic(Observed(stall_s=0.001, durable_s=40.0, mtbf_s=60.0), max_overhead=0.5) == 40.0


@pytest.mark.parametrize(("cost", "mtbf"), [(-1.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.nan)])
def test_nonsense_is_refused(cost: float, mtbf: float) -> None:
    with pytest.raises(ValueError, match="need cost_s"):
        daly(cost, mtbf)
