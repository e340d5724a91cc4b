"""Donors that die, freeze, crawl or lie while they are asked: the fetch ends elsewhere, nothing is fetched twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from swarm_kit import MIB, Made
from swarm_nodes import HERE, MOMENTS, Donor, Donors, Joiner, StrikingProxy, check_outer, joiner, run

from hotswarm.errors import HotswarmError, LocalFailure, PeerUnavailable
from hotswarm.swarm.model import RecoverOutcome, RecoverRequest

RATE = 12_000_000  # bytes/s of a donor: there is about a second in which to strike


@pytest.fixture
def donors(processes: Any, short_dir: Path) -> Donors:
    return Donors(processes, short_dir)


def victims(donors: Donors, count: int, **options: Any) -> tuple[Donor, list[Donor]]:
    """One that lives and serves inner, and some that are going to be struck. Capped, so that there is time to."""
    good, *others = donors.start(
        {"name": "good", "made": Made("good", inner_step=50), "bytes_per_s": RATE, "slots": 16},
        *({"name": f"v{number}", "bytes_per_s": RATE, **options} for number in range(count)),
    )
    return good, others


async def struck_at_byte(root: Path, good: Donor, victim: Donor, at: int, number: int) -> RecoverOutcome:
    """A recovery from both, in which the victim gets that signal when exactly `at` of its bytes have passed."""
    async with (
        StrikingProxy(victim.listen, at, lambda: victim.signal(number)) as proxy,
        joiner(root / f"j{at}", proxy.address, good.listen) as joined,
    ):
        outcome = await joined.recover(inner="adopt")
        check_outer(joined, outcome.snapshot_id, Made("good", inner_step=50), MOMENTS | {"buffer"})
        outer = outcome.report.sections["outer"]
        assert outer.fetched_chunks == outer.chunks, "a verified chunk was fetched twice, or one came from nowhere"
        assert proxy.struck
        return outcome


def test_a_donor_killed_at_any_byte_is_replaced_and_nothing_verified_comes_twice(
    donors: Donors, short_dir: Path
) -> None:
    offsets = [3_000, 200_000, MIB, MIB + 5_000, 2 * MIB + 300_000, 3 * MIB]
    good, others = victims(donors, len(offsets))

    async def work() -> None:
        for at, victim in zip(offsets, others, strict=True):
            outcome = await struck_at_byte(short_dir, good, victim, at, signal.SIGKILL)
            assert good.node in outcome.report.donors
            assert outcome.report.bytes_wasted <= MIB

    run(work(), 90)


def test_a_donor_killed_right_after_a_whole_chunk_is_replaced(donors: Donors, short_dir: Path) -> None:
    good, others = victims(donors, 3)

    async def work() -> None:
        for chunks, victim in zip((1, 2, 3), others, strict=True):
            async with joiner(short_dir / f"j{chunks}", victim.listen, good.listen) as joined:

                def strike(seen: dict[str, Any], victim: Donor = victim, chunks: int = chunks) -> None:
                    if seen.get("donors", {}).get(victim.node, 0) >= chunks * MIB:
                        victim.signal(signal.SIGKILL)

                joined.on_progress = strike
                outcome = await joined.recover(inner="adopt")
                check_outer(joined, outcome.snapshot_id, Made("good", inner_step=50), MOMENTS | {"buffer"})
                assert outcome.report.sections["outer"].fetched_chunks == 10

    run(work(), 60)


def test_a_frozen_donor_is_left_within_fifteen_seconds(donors: Donors, short_dir: Path) -> None:
    offsets = [150_000, MIB + 200_000, 2 * MIB]
    good, others = victims(donors, len(offsets))

    async def work() -> None:
        started = time.monotonic()
        outcomes = await asyncio.gather(
            *(struck_at_byte(short_dir, good, v, at, signal.SIGSTOP) for at, v in zip(offsets, others, strict=True))
        )
        alone_s = 3 * 21 * MIB / RATE  # all three from the good donor alone
        assert time.monotonic() - started < alone_s + 15
        for outcome in outcomes:
            assert outcome.report.bytes_wasted <= 2 * MIB

    run(work(), 90)


def test_a_frozen_inner_donor_is_left_within_fifteen_seconds(donors: Donors, short_dir: Path) -> None:
    frozen, good = donors.start(
        {"name": "frozen", "made": Made("frozen", inner_step=60), "bytes_per_s": RATE}, {"name": "good"}
    )

    async def work() -> None:
        async with joiner(short_dir / "j", frozen.listen, good.listen) as joined:
            struck_at: list[float] = []

            def strike(seen: dict[str, Any]) -> None:
                if not struck_at and seen.get("donors", {}).get(frozen.node, 0) >= 2 * MIB:
                    struck_at.append(time.monotonic())
                    frozen.signal(signal.SIGSTOP)

            joined.on_progress = strike
            outcome = await joined.recover(inner="adopt")
            assert time.monotonic() - struck_at[0] < 15
            inner_restarted(joined, outcome, frozen, good)

    run(work(), 60)


def inner_restarted(joined: Joiner, outcome: RecoverOutcome, lost: Donor, good: Donor) -> None:
    """Only the inner section began again: the outer one was fetched once, and the report names the waste."""
    report = outcome.report
    assert report.inner_donor == good.node
    assert report.sections["outer"].fetched_chunks == report.sections["outer"].chunks
    assert 0 < report.bytes_wasted <= 11 * MIB
    assert lost.node in report.rejected
    check_outer(joined, outcome.snapshot_id, Made("good"), MOMENTS | {"buffer"})


def test_the_inner_donors_death_restarts_only_the_inner_section(donors: Donors, short_dir: Path) -> None:
    inner, good = donors.start(
        {"name": "inner", "made": Made("inner", inner_step=60), "bytes_per_s": RATE}, {"name": "good"}
    )

    async def work() -> None:
        async with joiner(short_dir / "j", inner.listen, good.listen) as joined:
            joined.on_progress = lambda seen: (
                inner.signal(signal.SIGKILL) if seen.get("donors", {}).get(inner.node, 0) >= 2 * MIB else None
            )
            outcome = await joined.recover(inner="adopt")
            inner_restarted(joined, outcome, inner, good)

    run(work())


def test_of_dead_slow_corrupt_and_good_the_good_one_is_used_and_each_other_named(
    donors: Donors, short_dir: Path
) -> None:
    slow, corrupt, good = donors.start(
        {"name": "slow", "bytes_per_s": 1000},
        {"name": "corrupt", "corrupt": ["outer", *range(10)]},  # whichever it is asked for
        {"name": "good", "made": Made("good", inner_step=50), "bytes_per_s": RATE},
    )
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = f"127.0.0.1:{closed.getsockname()[1]}"

    async def work() -> None:
        async with joiner(short_dir / "j", dead, slow.listen, corrupt.listen, good.listen) as joined:
            outcome = await joined.recover(inner="adopt")
            report = outcome.report
            check_outer(joined, outcome.snapshot_id, Made("good", inner_step=50), MOMENTS | {"buffer"})
            assert good.node in report.donors
            assert set(report.rejected) == {dead, slow.node, corrupt.node}
            assert "slow" in report.rejected[slow.node] or "stalled" in report.rejected[slow.node]
            assert "does not match its digest" in report.rejected[corrupt.node]
            # the one that lied is left out of the next recovery too
            again = await joined.recover(mode="outer", min_agree=2, inner="fresh")
            assert "left out" in again.report.rejected[corrupt.node]

    run(work())
    # told of it, the corrupt donor looked at itself
    log = ""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not list((corrupt.state_dir / "runs/kit/quarantine").glob("*.manifest")):
        time.sleep(0.05)
    assert list((corrupt.state_dir / "runs/kit/quarantine").glob("*.manifest")), log


def test_three_donors_that_all_fail_verification_mean_that_this_machine_is_at_fault(
    donors: Donors, short_dir: Path
) -> None:
    bad = donors.start(*({"name": name, "corrupt": ["outer", 0]} for name in "abc"))

    async def work() -> None:
        async with joiner(short_dir / "j", *(donor.listen for donor in bad)) as joined:
            with pytest.raises((LocalFailure, PeerUnavailable)) as failed:
                await joined.recover(inner="adopt", timeout_s=10)
            assert joined.store.snapshots() == []
            assert isinstance(failed.value, LocalFailure)
            assert "memory and disk" in str(failed.value)

    run(work())


def test_a_stream_that_is_cut_is_never_a_success(donors: Donors, short_dir: Path) -> None:
    (only,) = donors.start({"name": "only", "bytes_per_s": RATE})

    async def work() -> None:
        async with (
            StrikingProxy(only.listen, 3 * MIB + 12_345, lambda: only.signal(signal.SIGKILL)) as proxy,
            joiner(short_dir / "j", proxy.address) as joined,
        ):
            with pytest.raises(HotswarmError):
                await joined.recover(inner="adopt", timeout_s=5)
            assert joined.store.snapshots() == []
            begun = list(joined.store.folders.partial.iterdir())
            assert begun, "what was verified is kept for the next try"

    run(work())


def test_a_joiner_killed_in_the_middle_goes_on_where_it_was(
    donors: Donors, processes: Any, short_dir: Path, wait_until: Any
) -> None:
    a, b = donors.start(
        {"name": "a", "made": Made("a", inner_step=9), "bytes_per_s": RATE // 2},
        {"name": "b", "bytes_per_s": RATE // 2},
    )
    options = {
        "state_dir": str(short_dir / "j"),
        "peers": [a.listen, b.listen],
        "request": RecoverRequest(inner="adopt", timeout_s=30).to_json(),
    }
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    argv = [sys.executable, HERE / "joiner.py", json.dumps(options)]
    first = processes.start(argv, env=env)

    def fetched() -> int:
        seen = [
            json.loads(line) for line in processes.log_of(first).splitlines() if line.startswith('{"phase": "fetch')
        ]
        return seen[-1]["bytes"] if seen else 0

    wait_until(lambda: fetched() >= 6 * MIB, 30, "the fetch")
    first.kill()
    first.wait()
    before = fetched()
    again = processes.start(argv, env=env)
    assert again.wait(60) == 0, processes.log_of(again)
    outcome = RecoverOutcome.from_json(json.loads(processes.log_of(again).splitlines()[-1])["outcome"])
    report = outcome.report
    assert report.bytes_reused >= before
    wanted = report.sections["outer"].raw + report.sections["inner"].raw - 5_200_020  # but for the live parameters
    assert report.bytes + report.bytes_reused == wanted
    assert report.bytes_wasted == 0
