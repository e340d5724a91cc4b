from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from hotswarm.swarm.strikes import Strikes
from hotswarm.swarm.vouchers import FILE, VoucherBook


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def test_vouchers_of_the_last_sixteen_steps_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / FILE
    book = VoucherBook(path)
    for step in range(20):
        assert book.note({step: digest(step)})
    assert not book.note({19: digest(19)})
    again = VoucherBook(path)
    assert again.held == {step: digest(step) for step in range(4, 20)}
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_the_latest_word_on_a_step_counts(tmp_path: Path) -> None:
    book = VoucherBook(tmp_path / FILE)
    book.note({3: digest(1)})
    book.note({3: digest(2)})
    assert VoucherBook(tmp_path / FILE).held == {3: digest(2)}


def test_going_back_forgets_what_came_later(tmp_path: Path) -> None:
    book = VoucherBook(tmp_path / FILE)
    book.note({3: digest(3), 4: digest(4), 5: digest(5)})
    book.go_back(3, ["a" * 32])
    again = VoucherBook(tmp_path / FILE)
    assert (again.held, again.abandoned) == ({3: digest(3)}, {"a" * 32})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"version": 2, "vouchers": {}}',
        b'{"version": 1, "vouchers": {"1": "00"}}',
        b'{"version": 1, "vouchers": {"-1": "%s"}}' % (b"0" * 64),
        b'{"version": 1, "vouchers": {"x": "%s"}}' % (b"0" * 64),
        b'{"version": 1, "vouchers": []}',
        b'{"version": 1, "vouchers": {}, "abandoned": ["../x"]}',
        b"x" * 100_000,
    ],
)
def test_a_damaged_file_is_set_aside_and_said_so(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FILE
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        book = VoucherBook(path)
    assert book.held == {}
    assert "damaged" in caplog.text
    assert (tmp_path / f"{FILE}.bad").read_bytes() == content
    book.note({1: digest(1)})
    assert VoucherBook(path).held == {1: digest(1)}


def test_a_full_disk_keeps_vouchers_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = VoucherBook(tmp_path / "missing" / FILE)
    with caplog.at_level(logging.WARNING):
        book.note({1: digest(1)})
    assert book.held == {1: digest(1)}
    assert "next snapshot tries again" in caplog.text


def test_a_node_that_misbehaves_is_left_out_for_a_minute_then_longer_up_to_an_hour() -> None:
    now = 0.0
    strikes = Strikes(lambda: now)
    lengths = []
    for _ in range(9):
        strikes.add("n", "it lied")
        strikes.add("n", "it lied")  # the same incident
        assert "it lied" in (strikes.reason("n") or "")
        start = now
        while strikes.reason("n"):
            now += 1
        lengths.append(now - start)
    assert lengths == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    now += 7201
    strikes.add("n", "again")
    now += 61
    assert strikes.reason("n") is None
    assert strikes.reason("other") is None
