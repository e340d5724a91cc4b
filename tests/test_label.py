"""A node's kept name: whatever lies in its file, a trainer starts."""

from __future__ import annotations

import os

import pytest
import torch

import hotswarm
from hotswarm.label import FILE_NAME, MAX_BYTES, kept_label


def test_a_name_is_made_once_and_kept(tmp_path):
    first = kept_label(tmp_path)
    assert first.startswith("node-")
    assert kept_label(tmp_path) == first
    assert (tmp_path / FILE_NAME).read_text() == first + "\n"


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00\x01", b"a\x00b", b"a\nb", b"x" * (MAX_BYTES + 1)],
    ids=["no-utf8", "nul", "two-lines", "long"],
)
def test_a_damaged_name_is_replaced_for_this_start_and_nothing_ends(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    assert kept_label(tmp_path).startswith("node-")
    assert (tmp_path / FILE_NAME).read_bytes() == content
    model = torch.nn.Linear(2, 2)
    checkpointer = hotswarm.SpeculativeCheckpointer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint_dir=tmp_path
    )
    assert checkpointer.force_snapshot() is not None


@pytest.mark.parametrize(
    "make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/hostname", path)], ids=["pipe", "folder", "link"]
)
def test_what_is_no_file_is_neither_followed_nor_waited_for(tmp_path, make):
    make(tmp_path / FILE_NAME)
    assert kept_label(tmp_path).startswith("node-")


def test_a_name_of_the_greatest_length_is_kept(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"x" * MAX_BYTES)
    assert kept_label(tmp_path) == "x" * MAX_BYTES
