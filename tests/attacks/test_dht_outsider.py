"""What somebody without the swarm key can do to the DHT, with sockets and captured traffic: nothing."""

from __future__ import annotations

import asyncio
import os
import random
import socket

import pytest
import umsgpack

from hotswarm.swarm.dht import Announcement
from hotswarm.swarm.sealed import KNOCK, SealedChannel
from hotswarm.swarm.swarmkey import SwarmKey
from support.dhtkit import LOOPS, Wire, routes, run, signers, swarm, until

OVERHEARD = "the datagrams of a whole swarm's life: joining, announcing, looking up"


class Outsider:
    """A UDP socket that counts what comes back."""

    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.setblocking(False)

    async def send_all(self, datagrams, targets) -> list[bytes]:
        """Send each datagram to each target; what was answered within half a second after."""
        for datagram in datagrams:
            for target in targets:
                self.socket.sendto(datagram, target)
            await asyncio.sleep(0)
        answers = []
        for _ in range(25):
            await asyncio.sleep(0.02)
            try:
                while True:
                    answers.append(self.socket.recv(65536))
            except BlockingIOError:
                pass
        return answers

    def close(self) -> None:
        self.socket.close()


def state_of(nodes) -> list:
    return [(routes(n), sorted((r.signed.signer, r.signed.record.seq) for r in n.known())) for n in nodes]


def kademlia_request(name: str, *args: object) -> bytes:
    return b"\0" + os.urandom(20) + umsgpack.packb([name, list(args)])


@pytest.mark.parametrize("loop", LOOPS)
def test_fresh_packets_of_a_non_member_get_no_answer_and_change_nothing(loop):
    rng = random.Random(7)

    async def main():
        outsider = Outsider()
        async with swarm() as s:
            nodes = await s.mesh(3)
            before = state_of(nodes)
            fake, key = os.urandom(20), nodes[0]._keys[0][0]
            stranger = SealedChannel([SwarmKey.generate().udp_key], fake, lambda _: True)
            sealed_by_another_swarm = stranger.send(b"hello", nodes[0].address, 0.0)[0][0]
            packets = [
                kademlia_request("ping", fake),
                kademlia_request("stun"),
                kademlia_request("find_node", fake, key),
                kademlia_request("find_value", fake, key),
                kademlia_request("store", fake, key, b"x" * 50),
                b"\1" + os.urandom(60),
                b"",
                b"\0" * 21,
                sealed_by_another_swarm,
                *(rng.randbytes(rng.randrange(1, 1400)) for _ in range(100)),
            ]
            assert await outsider.send_all(packets, [n.address for n in nodes]) == []
            assert state_of(nodes) == before
            assert nodes[0].status()["datagrams_dropped"] >= 105
        outsider.close()

    run(loop, main())


@pytest.mark.parametrize("loop", LOOPS)
def test_captured_packets_replayed_to_anybody_get_no_answer_and_move_no_route(loop, monkeypatch):
    async def main():
        wire = Wire(monkeypatch)
        outsider = Outsider()
        async with swarm() as s:
            nodes = await s.mesh(4)
            for n in nodes:
                await n.find()
            captured = [datagram for datagram, _, _ in wire.seen]
            assert len(captured) > 200, OVERHEARD
            before = state_of(nodes)
            some = captured[:120] + captured[-120:]
            assert await outsider.send_all(some, [n.address for n in nodes]) == []
            assert state_of(nodes) == before
            # And with the sender's address forged, as an outsider on the same link can: handed in below the socket.
            sent = len(wire.seen)
            for datagram, source, to in wire.seen[:sent]:
                for n in nodes:
                    for claimed in (source, to):
                        n.protocol.datagram_received(datagram, claimed)
            await asyncio.sleep(0.2)
            assert len(wire.seen) == sent, "an answer was sent"
            assert state_of(nodes) == before
        outsider.close()

    run(loop, main())


def test_a_restarted_node_gives_a_replayer_at_most_what_it_sent_and_no_route(monkeypatch):
    async def main():
        wire = Wire(monkeypatch)
        outsider = Outsider()
        async with swarm() as s:
            a, b = await s.mesh(2)
            await b.find()
            captured = [datagram for datagram, _, to in wire.seen if to == a.address]
            identity, port = a.identity, a.address[1]
            await a.stop(withdraw=False)
            again = await s.add(identity=identity, port=port)
            answers = await outsider.send_all(captured, [again.address])
            knocks = [d for d in captured if kind_of(a, d) == KNOCK]
            assert len(answers) <= len(knocks)
            assert sum(map(len, answers)) <= sum(map(len, knocks))
            assert again.contacts() == []
            assert again.known() == []
            # What came back cannot be made into anything: sent on to whomever, it dies.
            before = state_of([again, b])
            assert await outsider.send_all(answers, [again.address, b.address]) == []
            assert state_of([again, b]) == before
        outsider.close()

    run("asyncio", main())


def kind_of(node, datagram: bytes) -> int:
    """Opened with the key, which the test has and the outsider has not."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    from support.dhtkit import KEY

    return ChaCha20Poly1305(KEY.udp_key).decrypt(datagram[:12], datagram[12:], b"hotswarm-udp-v1")[0]


def test_run_names_and_records_cannot_be_read_off_the_wire(monkeypatch):
    async def main():
        wire = Wire(monkeypatch)
        async with swarm() as s:
            nodes = await s.mesh(3, run="a-secret-run-name")
            await nodes[0].find()
            everything = b"".join(d for d, _, _ in wire.seen)
            for n in nodes:
                assert n.identity.public_key not in everything
                assert n.identity.kademlia_id not in everything
            assert b"a-secret-run-name" not in everything
            assert b"find_value" not in everything

    run("asyncio", main())


def test_under_a_flood_of_garbage_members_still_find_each_other():
    async def main():
        outsider = Outsider()
        async with swarm() as s:
            nodes = await s.mesh(3)
            stop = asyncio.Event()

            async def flood() -> None:
                while not stop.is_set():
                    for n in nodes:
                        for _ in range(5):
                            outsider.socket.sendto(os.urandom(200), n.address)
                    await asyncio.sleep(0.002)

            flooding = asyncio.create_task(flood())
            await asyncio.sleep(0.3)
            found = [len(signers(await n.find(timeout_s=5))) for n in nodes]
            await nodes[0].publish(Announcement((nodes[0].address,), outer_step=5))
            await until(lambda: any(r.signed.record.outer_step == 5 for r in nodes[1].known()), 5, "the new record")
            stop.set()
            await flooding
            assert found == [2, 2, 2]
        outsider.close()

    run("asyncio", main())
