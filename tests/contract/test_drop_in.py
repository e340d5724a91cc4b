"""Code that was written for the existing class of the same name runs unchanged."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from old_style import OldTrainer, SmallNet

from hotswarm import CheckpointConfig, CheckpointType, SpeculativeCheckpointer, create_checkpointer


@pytest.fixture
def net() -> SmallNet:
    torch.manual_seed(0)
    return SmallNet()


@pytest.fixture
def checkpointer(net: SmallNet, short_dir: Path) -> SpeculativeCheckpointer:
    return SpeculativeCheckpointer(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters()),
        config=CheckpointConfig(checkpoint_dir=str(short_dir)),
        node_id="test_node",
    )


def test_attributes_before_start(checkpointer: SpeculativeCheckpointer, net: SmallNet, short_dir: Path) -> None:
    assert checkpointer.running is False
    assert checkpointer.node_id == "test_node"
    assert checkpointer.model is net
    assert checkpointer.diloco is None
    assert checkpointer.p2p is None
    assert checkpointer.checkpoint_dir == short_dir
    assert (checkpointer.hot_snapshots, checkpointer.cold_checkpoints) == ([], [])
    assert (checkpointer.training_step, checkpointer.outer_step, checkpointer.inner_step) == (0, 0, 0)
    assert (checkpointer.snapshots_saved, checkpointer.snapshots_served, checkpointer.recoveries_performed) == (0, 0, 0)


def test_force_snapshot_before_start(checkpointer: SpeculativeCheckpointer, net: SmallNet) -> None:
    metadata = checkpointer.force_snapshot()
    assert metadata is not None, checkpointer.last_error
    assert metadata.checkpoint_type == CheckpointType.HOT
    assert Path(metadata.file_path).exists()
    assert checkpointer.snapshots_saved == 1
    assert metadata.num_params == sum(p.numel() for p in net.parameters())
    assert metadata.layer_ids == [0, 1]
    assert metadata.node_id == "test_node"
    assert metadata.original_size >= 4 * metadata.num_params
    assert abs(metadata.timestamp - time.time()) < 60


def test_load_what_was_saved(checkpointer: SpeculativeCheckpointer, net: SmallNet) -> None:
    metadata = checkpointer.force_snapshot()
    checkpoint = checkpointer.load_checkpoint(metadata.file_path)
    assert checkpoint is not None
    assert {"model_state_dict", "optimizer_state_dict", "training_step"} <= checkpoint.keys()
    for name, tensor in net.state_dict().items():
        assert torch.equal(checkpoint["model_state_dict"][name], tensor)
    net.load_state_dict(checkpoint["model_state_dict"])
    assert checkpoint["checkpoint_type"] == "hot"
    assert checkpoint["node_id"] == "test_node"


def test_restore(checkpointer: SpeculativeCheckpointer, net: SmallNet) -> None:
    checkpointer.update_training_state(training_step=100, outer_step=5)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    metadata = checkpointer.force_snapshot()
    assert (metadata.training_step, metadata.outer_step) == (100, 5)
    for param in net.parameters():
        param.data.fill_(0)
    checkpointer.update_training_state(training_step=999)

    assert checkpointer.restore_from_checkpoint(checkpointer.load_checkpoint(metadata.file_path))

    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert checkpointer.training_step == 100
    assert checkpointer.recoveries_performed == 1


def test_retention_of_two_after_four_quick_snapshots(net: SmallNet, short_dir: Path) -> None:
    checkpointer = SpeculativeCheckpointer(
        net,
        torch.optim.AdamW(net.parameters()),
        config=CheckpointConfig(checkpoint_dir=str(short_dir), max_hot_snapshots=2),
    )
    taken = [checkpointer.force_snapshot() for _ in range(4)]
    kept = checkpointer.hot_snapshots
    assert [m.checkpoint_id for m in kept] == [m.checkpoint_id for m in taken[2:]]
    assert len({m.checkpoint_id for m in taken}) == 4
    assert all(checkpointer.load_checkpoint(m.file_path) for m in kept)


def test_update_training_state(checkpointer: SpeculativeCheckpointer) -> None:
    checkpointer.update_training_state(training_step=50, outer_step=2, inner_step=10)
    assert (checkpointer.training_step, checkpointer.outer_step, checkpointer.inner_step) == (50, 2, 10)


def test_get_stats(checkpointer: SpeculativeCheckpointer) -> None:
    stats = checkpointer.get_stats()
    assert stats["running"] is False
    assert stats["latest_snapshot_age"] is None
    assert stats.keys() >= {
        "running",
        "snapshots_saved",
        "snapshots_served",
        "recoveries_performed",
        "hot_snapshot_count",
        "cold_checkpoint_count",
        "latest_snapshot_age",
        "training_step",
        "failures",
        "last_error",
        "stall_seconds_last",
        "stall_seconds_total",
        "skipped",
        "work_at_risk_seconds",
        "interval_seconds",
    }
    checkpointer.force_snapshot()
    stats = checkpointer.get_stats()
    assert stats["hot_snapshot_count"] == stats["snapshots_saved"] == 1
    assert stats["stall_seconds_total"] >= stats["stall_seconds_last"] > 0
    assert stats["latest_snapshot_age"] < 60
    json.dumps(stats)


def test_with_a_diloco_trainer(net: SmallNet, short_dir: Path) -> None:
    trainer = OldTrainer(net)
    trainer.start_inner_loop()
    trainer.stats.outer_step_count = 3
    checkpointer = SpeculativeCheckpointer(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters()),
        diloco_trainer=trainer,
        config=CheckpointConfig(checkpoint_dir=str(short_dir)),
        node_id="test_node",
    )
    metadata = checkpointer.force_snapshot()
    checkpoint = checkpointer.load_checkpoint(metadata.file_path)
    state = checkpoint["diloco_state"]
    assert state["stats"] == {"inner_step_count": 0, "outer_step_count": 3, "total_inner_steps": 0}
    assert state["phase"] == "inner_loop"
    assert state["initial_weights"].keys() == dict(net.named_parameters()).keys()
    assert state["outer_optimizer"]["lr"] == 0.7


def test_a_whole_training_with_the_trainer(net: SmallNet, short_dir: Path) -> None:
    trainer = OldTrainer(net, inner_steps=3)
    checkpointer = SpeculativeCheckpointer(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters()),
        diloco_trainer=trainer,
        config=CheckpointConfig(checkpoint_dir=str(short_dir)),
    )
    trainer.train(6)
    checkpointer.update_training_state(training_step=6, outer_step=2)
    metadata = checkpointer.force_snapshot()
    checkpoint = checkpointer.load_checkpoint(metadata.file_path)
    assert checkpoint["diloco_state"]["stats"]["outer_step_count"] == 2
    trainer.outer_optimizer.load_state_dict(checkpoint["diloco_state"]["outer_optimizer"])


def test_load_latest_checkpoint(checkpointer: SpeculativeCheckpointer) -> None:
    assert checkpointer.load_latest_checkpoint() is None
    checkpointer.update_training_state(1)
    checkpointer.force_snapshot()
    checkpointer.update_training_state(2)
    checkpointer.force_snapshot()
    assert checkpointer.load_latest_checkpoint()["training_step"] == 2


def test_factory(net: SmallNet, short_dir: Path) -> None:
    checkpointer = create_checkpointer(
        net,
        torch.optim.AdamW(net.parameters()),
        checkpoint_dir=str(short_dir),
        snapshot_interval=60.0,
        node_id="factory_node",
        max_hot_snapshots=3,
    )
    assert isinstance(checkpointer, SpeculativeCheckpointer)
    assert checkpointer.config.snapshot_interval == 60.0
    assert checkpointer.config.max_hot_snapshots == 3
    assert checkpointer.checkpoint_dir == short_dir
    assert checkpointer.node_id == "factory_node"


def test_serving_bytes_for_old_callers(checkpointer: SpeculativeCheckpointer, net: SmallNet, short_dir: Path) -> None:
    assert checkpointer.get_latest_snapshot_for_serving() is None
    checkpointer.force_snapshot()
    data = checkpointer.get_latest_snapshot_for_serving()
    assert isinstance(data, bytes)
    (short_dir / "from_peer.pt.gz").write_bytes(data)
    checkpoint = checkpointer.load_checkpoint(str(short_dir / "from_peer.pt.gz"))
    assert torch.equal(checkpoint["model_state_dict"]["fc1.weight"], net.fc1.weight)
