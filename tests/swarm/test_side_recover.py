"""Recoveries of a joiner from donors that are processes of their own: what is taken, from whom, and what is left."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from pathlib import Path

import pytest
from swarm_kit import MIB, Made, arch_of, fill
from swarm_nodes import MOMENTS, Here, check_outer, donors_here, eventually, joiner, run

from hotswarm.errors import Incompatible, NoSnapshot, NotAuthorised, StoreError, Unconfirmed
from hotswarm.store.fileops import FileOps
from hotswarm.swarm.dht import Announcement
from hotswarm.swarm.model import LiveClock, RecoverOutcome, RecoverRequest, TensorName
from hotswarm.swarm.swarmkey import SwarmKey, write_key_file


def test_a_fresh_node_takes_outer_from_all_and_moments_from_one(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a"}, {"name": "b"}, {"name": "c", "made": Made("c", inner_step=7)}) as (
                a,
                b,
                c,
            ),
            joiner(short_dir / "j", a.listen, b.listen, c.listen) as joined,
        ):
            outcome = await joined.recover(inner="adopt")
            assert (outcome.action, outcome.inner_source, outcome.private_from) == ("outer", "adopt", None)
            report = outcome.report
            assert report.agreement == "agreed"
            assert report.inner_donor == c.node  # the furthest in the round
            assert set(report.donors) == {a.node, b.node, c.node}
            assert (report.bytes_wasted, report.rejected) == (0, {})
            assert report.sections["outer"].fetched_chunks == report.sections["outer"].chunks == 10
            assert {"locate", "choose", "fetch"} <= set(report.seconds)
            check_outer(joined, outcome.snapshot_id, Made("c", inner_step=7), MOMENTS | {"buffer"})
            assert joined.progress[-1]["bytes"] == joined.progress[-1]["total"] == report.bytes
            json.dumps(joined.progress)
            assert RecoverOutcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome
            again = await joined.recover(mode="outer", inner="adopt")
            assert (again.snapshot_id, again.report.bytes) == (outcome.snapshot_id, 0)

    run(work())


@pytest.mark.parametrize("inner", ["own", "fresh"])
def test_without_adopting_only_buffers_come_from_the_inner_donor(short_dir: Path, inner: str) -> None:
    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a"}, {"name": "b"}) as (a, b),
            joiner(short_dir / "j", a.listen, b.listen) as joined,
        ):
            mine = fill(joined.store, joined.identity, Made("j", outer_step=8))
            outcome = await joined.recover(inner=inner)
            assert (outcome.action, outcome.inner_source, outcome.private_from) == (
                "outer",
                inner,
                mine.snapshot_id,
            )
            check_outer(joined, outcome.snapshot_id, Made("a"), {"buffer"})

    run(work())


def test_parameters_that_the_outer_copy_lacks_come_from_the_inner_donor(short_dir: Path) -> None:
    made = Made("a", frozen=300_000)

    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a", "made": made}) as (a,),
            joiner(short_dir / "j", a.listen) as joined,
        ):
            outcome = await joined.recover(inner="fresh")
            with joined.store.open(outcome.snapshot_id) as source:
                layout = source.manifest.sections["inner"].layout
                frozen = layout.chunks_of_paths([("model", "frozen.weight")])
                here = {index for index in range(len(layout.chunks)) if source.has_chunk("inner", index)}
                assert here == {*frozen, *layout.chunks_of_roles(["buffer"])}
                assert len(frozen) == 2

    run(work())


def test_moments_are_worth_it_when_a_round_is_long_enough(short_dir: Path) -> None:
    async def work() -> None:
        async with donors_here(
            short_dir,
            {"name": "a", "max_upload_bytes_per_s": 20_000_000},
            {"name": "b", "max_upload_bytes_per_s": 20_000_000},
        ) as (a, b):
            async with joiner(short_dir / "j1", a.listen, b.listen) as joined:
                outcome = await joined.recover(round_seconds=600)
                assert outcome.inner_source == "adopt"
                check_outer(joined, outcome.snapshot_id, Made("a"), MOMENTS | {"buffer"})
            async with joiner(short_dir / "j2", a.listen, b.listen) as joined:
                outcome = await joined.recover(round_seconds=1)
                assert outcome.inner_source == "fresh"
                check_outer(joined, outcome.snapshot_id, Made("a"), {"buffer"})

    run(work())


def test_the_own_snapshot_of_the_current_round_is_resumed_without_a_byte(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a"}, {"name": "b"}) as (a, b),
            joiner(short_dir / "j", a.listen, b.listen) as joined,
        ):
            mine = fill(joined.store, joined.identity, Made("j"))
            outcome = await joined.recover()
            assert (outcome.action, outcome.snapshot_id) == ("resume", mine.snapshot_id)
            assert (outcome.report.bytes, outcome.report.agreement) == (0, "agreed")

    run(work())


def test_a_joiner_behind_by_a_round_takes_the_swarms_and_keeps_its_private_state(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            donors_here(
                short_dir,
                {"name": "a", "made": Made("a", outer_step=5)},
                {"name": "b", "made": Made("b", outer_step=12)},
            ) as (behind, ahead),
            joiner(short_dir / "j", behind.listen, ahead.listen) as joined,
        ):
            mine = fill(joined.store, joined.identity, Made("j", outer_step=9))
            outcome = await joined.recover()
            assert (outcome.action, outcome.report.outer_step, outcome.private_from) == (
                "outer",
                12,
                mine.snapshot_id,
            )
            assert outcome.report.agreement == "unconfirmed"
            assert "behind" in outcome.report.rejected[behind.node]

    run(work())


def test_with_peers_behind_it_a_node_keeps_its_own_snapshot(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a", "made": Made("a", outer_step=5)}) as (behind,),
            joiner(short_dir / "j", behind.listen) as joined,
        ):
            mine = fill(joined.store, joined.identity, Made("j", outer_step=9))
            outcome = await joined.recover()
            assert (outcome.action, outcome.snapshot_id) == ("own", mine.snapshot_id)
            assert "behind" in outcome.report.rejected[behind.node]

    run(work())


def test_a_node_told_to_go_back_does_not_come_forward_again_by_itself(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a", "made": Made("a", 5)}, {"name": "b", "made": Made("b", 5)}) as (a, b),
            joiner(short_dir / "j", a.listen, b.listen) as joined,
        ):
            mine = fill(joined.store, joined.identity, Made("j", outer_step=9))
            assert (await joined.recover()).action == "own"
            back = await joined.recover(mode="outer", allow_rollback=True)
            assert (back.action, back.report.outer_step) == ("outer", 5)
            again = await joined.recover()
            assert (again.action, again.report.outer_step) == ("outer", 5)
            assert mine.snapshot_id in {info.snapshot_id for info in joined.store.snapshots()}, "nothing is deleted"

    run(work())


def test_a_round_that_ends_during_the_choice_is_waited_for(short_dir: Path) -> None:
    async def work() -> None:
        mades = [Made(name, outer_step=8) for name in "abc"]
        async with (
            donors_here(short_dir, *({"name": made.node, "made": made} for made in mades)) as donors,
            joiner(short_dir / "j", *(donor.listen for donor in donors)) as joined,
        ):

            async def cross(number: int) -> None:
                here = donors[number].joined
                await asyncio.to_thread(fill, here.store, here.identity, Made("abc"[number], outer_step=9))
                await here.swarm.announce()

            await cross(2)
            recovery = asyncio.create_task(joined.recover(inner="fresh"))
            await asyncio.sleep(0.7)
            await cross(1)
            outcome = await recovery
            assert (outcome.report.outer_step, outcome.report.agreement) == (9, "agreed")
            assert outcome.report.seconds["choose"] < 2.5

    run(work())


def test_the_majoritys_state_is_taken_and_the_other_donor_named(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a"}, {"name": "b"}, {"name": "c", "made": Made("c", seed="other")}) as (
                a,
                b,
                odd,
            ),
            joiner(short_dir / "j", odd.listen, a.listen, b.listen) as joined,
        ):
            outcome = await joined.recover(min_agree=2)
            assert outcome.report.agreement == "agreed"
            assert odd.node not in outcome.report.donors
            assert "outer digest" in outcome.report.rejected[odd.node]
            check_outer(joined, outcome.snapshot_id, Made("a"), MOMENTS | {"buffer"})
            with pytest.raises(Unconfirmed):
                await joined.recover(mode="outer", min_agree=3)

    run(work())


def test_a_record_that_claims_more_than_describe_shows_is_believed_at_what_describe_shows(short_dir: Path) -> None:
    async def work() -> None:
        options = (
            {"name": name, "made": Made(name, outer_step=step)} for name, step in (("a", 10), ("b", 12), ("c", 12))
        )
        async with donors_here(short_dir, *options) as (a, b, c):
            claim = Announcement((("127.0.0.1", int(a.listen.rpartition(":")[2])),), outer_step=50, inner_step=99)
            for donor in (b, c):
                await donor.joined.swarm._neighbours.ask_peer(a.listen, 5)  # so that they are one directory
            await a.joined.swarm._directory.publish(claim)
            await eventually(lambda: len(a.joined.swarm._directory.known()) == 2)
            async with joiner(short_dir / "j", a.listen) as joined:
                outcome = await joined.recover(inner="fresh")
                assert (outcome.report.outer_step, outcome.report.agreement) == (12, "agreed")
                assert set(outcome.report.donors) == {b.node, c.node}
                assert "does not hold" in outcome.report.rejected[a.node]
                records = {r.signed.signer: r.signed.record for r in joined.swarm._directory.known()}
                assert records[a.node].outer_step == 50

    run(work())


def test_a_divergent_swarm_gives_one_donors_section_whole(short_dir: Path) -> None:
    names = ("a", "b", "c")

    async def work() -> None:
        async with (
            donors_here(short_dir, *({"name": name, "made": Made(name, seed=name)} for name in names)) as started,
            joiner(short_dir / "j", *(donor.listen for donor in started)) as joined,
        ):
            outcome = await joined.recover(inner="adopt")
            assert outcome.report.agreement == "divergent"
            assert list(outcome.report.donors) == [outcome.report.inner_donor]
            name = names[[donor.node for donor in started].index(outcome.report.inner_donor)]
            check_outer(joined, outcome.snapshot_id, Made(name, seed=name), MOMENTS | {"buffer"})

    run(work())


@pytest.mark.parametrize("outer", [True, False])
def test_a_node_that_promises_more_and_does_not_deliver_is_passed_over(short_dir: Path, outer: bool) -> None:
    async def work() -> None:
        promising = {"made": Made("p", 9 * outer, 90, seed="P", outer=outer), "max_upload_bytes_per_s": 1000}
        async with (
            donors_here(short_dir, {"name": "a", "made": Made("a", 8 * outer, 50, outer=outer)}) as (a,),
            donors_here(short_dir, {"name": "p", **promising}) as (p,),
            joiner(short_dir / "j", a.listen, p.listen) as joined,
        ):
            outcome = await joined.recover(mode="auto", timeout_s=3.0)
            assert (outcome.action, outcome.report.outer_step) == (("outer", 8) if outer else ("clone", 0))
            assert set(outcome.report.donors) >= {a.node}
            assert "no progress" in outcome.report.rejected[p.node]

    run(work())


def test_another_architecture_is_refused_before_a_byte_moves(short_dir: Path) -> None:
    mine = Made("j", width=1)
    names = (
        *(TensorName(f"layer{i}.weight", "param", "float32", (size + 1,)) for i, size in enumerate(mine.params)),
        TensorName("running_mean", "buffer", "float32", (mine.buffer,)),
    )

    async def work() -> None:
        async with donors_here(short_dir, {"name": "a"}) as (a,), joiner(short_dir / "j", a.listen) as joined:
            with pytest.raises(Incompatible, match=r"layer0.weight: 600001 float32 param here, 600000 float32 param"):
                await joined.recover(mode="outer", arch=arch_of(mine), names=names)
            assert all("bytes" not in seen for seen in joined.progress)
            assert (await joined.recover(mode="outer", arch=arch_of(Made()))).action == "outer"

    run(work())


def test_a_run_without_an_outer_optimizer_clones_the_furthest(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            donors_here(
                short_dir,
                {"name": "a", "made": Made("a", 0, 10, outer=False)},
                {"name": "b", "made": Made("b", 0, 90, outer=False)},
            ) as (a, b),
            joiner(short_dir / "j", a.listen, b.listen) as joined,
        ):
            fill(joined.store, joined.identity, Made("j", 0, 50, outer=False))
            outcome = await joined.recover()
            assert (outcome.action, outcome.report.agreement) == ("clone", "unconfirmed")
            assert outcome.report.inner_donor == b.node
            check_outer(joined, outcome.snapshot_id, Made("b", 0, 90, outer=False), MOMENTS | {"buffer", "param"})

    run(work())


def test_clone_brings_the_donors_live_parameters_too(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a"}, {"name": "b"}) as (a, b),
            joiner(short_dir / "j", a.listen, b.listen) as joined,
        ):
            outcome = await joined.recover(mode="clone")
            assert outcome.action == "clone"
            check_outer(joined, outcome.snapshot_id, Made("a"), MOMENTS | {"buffer", "param"})

    run(work())


def test_a_state_with_a_nan_is_named_and_the_step_before_is_taken(short_dir: Path) -> None:
    bad = [Made("a", 8), Made("a", 9, nan_at=1234)], [Made("b", 8), Made("b", 9, nan_at=1234)]

    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a", "made": bad[0]}, {"name": "b", "made": bad[1]}) as (a, b),
            joiner(short_dir / "j", a.listen, b.listen) as joined,
        ):
            outcome = await joined.recover(inner="fresh")
            assert outcome.report.outer_step == 8
            check_outer(joined, outcome.snapshot_id, Made("a", 8), {"buffer"})

    run(work())


def test_the_chunks_that_are_here_already_are_not_fetched(short_dir: Path) -> None:
    async def work() -> None:
        async with donors_here(short_dir, {"name": "a"}) as (a,), joiner(short_dir / "j", a.listen) as joined:
            fill(joined.store, joined.identity, Made("j", inner_step=1))  # the same outer state
            outcome = await joined.recover(mode="outer", inner="fresh")
            assert outcome.report.sections["outer"].fetched == 0
            assert outcome.report.bytes_reused == outcome.report.sections["outer"].raw
            assert outcome.report.bytes == 64 * 4  # the buffer

    run(work())


def test_a_dry_run_prints_the_plan_and_moves_nothing(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a"}, {"name": "b"}) as (a, b),
            joiner(short_dir / "j", a.listen, b.listen) as joined,
        ):
            outcome = await joined.recover(dry_run=True)
            assert (outcome.action, outcome.snapshot_id) == ("outer", None)
            assert any("10400040 bytes" in line for line in outcome.report.plan)
            assert joined.store.snapshots() == []

    run(work())


def test_one_peer_alone_is_asked_by_id_or_by_address(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a"}, {"name": "b", "made": Made("b", outer_step=10)}) as (a, b),
            joiner(short_dir / "j", b.listen) as joined,
        ):
            fill(joined.store, joined.identity, Made("j", outer_step=11))
            info = await joined.swarm.fetch(a.listen, RecoverRequest(timeout_s=20), lambda _: None)
            assert (info.outer_step, info.kind, info.own) == (9, "recovery", False)
            info = await joined.swarm.fetch(b.node, RecoverRequest(timeout_s=20), lambda _: None)
            assert info.outer_step == 10

    run(work())


def test_the_live_clock_is_that_of_the_furthest_trainer(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            donors_here(
                short_dir,
                {"name": "a", "made": Made("a", inner_step=40), "speed": 3.0},
                {"name": "b", "made": Made("b", inner_step=60), "speed": 2.5},
                {"name": "c", "made": Made("c", outer_step=11), "live": False},
            ) as (a, b, c),
            joiner(short_dir / "j", a.listen, b.listen, c.listen) as joined,
        ):
            assert await joined.swarm.clock() == LiveClock(9, 60, 960, 2.5, 100, b.node)

    run(work())


class DiskThatFills(FileOps):
    """Takes so many bytes of chunks, and no more until there is room again."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, data, offset)


