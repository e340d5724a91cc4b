"""What the older checkpointer captured wrongly, or not at all; each is a test that fails when it comes back."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from old_style import OldTrainer, SmallNet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotswarm import CheckpointConfig, SpeculativeCheckpointer


def local(folder: Path, **settings: object) -> CheckpointConfig:
    return CheckpointConfig(
        checkpoint_dir=folder, announce_to_dht=False, serve_to_peers=False, linger_seconds=0, **settings
    )


def fresh_net(seed: int = 0) -> SmallNet:
    torch.manual_seed(seed)
    return SmallNet()


def test_the_counters_are_the_trainers_own_and_nobody_has_to_tell_them(short_dir: Path) -> None:
    net = fresh_net()
    trainer = OldTrainer(net, inner_steps=5)
    checkpointer = SpeculativeCheckpointer(net, trainer.inner_optimizer, trainer, local(short_dir))
    trainer.train(13)
    metadata = checkpointer.force_snapshot()
    assert (metadata.training_step, metadata.outer_step, metadata.inner_step) == (13, 2, 3)
    assert (checkpointer.training_step, checkpointer.outer_step, checkpointer.inner_step) == (13, 2, 3)


def test_without_a_trainer_steps_are_counted_here(short_dir: Path) -> None:
    net = fresh_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with SpeculativeCheckpointer(net, optimizer, config=local(short_dir)) as checkpointer:
        for _ in range(7):
            net(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            checkpointer.step()
        assert checkpointer.training_step == 7
        assert checkpointer.force_snapshot().training_step == 7


def test_the_optimizer_captured_is_the_one_that_trains(short_dir: Path) -> None:
    net = fresh_net()
    trainer = OldTrainer(net)
    bystander = torch.optim.AdamW(net.parameters(), lr=123.0)
    checkpointer = SpeculativeCheckpointer(net, bystander, trainer, local(short_dir))
    trainer.train(3)
    checkpoint = checkpointer.load_checkpoint(checkpointer.force_snapshot().file_path)
    saved = checkpoint["optimizer_state_dict"]
    assert saved["param_groups"][0]["lr"] == trainer.inner_optimizer.param_groups[0]["lr"]
    live = trainer.inner_optimizer.state_dict()["state"]
    assert torch.equal(saved["state"][0]["exp_avg"], live[0]["exp_avg"])
    names = [name for name, _ in net.named_parameters()]
    assert checkpoint["optimizer_param_names"] == names


class Hidden(nn.Module):
    """Layers in a plain dict: `state_dict()` does not list them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.layers = {3: nn.Linear(4, 4), 4: nn.Linear(4, 4)}

    def parameters(self, recurse: bool = True):
        yield from super().parameters(recurse)
        for layer in self.layers.values():
            yield from layer.parameters(recurse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)


def test_parameters_outside_of_state_dict_come_back(short_dir: Path) -> None:
    torch.manual_seed(1)
    net = Hidden()
    optimizer = torch.optim.AdamW(net.parameters())
    checkpointer = SpeculativeCheckpointer(net, optimizer, config=local(short_dir))
    before = {key: layer.weight.detach().clone() for key, layer in net.layers.items()}
    metadata = checkpointer.force_snapshot()
    for layer in net.layers.values():
        layer.weight.data.zero_()
    assert checkpointer.restore_from_checkpoint(checkpointer.load_checkpoint(metadata.file_path))
    for key, layer in net.layers.items():
        assert torch.equal(layer.weight, before[key])


def test_the_outer_optimizers_weight_decay_comes_back(short_dir: Path) -> None:
    net = fresh_net()
    trainer = OldTrainer(net, weight_decay=0.01)
    checkpointer = SpeculativeCheckpointer(net, trainer.inner_optimizer, trainer, local(short_dir))
    trainer.train(7)
    metadata = checkpointer.force_snapshot()

    other = OldTrainer(fresh_net(5), weight_decay=0.0)
    second = SpeculativeCheckpointer(other.model, other.inner_optimizer, other, local(short_dir))
    assert second.restore_from_checkpoint(second.load_checkpoint(metadata.file_path)), second.last_error
    assert other.outer_optimizer.weight_decay == 0.01
    assert other.outer_optimizer.velocity.keys() == trainer.outer_optimizer.velocity.keys()
    for name, velocity in trainer.outer_optimizer.velocity.items():
        assert torch.equal(other.outer_optimizer.velocity[name], velocity)


