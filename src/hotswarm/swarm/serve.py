"""The gRPC server of a node: service `SwarmRecovery` and `grpc.health.v1`, over mTLS.

Serving must never hurt the node that serves. Streams are limited in all and per peer, bytes by one bucket; a full node
answers RESOURCE_EXHAUSTED and says in the trailing metadata (`retry-after-ms`) when to come back. Chunks are read and
framed on threads, one ahead of what is being sent, so the loop only hands over. Each write has a deadline; a reader
that stalls loses its slot then, even though grpc lets the call itself go only when the connection dies.

Chunks are served as they lie on disk, unverified: who receives them checks every one. `ReportBadChunk` makes this node
check itself.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Protocol, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import HotswarmError, IntegrityError, LocalFailure, LockedError, NotAuthorised, StoreError
from hotswarm.ids import is_snapshot_id
from hotswarm.snapshot.signing import Signer
from hotswarm.store.base import SnapshotInfo
from hotswarm.store.files import FileStore
from hotswarm.store.source import FileSource
from hotswarm.swarm import wire
from hotswarm.swarm.catalog import FRESH_S, Catalog
from hotswarm.swarm.describe import NONCE_BYTES, sign_description
from hotswarm.swarm.model import Description, LiveClock
from hotswarm.swarm.throttle import Slots, TokenBucket

log = logging.getLogger(__name__)

SERVICE = "hotswarm.v1.SwarmRecovery"
RETRY_AFTER_MS = "retry-after-ms"
WRITE_TIMEOUT_S = 30.0
LEASE_S = 60
MANIFEST_PART_BYTES = 1 << 20
MAX_RANGES = 4096
MAX_CALLS_PER_PEER = 16  # of all kinds, until grpc itself has let go of them: what a stalled reader may hold
FULL_RETRY_S = 0.5
SELF_CHECK_EVERY_S = 60.0  # at most that often per snapshot, whatever is reported
MAX_KNOWN_RECORDS = 64
READERS = 4  # threads

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # else a second daemon binds the same port, silently
    ("grpc.max_receive_message_length", wire.MAX_FRAME_BYTES),
    ("grpc.max_concurrent_streams", 64),
    # a client that vanished without a word is found within half a minute, so that its slots are free again
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # clients ping every 5 s (client.py); less than half of that is allowed here, or they would be sent away
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 2_000),
    ("grpc.keepalive_permit_without_calls", 1),
]

Context = grpc.aio.ServicerContext[Any, Any]


class Exchange(Protocol):
    """Peer exchange: what this node knows of others, as signed records."""

    def take(self, records: Iterable[pb.SignedRecord]) -> None:
        """Records that a peer relays."""

    def give(self) -> list[pb.SignedRecord]:
        """Records to relay, with the time to live that remains; this node's own too."""


