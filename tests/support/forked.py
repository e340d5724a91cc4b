"""Child processes that have torch imported already: forked from a server process that imported it once.

Importing torch and torchft costs some four seconds of a core, which a test with ten trainers cannot afford. Each child
is a process of its own all the same: its own session, environment, output files, signals and exit code.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

PRELOADED = [
    "pytest",  # which the child imports because the parent's main module is it
    "torch",
    "torch._dynamo",  # the first optimizer imports it
    "torchft.local_sgd",
    "torchft.manager",
    "torchft.process_group",
    "hotswarm.checkpointer",
    "hotswarm.torchft",
    "hotswarm.swarm.control",
    "hotswarm.swarm.spawn",
    "hotswarm.demo.data",
    "hotswarm.demo.journal",
]


class Forked:
    """Like a subprocess.Popen, as far as the tests need it. Ends with `end()` at the latest."""

    def __init__(self, main: Callable[[str], None], argument: str, out: Path, err: Path) -> None:
        """Runs `main(argument)`, a function of an importable module. Exit code 0 unless it ends the process itself."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._process: ForkServerProcess = context.Process(
            target=_run, args=(main, argument, str(out), str(err), dict(os.environ)), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout_s or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)
        self._process.join(10)
        self._process.close()


def _run(main: Callable[[str], None], argument: str, out: str, err: str, environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for path, number in ((out, 1), (err, 2)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the server ignores it
    main(argument)
