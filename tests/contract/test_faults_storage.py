"""Where the older checkpointer put things, and what it did with what lay there."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from old_style import OldTrainer, SmallNet
from test_faults_capture import fresh_net, local

from hotswarm import SpeculativeCheckpointer
from hotswarm.errors import ConfigError


def made(folder: Path, net: SmallNet | None = None, **settings: object) -> SpeculativeCheckpointer:
    net = fresh_net() if net is None else net
    return SpeculativeCheckpointer(net, torch.optim.AdamW(net.parameters()), config=local(folder, **settings))


def flip_a_byte_of_the_newest(folder: Path) -> None:
    """In the middle of the inner pack that was written last."""
    pack = max(folder.glob("runs/*/packs/inner-*"), key=lambda p: p.stat().st_mtime_ns)
    with pack.open("r+b") as file:
        file.seek(pack.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_ten_snapshots_in_one_second_are_ten_and_retention_leaves_exactly_n(short_dir: Path) -> None:
    checkpointer = made(short_dir, max_hot_snapshots=4)
    checkpointer.force_snapshot()  # the first one pays for the arena
    began = time.monotonic()
    taken = [checkpointer.force_snapshot() for _ in range(10)]
    took = time.monotonic() - began
    assert len({m.checkpoint_id for m in taken}) == len({m.snapshot_id for m in taken}) == 10
    assert [m.checkpoint_id for m in checkpointer.hot_snapshots] == [m.checkpoint_id for m in taken[-4:]]
    assert all(checkpointer.load_checkpoint(m.file_path) for m in taken[-4:])
    assert all(checkpointer.load_checkpoint(m.file_path) is None for m in taken[:-4])
    assert len(list(short_dir.rglob("*.manifest"))) == 4
    assert took < 1.0 or os.environ.get("CI"), f"{took:.2f} s"


def test_a_new_process_finds_and_retires_what_lies_there(short_dir: Path) -> None:
    first = made(short_dir, max_hot_snapshots=3)
    for step in range(1, 4):
        first.update_training_state(step)
        first.force_snapshot()
    code = """
import sys, torch
from hotswarm import SpeculativeCheckpointer, CheckpointConfig
sys.path.insert(0, sys.argv[2])
from old_style import SmallNet
net = SmallNet()
c = SpeculativeCheckpointer(net, torch.optim.AdamW(net.parameters()), config=CheckpointConfig(
    checkpoint_dir=sys.argv[1], announce_to_dht=False, serve_to_peers=False, max_hot_snapshots=3))
print([m.training_step for m in c.hot_snapshots], c.load_latest_checkpoint()["training_step"])
c.update_training_state(9)
print(c.force_snapshot().training_step)
print([m.training_step for m in c.hot_snapshots])
"""
    here = str(Path(__file__).parent)
    out = subprocess.run(
        [sys.executable, "-c", code, str(short_dir), here], capture_output=True, text=True, check=False
    )
    assert out.stdout.split("\n")[:3] == ["[1, 2, 3] 3", "9", "[2, 3, 9]"], out.stderr


def test_two_processes_in_one_directory_the_second_is_told_who_the_first_is(short_dir: Path) -> None:
    first = made(short_dir)
    first.start()
    first.force_snapshot()
    code = """
import sys, torch
from hotswarm import SpeculativeCheckpointer, CheckpointConfig
net = torch.nn.Linear(2, 2)
c = SpeculativeCheckpointer(net, torch.optim.SGD(net.parameters(), lr=1.), config=CheckpointConfig(
    checkpoint_dir=sys.argv[1], announce_to_dht=False, serve_to_peers=False))