class Servicer:
    """The five RPCs. `authenticate` gives the caller's proven node id from its auth context, or NotAuthorised."""

    def __init__(
        self,
        store: FileStore,
        signer: Signer,
        catalog: Catalog,
        exchange: Exchange,
        *,
        authenticate: Callable[[Mapping[str, Iterable[bytes]]], str],
        live: Callable[[], LiveClock | None],
        addresses: Callable[[], Sequence[str]],
        name: str = "",
        slots: int = 4,
        bytes_per_s: float | None = None,
    ) -> None:
        self.slots = Slots(slots)
        self.bytes_sent = 0
        self.chunks_sent = 0
        self.streams_served = 0
        self.refused_full = 0
        self._store = store
        self._signer = signer
        self._catalog = catalog
        self._exchange = exchange
        self._authenticate = authenticate
        self._live = live
        self._addresses = addresses
        self._name = name
        self._bucket = TokenBucket(bytes_per_s)
        self._calls: Counter[str] = Counter()
        self._checked_at: dict[str, float] = {}
        self._checks: set[asyncio.Task[None]] = set()
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="serve")

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """For `add_generic_rpc_handlers`. Frames pass as bytes: wire.py writes them."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Describe": unary(self._guard(self.describe), pb.DescribeRequest.FromString, _serialize),
                "GetManifest": stream(self._guard(self.get_manifest), pb.ManifestRequest.FromString, _serialize),
                "GetHotSnapshot": stream(self._guard(self.get_hot_snapshot), pb.SnapshotRequest.FromString, None),
                "Peers": unary(self._guard(self.peers), pb.PeersRequest.FromString, _serialize),
                "ReportBadChunk": unary(self._guard(self.report_bad_chunk), pb.BadChunkReport.FromString, _serialize),
            },
        )

    def close(self) -> None:
        """End the threads and the self-checks."""
        for check in self._checks:
            check.cancel()
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _guard(self, method: Callable[[str, Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
        """Who calls, and does it have too many calls open? Then the method, its errors as statuses."""

        async def guarded(request: Any, context: Context) -> Any:
            try:
                peer = self._authenticate(context.auth_context())
            except NotAuthorised as error:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
            if self._calls[peer] >= MAX_CALLS_PER_PEER:
                await self._full(context)
            self._calls[peer] += 1
            _when_done(context, lambda: self._done(peer))
            if request.run != self._store.run:
                await context.abort(grpc.StatusCode.NOT_FOUND, f"this node is of run {self._store.run!r}")
            try:
                return await method(peer, request, context)
            except StoreError as error:  # deleted or damaged since it was offered
                await context.abort(grpc.StatusCode.NOT_FOUND, str(error))

        return guarded

    def _done(self, peer: str) -> None:
        self._calls[peer] -= 1
        if self._calls[peer] <= 0:
            del self._calls[peer]

    async def _full(self, context: Context) -> NoReturn:
        self.refused_full += 1
        context.set_trailing_metadata(((RETRY_AFTER_MS, str(int(FULL_RETRY_S * 1000))),))
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "all upload slots of this node are in use")

    # ------------------------------------------------------------ who and what

    async def describe(self, peer: str, request: pb.DescribeRequest, context: Context) -> pb.SignedDescription:
        """What this node can serve now, signed with the caller's nonce."""
        if not NONCE_BYTES[0] <= len(request.nonce) <= NONCE_BYTES[1]:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the nonce has 16 to 64 bytes")
        await self._catalog.refresh(max_age_s=FRESH_S)
        clock = self._live()
        description = Description(
            node=self._signer.node_id,
            name=self._name,
            run=self._store.run,
            live=clock is not None,
            clock=clock,
            offers=self._catalog.offers(),
            vouchers=self._catalog.vouchers(),
            streams_active=self.slots.active,
            streams_max=self.slots.total,
            addresses=tuple(self._addresses()),
            seq=time.time_ns() // 1_000_000,
            nonce=request.nonce,
        )
        return sign_description(description, self._signer)

    async def peers(self, peer: str, request: pb.PeersRequest, context: Context) -> pb.PeersReply:
        """Exchange records."""
        self._exchange.take(request.known[:MAX_KNOWN_RECORDS])
        return pb.PeersReply(records=self._exchange.give())

    # ------------------------------------------------------------ snapshots

    def _find(self, snapshot_id: str) -> SnapshotInfo:
        infos = self._store.snapshots()
        if snapshot_id in ("", "newest"):
            complete = [info for info in infos if info.complete_sections]
            if not complete:
                raise StoreError("this node holds no snapshot")
            return complete[-1]
        found = [info for info in infos if info.snapshot_id == snapshot_id]
        if not found or not is_snapshot_id(snapshot_id):
            raise StoreError("this node does not hold that snapshot any more")
        return found[0]

    async def get_manifest(self, peer: str, request: pb.ManifestRequest, context: Context) -> None:
        """The signed manifest in parts, and a lease on its snapshot."""

        def look() -> tuple[bytes, float]:
            info = self._find(request.snapshot_id)
            return self._store.signed(info.snapshot_id).to_bytes(), self._store.lease(info.snapshot_id, LEASE_S)

        data, lease_s = await asyncio.to_thread(look)
        for at in range(0, len(data), MANIFEST_PART_BYTES):
            part = data[at : at + MANIFEST_PART_BYTES]
            last = at + MANIFEST_PART_BYTES >= len(data)
            await self._write(context, pb.ManifestPart(data=part, last=last, lease_s=int(lease_s)))

    async def get_hot_snapshot(self, peer: str, request: pb.SnapshotRequest, context: Context) -> None:
        """Chunks of one section as frames: header, chunks, end."""
        give_back = self.slots.take(peer, recovering=request.recovering)
        if give_back is None:
            await self._full(context)
        _when_done(context, give_back)
        source: FileSource | None = None
        try:
            opened, section = await asyncio.to_thread(self._open, request)
            source = opened
            entry = opened.manifest.sections[section]
            indexes = _indexes(request.ranges, len(entry.chunk_digests))
            if indexes is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the ranges are not within the section")
            header = wire.HeaderFrame(opened.snapshot_id, section, entry.digest, len(entry.chunk_digests))
            await self._write(context, wire.encode_header(header))
            await self._send(context, opened, section, indexes)
            await self._write(context, wire.encode_end(len(indexes)))
            self.streams_served += 1
        finally:
            give_back()
            if source is not None:
                source.close()

    def _open(self, request: pb.SnapshotRequest) -> tuple[FileSource, str]:
        if request.section_digest:
            found = self._with_section(request.section_digest)
            if found is None:
                raise StoreError("this node does not hold that section")
            snapshot_id, section = found[0].snapshot_id, found[1]
        else:
            snapshot_id, section = self._find(request.snapshot_id).snapshot_id, request.section
        if section == "private":
            raise StoreError("a private section is not served")
        self._store.lease(snapshot_id, LEASE_S)
        source = self._store.open(snapshot_id)
        entry = source.manifest.sections.get(section)
        if entry is None or (request.section_digest and entry.digest != request.section_digest):
            source.close()
            raise StoreError("this node does not hold that section")
        return source, section

    def _with_section(self, digest: bytes) -> tuple[SnapshotInfo, str] | None:
        found = self._catalog.find(digest)
        if found is None:
            self._catalog.refresh_now()  # it may be a moment old
            found = self._catalog.find(digest)
        return found

    async def _send(self, context: Context, source: FileSource, section: str, indexes: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()

        def frame(index: int) -> bytes:
            return wire.encode_chunk(index, source.chunk(section, index))

        ahead: asyncio.Future[bytes] | None = None
        try:
            for position, _ in enumerate(indexes):
                if ahead is None:
                    ahead = loop.run_in_executor(self._readers, frame, indexes[position])
                data = await ahead
                following = indexes[position + 1 : position + 2]
                ahead = loop.run_in_executor(self._readers, frame, following[0]) if following else None
                await self._bucket.take(len(data))
                await self._write(context, data)
                self.bytes_sent += len(data)
                self.chunks_sent += 1
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.wait([ahead])  # the thread may still be reading: the source is closed after this

    async def _write(self, context: Context, message: Any) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await context.write(message)
        except TimeoutError:
            # abort() would wait for the same stalled reader; raising ends the handler and frees the slot
            raise LocalFailure(f"a reader took nothing for {WRITE_TIMEOUT_S:.0f} s; its stream ends") from None

    # ------------------------------------------------------------ self-check

    async def report_bad_chunk(self, peer: str, request: pb.BadChunkReport, context: Context) -> pb.BadChunkAnswer:
        """Somebody got bytes from here that do not match. Look at the snapshot with own eyes."""
        info = await asyncio.to_thread(self._reported, request)
        now = time.monotonic()
        if info is None or now - self._checked_at.get(info.snapshot_id, -SELF_CHECK_EVERY_S) < SELF_CHECK_EVERY_S:
            return pb.BadChunkAnswer(noted=False)
        self._checked_at = {key: at for key, at in self._checked_at.items() if now - at < SELF_CHECK_EVERY_S}
        self._checked_at[info.snapshot_id] = now
        log.warning("node %s reports a corrupt chunk of snapshot %s: checking it", peer, info.snapshot_id)
        check = asyncio.get_running_loop().create_task(self._self_check(info))
        self._checks.add(check)
        check.add_done_callback(self._checks.discard)
        return pb.BadChunkAnswer(noted=True)

    def _reported(self, request: pb.BadChunkReport) -> SnapshotInfo | None:
        found = self._with_section(request.section_digest)
        if found is not None:
            return found[0]
        try:
            return self._find(request.snapshot_id) if is_snapshot_id(request.snapshot_id) else None
        except StoreError:
            return None

    async def _self_check(self, info: SnapshotInfo) -> None:
        def check() -> None:
            try:
                self._store.verify(info.snapshot_id)
            except IntegrityError as error:
                self._store.quarantine(info.snapshot_id, str(error))

        try:
            await asyncio.to_thread(check)
            await self._catalog.refresh()
        except HotswarmError as error:
            log.warning("could not check snapshot %s: %s", info.snapshot_id, error)


def _when_done(context: Context, then: Callable[[], None]) -> None:
    """Call `then` once grpc has let go of the call; the published types know no way to say that."""
    cast("Any", context).add_done_callback(lambda _: then())


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _indexes(ranges: Sequence[pb.Range], count: int) -> list[int] | None:
    """The chunk indexes that ranges stand for, all for none; None when they are not within the section."""
    if not ranges:
        return list(range(count))
    if len(ranges) > MAX_RANGES or any(r.count < 1 or r.first + r.count > count for r in ranges):
        return None
    indexes = [index for r in ranges for index in range(r.first, r.first + r.count)]
    return indexes if len(set(indexes)) == len(indexes) else None


class SwarmServer:
    """The server around a servicer. Without credentials it is plaintext: for benchmarks and nothing else."""

    def __init__(self, servicer: Servicer, credentials: grpc.ServerCredentials | None) -> None:
        self.servicer = servicer
        self._credentials = credentials
        self._server: grpc.aio.Server | None = None
        self._health = cast("Any", health).aio.HealthServicer()

    async def start(self, host: str, port: int) -> int:
        """Bind and serve. Returns the port. LockedError when it is taken, LocalFailure when it cannot be bound."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((self.servicer.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._credentials is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            await server.stop(None)
            if os_error(host, port) == errno.EADDRINUSE:
                raise LockedError(
                    f"TCP port {port} on {host} belongs to another process; end it, or choose another --listen"
                ) from error
            raise LocalFailure(f"cannot listen on TCP {address}: {error}; check --listen") from error
        await server.start()
        self._server = server
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        return int(bound)

    async def stop(self, grace_s: float = 0.5) -> None:
        """Stop serving; streams in progress get `grace_s`. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            await self._health.enter_graceful_shutdown()
            await server.stop(grace_s)
        self.servicer.close()


def os_error(host: str, port: int) -> int | None:
    """Why a TCP port cannot be bound, as errno; None when it can. grpc says only that it failed."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno
    return None
