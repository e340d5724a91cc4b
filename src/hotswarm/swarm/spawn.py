"""Starting a daemon as a process of its own, from a trainer or from a program that owns it.

Two trainers that start at once on one state directory must not start two daemons: a lock beside the socket is held
from the look for a running one until the new one answers. The lock is the kernel's (flock), so nobody's death leaves
it behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hotswarm.config import NodeConfig
from hotswarm.errors import ControlError, LocalFailure, LockedError
from hotswarm.store.lock import read_lock
from hotswarm.swarm.channel import error_from_json
from hotswarm.swarm.control import ControlClient
from hotswarm.swarm.paths import read_daemon_info, socket_path

READY_TIMEOUT_S = 30.0  # a start takes under a second; a machine that swaps may take many
STOPPING_TIMEOUT_S = 15.0  # a daemon that ends writes at most its arena's slots, and withdraws for up to 5 s
LOG_NAME = "daemon.log"
_SERVICE_MANAGERS = {"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}
MAX_LOG_BYTES = 8 << 20  # a log that has grown past this is put aside at the next start


@dataclass(frozen=True, slots=True)
class Started:
    """A daemon that answers. `process` is there when it is a child to be waited for, not a detached one."""

    client: ControlClient
    pid: int
    listen: str
    process: subprocess.Popen[bytes] | None


def spawn(config: NodeConfig) -> ControlClient:
    """A client for the daemon of `config.state_dir`: the one that runs, or a new, detached one.

    The new one lives in a session of its own, logs to `<state_dir>/daemon.log`, and ends `linger_seconds` after its
    last trainer left. Raises what kept it from starting: LockedError, NotAuthorised, ConfigError, LocalFailure.
    """
    with _local_failures(config.state_dir), _spawn_lock(config.state_dir):
        deadline = time.monotonic() + STOPPING_TIMEOUT_S
        while True:
            running = ControlClient.find(config.state_dir)
            if running is not None and _ready(running):
                return running
            try:
                return start_daemon(config, spawned=True, detach=True, owner_pid=os.getpid()).client
            except LockedError:
                # The state directory is held by one that is just ending, persisting what it has: it will let go. A
                # port that is held, or a directory that another kind of process holds, stays so.
                ending = read_lock(config.state_dir)[1] and read_daemon_info(config.state_dir) is not None
                if not ending or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def start_daemon(
    config: NodeConfig, *, spawned: bool = False, detach: bool = False, owner_pid: int | None = None
) -> Started:
    """Start a daemon and wait until it answers. When it ends by itself: see `lifetime`. Raises as `spawn` does."""
    config = _absolute(config)
    with _local_failures(config.state_dir):
        return _start(config, spawned=spawned, detach=detach, owner_pid=owner_pid)


@contextmanager
def _local_failures(state_dir: Path) -> Iterator[None]:
    """A full process table, no descriptor left, a folder that cannot be written: this machine's fault."""
    try:
        yield
    except OSError as error:
        what = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        raise LocalFailure(
            f"cannot start a daemon on {state_dir}: {what}; this machine refuses, check its limits and permissions"
        ) from error


def _start(config: NodeConfig, *, spawned: bool, detach: bool, owner_pid: int | None) -> Started:
    _make_state_dir(config.state_dir)
    settings = {"config": config.to_json(), "spawned": spawned, "owner_pid": owner_pid, "detach": detach}
    with _Pipe() as settings_pipe, _Pipe() as ready_pipe:
        process = _launch(config, settings_pipe.read, ready_pipe.write)
        ready_pipe.close_write()
        try:
            os.write(settings_pipe.write, json.dumps(settings).encode())  # far less than a pipe's 64 KiB
            settings_pipe.close_write()
            if detach:
                process.wait()  # the intermediate process ends as soon as it has forked
            answer = _await_ready(ready_pipe.read, config.state_dir)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the detached one too: it would hold the state directory
            process.wait()
            raise
    if "error" in answer:
        process.wait()
        raise error_from_json(answer["error"])
    client = ControlClient(answer["socket"])
    return Started(client, int(answer["pid"]), str(answer["listen"]), None if detach else process)


def _ready(client: ControlClient) -> bool:
    try:
        return bool(client.status()["ready"])
    except ControlError:
        return False


class _Pipe:
    """Both ends of a pipe, closed at the end at the latest."""

    def __enter__(self) -> Self:
        self.read, self.write = os.pipe()
        return self

    def close_write(self) -> None:
        if self.write >= 0:
            os.close(self.write)
            self.write = -1

    def __exit__(self, *exc: object) -> None:
        self.close_write()
        os.close(self.read)


def _launch(config: NodeConfig, settings_fd: int, ready_fd: int) -> subprocess.Popen[bytes]:
    log = _open_log(config.state_dir)
    program = [sys.executable, "-P", "-m", "hotswarm.swarm.daemon", str(settings_fd), str(ready_fd)]
    try:
        return subprocess.Popen(
            [*program, config.run, os.fspath(config.state_dir)],  # the last two are for people who look at ps
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=_environment(),
            start_new_session=True,
            pass_fds=(settings_fd, ready_fd),
        )
    finally:
        os.close(log)


def _await_ready(fd: int, state_dir: Path) -> dict[str, Any]:
    data, deadline = b"", time.monotonic() + READY_TIMEOUT_S
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            raise ControlError(f"the daemon was not ready after {READY_TIMEOUT_S:g} s; see {state_dir / LOG_NAME}")
        piece = os.read(fd, 65536)
        if not piece:
            raise ControlError(f"the daemon ended before it was ready: {_last_line(state_dir / LOG_NAME)}")
        data += piece
    answer: dict[str, Any] = json.loads(data)
    return answer


def _last_line(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return f"{lines[-1].strip()} (from {path})" if lines else f"it wrote nothing to {path}"


@contextmanager
def _spawn_lock(state_dir: Path) -> Iterator[None]:
    path = socket_path(state_dir).with_suffix(".spawn")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LockedError(
                        f"another process has been starting a daemon on {state_dir} for {READY_TIMEOUT_S:g} s; "
                        f"look into {state_dir / LOG_NAME}"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)


def _absolute(config: NodeConfig) -> NodeConfig:
    paths = ("state_dir", "swarm_key", "join_file", "http_token_file")
    given = {name: getattr(config, name) for name in paths}
    return config.replace(**{name: Path(path).absolute() for name, path in given.items() if path is not None})


def _make_state_dir(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LocalFailure(f"cannot make the state directory {path}: {error.strerror}; choose another") from None


def _open_log(state_dir: Path) -> int:
    path = state_dir / LOG_NAME
    try:
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise LocalFailure(f"cannot write {path}: {error.strerror}; check its owner and the disk") from None


def _environment() -> dict[str, str]:
    """The own environment, so that the child finds hotswarm as this process did, wherever it was imported from.

    Without what a service manager said to this process alone: a daemon that reported ready would report its trainer so.
    """
    package_parent = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in _SERVICE_MANAGERS}
    return {**kept, "PYTHONPATH": f"{path}{os.pathsep}{package_parent}" if path else package_parent}
