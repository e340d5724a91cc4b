"""SIGKILL of a writing process: only complete snapshots are visible, the newest loads, nothing leaks."""

from __future__ import annotations

import os
import random
import signal
import time

from support.faults import CountedOps, killed_at
from support.snapshots import draft, state
from support.stores import SIGNER, check_holds, in_child, kill, leftovers, small_store, write

SIZE = 150_000  # 1.8 MB of tensors: several chunks, several writes


def check_after_kill(root):
    """What a new process finds. Returns its snapshots."""
    reader = small_store(root)
    before = [info.snapshot_id for info in reader.snapshots()]
    with small_store(root) as store:
        infos = store.snapshots()
        assert [info.snapshot_id for info in infos] == before  # opening for writing loses none
        assert store.health == []
        for info in infos:
            check_holds(store, info, info.training_step, outer=info.outer_step, size=SIZE)
        assert store.newest() == (infos[-1] if infos else None)
        assert leftovers(store) == set()
        assert list(store.folders.quarantine.iterdir()) == []
    return infos


def test_killed_before_each_single_call(fast_dir):
    def prepare(root):
        with small_store(root) as store:
            for step in range(3):
                write(store, step, outer=step // 2, size=SIZE)

    def job(root, ops):
        with small_store(root, ops=ops) as store:
            write(store, 3, outer=2, size=SIZE)

    prepare(fast_dir / "dry")
    ops = CountedOps()
    job(fast_dir / "dry", ops)
    assert len(ops.calls) > 12
    for number in range(len(ops.calls)):
        root = fast_dir / f"{number}"
        prepare(root)
        assert in_child(lambda: job(root, killed_at(number))) == -signal.SIGKILL  # noqa: B023
        steps = [info.training_step for info in check_after_kill(root)]
        committed = ops.calls[:number].count("rename") > 0
        assert steps[-1] == (3 if committed else 2)
        assert {1, 2} <= set(steps)


def test_killed_at_twenty_random_points(fast_dir):
    seed = int(os.environ.get("KILL_SEED", random.randrange(1 << 30)))
    print(f"KILL_SEED={seed} repeats this run")
    rng = random.Random(seed)
    last = 0
    for _ in range(20):
        made = [draft(step // 4, step, **state(step, SIZE, step // 4)) for step in range(last, last + 10)]
        opened, opened_child = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                with small_store(fast_dir) as store:
                    os.write(opened_child, b"x")
                    for one, streams in made:
                        store.write(one, streams, SIGNER)
            finally:
                os._exit(1)
        os.close(opened_child)
        os.read(opened, 1)
        os.close(opened)
        time.sleep(rng.random() * 0.3)
        kill(pid)
        infos = check_after_kill(fast_dir)
        assert len(infos) <= 5  # three, one of the round before, and one committed when retention had not begun
        newest = infos[-1].training_step if infos else 0
        assert newest >= last
        last = newest
    assert last > 0
