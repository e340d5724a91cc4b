"""The client of a local daemon: what trainers and the command line speak. Standard library only, blocking.

HTTP/JSON over the control socket; every answer is one JSON object, an error is `{"error": {...}}` and is raised as the
class that the daemon raised (`channel.error_to_json`).

    GET  /api/v1/status      {"node_id", "run", "listen", "trainer", "clock", "health", "persist", "swarm", …}
    GET  /api/v1/snapshots   {"snapshots": [SnapshotInfo, …]}             oldest first
    GET  /api/v1/peers       {"peers": [{"node_id", "name", "addresses", …}, …]}
    GET  /api/v1/recoveries  {"recoveries": [RecoverOutcome and "finished_ms", …]}
    GET  /api/v1/clock       {"clock": LiveClock or null}                 of the swarm, not of this node
    POST /api/v1/flush       {"seq", "timeout"} → {"snapshot": SnapshotInfo}      when that capture is durable
    POST /api/v1/recover     RecoverRequest → JSON lines {"progress": {…}} … {"outcome": RecoverOutcome}
    POST /api/v1/fetch       {"peer", "request": RecoverRequest} → JSON lines {"progress"} … {"snapshot": SnapshotInfo}
    POST /api/v1/verify      {"snapshot_id"} → {"snapshot_id", "bytes", "sections"}
    POST /api/v1/pin         {"snapshot_id", "pinned"} → {}
    POST /api/v1/stop        {} → {"pid"}

Attaching and opening snapshots need descriptors and use the second socket (`channel`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hotswarm.errors import ControlError
from hotswarm.store.base import SnapshotInfo, SnapshotSource
from hotswarm.swarm import channel
from hotswarm.swarm.model import LiveClock, RecoverOutcome, RecoverRequest
from hotswarm.swarm.paths import fd_socket_path, find_socket, socket_path
from hotswarm.swarm.session import Session

__all__ = ["ControlClient", "Session", "find_socket", "snapshot_from_json", "snapshot_to_json", "socket_path"]

MAX_ANSWER_BYTES = 64 * 1024 * 1024
CONNECT_TIMEOUT_S = 5.0
ATTACH_TIMEOUT_S = 120.0  # the daemon touches every page of a new arena: up to 3 s/GiB on a machine that was idle

Json = dict[str, Any]


# ---------------------------------------------------------------- snapshots as JSON


def snapshot_to_json(info: SnapshotInfo) -> Json:
    """A SnapshotInfo as JSON: bytes as hex, the manifest's path as text, sections sorted."""
    return {
        "snapshot_id": info.snapshot_id,
        "kind": info.kind,
        "run": info.run,
        "node": info.node,
        "label": info.label,
        "seq": info.seq,
        "time_ms": info.time_ms,
        "outer_step": info.outer_step,
        "inner_step": info.inner_step,
        "training_step": info.training_step,
        "outer_digest": info.outer_digest.hex() if info.outer_digest is not None else None,
        "arch": info.arch.hex(),
        "bytes": info.bytes,
        "stored_bytes": info.stored_bytes,
        "path": str(info.path),
        "complete_sections": sorted(info.complete_sections),
        "all_sections": sorted(info.all_sections),
        "pinned": info.pinned,
        "own": info.own,
    }


def snapshot_from_json(data: Mapping[str, Any]) -> SnapshotInfo:
    """The inverse of `snapshot_to_json`. Raises ControlError."""
    try:
        values = dict(data)
        digest = values["outer_digest"]
        values["outer_digest"] = bytes.fromhex(digest) if digest is not None else None
        values["arch"] = bytes.fromhex(values["arch"])
        values["path"] = Path(values["path"])
        values["complete_sections"] = frozenset(values["complete_sections"])
        values["all_sections"] = frozenset(values["all_sections"])
        return SnapshotInfo(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise ControlError(f"the daemon described a snapshot in another way than this version: {error}") from None


# ---------------------------------------------------------------- HTTP over a Unix socket


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float | None) -> None:
        super().__init__("localhost")
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(CONNECT_TIMEOUT_S)
        self.sock.connect(os.fspath(self._path))
        self.sock.settimeout(self._timeout_s)


