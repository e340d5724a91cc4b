"""The planner against make-believe donors."""

from __future__ import annotations

import pytest
from plan_sim import INNER, MIB, OUTER, SimDonor, Simulation

from hotswarm.swarm.plan import READ_TIMEOUT_S, Planner
from hotswarm.swarm.plan_types import (
    Arrived,
    Ask,
    Cancel,
    DonorAdded,
    Ended,
    Finished,
    Lost,
    SectionAdded,
    SectionDropped,
    Tick,
)

UPLINK = 2.5e6  # 20 Mbit/s


def chunks(count: int) -> list[int]:
    return [MIB] * count


@pytest.mark.parametrize("donors", [1, 2, 4, 8])
def test_n_equal_donors_take_an_nth_of_the_time(donors: int) -> None:
    count = 200
    sim = Simulation([SimDonor(f"d{i}", UPLINK) for i in range(donors)], {OUTER: chunks(count)})
    result = sim.run()
    assert result.finished_at < 1.08 * count * MIB / (donors * UPLINK)
    assert sim.planner.wasted_bytes == 0


def test_donors_of_unequal_rate_finish_together() -> None:
    rates = [0.5e6, 2.5e6, 10e6]
    sim = Simulation([SimDonor(f"d{rate:.0f}", rate) for rate in rates], {OUTER: chunks(300)})
    result = sim.run()
    assert result.finished_at < 1.15 * 300 * MIB / sum(rates)
    given = sim.planner.bytes_by_donor()
    assert given["d500000"] < given["d2500000"] < given["d10000000"]


def test_the_inner_donor_gives_inner_first_while_others_give_outer() -> None:
    a = SimDonor("a", UPLINK, frozenset({OUTER, INNER}))
    b = SimDonor("b", UPLINK)
    result = Simulation([a, b], {OUTER: chunks(40), INNER: chunks(40)}).run()
    assert result.finished_at < 1.1 * 80 * MIB / (2 * UPLINK)


def test_dead_slow_and_corrupt_donors_are_left_with_a_reason_each() -> None:
    sim = Simulation(
        [
            SimDonor("dead", UPLINK, dies_at=0),
            SimDonor("slow", 100.0),
            SimDonor("corrupt", UPLINK, corrupt=frozenset(range(100))),
            SimDonor("good", UPLINK),
        ],
        {OUTER: chunks(100)},
    )
    result = sim.run()
    assert result.finished_at is not None
    problems = sim.planner.problems()
    assert set(problems) == {"dead", "slow", "corrupt"}
    assert "refused" in problems["dead"]
    assert "slow" in problems["slow"] or "stalled" in problems["slow"]
    assert "does not match its digest" in problems["corrupt"]
    assert [report.node for report in result.reports] == ["corrupt"]
    assert sim.planner.bytes_by_donor() == {"good": 100 * MIB}


@pytest.mark.parametrize("at", [0.0, 0.4, 3.3, 8.39, 20.0])
def test_a_donor_that_dies_costs_only_what_was_in_flight(at: float) -> None:
    sim = Simulation([SimDonor("a", UPLINK, dies_at=at), SimDonor("b", UPLINK)], {OUTER: chunks(100)})
    result = sim.run()
    assert result.finished_at is not None
    assert result.asked_after_verified == 0
    assert set(result.verified.values()) == {1}
    assert sim.planner.wasted_bytes == 0


def test_a_frozen_donor_is_left_within_fifteen_seconds() -> None:
    sim = Simulation([SimDonor("a", UPLINK, freezes_at=5.0), SimDonor("b", UPLINK)], {OUTER: chunks(50)})
    alone = 50 * MIB / UPLINK
    result = sim.run()
    assert result.finished_at < min(alone, 5.0 + 15.0)


def test_a_donor_that_comes_back_is_used_again() -> None:
    sim = Simulation([SimDonor("a", UPLINK, dies_at=5.0, back_at=6.0), SimDonor("b", UPLINK)], {OUTER: chunks(200)})
    assert sim.run().finished_at < 1.1 * (200 * MIB / (2 * UPLINK)) + 2.0


