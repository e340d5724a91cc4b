"""Messages with file descriptors over a Unix socket: the wire format of `<socket>.fd`.

SOCK_SEQPACKET keeps message boundaries, so one message is one JSON object of at most `MAX_MESSAGE` bytes together with
its descriptors (SCM_RIGHTS); there is nothing to frame and nothing half-read. What is too long for a message (a
manifest) travels as a descriptor of its own.

    trainer → daemon   {"op": "attach", "slot_bytes", "table_bytes", "slots", "label", "rank", "retention"} [arena]
    daemon  → trainer  {"ok": true, "slots", "next_seq", "reused", "run", "node_id"} [arena]
    trainer → daemon   {"op": "ready", "slot", "seq"}                     a hint; no answer
    any     → daemon   {"op": "open", "snapshot_id", "from_arena"}
    daemon  → any      {"ok": true, "packs": [name, …]} [manifest, pack, …]
    daemon  → trainer  {"ok": true, "slot": index} [manifest, arena]      when its own arena still holds it
    daemon  → any      {"error": {…}}                                     see `error_to_json`

An attached session lasts as long as its connection.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from hotswarm import errors as errors_module
from hotswarm.errors import ControlError, HotswarmError, PeerMisbehaved, PeerUnavailable

MAX_MESSAGE = 64 * 1024
MAX_FDS = 16  # a snapshot is a manifest and at most four packs

Json = dict[str, Any]


def send(sock: socket.socket, message: Json, fds: Sequence[int] = ()) -> None:
    """Send one message. OSError when the other side is gone (or, on a non-blocking socket, slow)."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_MESSAGE:
        raise ControlError(f"a control message of {len(data)} bytes exceeds {MAX_MESSAGE}; this is a bug of hotswarm")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[Json, list[int]] | None:
    """The next message and its descriptors (close-on-exec, the caller's to close), or None at the end.

    Raises ControlError for anything that is not one JSON object; its descriptors are closed then.
    """
    space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
    data, ancillary, flags, _ = sock.recvmsg(MAX_MESSAGE + 1, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
            fds.extend(numbers)
    if not data and not fds:
        return None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(data) > MAX_MESSAGE:
            raise ControlError("a control message was cut; is the other side of another version?")
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ControlError("a control message is not a JSON object; is the other side of another version?")
    except ValueError:
        close_all(fds)
        raise ControlError("a control message is not JSON; is the other side of another version?") from None
    except ControlError:
        close_all(fds)
        raise
    return message, fds


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that nobody will use."""
    for fd in fds:
        os.close(fd)


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process at the other end when it connected, as the kernel saw it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


# ---------------------------------------------------------------- errors


def error_to_json(error: BaseException) -> Json:
    """`{"type", "message", "exit_code"}` and, for some types, the attributes that rebuild it."""
    known = isinstance(error, HotswarmError)
    public = [kind.__name__ for kind in type(error).__mro__ if getattr(errors_module, kind.__name__, None) is kind]
    data: Json = {
        "type": public[0] if public else "LocalFailure",
        "message": str(error) if known else f"the daemon failed: {type(error).__name__}: {error}; see its log",
        "exit_code": error.exit_code if isinstance(error, HotswarmError) else 1,
    }
    for name in ("peer", "evidence", "retry_after_s", "field"):
        if known and getattr(error, name, None) is not None:
            data[name] = getattr(error, name)
    return data


def error_from_json(data: object) -> HotswarmError:
    """The error that the daemon raised, as the same class, for the caller to raise."""
    if not isinstance(data, dict):
        return ControlError(f"the daemon answered with an error that cannot be read: {data!r}")
    message = str(data.get("message", "the daemon failed and did not say why"))
    kind = getattr(errors_module, str(data.get("type")), None)
    if not (isinstance(kind, type) and issubclass(kind, HotswarmError)):
        kind = ControlError
    if kind is PeerMisbehaved:
        return PeerMisbehaved(str(data.get("peer", "")), str(data.get("evidence", message)))
    if kind is PeerUnavailable:
        retry = data.get("retry_after_s")
        return PeerUnavailable(message, str(data.get("peer", "")), float(retry) if retry is not None else None)
    if kind is errors_module.ConfigError:
        return errors_module.ConfigError(message, str(data.get("field", "")))
    return kind(message)
