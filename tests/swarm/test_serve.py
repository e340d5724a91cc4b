"""The server of a node, asked by plain protobuf clients over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from swarm_kit import MIB, RUN, Made, fill, open_store
from swarm_nodes import eventually, joiner, run

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import LockedError
from hotswarm.store.files import FileStore
from hotswarm.swarm import serve
from hotswarm.swarm.catalog import Catalog
from hotswarm.swarm.describe import check_description
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.serve import SERVICE, Servicer, SwarmServer
from hotswarm.swarm.swarmkey import Membership, SwarmKey, issue_leaf
from hotswarm.swarm.tls import SwarmTls


class NoExchange:
    def take(self, records: Any) -> None: ...

    def give(self) -> list[pb.SignedRecord]:
        return []


class Stub:
    """What generated code would be: default channel options, protobuf on both sides."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        def unary(name: str, reply: Any) -> Any:
            return channel.unary_unary(f"/{SERVICE}/{name}", lambda m: m.SerializeToString(), reply.FromString)

        def stream(name: str, reply: Any) -> Any:
            return channel.unary_stream(f"/{SERVICE}/{name}", lambda m: m.SerializeToString(), reply.FromString)

        self.Describe = unary("Describe", pb.SignedDescription)
        self.GetManifest = stream("GetManifest", pb.ManifestPart)
        self.GetHotSnapshot = stream("GetHotSnapshot", pb.SnapshotFrame)
        self.Peers = unary("Peers", pb.PeersReply)
        self.ReportBadChunk = unary("ReportBadChunk", pb.BadChunkAnswer)


class Served:
    def __init__(self, store: FileStore, servicer: Servicer, port: int, channel: grpc.aio.Channel) -> None:
        self.store, self.servicer, self.port, self.channel = store, servicer, port, channel
        self.stub = Stub(channel)

    def outer(self) -> bytes:
        return self.store.snapshots()[-1].outer_digest or b""

    def request(self, **more: Any) -> pb.SnapshotRequest:
        return pb.SnapshotRequest(run=RUN, section_digest=self.outer(), **more)


