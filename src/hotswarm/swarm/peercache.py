"""`<state_dir>/peers.json`: where this node met others, so that it finds them again without the seeds.

    {"version": 1, "seq": 1764537000000, "peers": [{"id": "<40 hex>", "host": "10.0.0.7", "port": 7411, "seen_ms": …}]}

At most 256 entries, the most recently seen kept. `seq` is the highest sequence number that this node has used for its
record. Written to a temporary file, fsynced, renamed; a crash leaves the old file or the new one. A damaged file is
set aside and said so: it is a cache, and the swarm can be found without it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from hotswarm.ids import NodeId, is_node_id
from hotswarm.swarm.sealed import Address, canonical

log = logging.getLogger(__name__)

FILE = "peers.json"
MAX_PEERS = 256
VERSION = 1
_MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CachedPeer:
    """A node met before, its address, and when (Unix milliseconds)."""

    node_id: NodeId
    address: Address
    seen_ms: int


class PeerCache:
    """The file's content in memory. `save` does I/O; everything else does not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seq = 0
        self._peers: dict[NodeId, CachedPeer] = {}
        self._saved: bytes | None = None

    @classmethod
    def load(cls, state_dir: Path) -> PeerCache:
        """Read the cache of a state directory; an empty one when there is none, or none that can be read."""
        cache = cls(Path(state_dir) / FILE)
        try:
            fd = os.open(cache.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return cache
        except OSError as e:
            log.warning("cannot read %s: %s; going on without it", cache.path, e.strerror)
            return cache
        with os.fdopen(fd, "rb") as f:
            data = f.read(_MAX_FILE_BYTES + 1)
        try:
            cache._parse(data)
        except (ValueError, RecursionError) as e:
            log.warning("%s is damaged (%s): set aside as %s.bad", cache.path, e, FILE)
            with contextlib.suppress(OSError):
                os.replace(cache.path, cache.path.with_name(f"{FILE}.bad"))
        return cache

    def note(self, node_id: NodeId, address: Address, now_ms: int) -> None:
        """A node was heard from."""
        self._peers[node_id] = CachedPeer(node_id, address, now_ms)
        if len(self._peers) > MAX_PEERS:
            del self._peers[min(self._peers.values(), key=lambda p: p.seen_ms).node_id]

    def peers(self) -> list[CachedPeer]:
        """The most recently seen first."""
        return sorted(self._peers.values(), key=lambda p: -p.seen_ms)

    def render(self) -> bytes | None:
        """The file's next content, or None when it is what was saved last."""
        entries = [
            {"id": p.node_id, "host": p.address[0], "port": p.address[1], "seen_ms": p.seen_ms} for p in self.peers()
        ]
        data = json.dumps({"version": VERSION, "seq": self.seq, "peers": entries}, indent=1).encode("ascii")
        return None if data == self._saved else data

    def write(self, data: bytes) -> None:
        """Replace the file. OSError when that fails; the old file is then still there."""
        tmp = self.path.with_name(f".{FILE}.{os.getpid()}")
        try:
            fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(tmp, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(tmp)
            raise
        self._saved = data

    def _parse(self, data: bytes) -> None:
        if len(data) > _MAX_FILE_BYTES:
            raise ValueError("too large")
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise ValueError("not a peer cache of this version")
        seq, peers = content.get("seq"), content.get("peers")
        if type(seq) is not int or not 0 <= seq < 1 << 63 or not isinstance(peers, list):
            raise ValueError("fields of the wrong type")
        self.seq = seq
        for entry in peers[:MAX_PEERS]:
            if not isinstance(entry, dict):
                raise ValueError("an entry of the wrong type")  # noqa: TRY004  # the file's fault, not the caller's
            node_id, seen = entry.get("id"), entry.get("seen_ms")
            address = canonical(entry.get("host"), entry.get("port"))
            if isinstance(node_id, str) and is_node_id(node_id) and address is not None and type(seen) is int:
                self._peers[NodeId(node_id)] = CachedPeer(NodeId(node_id), address, seen)
