"""A swarm of directories over real sockets: finding, forgetting, coming back. Times are generous: what is asserted is
the order of magnitude, on machines that do other things at the same time."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from kademlia.node import Node

from hotswarm.errors import ConfigError, LocalFailure, LockedError
from hotswarm.swarm.dht import Announcement
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.kad import MAX_PACKET, K
from hotswarm.swarm.records import Record, Relayed, SignedRecord, decode_value, encode_value, shard_of
from hotswarm.swarm.swarmkey import SwarmKey, write_key_file
from support.dhtkit import KEY, LOOPS, Wire, routes, run, signers, swarm, until

TESTS = Path(__file__).parents[1]


def ids(nodes) -> set[str]:
    return {n.identity.node_id for n in nodes}


@pytest.mark.parametrize("loop", LOOPS)
def test_six_writers_of_one_run_are_all_found_by_each(loop):
    async def main():
        async with swarm() as s:
            nodes = await s.mesh(6)
            for n in nodes:
                assert signers(await n.find()) == ids(nodes) - {n.identity.node_id}
            late = await s.add(nodes[3])
            await until(late.contacts, 10, "a contact of the newcomer")
            assert signers(await late.find()) == ids(nodes)
            record = next(r for r in await late.find() if r.signed.signer == nodes[0].identity.node_id).signed.record
            assert record.addresses == (nodes[0].address,)

    run(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_with_four_of_six_gone_at_once_a_live_one_is_found_within_three_seconds(loop):
    async def main():
        async with swarm() as s:
            nodes = await s.mesh(6)
            joiner = await s.add(*nodes)
            await until(lambda: len(joiner.contacts()) >= 6, 10, "contacts of the joiner")
            for n in nodes[:4]:
                await n.stop(withdraw=False)
            live = ids(nodes[4:])
            began = time.monotonic()
            async with aclosing(joiner.lookup()) as records:
                async for r in records:
                    if r.signed.signer in live:
                        break
                else:
                    pytest.fail("no live member was found")
            assert time.monotonic() - began < 3.0
            # The two that are left lose the dead from their tables, and announce themselves to each other again.
            assert await nodes[4].publish(Announcement((nodes[4].address,), outer_step=8)) >= 1
            assert ids([nodes[5]]) <= signers(await nodes[4].find(timeout_s=10))
            await until(lambda: ids(nodes[:4]).isdisjoint(routes(nodes[4])), 10, "a table without the dead")
            found = {r.signed.signer: r.signed.record.outer_step for r in await nodes[5].find(timeout_s=10)}
            assert found[nodes[4].identity.node_id] == 8

    run(loop, main())


def test_with_four_of_six_processes_killed_a_live_one_is_found(processes, wait_until, tmp_path):
    key_file = tmp_path / "swarm.key"
    write_key_file(key_file, KEY)
    members: list[dict] = []
    children = []
    for _ in range(6):
        seeds = [m["address"] for m in members[:1]]
        child = processes.start(
            [sys.executable, "-m", "support.dht_member", key_file, tmp_path / f"state{len(children)}", *seeds],
            stdout=subprocess.PIPE,
            cwd=TESTS,
        )
        children.append(child)
        members.append(json.loads(child.stdout.readline()))

    async def main():
        async with swarm() as s:
            joiner = await s.add(*(m["address"] for m in members))
            await until(lambda: len(joiner.contacts()) >= 6, 30, "contacts of the joiner")
            for child in children[:4]:
                child.kill()
            for child in children[:4]:
                child.wait()
            live = {m["node"] for m in members[4:]}
            began = time.monotonic()
            async with aclosing(joiner.lookup()) as records:
                async for r in records:
                    if r.signed.signer in live:
                        break
                else:
                    pytest.fail("no live member was found")
            assert time.monotonic() - began < 3.0

    run("uvloop", main())


@pytest.mark.parametrize("relayed", [False, True])
def test_a_dead_nodes_record_is_gone_after_its_time_relayed_or_not(relayed):
    ttl = 4

    async def main():
        async with swarm() as s:
            dead, b, c = await s.mesh(3, ttl_s=ttl)
            gone = dead.identity.node_id
            await dead.stop(withdraw=False)
            died = time.monotonic()
            last_seen = {}

            async def watch() -> None:
                while True:
                    for n in (b, c):
                        if gone in signers(n.known()):
                            last_seen[n] = time.monotonic() - died
                    await asyncio.sleep(0.02)

            watching = asyncio.create_task(watch())
            while time.monotonic() - died < 1.75 * ttl:
                if relayed:  # by peer exchange, and by a newcomer that learned it from one and tells the other
                    b.add_records(c.known())
                    c.add_records(b.known())
                    newcomer = await s.add(b, ttl_s=ttl)
                    await until(newcomer.contacts, 10, "a contact")
                    found = await newcomer.find(timeout_s=2)
                    b.add_records(found)
                    c.add_records(found)
                    await newcomer.stop()
                await asyncio.sleep(0.1)
            watching.cancel()
            for n in (b, c):
                assert 0.25 * ttl < last_seen[n] <= ttl
            assert gone not in signers(await b.find(timeout_s=2))

    run("asyncio", main())


def test_stop_withdraws_the_record_everywhere():
    async def main():
        async with swarm() as s:
            a, b, c = await s.mesh(3)
            await a.stop()
            assert a.identity.node_id not in signers(b.known()) | signers(c.known())
            assert a.identity.node_id not in signers(await b.find())

    run("asyncio", main())


def test_stop_withdraws_even_while_an_announcement_waits_for_dead_nodes():
    async def main():
        async with swarm() as s:
            a, b, *dead = await s.mesh(4)
            for n in dead:
                await n.stop(withdraw=False)
            announcing = asyncio.create_task(a.publish(Announcement((a.address,), outer_step=3)))
            await until(lambda: any(r.signed.record.outer_step == 3 for r in b.known()), 5, "the new record")
            assert not announcing.done()
            began = time.monotonic()
            await a.stop()
            assert time.monotonic() - began < 2
            assert a.identity.node_id not in signers(b.known())
            await announcing
            await asyncio.sleep(0.2)
            assert a.identity.node_id not in signers(b.known()), "nor does the late one bring it back"

    run("asyncio", main())


def test_a_record_is_refreshed_with_a_new_seq_before_it_ends():
    async def main():
        async with swarm() as s:
            a, b = await s.mesh(2, ttl_s=3)

            def seq() -> int:
                return max(r.signed.record.seq for r in b.known())

            first = seq()
            await until(lambda: b.known() and seq() > first, 3, "a refresh")
            end = time.monotonic() + 3
            while time.monotonic() < end:
                assert a.identity.node_id in signers(b.known())
                await asyncio.sleep(0.05)

    run("asyncio", main())


def test_a_node_that_lost_its_state_directory_goes_on_from_its_own_higher_seq(caplog):
    async def main():
        async with swarm() as s:
            a, b, c = await s.mesh(3)
            identity = a.identity
            await a.stop(withdraw=False)
            before = {r.signed.signer: r.signed.record.seq for r in b.known()}[identity.node_id]
            again = await s.add(b, identity=identity, wall_ms=lambda: 1000)  # and its clock is wrong
            await until(lambda: len(again.contacts()) >= 2, 10, "contacts")
            await again.publish(Announcement((again.address,), outer_step=77))
            for n in (b, c):
                record = next(r.signed.record for r in n.known() if r.signed.signer == identity.node_id)
                assert (record.outer_step, record.addresses) == (77, (again.address,))
                assert record.seq == before + 1

    run("asyncio", main())


def test_alone_it_is_a_directory_of_one_without_errors():
    async def main():
        async with swarm() as s:
            a = await s.add()
            assert await a.publish(Announcement((a.address,))) == 0
            assert await a.find() == []
            assert signers(a.known_with_own()) == {a.identity.node_id}
            b = await s.add(a)
            await until(b.contacts, 10, "a contact")
            assert signers(await b.find()) == {a.identity.node_id}

    run("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
def test_seeds_that_come_up_later_or_have_names_are_found_in_the_end(loop):
    async def main():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        async with swarm() as s:
            early = await s.add(f"localhost:{port}", "no-such-host.invalid:7411", "127.0.0.1:1")
            await early.publish(Announcement((early.address,)))
            await asyncio.sleep(0.5)
            assert early.contacts() == []
            late = await s.add(port=port)
            await until(early.contacts, 20, "the seed's answer")
            await until(lambda: early.identity.node_id in signers(late.known()), 10, "the record, published again")

    run(loop, main())


def test_a_restarted_node_finds_the_swarm_from_its_peer_cache_alone(tmp_path):
    async def main():
        async with swarm() as s:
            nodes = await s.mesh(3)
            d = await s.add(nodes[0], state=tmp_path / "d")
            await until(lambda: len(d.contacts()) >= 3, 10, "contacts")
            await d.publish(Announcement((d.address,)))
            seq = d.status()["seq"]
            await d.stop()
            again = await s.add(identity=d.identity, state=tmp_path / "d", wall_ms=lambda: 0)
            await until(lambda: len(again.contacts()) >= 3, 10, "contacts without a seed")
            await again.publish(Announcement((again.address,)))
            assert again.status()["seq"] > seq, "kept with the cache, whatever the clock says"

    run("asyncio", main())


def test_a_moved_nodes_address_is_replaced_once_it_has_answered_there():
    async def main():
        async with swarm() as s:
            a, b, c = await s.mesh(3)
            identity = c.identity
            await c.stop(withdraw=False)
            moved = await s.add(a, identity=identity)
            assert moved.address != c.address
            for n in (a, b):
                await until(lambda n=n: routes(n)[identity.node_id] == moved.address, 10, "the new address")

    run("asyncio", main())


def test_a_node_that_is_restarted_at_its_old_address_is_reached_again():
    async def main():
        async with swarm() as s:
            a, b = await s.mesh(2)
            identity, port = b.identity, b.address[1]
            await b.stop(withdraw=False)
            again = await s.add(identity=identity, port=port)  # it knows nobody: a has to come to it
            reply = await a.protocol.request(again.address, "ping", a.identity.kademlia_id)
            assert reply == (True, identity.kademlia_id)

    run("asyncio", main())


def test_another_node_at_a_known_address_takes_its_place_in_the_table():
    async def main():
        async with swarm() as s:
            a, b = await s.mesh(2)
            port = b.address[1]
            await b.stop(withdraw=False)
            other = await s.add(port=port)
            await a.find(timeout_s=10)
            assert list(routes(a)) == [other.identity.node_id]

    run("asyncio", main())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("host", "dialled"), [("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")])
def test_wildcards_and_ipv6_work_too(host, dialled, loop):
    if ":" in host and not has_ipv6():
        pytest.skip("no IPv6 on this machine")

    async def main():
        async with swarm() as s:
            first = await s.add(host=host)
            seed = f"{dialled}:{first.address[1]}"
            others = [await s.add(seed, host=host) for _ in range(2)]
            nodes = [first, *others]
            await until(lambda: all(len(n.contacts()) == 2 for n in nodes), 10, "a full mesh")
            for n in nodes:
                await n.publish(Announcement((("10.0.0.7", n.address[1]),)))
            for n in nodes:
                assert len(signers(await n.find())) == 2

    run(loop, main())


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_members_of_other_runs_and_other_swarms_are_not_listed():
    async def main():
        async with swarm() as s:
            a = await s.add(run="one")
            b = await s.add(a, run="two")
            stranger = await s.add(a, keys=[SwarmKey.generate()], run="one")
            await until(b.contacts, 10, "a contact")
            for n in (a, b, stranger):
                await n.publish(Announcement((n.address,)))
            assert await a.find() == await b.find() == await stranger.find() == []
            assert stranger.contacts() == []

    run("asyncio", main())


def test_while_a_swarm_key_is_replaced_members_with_both_keys_see_everyone():
    async def main():
        new = SwarmKey.generate()
        async with swarm() as s:
            old_only = await s.add(keys=[KEY])
            first = await s.add(old_only, keys=[KEY, new])
            second = await s.add(first, keys=[new, KEY])
            new_only = await s.add(first, second, keys=[new])
            everyone = [old_only, first, second, new_only]
            await until(lambda: all(n.contacts() for n in everyone), 10, "contacts")
            await until(lambda: len(first.contacts()) >= 3, 10, "contacts of the one between")
            await until(lambda: len(second.contacts()) >= 2, 10, "contacts of the other between")
            for n in everyone:
                await n.publish(Announcement((n.address,)))
            assert signers(await first.find()) == ids(everyone) - ids([first])
            assert ids([first, second]) <= signers(await old_only.find())
            assert ids([first, second]) <= signers(await new_only.find())

    run("asyncio", main())


def test_records_travel_over_other_channels_too():
    async def main():
        async with swarm() as s:
            a, b = await s.mesh(2)
            alone = await s.add()
            assert alone.add_records(a.known_with_own()) == 2
            assert signers(alone.known()) == ids([a, b])
            assert alone.add_records(a.known_with_own()) == 0
            left = [r.ttl_left_s for r in alone.known()]
            assert all(0 < t <= 600 for t in left)
            await until(lambda: len(alone.contacts()) == 2, 10, "contacts at the addresses in the records")
            forged = SignedRecord(Record(2**40, 600).encode(), a.identity.public_key, b"\1" * 64)
            junk = SignedRecord(b"junk", b"junk", b"junk")
            assert alone.add_records([Relayed(forged, 600), Relayed(junk, 600)]) == 0

    run("asyncio", main())


def test_the_own_ip_is_what_two_others_see():
    async def main():
        async with swarm() as s:
            a, b = await s.mesh(2)
            assert await a.observed_ip() is None, "one witness is none"
            c = await s.add(a, b)
            await until(lambda: len(c.contacts()) == 2, 10, "contacts")
            assert await c.observed_ip() == "127.0.0.1"

    run("asyncio", main())


def test_no_packet_is_over_1200_bytes_with_full_values_and_tables(monkeypatch):
    async def main():
        wire = Wire(monkeypatch)
        async with swarm() as s:
            nodes = await s.mesh(3)
            key = nodes[0]._keys[0][0]
            people = [NodeIdentity.generate() for _ in range(8)]
            addresses = tuple((f"2001:db8::{i:x}", 65535) for i in (0xAAAA, 0xBBBB, 0xCCCC))
            for p in people:
                signed = SignedRecord.sign(Record(2**63, 86400, addresses), key, p)
                nodes[0].protocol.storage.offer(key, encode_value([Relayed(signed, 86400)]))
            value = nodes[0].protocol.storage.get(key)
            assert len(decode_value(value)) == 5
            me = nodes[1].identity.kademlia_id
            assert await nodes[1].protocol.request(nodes[2].address, "store", me, key, value) == (True, True)
            _, got = await nodes[1].protocol.request(nodes[0].address, "find_value", me, key)
            assert len(decode_value(got["value"])) == 5
            for _ in range(16):  # a full answer of nodes, and what is left of it beside a full value
                nodes[0].protocol.router.add_contact(Node(os.urandom(20), "255.255.254.254", 65535))
            _, nodes_found = await nodes[1].protocol.request(nodes[0].address, "find_node", me, key)
            assert len(nodes_found) == K
            assert (await nodes[1].protocol.request(nodes[0].address, "find_value", me, key))[0]
            assert 1_000 < max(len(d) for d, _, _ in wire.seen) <= MAX_PACKET == 1_200

    run("asyncio", main())


def test_a_port_in_use_and_an_address_that_is_not_here_are_named():
    async def main():
        async with swarm() as s:
            a = await s.add()
            with pytest.raises(LockedError, match=str(a.address[1])) as taken:
                await s.add(port=a.address[1])
            assert taken.value.exit_code == 11
            b = await s.add()
            with pytest.raises(LocalFailure, match=r"192\.0\.2\.1"):
                await b.start("192.0.2.1", 0)

    run("asyncio", main())


@pytest.mark.parametrize(
    "wrong", [{"seeds": ("nonsense",)}, {"seeds": ("h:0",)}, {"run": "../x"}, {"ttl_s": 0}, {"ttl_s": 86401}]
)
def test_bad_settings_are_named(wrong):
    async def main():
        async with swarm() as s:
            with pytest.raises(ConfigError):
                await s.add(*wrong.pop("seeds", ()), **wrong)

    run("asyncio", main())


def test_a_record_lies_in_the_shard_of_its_signer():
    async def main():
        async with swarm() as s:
            a, b = await s.mesh(2)
            for keys in a._keys:
                for shard, key in enumerate(keys):
                    here = signers(a.protocol.storage.book.records(key, time.monotonic()))
                    assert here == {i for i in ids([a, b]) if shard_of(i) == shard}

    run("asyncio", main())
