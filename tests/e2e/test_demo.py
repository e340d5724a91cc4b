"""`swarm-node demo --fast`, whole: real training, real kills; and nothing of it is left behind."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest
from PIL import Image

SWARM_NODE = Path(sys.executable).with_name("swarm-node")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_demo_holds_its_claims_and_leaves_no_process_behind(tmp_path, processes) -> None:
    demo = processes.start(
        [SWARM_NODE, "demo", "--fast", "--report-dir", tmp_path / "report"],
        env={**os.environ, "CI": "true", "TMPDIR": "/tmp"},
    )
    status = demo.wait(380)
    assert status == 0, processes.log_of(demo)

    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert len(report["claims"]) == 16
    assert [claim for claim in report["claims"] if not claim["held"] and not claim["clock_bound"]] == []
    with Image.open(tmp_path / "report" / "losses.png") as image:
        assert image.width > 500

    left = [process.cmdline() for process in psutil.process_iter() if "hs-demo-" in " ".join(_words(process))]
    assert left == []
    assert list(Path("/tmp").glob("hs-demo-*")) == []


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
