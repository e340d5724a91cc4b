"""One peer, from the other side: the RPCs of a donor as calls that raise this package's errors.

Every answer is checked here for what can be checked without knowing more than the question: signatures, lengths, that
chunks are those that were asked for, and that a stream ends with its end frame. Digests of chunks are the fetch's job.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Protocol, cast

import grpc

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import HotswarmError, ManifestError, NotAuthorised, PeerMisbehaved, PeerUnavailable
from hotswarm.ids import NodeId
from hotswarm.snapshot.limits import MAX_MANIFEST_BYTES
from hotswarm.snapshot.manifest import SectionEntry, SignedManifest
from hotswarm.swarm import wire
from hotswarm.swarm.describe import check_description
from hotswarm.swarm.model import Description
from hotswarm.swarm.serve import RETRY_AFTER_MS, SERVICE

log = logging.getLogger(__name__)

NONCE_BYTES = 32
MAX_LINKS = 64
MAX_RECORDS = 256

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", wire.MAX_FRAME_BYTES),
    # A frozen peer is found by neither of the first two alone (still waiting after 45 s): ping_timeout_ms does it.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A dead address is tried again soon, and a connection attempt to a frozen one does not hang for 20 s.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    ("grpc.enable_http_proxy", 0),  # peers are reached directly; a proxy variable is for other traffic
]


class PeerLacks(PeerUnavailable):
    """The peer answered that it does not hold that (any more)."""


class ClientTls(Protocol):
    """What dialling needs of `tls.SwarmTls`."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """This node's certificate and the swarm's roots."""

    @staticmethod
    def channel_options(expected: NodeId | None) -> list[tuple[str, str]]:
        """What makes the server's certificate bear this id, or, when None, only be of this swarm."""