@contextlib.asynccontextmanager
async def served(root: Path, *mades: Made, **options: Any) -> AsyncIterator[Served]:
    identity = NodeIdentity.load_or_create(root)
    with open_store(root, **options.pop("retention", {})) as store:
        for made in mades or (Made(),):
            await asyncio.to_thread(fill, store, identity, made)
        servicer = Servicer(
            store,
            identity,
            Catalog(store),
            NoExchange(),
            authenticate=lambda _: "peer",
            live=lambda: None,
            addresses=list,
            **options,
        )
        server = SwarmServer(servicer, None)
        port = await server.start("127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Served(store, servicer, port, channel)
        await server.stop(0)


async def status_of(call: Any) -> grpc.StatusCode:
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def manifest_of(stub: Stub, snapshot_id: str) -> bytes:
    return b"".join(
        [part.data async for part in stub.GetManifest(pb.ManifestRequest(run=RUN, snapshot_id=snapshot_id))]
    )


def test_a_plain_protobuf_client_with_default_limits_gets_everything(short_dir: Path) -> None:
    many = Made(params=(5_242_880, *([3] * 3_000)))  # one tensor of 20 MiB, and a manifest in several parts

    async def work() -> None:
        async with served(short_dir, many) as node:
            info = node.store.snapshots()[-1]
            data = await manifest_of(node.stub, info.snapshot_id)
            assert len(data) > 1 << 20
            assert data == node.store.signed(info.snapshot_id).to_bytes()
            frames = [frame async for frame in node.stub.GetHotSnapshot(node.request())]
            assert [frame.WhichOneof("frame") for frame in (frames[0], frames[-1])] == ["header", "end"]
            chunks = [frame.chunk for frame in frames[1:-1]]
            assert frames[-1].end.chunks_sent == len(chunks) == frames[0].header.chunk_count
            with node.store.open(info.snapshot_id) as source:
                for chunk in chunks:
                    assert chunk.data == bytes(source.chunk("outer", chunk.index))

    run(work())


def test_ranges_are_sent_in_their_order_and_bad_ones_refused(short_dir: Path) -> None:
    async def work() -> None:
        async with served(short_dir) as node:
            wanted = [pb.Range(first=7, count=2), pb.Range(first=0, count=1)]
            frames = [frame async for frame in node.stub.GetHotSnapshot(node.request(ranges=wanted))]
            assert [frame.chunk.index for frame in frames[1:-1]] == [7, 8, 0]
            for bad in ([pb.Range(first=9, count=2)], [pb.Range(first=0, count=0)], [pb.Range(first=1, count=1)] * 2):
                code = await status_of(node.stub.GetHotSnapshot(node.request(ranges=bad)))
                assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert node.servicer.slots.active == 0

    run(work())


def test_what_is_not_here_is_not_found_and_private_is_nobodys(short_dir: Path) -> None:
    async def work() -> None:
        async with served(short_dir) as node:
            info = node.store.snapshots()[-1]
            private = node.store.signed(info.snapshot_id).manifest.sections["private"].digest
            for request in (
                pb.SnapshotRequest(run=RUN, section_digest=b"x" * 32),
                pb.SnapshotRequest(run=RUN, section_digest=private),
                pb.SnapshotRequest(run=RUN, snapshot_id=info.snapshot_id, section="private"),
                pb.SnapshotRequest(run=RUN, snapshot_id="0" * 32, section="outer"),
                pb.SnapshotRequest(run=RUN, snapshot_id="../../etc/passwd", section="outer"),
                pb.SnapshotRequest(run="another", snapshot_id=info.snapshot_id, section="outer"),
            ):
                assert await status_of(node.stub.GetHotSnapshot(request)) is grpc.StatusCode.NOT_FOUND
            newest = pb.SnapshotRequest(run=RUN, snapshot_id="newest", section="outer")
            assert await status_of(node.stub.GetHotSnapshot(newest)) is grpc.StatusCode.OK
            assert all(s.name != "private" for s in (await described(node)).offers[0].sections)

    run(work())


async def described(node: Served) -> Any:
    nonce = os.urandom(16)
    answer = await node.stub.Describe(pb.DescribeRequest(nonce=nonce, run=RUN))
    return check_description(answer, nonce=nonce, run=RUN, peer="it")


def test_describe_offers_what_is_here_and_vouches_for_what_was(short_dir: Path) -> None:
    async def work() -> None:
        mades = [Made(outer_step=step) for step in range(1, 5)]
        async with served(short_dir, *mades, retention={"max_hot": 2}) as node:
            said = await described(node)
            assert [offer.outer_step for offer in said.offers] == [4, 3]
            assert [(v.outer_step, v.servable) for v in said.vouchers] == [(4, True), (3, True)]
        async with served(short_dir, Made(outer_step=5), retention={"max_hot": 2}) as node:
            said = await described(node)  # a new process remembers what it held
            assert [(v.outer_step, v.servable) for v in said.vouchers] == [(5, True), (4, True), (3, False)]
            for size in (15, 65):
                call = node.stub.Describe(pb.DescribeRequest(nonce=bytes(size), run=RUN))
                assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT

    run(work())


def test_a_full_node_says_when_to_come_back_and_a_cancelled_stream_frees_its_slot(short_dir: Path) -> None:
    async def work() -> None:
        async with served(short_dir, slots=2, bytes_per_s=1_000_000) as node:
            first, second = (node.stub.GetHotSnapshot(node.request(recovering=True)) for _ in range(2))
            await first.read()
            await second.read()
            third = node.stub.GetHotSnapshot(node.request(recovering=True))
            assert await status_of(third) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(await third.trailing_metadata())[serve.RETRY_AFTER_MS] == "500"
            first.cancel()
            await eventually(lambda: node.servicer.slots.active == 1)
            fourth = node.stub.GetHotSnapshot(node.request(recovering=True))
            await fourth.read()
            assert node.servicer.slots.active == 2

    run(work())


def test_one_slot_is_kept_for_nodes_that_wait_to_train(short_dir: Path) -> None:
    async def work() -> None:
        async with served(short_dir, slots=2, bytes_per_s=1_000_000) as node:
            background = node.stub.GetHotSnapshot(node.request())
            await background.read()
            assert await status_of(node.stub.GetHotSnapshot(node.request())) is grpc.StatusCode.RESOURCE_EXHAUSTED
            await node.stub.GetHotSnapshot(node.request(recovering=True)).read()
            assert node.servicer.slots.active == 2

    run(work())


def test_a_reader_that_stalls_loses_its_slot(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "WRITE_TIMEOUT_S", 0.5)
    large = Made(params=(8_000_000,))  # more than grpc buffers for a stream: about 6 MiB

    async def work() -> None:
        async with served(short_dir, large) as node:
            call = node.stub.GetHotSnapshot(node.request())
            await call.read()
            assert node.servicer.slots.active == 1
            await eventually(lambda: node.servicer.slots.active == 0, 10)
            call.cancel()

    run(work())


def test_all_uploads_together_keep_to_the_byte_rate(short_dir: Path) -> None:
    async def work() -> None:
        async with served(short_dir, bytes_per_s=10_000_000) as node:
            started = time.monotonic()
            codes = await asyncio.gather(*(status_of(node.stub.GetHotSnapshot(node.request())) for _ in range(2)))
            assert codes == [grpc.StatusCode.OK] * 2
            assert time.monotonic() - started > 2 * 10_400_000 / 10_000_000 * 0.85

    run(work())


def test_a_second_server_on_a_port_is_refused_and_the_port_named(short_dir: Path) -> None:
    async def work() -> None:
        async with joiner(short_dir / "a") as first:
            listen = str(first.swarm.status()["listen"])
            port = listen.rpartition(":")[2]
            from hotswarm.config import NodeConfig
            from hotswarm.swarm.side import build_swarm

            state_dir = short_dir / "b"
            with open_store(state_dir) as store:
                config = NodeConfig(run=RUN, listen=listen, state_dir=state_dir)
                second = build_swarm(config, NodeIdentity.load_or_create(state_dir), store, lambda: None)
                with pytest.raises(LockedError, match=port):
                    await second.start()
                await second.stop()

    run(work())


def test_health_is_served(short_dir: Path) -> None:
    async def work() -> None:
        async with served(short_dir) as node:
            stub = health_pb2_grpc.HealthStub(node.channel)
            for service in ("", SERVICE):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING

    run(work())


def test_a_reported_chunk_makes_the_node_check_itself(short_dir: Path) -> None:
    async def work() -> None:
        async with served(short_dir) as node:
            info = node.store.snapshots()[-1]
            report = pb.BadChunkReport(run=RUN, section_digest=node.outer(), index=1)
            assert (await node.stub.ReportBadChunk(report)).noted
            await eventually(lambda: not node.servicer._checks)
            assert [i.snapshot_id for i in node.store.snapshots()] == [info.snapshot_id], "a false report harms nothing"
            assert not (await node.stub.ReportBadChunk(report)).noted, "and is not acted on again and again"
            node.servicer._checked_at.clear()
            from donor import corrupt

            corrupt(node.store, info.snapshot_id, "outer", 1)
            assert (await node.stub.ReportBadChunk(report)).noted
            await eventually(lambda: not node.servicer._checks)
            assert node.store.snapshots() == []
            assert (await described(node)).offers == ()

    run(work())


def test_a_leased_snapshot_outlives_retention(short_dir: Path) -> None:
    async def work() -> None:
        async with served(short_dir, retention={"max_hot": 1}) as node:
            first = node.store.snapshots()[-1]
            await manifest_of(node.stub, first.snapshot_id)
            for step in range(10, 13):
                fill(node.store, NodeIdentity.load_or_create(short_dir), Made(outer_step=step))
            assert first.snapshot_id in {info.snapshot_id for info in node.store.snapshots()}
            request = pb.SnapshotRequest(run=RUN, section_digest=first.outer_digest)
            assert await status_of(node.stub.GetHotSnapshot(request)) is grpc.StatusCode.OK

    run(work())


def test_a_member_that_uses_anothers_name_is_refused(short_dir: Path) -> None:
    key = SwarmKey.public_loopback()
    victim, insider = NodeIdentity.generate(), NodeIdentity.generate()
    membership = Membership.from_keys([key], insider)
    leaf = issue_leaf(key.ca_key, key.ca_cert, insider.public, claim=victim.node_id)
    from cryptography.hazmat.primitives.serialization import Encoding

    forged = Membership(membership.roots_pem, leaf.public_bytes(Encoding.PEM), (), ())

    async def work() -> None:
        async with joiner(short_dir / "a") as node:
            listen = str(node.swarm.status()["listen"])
            for members, wanted in ((membership, grpc.StatusCode.OK), (forged, grpc.StatusCode.PERMISSION_DENIED)):
                tls = SwarmTls(insider, members)
                channel = grpc.aio.secure_channel(listen, tls.channel_credentials(), options=tls.channel_options(None))
                async with channel:
                    call = Stub(channel).Describe(pb.DescribeRequest(nonce=bytes(16), run=RUN))
                    assert await status_of(call) is wanted

    run(work())


def test_serving_takes_little_memory_whatever_the_state(short_dir: Path) -> None:
    import psutil

    large = Made(params=(12_000_000,), buffer=0)  # 46 MiB of parameters

    async def work() -> None:
        async with served(short_dir, large, bytes_per_s=100 * MIB) as node:
            process = psutil.Process()
            before = process.memory_info().rss
            peak = 0
            async for _ in node.stub.GetHotSnapshot(node.request()):
                peak = max(peak, process.memory_info().rss)
            assert peak - before < 40 * MIB

    run(work())
