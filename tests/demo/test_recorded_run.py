"""The judges on the record of a real `swarm-node demo --fast`, taken on a machine that was busy with other work."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from hotswarm.demo import claims, timeline
from hotswarm.demo.record import Record


@pytest.fixture(scope="module")
def recorded() -> Record:
    return Record.from_json(json.loads(gzip.decompress((Path(__file__).parent / "busy_machine.json.gz").read_bytes())))


def test_every_claim_about_state_holds_and_only_a_clock_bound_one_is_late(recorded: Record) -> None:
    verdict = claims.check(recorded)
    assert [(claim.sentence, claim.clock_bound) for claim in verdict if not claim.held] == [
        ("the survivors of the lost process never pause for 10 s", True)
    ]
    assert claims.passed(verdict, lenient_clock=True)
    assert not claims.passed(verdict, lenient_clock=False)


def test_its_costs_are_those_that_were_seen(recorded: Record) -> None:
    process, machine = timeline.comebacks(recorded)
    assert (process.label, process.mode, process.steps_redone, process.donors) == ("b", "resume", 13, {})
    assert (machine.label, machine.mode, machine.steps_lost) == ("c", "outer", 3)
    # outer parameters, momentum, both moments: as much as the calibration's snapshot of live, outer and both moments
    assert sum(machine.donors.values()) == pytest.approx(recorded.settings["snapshot_bytes"], rel=0.001)


def test_it_can_be_told_in_eighty_columns(recorded: Record) -> None:
    out = io.StringIO()
    timeline.show(recorded, claims.check(recorded), Console(file=out, width=80, force_terminal=False))
    assert max(map(len, out.getvalue().splitlines())) <= 80
    assert "outer step 4 committed, one state" in out.getvalue()
