"""The reference trainer under the checkpointer: what a joiner restores is what the next outer step works on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from hotswarm import CheckpointConfig, CheckpointType, SpeculativeCheckpointer
from hotswarm.diloco import DiLoCoConfig, DiLoCoTrainer

H = 4
ALONE = {"announce_to_dht": False, "serve_to_peers": False, "auto_fetch_on_start": False}


class Worker:
    """A model, its trainer and its checkpointer on a local store."""

    def __init__(self, folder: Path, *, seed: int, rejoin: str = "auto") -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
        self.inner = AdamW(self.model.parameters(), lr=1e-2 * (1 + seed))
        self.trainer = DiLoCoTrainer(self.model, DiLoCoConfig(inner_steps=H), self.inner)
        config = CheckpointConfig(checkpoint_dir=folder, rejoin=rejoin, **ALONE)
        self.checkpointer = SpeculativeCheckpointer(self.model, self.inner, self.trainer, config)

    def steps(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(8, 6, generator=generator)
            self.trainer.inner_step(nn.functional.mse_loss(self.model(x), x[:, :3]))

    def shared(self) -> dict[str, Tensor]:
        """Live parameters, outer copy and momentum, as copies."""
        live = {f"live.{name}": param for name, param in self.model.named_parameters()}
        outer = {f"outer.{name}": tensor for name, tensor in self.trainer.initial_weights.items()}
        momentum = {f"momentum.{name}": tensor for name, tensor in self.trainer.outer_optimizer.velocity.items()}
        return {name: tensor.detach().clone() for name, tensor in {**live, **outer, **momentum}.items()}


def assert_bitwise(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.int32), other[name].view(torch.int32)), name


def average_together(workers: list[Worker]) -> None:
    """Gives them an averaging callback that waits for all, like an all-reduce."""
    barrier, slots = threading.Barrier(len(workers), timeout=30), [{} for _ in workers]

    def average(index: int, own: dict[str, Tensor]) -> dict[str, Tensor]:
        slots[index] = own
        barrier.wait()
        averaged = {name: sum(slot[name] for slot in slots) / len(slots) for name in own}
        barrier.wait()
        return averaged

    for index, worker in enumerate(workers):
        worker.trainer.set_average(lambda own, index=index: average(index, own))


def run_both(*jobs: Any) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_a_joiner_with_other_weights_holds_the_donors_state_bit_for_bit_after_the_next_sync(tmp_path: Path) -> None:
    donor = Worker(tmp_path / "donor", seed=0)
    donor.steps(0, 2 * H + 2)  # two rounds, and two steps into the third
    assert donor.checkpointer.force_snapshot() is not None
    outer_then = {name: tensor.clone() for name, tensor in donor.trainer.initial_weights.items()}
    state = donor.checkpointer.load_latest_checkpoint()
    assert state is not None
    joiner = Worker(tmp_path / "joiner", seed=5, rejoin="outer")
    joiner.steps(500, 1)  # it has an outer copy, momentum and moments of its own, all of them wrong
    received = {
        **state,
        "checkpoint_type": CheckpointType.RECOVERY.value,
        "model_state_dict": state["diloco_state"]["initial_weights"],
    }
    assert joiner.checkpointer.restore_from_checkpoint(received), joiner.checkpointer.last_error
    assert_bitwise(dict(joiner.trainer.initial_weights), outer_then)
    assert_bitwise({name: param.detach() for name, param in joiner.model.named_parameters()}, outer_then)
    assert joiner.trainer.stats.outer_step_count == 2
    joiner.inner.param_groups[0]["lr"] = 0.0
    average_together([donor, joiner])
    left = H - joiner.trainer.stats.inner_step_count
    run_both(lambda: donor.steps(2 * H + 2, 2), lambda: joiner.steps(900, left))
    assert donor.trainer.stats.outer_step_count == joiner.trainer.stats.outer_step_count == 3
    assert_bitwise(joiner.shared(), donor.shared())


def test_a_new_process_on_the_old_directory_trains_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    through = Worker(tmp_path / "through", seed=0)
    through.steps(0, 3 * H)
    first = Worker(tmp_path / "killed", seed=0)
    first.steps(0, H + 2)
    assert first.checkpointer.force_snapshot() is not None
    first.steps(H + 2, 1)
    again = Worker(tmp_path / "killed", seed=8)
    report = again.checkpointer.recover()
    assert (report.outer_step, report.inner_step, report.training_step) == (1, 2, H + 2)
    again.steps(H + 2, 2 * H - 2)
    assert_bitwise(again.shared(), through.shared())
    for name, param in again.model.named_parameters():
        twin = dict(through.model.named_parameters())[name]
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(again.inner.state[param][key], through.inner.state[twin][key])


def test_the_snapshot_after_an_outer_step_holds_the_refreshed_outer_copy(tmp_path: Path) -> None:
    worker = Worker(tmp_path, seed=0)
    worker.checkpointer.start()
    try:
        for number in range(H):
            worker.steps(number, 1)
            worker.checkpointer.step()
        handle = worker.checkpointer.snapshot()
        assert handle is not None
        handle.result(20)
        state = worker.checkpointer.load_latest_checkpoint()
    finally:
        worker.checkpointer.stop(wait=True)
    assert state is not None
    assert state["outer_step"] == 1
    assert_bitwise(
        dict(state["diloco_state"]["initial_weights"]),
        {name: param.detach() for name, param in worker.model.named_parameters()},
    )
