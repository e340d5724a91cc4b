"""What every test may use: short folders, child processes that are surely ended, and waiting without fixed sleeps."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.children import Processes

# A suite that was started in the background of a shell ignores SIGINT, and so would every child that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
