"""Everything the demo starts it ends, also when the demo itself is stopped or killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hotswarm.demo.cluster import Cluster, DemoError

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]
ORCHESTRATOR = """
import sys
from pathlib import Path
from hotswarm.demo.cluster import Cluster, interrupt_on_sigterm

work = Path(sys.argv[1])
with interrupt_on_sigterm(), Cluster(work, work, lambda mark: None) as cluster:
    child = cluster.start("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.process.pid, flush=True)
    cluster.until(lambda: None, 60, "the end of time")
"""


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_children_end_with_the_orchestrator_however_it_ends(by, short_dir, processes, wait_until) -> None:
    script = short_dir / "orchestrator.py"
    script.write_text(ORCHESTRATOR)
    parent = processes.start([sys.executable, script, short_dir], stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    parent.send_signal(by)
    parent.wait(10)
    wait_until(lambda: gone(pid), what="the child's end")


def test_close_ends_a_child_that_ignores_sigterm(short_dir, wait_until) -> None:
    with Cluster(short_dir, short_dir, lambda mark: None) as cluster:
        children = [cluster.start("polite", SLEEPER), cluster.start("stubborn", STUBBORN)]
        wait_until(lambda: all("up" in child.end_of_log() for child in children))
        began = time.monotonic()
    assert all(child.process.poll() is not None for child in children)
    assert children[0].process.returncode == -signal.SIGTERM
    assert children[1].process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 8


def test_a_process_that_dies_on_its_own_stops_the_demo_and_shows_its_log(short_dir: Path) -> None:
    with Cluster(short_dir, short_dir, lambda mark: None) as cluster:
        cluster.start("broken", [sys.executable, "-c", "print('out of luck'); raise SystemExit(3)"])
        with pytest.raises(DemoError, match="broken ended with status 3 while the demo waited for a miracle") as caught:
            cluster.until(lambda: None, 30, "a miracle")
    assert caught.value.shown == "out of luck"


def test_a_wait_that_takes_too_long_names_what_it_waited_for(short_dir: Path) -> None:
    with (
        Cluster(short_dir, short_dir, lambda mark: None) as cluster,
        pytest.raises(DemoError, match="a miracle did not come within 0 s"),
    ):
        cluster.until(lambda: None, 0.1, "a miracle")
