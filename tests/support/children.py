"""Child processes that are surely ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil


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
