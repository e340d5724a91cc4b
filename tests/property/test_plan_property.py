"""Whatever the donors do, the planner asks for nothing twice that is verified, wastes little, and ends."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "swarm"))

from plan_sim import INNER, MIB, OUTER, SimDonor, Simulation

times = st.one_of(st.just(math.inf), st.floats(0, 60))


@st.composite
def donors(draw: st.DrawFn) -> list[SimDonor]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        dies = draw(times)
        found.append(
            SimDonor(
                node=f"d{number}",
                rate=draw(st.floats(2e5, 5e7)),
                holds=frozenset({OUTER, INNER}) if number == 0 else frozenset({OUTER}),
                dies_at=dies,
                back_at=dies + draw(st.floats(0.1, 30)) if draw(st.booleans()) else math.inf,
                freezes_at=draw(times),
                corrupt=frozenset(draw(st.sets(st.integers(0, 60), max_size=2))),
                full_until=draw(st.floats(-1, 5)),
            )
        )
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(donors(), st.integers(0, 60), st.integers(0, 20), st.booleans())
def test_no_verified_chunk_is_asked_for_again_and_waste_is_bounded(
    network: list[SimDonor], outer: int, inner: int, good: bool
) -> None:
    if good:
        network = [*network, SimDonor("good", 2e6, frozenset({OUTER, INNER}))]
    sizes = {OUTER: [MIB] * outer, INNER: [MIB // 3] * inner}
    sim = Simulation(network, sizes)
    result = sim.run()
    assert result.asked_after_verified == 0
    assert set(result.verified.values()) <= {1, 2}
    assert sim.planner.duplicates <= 16 + len(network)
    corrupt_bytes = sum(MIB for donor in network if donor.corrupt)
    assert sim.planner.wasted_bytes <= corrupt_bytes + sim.planner.duplicates * MIB
    assert result.finished_at is not None or result.stuck or result.blamed
    if good and not result.blamed:
        assert result.finished_at is not None
        assert sim.planner.fetched_bytes() == sim.planner.wanted_bytes() == outer * MIB + inner * (MIB // 3)
