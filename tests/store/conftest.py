from __future__ import annotations

import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from hotswarm.store import fileops


@pytest.fixture(autouse=True)
def _no_descriptor_leaks():
    """Whatever a test does to a store, no file of ours stays open."""
    before = set(fileops._open_fds)
    yield
    gc.collect()
    assert fileops._open_fds - before == set()


@pytest.fixture
def fast_dir(tmp_path):
    """A folder in memory, for tests that write hundreds of snapshots and have nothing to do with the disk's speed."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="hs-store-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