print(c.force_snapshot())
print(c.last_error)
print(len(c.hot_snapshots))
"""
    out = subprocess.run([sys.executable, "-c", code, str(short_dir)], capture_output=True, text=True, check=True)
    taken, error, seen = out.stdout.strip().split("\n")
    assert taken == "None"
    assert f"process {os.getpid()}" in error
    assert seen == "1"  # reading needs no lock
    assert first.force_snapshot() is not None
    first.stop()


def test_a_byte_quota_is_kept(short_dir: Path) -> None:
    checkpointer = made(short_dir, max_hot_snapshots=50, max_bytes=400_000)
    size = checkpointer.force_snapshot().original_size
    for step in range(8):
        for param in checkpointer.model.parameters():
            param.data.fill_(step)
        checkpointer.force_snapshot()
    kept = checkpointer.hot_snapshots
    assert 1 <= len(kept) <= 400_000 // size + 1
    assert sum(p.stat().st_size for p in short_dir.glob("runs/*/packs/*")) <= 400_000


def test_a_damaged_newest_snapshot_is_named_and_the_older_one_loads(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = made(short_dir)
    for step in (1, 2, 3):
        checkpointer.update_training_state(step)
        newest = checkpointer.force_snapshot()
    flip_a_byte_of_the_newest(short_dir)
    checkpoint = checkpointer.load_latest_checkpoint()
    assert checkpoint["training_step"] == 2
    assert newest.snapshot_id in caplog.text
    assert [m.training_step for m in checkpointer.hot_snapshots] == [1, 2]
    assert list(short_dir.glob("runs/*/quarantine/*.manifest"))
    assert checkpointer.load_checkpoint(newest.file_path) is None


def test_a_damaged_newest_snapshot_does_not_stop_recovery(short_dir: Path) -> None:
    checkpointer = made(short_dir)
    for step in (1, 2, 3):
        checkpointer.update_training_state(step)
        checkpointer.force_snapshot()
    flip_a_byte_of_the_newest(short_dir)
    net = fresh_net(4)
    second = made(short_dir, net)
    report = second.recover()
    assert (report.action, report.training_step) == ("own", 2)
    assert second.training_step == 2
    assert torch.equal(net.fc1.weight, checkpointer.model.fc1.weight)


def test_an_empty_dict_restores_nothing(short_dir: Path) -> None:
    checkpointer = made(short_dir)
    before = {name: tensor.clone() for name, tensor in checkpointer.model.state_dict().items()}
    for nothing in ({}, None, [], "x", {"training_step": 5}):
        assert checkpointer.restore_from_checkpoint(nothing) is False
        assert checkpointer.last_error
    assert checkpointer.recoveries_performed == 0
    assert checkpointer.training_step == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in checkpointer.model.state_dict().items())


def unchanged(checkpointer: SpeculativeCheckpointer, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(before[name], tensor) for name, tensor in checkpointer.model.state_dict().items())


@pytest.mark.parametrize("how", ["dict", "recover"])
@pytest.mark.parametrize("what", ["other width", "other names", "other optimizer", "half of the optimizer"])
def test_a_mismatch_changes_nothing_and_says_why(what: str, how: str, short_dir: Path) -> None:
    donor = made(short_dir)
    donor.model(torch.ones(1, 64)).sum().backward()
    donor.optimizer.step()
    donor.update_training_state(8)
    path = donor.force_snapshot().file_path
    net: torch.nn.Module = SmallNet(width=32) if what == "other width" else fresh_net(3)
    if what == "other names":
        net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 32))
    params = list(net.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(params)
    if what == "other optimizer":
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.5)
    if what == "half of the optimizer":
        optimizer = torch.optim.AdamW(params[:2])
    joiner = SpeculativeCheckpointer(net, optimizer, config=local(short_dir))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    groups = [dict(group) for group in optimizer.param_groups]
    if how == "dict":
        assert joiner.restore_from_checkpoint(joiner.load_checkpoint(path)) is False
    else:
        assert asyncio_run(joiner) is False
    assert joiner.last_error
    assert unchanged(joiner, before)
    assert optimizer.state == {}
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert joiner.training_step == 0
    assert joiner.recoveries_performed == 0


def asyncio_run(checkpointer: SpeculativeCheckpointer) -> bool:
    import asyncio

    return asyncio.run(recover_strictly(checkpointer))


async def recover_strictly(checkpointer: SpeculativeCheckpointer) -> bool:
    checkpointer.config.rejoin = "resume"
    return await checkpointer.try_auto_recovery()


def test_an_older_classes_file_restores(short_dir: Path) -> None:
    old = OldTrainer(fresh_net(1), inner_steps=3)
    old.train(7)
    saved = {
        "checkpoint_type": "hot",
        "timestamp": 1.0,
        "node_id": "old",
        "model_state_dict": old.model.state_dict(),
        "optimizer_state_dict": old.inner_optimizer.state_dict(),
        "training_step": 7,
        "outer_step": 2,
        "inner_step": 1,
        "diloco_state": {
            "initial_weights": old.initial_weights,
            "outer_optimizer": old.outer_optimizer.state_dict(),
            "stats": {"inner_step_count": 1, "outer_step_count": 2, "total_inner_steps": 7},
            "phase": "inner_loop",
        },
    }
    with gzip.open(short_dir / "hot_1_old.pt.gz", "wb") as file:
        torch.save(saved, file)
    new = OldTrainer(fresh_net(2), inner_steps=3)
    checkpointer = SpeculativeCheckpointer(new.model, new.inner_optimizer, new, local(short_dir / "d"))
    checkpoint = checkpointer.load_checkpoint(str(short_dir / "hot_1_old.pt.gz"))
    assert checkpointer.restore_from_checkpoint(checkpoint), checkpointer.last_error
    assert (new.stats.total_inner_steps, new.stats.outer_step_count, new.stats.inner_step_count) == (7, 2, 1)
    assert old.train(8) == new.train(8)


def test_missing_and_foreign_files_are_none_with_a_reason(short_dir: Path) -> None:
    checkpointer = made(short_dir / "d")
    (short_dir / "x.manifest").write_bytes(b"not a manifest")
    for path in (short_dir / "gone.pt", short_dir / "x.manifest", short_dir / "nothing", "0" * 32, "hot_" + "0" * 32):
        assert checkpointer.load_checkpoint(path) is None
        assert checkpointer.last_error


def test_a_snapshot_loads_by_its_ids_too(short_dir: Path) -> None:
    checkpointer = made(short_dir)
    checkpointer.update_training_state(4)
    metadata = checkpointer.force_snapshot()
    for name in (metadata.snapshot_id, metadata.checkpoint_id, Path("/elsewhere") / Path(metadata.file_path).name):
        assert checkpointer.load_checkpoint(name)["training_step"] == 4


class Table:
    def __init__(self) -> None:
        self.table: dict[str, str] = {}
        self.dht = self

    def store(self, key: str, value: str) -> None:
        self.table[key] = value

    def lookup_value(self, key: str) -> str | None:
        return self.table.get(key)

    def get_peers(self) -> list[str]:
        return []


def test_announcements_are_json_begin_with_start_and_carry_what_a_reader_needs(short_dir: Path) -> None:
    net = fresh_net()
    trainer = OldTrainer(net, inner_steps=2)
    manager = Table()
    config = local(short_dir)
    config.announce_to_dht = True
    checkpointer = SpeculativeCheckpointer(net, trainer.inner_optimizer, trainer, config, "me", manager)
    trainer.train(3)
    checkpointer.force_snapshot()
    assert manager.table == {}  # nothing is announced before start
    config.announce_to_dht = False
    checkpointer.start()
    config.announce_to_dht = True
    metadata = checkpointer.force_snapshot()
    deadline = time.monotonic() + 10
    while not manager.table and time.monotonic() < deadline:
        time.sleep(0.02)
    checkpointer.stop()
    value = json.loads(manager.table["checkpoint_me"])
    assert value["outer_digest"] == metadata.outer_digest != ""
    assert (value["training_step"], value["outer_step"], value["inner_step"]) == (3, 1, 1)
    assert value["checkpoint_id"] == metadata.checkpoint_id


def test_bad_arguments_are_config_errors(short_dir: Path) -> None:
    net = fresh_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    (short_dir / "file").write_text("")
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        SpeculativeCheckpointer(net, optimizer, checkpoint_dir=short_dir / "file" / "below")
    with pytest.raises(ConfigError, match="node must be"):
        SpeculativeCheckpointer(net, optimizer, checkpoint_dir=short_dir, node=7)
    from hotswarm import create_checkpointer

    with pytest.raises(ConfigError, match="max_hot_snapshots"):
        create_checkpointer(net, optimizer, short_dir, max_hot_snapshot=3)