def test_a_full_disk_is_nobodys_fault_but_this_machines_and_what_was_fetched_is_kept(short_dir: Path) -> None:
    disk = DiskThatFills(4 * MIB)

    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a"}, {"name": "b"}) as (a, b),
            joiner(short_dir / "j", a.listen, b.listen, ops=disk) as joined,
        ):
            with pytest.raises(StoreError, match="No space left"):
                await joined.recover(inner="adopt")
            assert joined.store.snapshots() == []
            disk.room = 1 << 40
            outcome = await joined.recover(inner="adopt")
            assert outcome.report.rejected == {}
            assert 2 * MIB <= outcome.report.bytes_reused <= 4 * MIB
            check_outer(joined, outcome.snapshot_id, Made(outcome_donor(outcome, a, b)), MOMENTS | {"buffer"})

    run(work())


def outcome_donor(outcome: RecoverOutcome, a: Here, b: Here) -> str:
    """The name of the inner donor."""
    return {a.node: "a", b.node: "b"}[outcome.report.inner_donor]


def test_a_node_of_another_swarm_gets_nothing_and_is_told_why(short_dir: Path) -> None:
    write_key_file(short_dir / "theirs", SwarmKey.generate())
    write_key_file(short_dir / "mine", SwarmKey.generate())

    async def work() -> None:
        async with donors_here(short_dir, {"name": "a", "swarm_key": short_dir / "theirs"}) as (a,):
            async with joiner(short_dir / "j", a.listen, swarm_key=short_dir / "mine") as joined:
                with pytest.raises(NotAuthorised, match="swarm key"):
                    await joined.recover(mode="outer")
                assert any("refuses" in reason for reason in joined.swarm.status()["health"])
            async with joiner(short_dir / "k", a.listen, swarm_key=short_dir / "theirs") as joined:
                assert (await joined.recover(mode="outer")).action == "outer"

    run(work())


def test_a_node_of_another_run_is_no_donor(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            joiner(short_dir / "a", run="elsewhere") as other,
            joiner(short_dir / "j", str(other.swarm.status()["listen"])) as joined,
        ):
            with pytest.raises(NoSnapshot):
                await joined.recover(mode="outer", timeout_s=3.0)
            assert (await joined.recover(timeout_s=1.0)).action == "fresh"

    run(work())
