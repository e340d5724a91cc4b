"""Recovery time falls with the number of donors, where uplinks are what is slow."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_kit import Made
from swarm_nodes import donors_here, joiner, run

UPLINK = 2_500_000  # bytes/s: 20 Mbit/s


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_n_slow_uplinks_give_the_outer_section_in_an_nth_of_the_time(short_dir: Path, count: int) -> None:
    made = [Made(f"d{number}", params=(1_310_720 * count,), buffer=0) for number in range(count)]  # 10 MiB for each

    async def work() -> None:
        options = ({"name": one.node, "made": one, "max_upload_bytes_per_s": UPLINK} for one in made)
        async with (
            donors_here(short_dir, *options) as donors,
            joiner(short_dir / "j", *(donor.listen for donor in donors)) as joined,
        ):
            outcome = await joined.recover(inner="fresh")
            nbytes = outcome.report.sections["outer"].raw
            assert outcome.report.bytes == nbytes
            assert len(outcome.report.donors) == count
            assert outcome.report.seconds["fetch"] <= 1.15 * nbytes / (count * UPLINK) + 0.3

    run(work(), 100)
