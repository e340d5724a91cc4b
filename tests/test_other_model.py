"""Another model in an old directory; what `last_error` says, and when that is over; fetching by directory."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotswarm
from hotswarm import CheckpointConfig, SpeculativeCheckpointer
from hotswarm.config import NodeConfig
from hotswarm.errors import HotswarmError
from hotswarm.node_api import SwarmNode
from hotswarm.swarm.control import ControlClient
from hotswarm.troubles import Troubles


def trained(folder: Path, width: int, steps: int, **settings: Any) -> SpeculativeCheckpointer:
    torch.manual_seed(width)
    net = nn.Linear(4, width)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {"announce_to_dht": False, "serve_to_peers": False, "snapshot_interval": 3600.0, **settings}
    checkpointer = SpeculativeCheckpointer(net, optimizer, config=CheckpointConfig(checkpoint_dir=folder, **given))
    checkpointer.start()
    for number in range(steps):
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        checkpointer.update_training_state(checkpointer.training_step + 1)
        checkpointer.step()
        assert checkpointer.force_snapshot() is not None, number
    return checkpointer


def test_another_model_in_an_old_directory_is_said_and_takes_nothing_away(short_dir: Path, caplog: Any) -> None:
    old = trained(short_dir, 8, 4, max_hot_snapshots=2)
    old.stop()
    weights, reached = old.model.weight.detach().clone(), old.training_step
    with caplog.at_level(logging.WARNING, "hotswarm"):
        new = trained(short_dir, 6, 0, max_hot_snapshots=2)
    for said in (new.last_error, caplog.text, new.last_report.warning):
        assert "of another model: bias: 6 float32 param here, 8 float32 param there; starting fresh" in said
    assert new.training_step == 0
    new.stop()
    new = trained(short_dir, 6, 3, max_hot_snapshots=2)  # resumes its own: nothing to say any more
    assert new.last_error is None
    assert new.load_latest_checkpoint()["model_state_dict"]["weight"].shape == (6, 4)  # though the other is further on
    new.stop()
    again = trained(short_dir, 8, 0, max_hot_snapshots=2)
    assert again.last_error is None
    assert again.training_step == reached
    assert torch.equal(again.model.weight, weights)
    again.stop()


def test_a_trouble_is_over_when_the_same_thing_succeeds(short_dir: Path) -> None:
    checkpointer = trained(short_dir, 3, 1)
    assert checkpointer.last_error is None
    assert asyncio.run(checkpointer.fetch_neighbor_snapshot("127.0.0.1:1")) is None
    assert checkpointer.load_checkpoint(short_dir / "nope.pt") is None
    assert checkpointer.last_error == f"{short_dir}/nope.pt is missing: there is no such file; check the path"
    assert checkpointer.load_checkpoint(short_dir / "nope") is None
    assert "is missing" in checkpointer.last_error
    found = checkpointer.load_latest_checkpoint()
    assert "without a daemon" in checkpointer.last_error or "no daemon" in checkpointer.last_error, "not over yet"
    assert asyncio.run(checkpointer.try_auto_recovery())
    assert checkpointer.last_error is None
    assert checkpointer.get_stats()["last_error"] is None
    assert checkpointer.restore_from_checkpoint({}) is False
    assert "empty" in checkpointer.last_error
    assert checkpointer.restore_from_checkpoint(found) is True
    assert checkpointer.last_error is None
    checkpointer.stop()


def test_troubles_are_told_once_and_the_newest_is_shown() -> None:
    troubles = Troubles()
    assert troubles.newest is None
    assert troubles.note("snapshot", "disk full")
    assert troubles.note("recovery", "nobody there")
    assert troubles.newest == "nobody there"
    assert not troubles.note("snapshot", "disk full")
    assert troubles.newest == "disk full"
    troubles.over("snapshot")
    troubles.over("snapshot")
    assert troubles.newest == "nobody there"


def test_a_fetch_that_fails_leaves_no_directory(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short_dir)
    with pytest.raises(HotswarmError):
        hotswarm.fetch_neighbor_snapshot("127.0.0.1:1", timeout=2.0)
    assert list(short_dir.iterdir()) == []


def test_a_neighbour_by_state_directory_into_a_model_alone(short_dir: Path) -> None:
    served = {"announce_to_dht": True, "serve_to_peers": True, "linger_seconds": 60}
    donor = trained(short_dir / "a", 5, 1, **served)
    there = ControlClient.find(short_dir / "a")
    assert there is not None
    config = NodeConfig(state_dir=short_dir / "b", listen="127.0.0.1:0")
    node = SwarmNode(config)
    node.start()
    try:
        for given in (short_dir / "b", str(short_dir / "b"), config, node):
            with hotswarm.fetch_neighbor_snapshot(there.status()["listen"], node=given, mode="clone") as snapshot:
                model = nn.Linear(4, 5)
                snapshot.restore_into(model)
                assert torch.equal(model.weight, donor.model.weight)
                with pytest.raises(HotswarmError, match="bias is only in the snapshot"):
                    snapshot.restore_into(nn.Linear(4, 6, bias=False))
    finally:
        node.stop()
        donor.stop()
        there.stop()