def test_a_full_donor_is_asked_again_when_it_said() -> None:
    sim = Simulation([SimDonor("a", UPLINK, full_until=3.0)], {OUTER: chunks(10)})
    assert sim.run().finished_at < 3.0 + 10 * MIB / UPLINK + 1.0


def test_the_only_donor_may_be_silent_for_as_long_as_progress_may_take() -> None:
    patient = Simulation([SimDonor("a", MIB / 20)], {OUTER: chunks(3)}, timeout_s=60.0)
    assert patient.run().finished_at == pytest.approx(60.0, abs=1.0)
    frozen = Simulation([SimDonor("a", UPLINK, freezes_at=1.0)], {OUTER: chunks(9)}, timeout_s=30.0).run()
    assert frozen.finished_at is None
    assert frozen.stuck or frozen.lost


def test_a_section_that_could_be_replaced_is_lost_at_the_first_failure() -> None:
    key_holder = SimDonor("a", UPLINK, frozenset({INNER}), dies_at=2.0)
    sim = Simulation([key_holder], {INNER: chunks(50)}, patience=1)
    result = sim.run(until=3.0)
    assert [lost.key for lost in result.lost] == [INNER]
    assert result.lost[0].reasons == {"a": "stream cut"}


def test_a_frozen_donor_of_a_replaceable_section_is_lost_at_the_read_timeout() -> None:
    sim = Simulation([SimDonor("a", UPLINK, frozenset({INNER}), freezes_at=2.0)], {INNER: chunks(50)}, patience=1)
    result = sim.run(until=2.0 + READ_TIMEOUT_S + 1.0)
    assert [lost.key for lost in result.lost] == [INNER]


def test_three_corrupt_donors_mean_that_this_machine_is_at_fault() -> None:
    donors = [SimDonor(name, UPLINK, corrupt=frozenset(range(30))) for name in ("a", "b", "c", "d")]
    assert Simulation(donors, {OUTER: chunks(30)}).run().blamed


def test_a_dropped_section_is_waste_and_leaves_the_others_alone() -> None:
    planner = Planner(timeout_s=60, now=0.0)
    planner.handle(SectionAdded(INNER, "inner", ((0, 10), (1, 10))), 0.0)
    effects = planner.handle(DonorAdded("a", frozenset({INNER, OUTER})), 0.0)
    assert effects == [Ask(1, "a", INNER, (0, 1))]
    planner.handle(Arrived(1, "a", INNER, 0, 10), 0.1)
    planner.handle(SectionAdded(OUTER, "outer", ((5, 10),)), 0.1)
    effects = planner.handle(SectionDropped(INNER), 0.2)
    assert isinstance(effects[0], Cancel)
    assert effects[1] == Ask(2, "a", OUTER, (5,))
    assert planner.wasted_bytes == 10
    assert planner.handle(Arrived(2, "a", OUTER, 5, 10), 0.3)[-1] == Finished()


def test_a_complete_stream_that_lacks_chunks_is_misbehaviour() -> None:
    planner = Planner(timeout_s=60, now=0.0)
    planner.handle(SectionAdded(OUTER, "outer", ((0, 10), (1, 10))), 0.0)
    planner.handle(DonorAdded("a", frozenset({OUTER})), 0.0)
    planner.handle(Arrived(1, "a", OUTER, 0, 10), 0.1)
    effects = planner.handle(Ended(1, "complete"), 0.2)
    assert [type(effect) for effect in effects] == [Lost]
    assert "without sending" in planner.problems()["a"]
    again = planner.handle(DonorAdded("a", frozenset({OUTER})), 1.0)  # no second chance
    assert [type(effect) for effect in again] == [Lost]


def test_an_empty_section_is_done_at_once() -> None:
    planner = Planner(timeout_s=60, now=0.0)
    assert Finished() in planner.handle(SectionAdded(OUTER, "outer", ()), 0.0)


def test_a_silent_planner_asks_for_no_tick_in_the_past() -> None:
    planner = Planner(timeout_s=60, now=100.0)
    planner.handle(SectionAdded(OUTER, "outer", ((0, 10),)), 100.0)
    planner.handle(DonorAdded("a", frozenset({OUTER})), 100.0)
    for now in (100.0, 105.0, 130.0, 159.0):
        planner.handle(Tick(), now)
        assert planner.next_deadline(now) > now
