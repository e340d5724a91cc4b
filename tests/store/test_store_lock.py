"""One writer per state directory, across processes; any number of readers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from hotswarm.errors import LockedError, StoreError
from hotswarm.store.lock import StateDirLock, read_lock
from support.stores import check_holds, in_child, kill, small_store, write

HOLDER = (
    "import sys, time; from pathlib import Path; from hotswarm.store.lock import StateDirLock\n"
    "lock = StateDirLock(Path(sys.argv[1])); lock.acquire(); lock.update(socket='/run/x.sock')\n"
    "print('held', flush=True); time.sleep(60)\n"
)


def said(root):
    """What the lock says, less the name of the process among all that ever had its pid."""
    info, held = read_lock(root)
    assert len(info.pop("holder")) == 16
    return info, held


@pytest.fixture
def holder(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path, holder):
    with pytest.raises(LockedError, match=f"in use by process {holder.pid}") as error:
        small_store(tmp_path).open_for_writing()
    assert error.value.exit_code == 11
    assert said(tmp_path) == ({"pid": holder.pid, "socket": "/run/x.sock"}, True)


def test_the_lock_of_a_killed_process_is_free_and_says_so(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert said(tmp_path) == ({"pid": holder.pid, "socket": "/run/x.sock"}, False)
    with small_store(tmp_path) as store:
        write(store, 1)
        assert said(tmp_path) == ({"pid": os.getpid()}, True)
    assert read_lock(tmp_path)[1] is False


def test_reading_needs_no_lock(tmp_path):
    with small_store(tmp_path) as store:
        info = write(store, 1)
    child = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        child.stdout.readline()
        check_holds(small_store(tmp_path), info, 1)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_what_the_daemon_says_about_itself_grows_and_shrinks_whole(tmp_path):
    lock = StateDirLock(tmp_path)
    assert lock.acquire()
    lock.update(socket="/run/" + "x" * 500, listen="127.0.0.1:1")
    lock.update(socket="/run/y")
    text = json.loads((tmp_path / "daemon.lock").read_text())
    assert len(text.pop("holder")) == 16
    assert text == {"pid": os.getpid(), "socket": "/run/y", "listen": "127.0.0.1:1"}
    lock.release()
    lock.release()


def test_within_a_process_the_lock_is_counted(tmp_path):
    one, two = StateDirLock(tmp_path), StateDirLock(tmp_path / ".")
    assert one.acquire() is True
    assert two.acquire() is False
    one.release()
    assert read_lock(tmp_path)[1] is True
    two.release()
    assert read_lock(tmp_path)[1] is False


def test_taking_it_again_says_whether_another_process_was_there_in_between(tmp_path):
    lock = StateDirLock(tmp_path)
    for expected in (True, False, False):
        assert lock.acquire() is expected
        lock.release()
    assert in_child(lambda: StateDirLock(tmp_path).acquire()) == 0
    assert lock.acquire() is True
    lock.release()


def test_a_lock_that_cannot_be_written_is_not_held(tmp_path):
    (tmp_path / "daemon.lock").touch()
    lock = StateDirLock(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(StoreError, match="cannot be written"):
            lock.acquire()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not lock.held
    assert read_lock(tmp_path)[1] is False
    assert lock.acquire() is True
    lock.release()


def open_files(pid):
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def test_forked_children_do_not_hold_it(tmp_path, wait_until):
    """A DataLoader worker that outlives its parent must not lock the next daemon out."""
    read_end, write_end = os.pipe()
    with small_store(tmp_path) as store:
        write(store, 1)
        source = store.open(store.newest().snapshot_id)
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            os.read(read_end, 1)
            os._exit(0)
        try:
            wait_until(lambda: not [path for path in open_files(pid) if str(tmp_path) in path], what="no file of ours")
            source.verify()
            store.close()
            assert read_lock(tmp_path)[1] is False
        finally:
            kill(pid)
            source.close()
            os.close(read_end)
            os.close(write_end)


def test_a_forked_child_may_close_what_it_inherited_without_harm(tmp_path):
    with small_store(tmp_path) as store:
        source = store.open(write(store, 1).snapshot_id)

        def job():
            fd = os.open(os.devnull, os.O_RDONLY)  # takes the number of a descriptor that was closed at fork
            source.close()
            store.close()
            os.fstat(fd)
            with pytest.raises(LockedError):
                small_store(tmp_path).open_for_writing()

        assert in_child(job) == 0
        source.verify()
        write(store, 2)
        source.close()


def test_a_lock_file_that_is_a_link_or_nonsense_is_survived(tmp_path):
    (tmp_path / "daemon.lock").write_bytes(b"\xff[" * 5000)
    assert read_lock(tmp_path) == ({}, False)
    with small_store(tmp_path) as store:
        write(store, 1)
    (tmp_path / "daemon.lock").unlink()
    (tmp_path / "daemon.lock").symlink_to(tmp_path / "other")
    with pytest.raises(StoreError, match=r"daemon\.lock cannot be opened"):
        small_store(tmp_path).open_for_writing()
    assert not (tmp_path / "other").exists()