class PeerClient:
    """A peer at an address. `node_id` is None while it is known by its address alone."""

    def __init__(self, channel: grpc.aio.Channel, address: str, run: str, node_id: NodeId | None) -> None:
        self.address = address
        self.node_id = node_id
        self._run = run
        self._channel = channel
        prefix = f"/{SERVICE}/"
        self._describe = channel.unary_unary(prefix + "Describe", _serialize, pb.SignedDescription.FromString)
        self._manifest = channel.unary_stream(prefix + "GetManifest", _serialize, pb.ManifestPart.FromString)
        self._snapshot = channel.unary_stream(prefix + "GetHotSnapshot", _serialize, None)
        self._peers = channel.unary_unary(prefix + "Peers", _serialize, pb.PeersReply.FromString)
        self._report = channel.unary_unary(prefix + "ReportBadChunk", _serialize, pb.BadChunkAnswer.FromString)

    @property
    def name(self) -> str:
        """For messages and reports: the node id, or the address while that is all that is known."""
        return self.node_id or self.address

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(None)

    async def describe(self, timeout_s: float) -> Description:
        """What the peer can serve now. PeerUnavailable, PeerMisbehaved, NotAuthorised."""
        nonce = os.urandom(NONCE_BYTES)
        try:
            answer = await self._describe(pb.DescribeRequest(nonce=nonce, run=self._run), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        description = check_description(answer, nonce=nonce, run=self._run, peer=self.name)
        if self.node_id is not None and description.node != self.node_id:
            raise PeerMisbehaved(self.node_id, f"{self.address} answers as {description.node}")
        return description

    async def manifest(self, snapshot_id: str, timeout_s: float) -> SignedManifest:
        """The signed manifest of a snapshot, parsed and checked. Takes a lease on the snapshot."""
        request = pb.ManifestRequest(run=self._run, snapshot_id=snapshot_id)
        call = self._manifest(request, timeout=timeout_s)
        data, last = bytearray(), False
        try:
            async for part in call:
                data += part.data
                last = part.last
                if len(data) > MAX_MANIFEST_BYTES:
                    raise PeerMisbehaved(self.name, f"its manifest is larger than {MAX_MANIFEST_BYTES} bytes")
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()
        if not last:
            raise PeerUnavailable(f"{self.name} sent a manifest that is cut off; trying elsewhere", self.name)
        try:
            signed = await asyncio.to_thread(SignedManifest.parse, bytes(data))
        except ManifestError as error:
            raise PeerMisbehaved(self.name, str(error)) from error
        if signed.snapshot_id != snapshot_id or signed.manifest.run != self._run:
            raise PeerMisbehaved(self.name, "it sent the manifest of another snapshot than asked for")
        return signed

    async def chunks(
        self, entry: SectionEntry, indexes: Sequence[int], *, recovering: bool = True
    ) -> AsyncGenerator[wire.ChunkFrame, None]:
        """Those chunks of a section, in that order, unverified. It ends only after a right end frame.

        PeerUnavailable when the stream breaks or is cut, PeerLacks, PeerMisbehaved, NotAuthorised. Close it (`aclose`)
        to cancel the stream.
        """
        request = pb.SnapshotRequest(
            run=self._run,
            section=entry.name,
            section_digest=entry.digest,
            ranges=_ranges(indexes),
            codecs=["raw"],
            recovering=recovering,
        )
        call = self._snapshot(request)
        checker = _StreamCheck(self.name, entry, indexes)
        try:
            async for message in call:
                chunk = checker.take(message)
                if chunk is not None:
                    yield chunk
            checker.finish()
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    async def exchange(self, known: Iterable[pb.SignedRecord], timeout_s: float) -> list[pb.SignedRecord]:
        """Tell the peer some records, get those that it knows."""
        try:
            reply = await self._peers(pb.PeersRequest(run=self._run, known=known), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        return list(reply.records)[:MAX_RECORDS]

    async def report_bad_chunk(self, snapshot_id: str, section_digest: bytes, index: int, timeout_s: float) -> None:
        """Tell the peer that it serves a corrupt chunk."""
        report = pb.BadChunkReport(run=self._run, snapshot_id=snapshot_id, section_digest=section_digest, index=index)
        try:
            await self._report(report, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None

    def _error(self, error: grpc.aio.AioRpcError) -> HotswarmError:
        code, details = error.code(), (error.details() or "")[:300]
        if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
            return NotAuthorised(f"{self.name} refuses this node: {details}")
        if code is grpc.StatusCode.UNAVAILABLE and _is_handshake(details):
            return NotAuthorised(
                f"{self.address} is of another swarm, or not the node that was expected there; check the swarm key"
            )
        if code is grpc.StatusCode.NOT_FOUND:
            return PeerLacks(f"{self.name}: {details}", self.name)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            metadata: dict[str, Any] = dict(cast("Any", error.trailing_metadata() or ()))
            retry_ms = metadata.get(RETRY_AFTER_MS)
            if retry_ms is None:
                return PeerMisbehaved(self.name, "it sent a message larger than 2 MiB")
            retry_s = min(int(retry_ms), 60_000) / 1000 if str(retry_ms).isdigit() else 1.0
            return PeerUnavailable(f"{self.name} is full", self.name, retry_s)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return PeerUnavailable(f"{self.name} did not answer in time", self.name)
        return PeerUnavailable(f"{self.name} cannot be used: {code.name} {details}".strip(), self.name)


class _StreamCheck:
    """What a stream of frames must look like: header, the chunks asked for in their order, end."""

    def __init__(self, peer: str, entry: SectionEntry, indexes: Sequence[int]) -> None:
        self._peer = peer
        self._entry = entry
        self._indexes = indexes
        self._got = 0
        self._begun = self._ended = False

    def take(self, message: bytes) -> wire.ChunkFrame | None:
        """The chunk in a message, None for header and end. PeerMisbehaved."""
        try:
            frame = wire.parse_frame(message)
        except wire.WireError as error:
            raise PeerMisbehaved(self._peer, f"it sent a frame that is none: {error}") from error
        if self._ended:
            raise PeerMisbehaved(self._peer, "it sent more after the end of a stream")
        if isinstance(frame, wire.HeaderFrame):
            if self._begun or frame.section_digest != self._entry.digest:
                raise PeerMisbehaved(self._peer, "it sent the header of another section")
            self._begun = True
            return None
        if not self._begun:
            raise PeerMisbehaved(self._peer, "it sent a stream without a header")
        if isinstance(frame, wire.EndFrame):
            if frame.chunks_sent != self._got or self._got != len(self._indexes):
                raise PeerMisbehaved(
                    self._peer,
                    f"it ended a stream after {self._got} of {len(self._indexes)} chunks as if that were all",
                )
            self._ended = True
            return None
        if self._got >= len(self._indexes) or frame.index != self._indexes[self._got]:
            raise PeerMisbehaved(self._peer, f"it sent chunk {frame.index}, which was not asked for there")
        length = self._entry.layout.chunks[frame.index].length
        if frame.codec != wire.RAW or frame.raw_bytes != length or len(frame.data) != length:
            raise PeerMisbehaved(self._peer, f"it sent chunk {frame.index} in a form or length that is not the chunk's")
        self._got += 1
        return frame

    def finish(self) -> None:
        """The stream is over. PeerUnavailable unless its end frame came."""
        if not self._ended:
            raise PeerUnavailable(
                f"{self._peer}: the stream was cut after {self._got} of {len(self._indexes)} chunks", self._peer
            )


class PeerLinks:
    """Connections to peers, one for each (address, id), reused. The least recently used go when there are many."""

    def __init__(self, run: str, tls: ClientTls | None) -> None:
        """`tls` None dials in plaintext: for benchmarks and nothing else."""
        self._run = run
        self._tls = tls
        self._links: dict[tuple[str, NodeId | None], PeerClient] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def link(self, address: str, node_id: NodeId | None) -> PeerClient:
        """The peer at `host:port`; nothing is dialled before the first call."""
        key = (address, node_id)
        client = self._links.pop(key, None)
        if client is None:
            client = PeerClient(self._channel(address, node_id), address, self._run, node_id)
        self._links[key] = client  # at the end: most recently used
        if len(self._links) > MAX_LINKS:
            self._close_soon(next(iter(self._links)))
        return client

    def drop(self, client: PeerClient) -> None:
        """Close a connection; the next `link` dials anew."""
        for key, other in list(self._links.items()):
            if other is client:
                self._close_soon(key)

    async def close(self) -> None:
        """Close them all."""
        for key in list(self._links):
            self._close_soon(key)
        if self._closing:
            await asyncio.wait(self._closing)

    def _close_soon(self, key: tuple[str, NodeId | None]) -> None:
        task = asyncio.get_running_loop().create_task(self._links.pop(key).close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _channel(self, address: str, node_id: NodeId | None) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(target(address), options=CHANNEL_OPTIONS)
        options = [*CHANNEL_OPTIONS, *self._tls.channel_options(node_id)]
        return grpc.aio.secure_channel(target(address), self._tls.channel_credentials(), options=options)


def target(address: str) -> str:
    """`host:port` as grpc wants it; an IP literal is dialled without any look-up."""
    host, _, port = address.rpartition(":")
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return f"dns:///{address}"
    return f"ipv4:{ip}:{port}" if ip.version == 4 else f"ipv6:[{ip}]:{port}"


def _ranges(indexes: Sequence[int]) -> list[pb.Range]:
    """Ascending chunk indexes as runs."""
    ranges: list[pb.Range] = []
    for index in indexes:
        if ranges and ranges[-1].first + ranges[-1].count == index:
            ranges[-1].count += 1
        else:
            ranges.append(pb.Range(first=index, count=1))
    return ranges


def _is_handshake(details: str) -> bool:
    """Whether a connection failed in TLS, as far as grpc's words tell."""
    text = details.lower()
    return any(word in text for word in ("handshake", "certificate", "tsi_", "ssl_error", "hostname verification"))


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())
