"""The demo's report for people, drawn from the made-up healthy run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from healthy import healthy, record
from PIL import Image
from rich.console import Console

from hotswarm.demo import claims, plot, timeline
from hotswarm.demo.cluster import Tail


def test_rows_stand_in_order_of_time_and_tell_each_kill_and_comeback() -> None:
    rows = timeline.rows(record())
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    told = [(row.label, row.what) for row in rows]
    assert ("b", "kill -9 trainer") in told
    assert ("a", "kill -9 daemon") in told
    assert ("c", "state directory deleted") in told
    assert ("b", "restored, mode resume: outer 1, inner 10, step 50") in told
    assert ("c", "restored, mode outer, 14.0 MB from b and 6.0 MB from a, agreed: outer 2, inner 0, step 80") in told
    assert ("a,b,c", "outer step 3 committed, one state") in told
    assert ("c", "first step: outer 2, inner 36, step 116") in told


def test_costs_count_steps_and_seconds_as_the_logs_have_them() -> None:
    process, machine = timeline.comebacks(record())
    # b had trained 24 steps of the round; its snapshot was taken after 10
    assert (process.mode, process.steps_redone, process.steps_lost) == ("resume", 14, 0)
    assert process.away_s == pytest.approx(9.7 - 7.9)
    # c had trained 5 steps since the last outer step; nobody has them now
    assert (machine.mode, machine.steps_redone, machine.steps_lost) == ("outer", 0, 5)
    assert machine.donors == {"a": 6_000_000, "b": 14_000_000}


def test_show_prints_every_claim_and_marks_late_ones() -> None:
    out = io.StringIO()
    verdict = [
        claims.Claim("it holds", True, "yes"),
        claims.Claim("it is late", False, "11 s", clock_bound=True),
        claims.Claim("it is wrong", False, "no"),
    ]
    timeline.show(record(), verdict, Console(file=out, width=160), lenient_clock=True)
    text = out.getvalue()
    assert "held it holds" in text
    assert "LATE it is late" in text
    assert "FAILED it is wrong" in text


def test_report_is_plain_json_with_every_claim() -> None:
    verdict = claims.check(record())
    report = json.loads(json.dumps(timeline.report(record(), verdict)))
    assert [claim["held"] for claim in report["claims"]] == [True] * len(verdict)
    assert report["comebacks"][1]["bytes_per_donor"] == {"a": 6_000_000, "b": 14_000_000}


def test_a_run_that_never_came_back_can_still_be_told() -> None:
    data = healthy()
    data["lives"] = [life for life in data["lives"] if life["number"] == 1]
    lost = record(data)
    timeline.show(lost, claims.check(lost), Console(file=io.StringIO()))
    assert [back.away_s for back in timeline.comebacks(lost)] == [None, None]


def test_plot_is_a_png_with_a_curve_in_it(tmp_path: Path) -> None:
    plot.draw(record(), tmp_path / "losses.png")
    with Image.open(tmp_path / "losses.png") as image:
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 50


def test_tail_reads_whole_lines_only(tmp_path: Path) -> None:
    log = tmp_path / "a.jsonl"
    tail = Tail(log)
    tail.poll()
    assert tail.events == []
    with log.open("wb", buffering=0) as file:
        file.write(b'{"ev": "start", "t": 1.0}\n{"ev": "st')
        tail.poll()
        assert [event.kind for event in tail.events] == ["start"]
        file.write(b'ep", "t": 2.0, "outer": 3}\n')
    tail.poll()
    assert tail.events[1].position() == (3, 0, 0)
