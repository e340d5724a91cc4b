"""The daemon as a process: memory allocator, logs, event loop, exit code.

    python -P -m hotswarm.swarm.daemon SETTINGS_FD READY_FD RUN STATE_DIR

is how `spawn` starts it. The last two are not read: they are for whoever looks at the list of processes. The settings
arrive as one JSON object on SETTINGS_FD, `{"config": {…}, "spawned": bool, "owner_pid": int|null, "detach": bool}`. On
READY_FD goes one JSON line when the node serves, `{"pid", "socket", "listen", "http"}`, or `{"error": {…}}` when it
cannot.
`swarm-node serve` calls `run` directly.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hotswarm.config import NodeConfig
from hotswarm.errors import HotswarmError
from hotswarm.swarm.channel import error_to_json
from hotswarm.swarm.logs import setup_logging

log = logging.getLogger(__name__)

# malloc.h. glibc gives each freed 1 MiB message buffer back to the kernel and faults it in again at the next one;
# keeping them gained 1.37x on raw gRPC and 2.5x on protobuf over aio (64 streams of 1 MiB, 2 cores, loopback).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MMAP_THRESHOLD = 32 << 20  # the most that every glibc takes; message buffers are 1 to 2 MiB
_TOP_PAD = 16 << 20
_TRIM_THRESHOLD = 32 << 20  # freed heap that stays with an idle daemon


def tune_allocator() -> None:
    """Keep freed message buffers in the heap. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for option, value in (
        (_M_MMAP_THRESHOLD, _MMAP_THRESHOLD),
        (_M_TOP_PAD, _TOP_PAD),
        (_M_TRIM_THRESHOLD, _TRIM_THRESHOLD),
    ):
        if not mallopt(option, value):
            log.debug("mallopt(%d, %d) was refused", option, value)


@contextmanager
def _no_certificates() -> Iterator[None]:
    """While this lasts, OpenSSL finds no certificates of the system to load.

    aiohttp loads them all when it is imported, for HTTPS clients that this process does not have: 0.11 of the 0.95
    CPU-seconds of a start (median of 3, 2 cores).
    """
    before = {name: os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
    os.environ.update(SSL_CERT_FILE=os.devnull, SSL_CERT_DIR=os.devnull)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def run(config: NodeConfig, *, ready_fd: int | None = None, spawned: bool = False, owner_pid: int | None = None) -> int:
    """Serve until a signal or, when spawned, until nobody needs the node any more. Returns the exit code.

    Raises HotswarmError when the node cannot start; it has then been told on `ready_fd` as well.
    """
    import uvloop

    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # every refused handshake is a line on stderr otherwise; ours tell
    tune_allocator()
    try:
        with _no_certificates():
            from hotswarm.swarm.node import serve
        return uvloop.run(serve(config, ready_fd=ready_fd, spawned=spawned, owner_pid=owner_pid))
    except HotswarmError as error:
        _tell(ready_fd, error)
        raise


def _tell(ready_fd: int | None, error: HotswarmError) -> None:
    if ready_fd is not None:
        try:
            os.write(ready_fd, json.dumps({"error": error_to_json(error)}).encode() + b"\n")
        except OSError:
            pass  # whoever waited is gone; the error is in the log and the exit code


def main(settings_fd: int, ready_fd: int) -> int:
    """Entry point of a spawned daemon."""
    with os.fdopen(settings_fd, "rb") as file:
        settings = json.loads(file.read())
    if settings["detach"] and os.fork():
        os._exit(0)  # the grandchild belongs to init: no zombie for a trainer that never waits
    os.set_inheritable(ready_fd, False)
    config = NodeConfig(**settings["config"])
    setup_logging(config.log_level, config.log_format)
    try:
        return run(config, ready_fd=ready_fd, spawned=settings["spawned"], owner_pid=settings["owner_pid"])
    except HotswarmError as error:
        log.error("%s", error)  # noqa: TRY400  the message is meant to suffice
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
