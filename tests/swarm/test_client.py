"""Donors that do not keep to the protocol, each in one way: what the client makes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from swarm_kit import RUN, Made, fill, open_store
from swarm_nodes import run

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import PeerMisbehaved, PeerUnavailable
from hotswarm.snapshot.manifest import SectionEntry, SignedManifest
from hotswarm.swarm import wire
from hotswarm.swarm.client import PeerClient, PeerLacks, PeerLinks, target
from hotswarm.swarm.describe import sign_description
from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.model import Description
from hotswarm.swarm.serve import SERVICE

Handler = Callable[[Any, Any], Awaitable[Any]]


@contextlib.asynccontextmanager
async def peer(node_id: Any = None, **methods: Handler) -> AsyncIterator[PeerClient]:
    """A server that answers as it is told, and a client to it. Replies are bytes."""
    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    kinds = {
        "Describe": (unary, pb.DescribeRequest),
        "GetManifest": (stream, pb.ManifestRequest),
        "GetHotSnapshot": (stream, pb.SnapshotRequest),
    }
    server = grpc.aio.server()
    handlers = {name: kinds[name][0](handler, kinds[name][1].FromString, None) for name, handler in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    links = PeerLinks(RUN, None)
    try:
        yield links.link(f"127.0.0.1:{port}", node_id)
    finally:
        await links.close()
        await server.stop(0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[SignedManifest, list[bytes]]:
    """A signed manifest, and the chunks of its outer section."""
    root = tmp_path_factory.mktemp("made")
    with open_store(root) as store:
        info = fill(store, NodeIdentity.load_or_create(root), Made(params=(400_000,)))
        with store.open(info.snapshot_id) as source:
            entry = source.manifest.sections["outer"]
            return source.signed, [bytes(source.chunk("outer", i)) for i in range(len(entry.chunk_digests))]


def frames_of(entry: SectionEntry, chunks: list[bytes], *indexes: int) -> list[bytes]:
    header = wire.HeaderFrame("0" * 32, "outer", entry.digest, len(chunks))
    body = [wire.encode_chunk(index, chunks[index]) for index in indexes]
    return [wire.encode_header(header), *body, wire.encode_end(len(indexes))]


def chunks_from(frames: list[bytes]) -> Handler:
    async def handler(_: Any, context: Any) -> None:
        for frame in frames:
            await context.write(frame)

    return handler


async def got(client: PeerClient, entry: SectionEntry, indexes: list[int]) -> list[tuple[int, bytes]]:
    async with contextlib.aclosing(client.chunks(entry, indexes)) as stream:
        return [(chunk.index, bytes(chunk.data)) async for chunk in stream]


def fetch(frames: list[bytes], entry: SectionEntry, indexes: list[int]) -> list[tuple[int, bytes]]:
    async def work() -> Any:
        async with peer(GetHotSnapshot=chunks_from(frames)) as client:
            return await got(client, entry, indexes)

    return run(work())


def test_an_honest_stream_gives_its_chunks(made: Any) -> None:
    signed, chunks = made
    entry = signed.manifest.sections["outer"]
    assert fetch(frames_of(entry, chunks, 0, 2), entry, [0, 2]) == [(0, chunks[0]), (2, chunks[2])]


def test_a_stream_without_its_end_frame_was_cut_whatever_the_status_says(made: Any) -> None:
    signed, chunks = made
    entry = signed.manifest.sections["outer"]
    whole = frames_of(entry, chunks, 0, 1)
    for length in range(len(whole)):
        with pytest.raises(PeerUnavailable, match="cut after"):
            fetch(whole[:length], entry, [0, 1])


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda f, _c: [f[0], f[1], wire.encode_end(1)], "as if that were all"),
        (lambda f, _c: [f[0], f[1], wire.encode_end(2)], "as if that were all"),
        (lambda f, _c: [f[0], f[2], f[1], f[3]], "was not asked for"),
        (lambda f, _c: [f[0], f[1], f[1], f[3]], "was not asked for"),
        (lambda f, c: [f[0], f[1], f[2], wire.encode_chunk(2, c[2]), f[3]], "was not asked for"),
        (lambda f, c: [f[0], wire.encode_chunk(0, c[0][:-1]), f[2], f[3]], "length"),
        (lambda f, c: [f[0], wire.encode_chunk(0, c[0], codec=1), f[2], f[3]], "form"),
        (lambda f, c: [f[0], wire.encode_chunk(0, c[0], raw_bytes=2**31), f[2], f[3]], "length"),
        (lambda f, _c: [f[1], f[2], f[3]], "without a header"),
        (lambda f, _c: [f[0], *f], "another section"),
        (lambda f, _c: [wire.encode_header(wire.HeaderFrame("", "outer", b"x" * 32, 3)), *f[1:]], "another section"),
        (lambda f, _c: [*f, f[1]], "after the end"),
        (lambda f, _c: [f[0], b"\xff\xff"], "none"),
        (lambda f, _c: [f[0], bytes(wire.MAX_FRAME_BYTES + 1)], "larger than 2 MiB"),
    ],
)
def test_every_departure_from_the_protocol_is_misbehaviour(lie: Any, words: str, made: Any) -> None:
    signed, chunks = made
    entry = signed.manifest.sections["outer"]
    with pytest.raises(PeerMisbehaved, match=words):
        fetch(lie(frames_of(entry, chunks, 0, 1), chunks), entry, [0, 1])


def test_leaving_a_stream_cancels_it_at_the_donor(made: Any) -> None:
    signed, chunks = made
    entry = signed.manifest.sections["outer"]
    cancelled = asyncio.Event()

    async def endless(_: Any, context: Any) -> None:
        try:
            await context.write(frames_of(entry, chunks)[0])
            while True:
                await context.write(wire.encode_chunk(0, chunks[0]))
        finally:
            cancelled.set()

    async def work() -> None:
        async with peer(GetHotSnapshot=endless) as client:
            async with contextlib.aclosing(client.chunks(entry, [0, 1])) as stream:
                async for _ in stream:
                    break
            await asyncio.wait_for(cancelled.wait(), 5)

    run(work())


def test_manifests_are_checked_against_what_was_asked_for(made: Any) -> None:
    signed, _ = made
    data = signed.to_bytes()
    flipped = bytearray(data)
    flipped[-1] ^= 1

    def parts(*pieces: bytes, last: bool = True) -> Handler:
        async def handler(_: Any, context: Any) -> None:
            for number, piece in enumerate(pieces, 1):
                part = pb.ManifestPart(data=piece, last=last and number == len(pieces))
                await context.write(part.SerializeToString())

        return handler

    async def work() -> None:
        async def ask(handler: Handler, snapshot_id: str = signed.snapshot_id) -> SignedManifest:
            async with peer(GetManifest=handler) as client:
                return await client.manifest(snapshot_id, 5.0)

        assert (await ask(parts(data[:100], data[100:]))).manifest == signed.manifest
        with pytest.raises(PeerUnavailable, match="cut off"):
            await ask(parts(data[:100], last=False))
        with pytest.raises(PeerMisbehaved, match="signature"):
            await ask(parts(bytes(flipped)))
        with pytest.raises(PeerMisbehaved, match="another snapshot"):
            await ask(parts(data), "1" * 32)
        with pytest.raises(PeerMisbehaved, match="larger"):
            await ask(parts(*[bytes(1 << 20)] * 17))

    run(work())


def test_descriptions_are_checked_against_the_question() -> None:
    identity, other = NodeIdentity.generate(), NodeIdentity.generate()

    def answer(signer: NodeIdentity = identity, *, fresh: bool = True, **changes: Any) -> Handler:
        async def handler(request: pb.DescribeRequest, _: Any) -> bytes:
            nonce = request.nonce if fresh else bytes(32)
            fields: dict[str, Any] = {"node": signer.node_id, "name": "", "run": RUN, "nonce": nonce, **changes}
            said = Description(live=False, clock=None, offers=(), vouchers=(), **fields)
            return bytes(sign_description(said, signer).SerializeToString())

        return handler

    async def work() -> None:
        async def ask(handler: Handler) -> Description:
            async with peer(identity.node_id, Describe=handler) as client:
                return await client.describe(5.0)

        assert (await ask(answer())).node == identity.node_id
        for handler, words in (
            (answer(fresh=False), "replay"),
            (answer(run="other"), "is of run"),
            (answer(node=other.node_id), "signed by another"),
            (answer(other), "answers as"),
            (answer(addresses=("x",) * 9), "too much"),
            (answer(name="x" * 300), "too long"),
        ):
            with pytest.raises(PeerMisbehaved, match=words):
                await ask(handler)

    run(work())


def test_a_peer_that_is_not_there_is_unavailable_within_the_timeout(tmp_path: Path) -> None:
    async def work() -> None:
        links = PeerLinks(RUN, None)
        client = links.link("127.0.0.1:1", None)
        async with asyncio.timeout(3):
            with pytest.raises(PeerUnavailable):
                await client.describe(2.0)
        await links.close()

    run(work())


def test_not_found_is_a_peer_that_lacks_it(made: Any) -> None:
    signed, _ = made

    async def gone(_: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "deleted")

    async def work() -> None:
        async with peer(GetHotSnapshot=gone) as client:
            with pytest.raises(PeerLacks, match="deleted"):
                await got(client, signed.manifest.sections["outer"], [0])

    run(work())


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("10.0.0.1:7411", "ipv4:10.0.0.1:7411"),
        ("[::1]:7411", "ipv6:[::1]:7411"),
        ("node.example:7411", "dns:///node.example:7411"),
    ],
)
def test_addresses_as_grpc_wants_them(address: str, wanted: str) -> None:
    assert target(address) == wanted
