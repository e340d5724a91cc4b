"""What every test may use: short folders, child processes that are surely ended, and waiting without fixed sleeps."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest


class Processes:
    """Starts child processes and ends them, and their children, by pid.

    Each child leads its own process group and writes to a log of its own in the test's folder, so that a failing test
    can show it and no pipe ever fills up.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, argv: Sequence[str | os.PathLike[str]], **popen: object) -> subprocess.Popen[bytes]:
        """The running child. `log_of` names its output; `popen` goes to subprocess.Popen as it is."""
        settings: dict[str, object] = {"stdin": subprocess.DEVNULL, "start_new_session": True, **popen}
        log = self._logs / f"child-{len(self.started)}.log"
        with log.open("wb") as out:
            settings.setdefault("stdout", out)
            settings.setdefault("stderr", subprocess.STDOUT if settings["stdout"] is out else out)
            child = subprocess.Popen([os.fspath(word) for word in argv], **settings)
        child.log = log
        self.started.append(child)
        return child

    @staticmethod
    def log_of(child: subprocess.Popen[bytes]) -> str:
        """What the child has printed so far."""
        return child.log.read_text(errors="replace")

    def end_all(self) -> None:
        """SIGKILL to every child still there and to all that they started."""
        victims: dict[int, psutil.Process] = {}
        for child in self.started:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(child.pid)
                victims[child.pid] = parent
                victims.update({p.pid: p for p in parent.children(recursive=True)})
        for process in victims.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        for child in self.started:
            child.wait(timeout=10)
            for pipe in (child.stdin, child.stdout, child.stderr):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """An empty folder whose path is short enough for Unix sockets (they end at 108 bytes; tmp_path may pass that)."""
    folder = Path(tempfile.mkdtemp(prefix="hs-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def processes(short_dir: Path) -> Iterator[Processes]:
    """Child processes that do not outlive the test."""
    starter = Processes(short_dir)
    yield starter
    starter.end_all()


@pytest.fixture
def wait_until() -> Callable[..., object]:
    """wait_until(condition, timeout_s=10, what="..."): polls until the condition is true, and returns its value."""

    def wait(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "the condition") -> object:
        deadline_at = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > deadline_at:
                pytest.fail(f"{what} did not come true within {timeout_s:g} s")
            time.sleep(0.02)

    return wait


@pytest.fixture(autouse=True)
def _own_runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Control sockets of this test session lie apart from those of anything else on the machine."""
    runtime = Path(tempfile.mkdtemp(prefix="hsr-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    for name in [name for name in os.environ if name.startswith("HOTSWARM_")]:
        monkeypatch.delenv(name)
    yield
    shutil.rmtree(runtime, ignore_errors=True)
