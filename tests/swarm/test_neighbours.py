"""How other nodes are found, and what becomes of those that are not there any more."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from swarm_kit import Made
from swarm_nodes import Joiner, donors_here, joiner, run

from hotswarm.swarm import neighbours
from hotswarm.swarm.dht import RunDirectory


def listen(node: Joiner) -> str:
    return str(node.swarm.status()["listen"])


async def found(node: Joiner) -> set[str]:
    return {answer.node for answer in await node.swarm._neighbours.search(10)}


def test_a_node_in_its_own_list_of_peers_is_no_peer(short_dir: Path) -> None:
    async def work() -> None:
        async with donors_here(short_dir, {"name": "a"}) as (a,):
            port = int(a.listen.rpartition(":")[2])
            async with joiner(short_dir / "j", a.listen, f"localhost:{port}") as joined:
                own = listen(joined)
                joined.swarm._neighbours._static = (own, own.replace("127.0.0.1", "localhost"), a.listen)
                assert await found(joined) == {a.node}
                assert await found(joined) == {a.node}
                assert joined.swarm._neighbours.problems() == {}

    run(work())


def test_peers_may_be_given_by_host_name(short_dir: Path) -> None:
    async def work() -> None:
        async with (
            donors_here(short_dir, {"name": "a"}) as (a,),
            joiner(short_dir / "j", a.listen.replace("127.0.0.1", "localhost")) as joined,
        ):
            assert await found(joined) == {a.node}

    run(work())


def test_without_a_dht_peer_exchange_completes_the_picture(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Any) -> AsyncGenerator[Any, None]:
        return
        yield

    async def work() -> None:
        names = ({"name": name} for name in "abc")
        async with donors_here(short_dir, *names) as donors:
            chain = [d.joined.swarm for d in donors]
            for here, there in zip(chain, donors[1:], strict=False):  # a knows b, b knows c
                await here._neighbours.ask_peer(there.listen, 5)
                here._directory.add_records(there.joined.swarm._directory.known_with_own())
            monkeypatch.setattr(RunDirectory, "lookup", nothing)
            async with joiner(short_dir / "j", donors[0].listen) as joined:
                assert await found(joined) == {donor.node for donor in donors}

    run(work())


def test_another_node_at_a_known_address_is_met_anew(short_dir: Path) -> None:
    async def work() -> None:
        async with contextlib.AsyncExitStack() as stack:
            first = await stack.enter_async_context(donors_here(short_dir, {"name": "a"}))
            address = first[0].listen
            joined = await stack.enter_async_context(joiner(short_dir / "j", address))
            assert await found(joined) == {first[0].node}
            await first[0].joined.swarm.stop()
            for attempt in range(50):
                try:
                    settings = {"name": "b", "listen": address, "made": Made("b")}
                    second = await stack.enter_async_context(donors_here(short_dir / str(attempt), settings))
                    break
                except OSError:
                    await asyncio.sleep(0.1)
            assert second[0].listen == address
            assert await found(joined) == {second[0].node}

    run(work())


def test_a_search_that_finds_nobody_ends_and_says_who_did_not_answer(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "ALONE_S", 1.0)

    async def work() -> None:
        async with joiner(short_dir / "j", "127.0.0.1:1") as joined:
            started = time.monotonic()
            assert await found(joined) == set()
            assert time.monotonic() - started < 4
            assert list(joined.swarm._neighbours.problems()) == ["127.0.0.1:1"]
            rows = joined.swarm.peers()
            assert [(row["addresses"], row["live"]) for row in rows] == [(["127.0.0.1:1"], False)]
            assert rows[0]["error"]
        async with joiner(short_dir / "k") as joined:
            started = time.monotonic()
            assert await found(joined) == set()  # nobody to ask: no reason to wait
            assert time.monotonic() - started < 0.5

    run(work())


def test_a_node_that_comes_back_under_another_id_replaces_the_old_one(short_dir: Path) -> None:
    async def work() -> None:
        async with joiner(short_dir / "old") as old:
            address = listen(old)
            watcher = joiner(short_dir / "w", address)
            watching = await watcher.__aenter__()
            assert await found(watching) == {old.identity.node_id}
        async with joiner(short_dir / "new", listen=address) as new:
            around = watching.swarm._neighbours
            await around.describe(address, old.identity.node_id, 5)  # as it is asked every ten seconds
            assert await found(watching) == {new.identity.node_id}
            for _ in range(2):
                await around.describe(address, old.identity.node_id, 5)
                assert [known.node for known in around.all()] == [new.identity.node_id]
                assert (around.refused, around.problems()) == ({}, {})
                assert watching.swarm.status()["health"] == []
        await watcher.__aexit__(None, None, None)

    run(work())


def test_a_node_that_reaches_none_of_its_peers_is_not_well(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "ALONE_S", 0.5)

    async def work() -> None:
        async with joiner(short_dir / "j", "127.0.0.1:1") as joined:
            await found(joined)
            (reason,) = joined.swarm.status()["health"]
            assert "no peer answers" in reason
            assert "127.0.0.1:1" in reason
            outcome = await joined.recover(mode="auto", timeout_s=1.0)
            assert outcome.action == "fresh"
            assert "no peer answered (127.0.0.1:1: " in outcome.report.reason
        async with joiner(short_dir / "k") as joined:
            assert joined.swarm.status()["health"] == []

    run(work())


def test_peers_that_were_met_are_found_again_without_any_seed(short_dir: Path) -> None:
    async def work() -> None:
        async with donors_here(short_dir, {"name": "a"}) as (a,):
            async with joiner(short_dir / "j", a.listen) as joined:
                assert await found(joined) == {a.node}
            async with joiner(short_dir / "j") as joined:
                assert await found(joined) == {a.node}

    run(work())