def draws() -> tuple[float, ...]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())  # noqa: NPY002


def test_scheduler_scaler_random_states_and_data_position_come_back(short_dir: Path) -> None:
    net = fresh_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    loader = DataLoader(TensorDataset(torch.arange(40.0)), batch_size=4, shuffle=True)
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)  # noqa: NPY002 - the global state is what old code uses
    with SpeculativeCheckpointer(
        net,
        optimizer,
        config=local(short_dir),
        scheduler=scheduler,
        scaler=scaler,
        dataloader=loader,
        extra={"ema": torch.ones(3), "note": "x"},
    ) as checkpointer:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
            optimizer.step()
            scheduler.step()
        checkpoint = checkpointer.load_checkpoint(checkpointer.force_snapshot().file_path)
        assert checkpoint.keys() >= {"scheduler", "scaler", "rng", "dataloader", "extra"}
        expected = (next(batches)[0].tolist(), *draws())

        optimizer.step()
        scheduler.step()
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
        assert checkpointer.restore_from_checkpoint(checkpoint), checkpointer.last_error
        assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [0.25]
        assert scaler.get_scale() == 64.0
        assert (next(iter(loader))[0].tolist(), *draws()) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64])
def test_every_dtype_is_captured_and_leaves_no_orphan(dtype: torch.dtype, short_dir: Path) -> None:
    net = nn.Linear(8, 8)
    net.register_buffer("odd", torch.arange(64.0).reshape(8, 8).to(dtype))
    checkpointer = SpeculativeCheckpointer(
        net, torch.optim.AdamW(net.parameters()), config=local(short_dir, max_hot_snapshots=1)
    )
    for _ in range(3):
        assert checkpointer.force_snapshot() is not None, checkpointer.last_error
    loaded = checkpointer.load_latest_checkpoint()["model_state_dict"]["odd"]
    assert loaded.dtype is dtype
    assert torch.equal(loaded.view(torch.uint8), net.odd.view(torch.uint8))
    assert len(list(short_dir.rglob("*.manifest"))) == 1
    assert len(list(short_dir.glob("runs/*/packs/*"))) <= 2


def test_what_cannot_be_captured_is_named_and_training_goes_on(short_dir: Path) -> None:
    net = fresh_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with SpeculativeCheckpointer(
        net, optimizer, config=local(short_dir, snapshot_interval=0.001), extra={"thing": object()}
    ) as checkpointer:
        for _ in range(3):
            optimizer.step()
            checkpointer.step()
        assert checkpointer.force_snapshot() is None
        assert "extra/thing" in checkpointer.last_error
        assert "object" in checkpointer.last_error
        assert checkpointer.get_stats()["failures"] >= 1
    assert list(short_dir.rglob("*.manifest")) == []


def test_the_models_hash_covers_its_last_byte_and_is_checked(short_dir: Path) -> None:
    net = nn.Linear(512, 512)
    checkpointer = SpeculativeCheckpointer(net, torch.optim.SGD(net.parameters(), lr=0.1), config=local(short_dir))
    first = checkpointer.force_snapshot()
    again = checkpointer.force_snapshot()
    with torch.no_grad():
        net.weight[-1, -1] += 1e-6
    other = checkpointer.force_snapshot()
    assert first.model_hash == again.model_hash != other.model_hash
    assert first.model_hash


def test_a_label_with_slashes_names_no_path_and_stands_verbatim(short_dir: Path) -> None:
    inside = short_dir / "inside"
    label = "../../escape/../ü " + "x" * 40
    net = fresh_net()
    checkpointer = SpeculativeCheckpointer(
        net, torch.optim.SGD(net.parameters(), lr=0.1), config=local(inside), node_id=label
    )
    metadata = checkpointer.force_snapshot()
    assert metadata.node_id == label
    assert checkpointer.load_checkpoint(metadata.file_path)["node_id"] == label
    assert os.listdir(short_dir) == ["inside"]
    assert all(label[:8] not in name for _, _, names in os.walk(short_dir) for name in names)


def test_a_node_without_a_name_gets_one_and_keeps_it(short_dir: Path) -> None:
    net = fresh_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first = SpeculativeCheckpointer(net, optimizer, config=local(short_dir / "a"))
    second = SpeculativeCheckpointer(net, optimizer, config=local(short_dir / "a"))
    elsewhere = SpeculativeCheckpointer(net, optimizer, config=local(short_dir / "b"))
    assert first.node_id
    assert first.node_id == second.node_id != elsewhere.node_id
