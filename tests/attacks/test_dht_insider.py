"""What a member that lies can do to the DHT: waste a little time, and nothing in another's name."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
import umsgpack
from kademlia.node import Node

from hotswarm.swarm.crawl import MAX_ASKED, crawl
from hotswarm.swarm.dht import Announcement
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.kad import RPC_TIMEOUT_S, RPC_TRIES, SealedProtocol
from hotswarm.swarm.records import Record, Relayed, SignedRecord, encode_value, shard_of
from support.dhtkit import KEY, LOOPS, RawMember, Wire, address_of, routes, run, signers, swarm, until

EVIL_REPLIES = {
    "no ip": [(b"q" * 20, None, None)],
    "port 70000": [(b"q" * 20, "127.0.0.1", 70000)],
    "port as text": [(b"q" * 20, "127.0.0.1", "9")],
    "an id of 40 bytes": [(b"q" * 40, "127.0.0.1", 9)],
    "pairs": [["x", "y"]],
    "an empty map": {},
    "a value of another type": {"value": {"a": 1}},
    "a value of 1,500 bytes": {"value": b"v" * 1500},
    "a value of 30,000 bytes": {"value": b"v" * 30_000},
    "a value of noise": {"value": bytes(range(256)) * 4},
    "nodes of another type": {"value": b"", "nodes": 7},
    "a thousand nodes": [(os.urandom(20), "127.0.0.1", 9)] * 1000,
    "broadcast and wildcard": [
        (b"b" * 20, "255.255.255.255", 9),
        (b"w" * 20, "0.0.0.0", 9),
        (b"m" * 20, "224.0.0.1", 9),
    ],
    "another family": [(b"6" * 20, "::1", 9), (b"7" * 20, "fe80::1%lo", 9)],
    "text": "nonsense",
    "nothing": None,
    "a number": 2**62,
}


@pytest.mark.parametrize("loop", LOOPS)
def test_evil_replies_neither_stop_a_lookup_nor_close_the_socket(loop):
    async def main():
        async with swarm() as s:
            nodes = await s.mesh(4)
            victim, evil = nodes[0], nodes[3]
            for what, reply in EVIL_REPLIES.items():
                evil.protocol.rpc_find_value = evil.protocol.rpc_find_node = lambda *_, reply=reply: reply
                began = time.monotonic()
                found = signers(await victim.find(timeout_s=10))
                took = time.monotonic() - began
                assert found >= {n.identity.node_id for n in nodes[1:3]}, what
                assert took < 2 * RPC_TRIES * RPC_TIMEOUT_S + 1, what
                # A flood of 30-kB answers can cost a holder or two for a moment; never all, and never the socket.
                assert await victim.publish(Announcement((victim.address,))) >= 1, what
                me = nodes[1].identity.kademlia_id
                assert (await nodes[1].protocol.request(victim.address, "ping", me, force=True))[0], what
                victim.protocol._shunned.clear()
                for n in nodes[1:]:  # back into the table, so that the next lie is heard too
                    victim.protocol.router.add_contact(Node(n.identity.kademlia_id, *n.address))
            assert victim.protocol.hostile > 0

    run(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_evil_requests_get_no_answer_and_harm_nothing(loop):
    async def main():
        async with swarm() as s:
            nodes = await s.mesh(2)
            victim = nodes[0]
            raw = RawMember()
            key, me = os.urandom(20), raw.node_id
            requests = [
                ["ping", []],
                ["ping", [b"short"]],
                ["ping", [me, me]],
                ["ping", "text"],
                ["ping", [7]],
                ["ping", [os.urandom(20)]],  # not the id that it knocked with
                ["stun", [1]],
                ["find_node", [me, b"k" * 32]],
                ["find_value", [me, {"a": 1}]],
                ["store", [me, key]],
                ["store", [me, key, "text"]],
                ["store", [me, b"short", b""]],
                ["store", [me, key, b"v" * 1100]],
                ["__init__", []],
                ["close", []],
                [None, []],
                [["ping"], [me]],
                {"ping": me},
                [],
                7,
            ]
            sent = [b"\0" + os.urandom(20) + umsgpack.packb(r) for r in requests]
            sent += [b"\0" + os.urandom(20) + b"\x91" * 900, b"\0" + os.urandom(20) + b"\xdd\xff\xff\xff\xff"]
            sent += [b"\0" + os.urandom(20) + b"\xc1", b"\0" + os.urandom(20), b"\2" * 40, b"", b"\1" * 30]
            for message in sent:
                raw.send(message, victim.address)
                assert await raw.messages(0.03) == [], message
            assert await raw.messages(0.3) == []
            raw.call("ping", me, to=victim.address)
            assert len(await raw.messages(0.5)) == 1, "an honest call is answered"
            assert signers(await nodes[1].find()) == {victim.identity.node_id}
            raw.close()

    run(loop, main())


def test_a_member_cannot_publish_in_anothers_name():
    async def main():
        async with swarm() as s:
            nodes = await s.mesh(4)
            victim, evil = nodes[0].identity, nodes[3]
            key = evil._keys[0][shard_of(victim.node_id)]
            genuine = next(r for r in evil.known() if r.signed.signer == victim.node_id)
            lie = Record(2**60, 600, (evil.address,), outer_step=999)
            own = SignedRecord.sign(lie, key, evil.identity)
            elsewhere = SignedRecord.sign(lie, evil._keys[0][(shard_of(victim.node_id) + 1) % 16], evil.identity)
            forgeries = [
                SignedRecord(lie.encode(), nodes[0].identity.public_key, own.signature),
                SignedRecord(lie.encode(), nodes[0].identity.public_key, bytes(64)),
                SignedRecord(own.body, nodes[0].identity.public_key, genuine.signed.signature),
                SignedRecord(genuine.signed.body, evil.identity.public_key, genuine.signed.signature),
                elsewhere,
            ]
            for forged in forgeries:
                for n in nodes[:3]:
                    reply = await evil.protocol.request(
                        n.address, "store", evil.identity.kademlia_id, key, encode_value([Relayed(forged, 600)])
                    )
                    assert reply == (True, False)
            evil.protocol.storage.get = lambda k, default=None: encode_value([Relayed(forgeries[0], 600)])
            for n in nodes[1:3]:
                for r in await n.find():
                    assert r.signed.record.outer_step != 999
                found = {r.signed.signer: r.signed.record for r in await n.find()}
                assert found[victim.node_id] == genuine.signed.record
            assert nodes[0].status()["seq"] < 2**60, "and the victim takes no forged seq for its own"

    run("asyncio", main())


def test_a_record_cannot_be_shown_under_another_run():
    async def main():
        async with swarm() as s:
            a, b = await s.add(run="one"), await s.add(run="two")
            await a.publish(Announcement((a.address,)))
            assert b.add_records(a.known_with_own()) == 0
            assert b.known() == []

    run("asyncio", main())


def test_an_address_that_never_answers_gets_no_more_than_it_sent_and_moves_nobody(monkeypatch):
    async def main():
        async with swarm() as s:
            a, b = await s.mesh(2)
            raw = RawMember(node_id=b.identity.kademlia_id)  # says that it is b
            raw.call("ping", raw.node_id, to=a.address)
            await asyncio.sleep(0.3)
            hello = raw.socket.recv(65536)
            assert len(hello) <= raw.bytes_sent, "nothing but the hello before it has shown that it receives"
            with pytest.raises(BlockingIOError):
                raw.socket.recv(65536)
            for reply, to in raw.channel.receive(hello, a.address, time.monotonic()).replies:
                raw.socket.sendto(reply, to)  # now the ping arrives; a asks back whether b is there, and gets no answer
            await asyncio.sleep(RPC_TRIES * RPC_TIMEOUT_S + 0.5)
            assert routes(a)[b.identity.node_id] == b.address
            raw.close()

    run("asyncio", main())


def test_a_liar_that_invents_ever_closer_nodes_is_given_up_on():
    async def main():
        async with swarm() as s:
            a, b = await s.mesh(2)
            target = bytes(20)
            asked = []
            original = SealedProtocol.call_find_node

            async def counted(protocol, node, goal):
                asked.append(node)
                if len(asked) == 1:
                    return await original(protocol, node, goal)
                made_up = [[(2**150 - len(asked) * 16 - i).to_bytes(20, "big"), "127.0.0.1", 9] for i in range(16)]
                return True, made_up

            a.protocol.call_find_node = lambda node, goal: counted(a.protocol, node, goal)
            b.protocol.rpc_find_node = lambda *_: [((2**151).to_bytes(20, "big"), "127.0.0.1", 9)]
            await crawl(a.protocol, target)
            assert len(asked) <= MAX_ASKED

    run("asyncio", main())


def test_a_member_with_many_names_pushes_out_records_only_from_its_shards_and_never_the_own():
    async def main():
        async with swarm() as s:
            nodes = await s.mesh(3)
            a = nodes[0]
            shard = shard_of(a.identity.node_id)
            key = a._keys[0][shard]
            for _ in range(40):
                signed = SignedRecord.sign(Record(1, 600, (("10.0.0.1", 1),)), key, NodeIdentity.generate())
                await nodes[2].protocol.request(
                    a.address, "store", nodes[2].identity.kademlia_id, key, encode_value([Relayed(signed, 600)])
                )
            own = a.protocol.storage.book.records(key, time.monotonic())
            assert a.identity.node_id in signers(own)
            assert len(own) <= 7
            others = {n.identity.node_id for n in nodes[1:] if shard_of(n.identity.node_id) != shard}
            assert others <= signers(a.known())

    run("asyncio", main())


def test_two_nodes_with_one_key_do_not_lead_each_other_astray():
    async def main():
        async with swarm() as s:
            a = await s.add()
            twin = await s.add(a, identity=a.identity)
            other = await s.add(a, twin)
            await until(other.contacts, 10, "a contact")
            await asyncio.sleep(0.5)
            assert a.contacts() == [] or list(routes(a)) == [other.identity.node_id]
            assert twin.identity.node_id not in routes(twin)
            await twin.publish(Announcement((twin.address,)))

    run("asyncio", main())


def test_addresses_in_records_are_only_ever_called_under_the_seal(monkeypatch):
    """A member announces somebody else's address: what that one gets is first contacts, sealed, and few."""

    async def main():
        wire = Wire(monkeypatch)
        bystander = RawMember()
        async with swarm() as s:
            a = await s.add()
            evil = await s.add(a)
            await evil.publish(Announcement((bystander.address,)))
            await until(a.known, 10, "the record")
            await asyncio.sleep(3.0)
            to_bystander = [d for d, _, to in wire.seen if to == bystander.address]
            assert len(to_bystander) <= 20
            assert all(len(d) <= 110 for d in to_bystander)
            assert address_of(a) != address_of(evil)
            assert KEY.secret not in b"".join(to_bystander)
        bystander.close()

    run("asyncio", main())