class ControlClient:
    """Speaks to the daemon behind one control socket. Thread-safe: every call uses its own connection.

    All methods raise ControlError when the daemon does not answer, or the error that the daemon reported.
    """

    def __init__(self, control_socket: str | os.PathLike[str], *, timeout_s: float = 30.0) -> None:
        self.socket = Path(control_socket)
        self.timeout_s = timeout_s

    @classmethod
    def find(cls, state_dir: str | os.PathLike[str]) -> ControlClient | None:
        """A client for the daemon that runs on this state directory; None when there is none."""
        found = find_socket(Path(state_dir))
        return None if found is None else cls(found)

    def get(self, path: str) -> Json:
        """GET one JSON object."""
        return self._once("GET", path, None, self.timeout_s)

    def post(self, path: str, body: Json, *, timeout_s: float | None = None) -> Json:
        """POST one JSON object, get one back. `timeout_s` is the longest silence."""
        return self._once("POST", path, body, self.timeout_s if timeout_s is None else timeout_s)

    def status(self) -> Json:
        """The node's state, see the module's docstring."""
        return self.get("/api/v1/status")

    def snapshots(self) -> list[SnapshotInfo]:
        """All snapshots that the daemon holds, oldest first."""
        return [snapshot_from_json(item) for item in self.get("/api/v1/snapshots")["snapshots"]]

    def peers(self) -> list[Json]:
        """The peers that the daemon knows, itself not among them."""
        found: list[Json] = self.get("/api/v1/peers")["peers"]
        return found

    def clock(self) -> LiveClock | None:
        """Where the swarm is in its round now, asked of the peers at once; None when no live peer answers."""
        data = self.get("/api/v1/clock")["clock"]
        return None if data is None else LiveClock.from_json(data)

    def flush(self, seq: int, timeout_s: float, *, grace_s: float = CONNECT_TIMEOUT_S) -> SnapshotInfo:
        """Wait until the capture `seq` is durable. Raises StoreError when it could not be written, ControlError when
        it is not after `timeout_s` seconds.
        """
        body = {"seq": seq, "timeout": timeout_s}
        answer = self.post("/api/v1/flush", body, timeout_s=timeout_s + grace_s)
        return snapshot_from_json(answer["snapshot"])

    def fetch(self, peer: str, request: RecoverRequest, *, timeout_s: float | None = None) -> SnapshotInfo:
        """Fetch the newest snapshot of one peer (node id or host:port) into the store, verified, kind "recovery"."""
        body = {"peer": peer, "request": request.to_json()}
        for line in self._lines("/api/v1/fetch", body, timeout_s):
            if "snapshot" in line:
                return snapshot_from_json(line["snapshot"])
        raise ControlError("the daemon ended a fetch without a result; see its log")

    def recover(self, request: RecoverRequest, on_progress: Callable[[Json], None] | None = None) -> RecoverOutcome:
        """Locate, choose and fetch. `on_progress` gets objects like {"phase": "fetch", "bytes", "total", "rate"}."""
        for line in self._lines("/api/v1/recover", request.to_json(), None):
            if "outcome" in line:
                return RecoverOutcome.from_json(line["outcome"])
            if on_progress is not None and line.get("progress"):  # an empty one is a heartbeat
                on_progress(line["progress"])
        raise ControlError("the daemon ended a recovery without an outcome; was it stopped? see its log")

    def verify(self, snapshot_id: str) -> Json:
        """Let the daemon check every digest of a snapshot. Raises IntegrityError that names section and chunk."""
        return self.post("/api/v1/verify", {"snapshot_id": snapshot_id}, timeout_s=3600.0)

    def pin(self, snapshot_id: str, pinned: bool = True) -> None:
        """Keep a snapshot from retention, or stop keeping it."""
        self.post("/api/v1/pin", {"snapshot_id": snapshot_id, "pinned": pinned})

    def stop(self) -> int:
        """Ask the daemon to stop as SIGTERM does; its pid, for waiting."""
        return int(self.post("/api/v1/stop", {})["pid"])

    # ---- what needs descriptors

    def attach(
        self,
        slot_bytes: int,
        table_bytes: int,
        slots: int = 0,
        *,
        label: str = "",
        rank: int = 0,
        retention: Mapping[str, int | None] | None = None,
        arena_fd: int | None = None,
        linger_seconds: float | None = None,
    ) -> Session:
        """Become this daemon's trainer. `slots` 0 lets the daemon choose by free memory.

        `arena_fd` gives the arena back to a daemon that restarted; what is READY in it is then persisted.
        `retention` is {"max_hot", "max_cold", "max_bytes"} for as long as this trainer is attached.
        Raises ControlError with "busy" when another live trainer is attached, LocalFailure when memory is short.
        """
        request: Json = {
            "op": "attach",
            "slot_bytes": slot_bytes,
            "table_bytes": table_bytes,
            "slots": slots,
            "label": label,
            "rank": rank,
            "retention": None if retention is None else dict(retention),
            "linger_seconds": linger_seconds,
        }
        sock, answer, fds = self._exchange(request, [] if arena_fd is None else [arena_fd], ATTACH_TIMEOUT_S)
        if len(fds) != 1:
            channel.close_all(fds)
            sock.close()
            raise ControlError("the daemon attached this trainer without an arena; is it of another version?")
        return Session(self, sock, fds[0], answer)

    def open_snapshot(self, snapshot_id: str, *, from_arena: bool = False) -> SnapshotSource:
        """Open a snapshot through descriptors, so the caller needs no access to the state directory.

        Its bytes stay readable until it is closed, whatever the daemon deletes. Raises NoSnapshot.
        `from_arena`: a trainer reads what the arena still holds from there (its own, or before it attaches that of the
        process before it); those bytes are readable until a trainer captures again (StoreError from then on).
        """
        from hotswarm.swarm.opened import open_received

        request = {"op": "open", "snapshot_id": snapshot_id, "from_arena": from_arena}
        sock, answer, fds = self._exchange(request, [], self.timeout_s)
        sock.close()
        return open_received(answer, fds)

    # ---- plumbing

    def _exchange(self, request: Json, fds: list[int], timeout_s: float) -> tuple[socket.socket, Json, list[int]]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            sock.connect(os.fspath(fd_socket_path(self.socket)))
            sock.settimeout(timeout_s)
            channel.send(sock, request, fds)
            got = channel.receive(sock)
        except OSError as error:
            sock.close()
            raise self._unreachable(error) from None
        except ControlError:
            sock.close()
            raise
        if got is None or "error" in got[0]:
            sock.close()
            if got is None:
                raise ControlError(f"the daemon at {self.socket} hung up; may this user use it? see its log")
            channel.close_all(got[1])
            raise channel.error_from_json(got[0]["error"])
        return sock, got[0], got[1]

    def _unreachable(self, error: Exception) -> ControlError:
        return ControlError(
            f"no answer from the daemon at {self.socket}: {error or type(error).__name__}; "
            "start one with `swarm-node serve`, or look into its log"
        )

    def _once(self, method: str, path: str, body: Json | None, timeout_s: float) -> Json:
        with self._request(method, path, body, timeout_s) as response:
            data = response.read(MAX_ANSWER_BYTES + 1)
            return self._parse(data)

    def _lines(self, path: str, body: Json, timeout_s: float | None) -> Iterator[Json]:
        with self._request("POST", path, body, timeout_s) as response:
            while line := response.readline(MAX_ANSWER_BYTES + 1):
                yield self._parse(line)

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: Json | None, timeout_s: float | None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = _UnixConnection(self.socket, timeout_s)
        payload = None if body is None else json.dumps(body).encode()
        headers = {} if payload is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, path, payload, headers)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()

    def _parse(self, data: bytes) -> Json:
        try:
            parsed = json.loads(data)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise ControlError(f"{self.socket} does not answer like a hotswarm daemon; is the path right?")
        if "error" in parsed:
            raise channel.error_from_json(parsed["error"])
        return parsed
