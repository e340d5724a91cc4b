"""Restored training goes on exactly like the training that was never interrupted."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
import torch
from capture_kit import everything, fingerprint, restore, snap
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hotswarm.capture.diloco import Counters
from hotswarm.capture.position import Position
from hotswarm.capture.restore import CLONE, RESUME, Restorer
from hotswarm.capture.state import TrainingState
from hotswarm.capture.verify import differences, live_digests


def net(seed: int = 1, *, batchnorm: bool = True, dropout: float = 0.3) -> nn.Sequential:
    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(16) if batchnorm else nn.LayerNorm(16)
    return nn.Sequential(nn.Linear(8, 16), middle, nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 4))


class Noisy(Dataset):
    """Each sample draws from the worker's three random states."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(8) + random.random() + float(np.random.rand())  # noqa: NPY002
        return torch.full((8,), float(index)) / 45 + noise


class Run:
    """A whole training: model, optimizer, scheduler, data, all three random states."""

    def __init__(self, *, seed: int = 0, workers: int = 0, persistent: bool = False, generator: bool = False) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        self.model = net(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: 1 / (1 + k))
        self.loader = DataLoader(
            Noisy(),
            batch_size=5,
            shuffle=True,
            num_workers=workers,
            persistent_workers=persistent,
            generator=torch.Generator().manual_seed(seed + 7) if generator else None,
            multiprocessing_context="fork" if workers else None,
        )
        self.position = Position(self.loader)
        self.position.attach()
        self.state = TrainingState(
            self.model, [self.optimizer], scheduler=self.scheduler, position=self.position, extra={"best": 1.5}
        )
        self.losses: list[str] = []
        self.lrs: list[float] = []

    def train(self, steps: int, *, stop_before_epoch_end: bool = False) -> None:
        """`steps` steps, over as many epochs as that takes."""
        done = 0
        while done < steps:
            for batch in self.loader:
                self.optimizer.zero_grad()
                loss = self.model(batch).square().mean()
                loss.backward()
                self.lrs.append(self.optimizer.param_groups[0]["lr"])
                self.optimizer.step()
                self.scheduler.step()
                self.losses.append(loss.item().hex())
                done += 1
                self.state.counters = Counters(0, 0, self.state.counters.training_step + 1)
                if done == steps:
                    self.at_end()
                    return

    def at_end(self) -> None:
        """Called inside the loop of the last step, where the iterator is still alive."""

    def close(self) -> None:
        """End persistent workers: left to the garbage collector, torch waits five seconds for each."""
        if self.loader._iterator is not None:
            self.loader._iterator._shutdown_workers()


def interrupted(cut: int, total: int, **kwargs: object) -> tuple[Run, Run]:
    """(uninterrupted run, a second run in which the state was carried over after `cut` steps)."""
    whole = Run(**kwargs)
    whole.train(total)

    first = Run(**kwargs)
    sources = []
    first.at_end = lambda: sources.append(snap(first.state))
    first.train(cut)
    second = Run(**{**kwargs, "seed": 99})
    second.train(3)  # a joiner with a past of its own
    second.losses.clear()
    second.lrs.clear()
    restore(second.state, sources[0])
    assert second.state.counters.training_step == cut
    second.train(total - cut)
    for run in (whole, first, second):
        run.close()
    return whole, second


@pytest.mark.parametrize("cut", [1, 4, 8, 9, 13])  # 9 batches an epoch: within, last, end and second epoch
@pytest.mark.parametrize("generator", [False, True])
def test_losses_and_learning_rates_go_on_exactly(cut, generator):
    whole, second = interrupted(cut, 20, generator=generator)
    assert second.losses == whole.losses[cut:]
    assert second.lrs == whole.lrs[cut:]
    assert everything(second.model, [second.optimizer], second.scheduler) == everything(
        whole.model, [whole.optimizer], whole.scheduler
    )


@pytest.mark.parametrize(("cut", "persistent"), [(4, False), (13, False), (4, True)])
def test_losses_go_on_exactly_with_data_loader_workers(cut, persistent):
    whole, second = interrupted(cut, 16, workers=2, persistent=persistent)
    assert second.losses == whole.losses[cut:]


def test_lambda_lr_has_its_published_values_after_a_restore():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    state = TrainingState(model, [optimizer], scheduler=scheduler)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    source = snap(state)

    model2 = nn.Linear(2, 1)
    optimizer2 = torch.optim.SGD(model2.parameters(), lr=1.0)
    state2 = TrainingState(model2, [optimizer2])
    state2.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer2, lambda k: 1 / (1 + k))  # given later
    restore(state2, source)
    assert optimizer2.param_groups[0]["lr"] == 0.25
    assert state2.scheduler.get_last_lr() == [0.25]
    optimizer2.step()
    state2.scheduler.step()
    assert optimizer2.param_groups[0]["lr"] == 0.2


def test_a_restore_differs_from_a_cold_optimizer_and_equals_the_uninterrupted_run():
    def trained(steps, model, optimizer):
        for k in range(steps):
            torch.manual_seed(k + 100)
            optimizer.zero_grad()
            model(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()

    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trained(5, model, optimizer)
    source = snap(TrainingState(model, [optimizer]))

    warm, cold = net(2, dropout=0.0), net(3, dropout=0.0)
    warm_opt = torch.optim.AdamW(warm.parameters(), lr=0.5)
    cold_opt = torch.optim.AdamW(cold.parameters(), lr=0.01)
    restore(TrainingState(warm, [warm_opt]), source)
    cold.load_state_dict(model.state_dict())
    for one, opt in ((model, optimizer), (warm, warm_opt), (cold, cold_opt)):
        trained(1, one, opt)
    assert everything(warm, [warm_opt]) == everything(model, [optimizer])
    assert everything(cold) != everything(model)


def test_the_live_digests_equal_the_manifest_after_a_restore_and_only_then():
    run = Run(seed=3)
    run.train(4)
    source = snap(run.state)
    other = Run(seed=4)
    assert differences(other.state.collect(), source.manifest)
    restore(other.state, source, CLONE)
    tree = other.state.collect()
    assert differences(tree, source.manifest) == []
    assert live_digests(tree, ["inner"])["inner"] == source.manifest.sections["inner"].digest
    with torch.no_grad():
        next(other.model.parameters()).view(-1)[3] += 1
    (found,) = differences(other.state.collect(), source.manifest)
    assert "0.weight" in found


def test_a_snapshot_taken_right_after_a_restore_is_the_one_restored():
    run = Run(seed=5)
    sources = []
    run.at_end = lambda: sources.append(snap(run.state))
    run.train(5)
    again = Run(seed=6)
    restore(again.state, sources[0])
    second = snap(again.state)
    assert {name: entry.digest for name, entry in second.manifest.sections.items()} == {
        name: entry.digest for name, entry in sources[0].manifest.sections.items()
    }


def test_grad_scaler_state_goes_along():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scales = []
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [16.0, 32.0]
    source = snap(TrainingState(model, [optimizer], scaler=scaler))
    fresh = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=1)
    model2 = nn.Linear(2, 2)
    optimizer2 = torch.optim.SGD(model2.parameters(), lr=0.1)
    restore(TrainingState(model2, [optimizer2], scaler=fresh), source)
    assert fresh.get_scale() == 32.0
    assert fresh.state_dict() == scaler.state_dict()
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    source = snap(TrainingState(model, [optimizer], scaler=disabled))
    restore(TrainingState(model2, [optimizer2], scaler=disabled), source)


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "Exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "Cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "WarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "Cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "Linear": torch.optim.lr_scheduler.LinearLR,
    "Polynomial": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 10),
    "Sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "Chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_every_scheduler_of_torch_goes_on_with_the_same_rates(name):
    def made():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer, scheduler, steps):
        seen = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(steps):
                optimizer.step()
                scheduler.step()
                seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return seen

    model, optimizer, scheduler = made()
    rates(optimizer, scheduler, 4)
    source = snap(TrainingState(model, [optimizer], scheduler=scheduler))
    model2, optimizer2, scheduler2 = made()
    restore(TrainingState(model2, [optimizer2], scheduler=scheduler2), source)
    assert rates(optimizer2, scheduler2, 6) == rates(optimizer, scheduler, 6)
    assert fingerprint(scheduler2.state_dict()) == fingerprint(scheduler.state_dict())
    assert {key: type(value) for key, value in vars(scheduler2).items()} == {
        key: type(value) for key, value in vars(scheduler).items()
    }


def test_plateau_scheduler_remembers_its_best():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for metric in (3.0, 2.0, 2.5):
        scheduler.step(metric)
    source = snap(TrainingState(model, [optimizer], scheduler=scheduler))
    optimizer2 = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler2 = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer2, patience=1)
    restore(TrainingState(model, [optimizer2], scheduler=scheduler2), source)
    assert scheduler2.best == 2.0
    assert scheduler2.num_bad_epochs == 1
    scheduler2.step(2.5)
    assert optimizer2.param_groups[0]["lr"] == pytest.approx(0.01)


def test_fast_forward_moves_the_scheduler_on_to_the_swarms_position():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = TrainingState(
        model, [optimizer], scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    )
    restore(state, snap(state), RESUME)
    Restorer(state).fast_forward(0)
    assert optimizer.param_groups[0]["lr"] == 1.0
    Restorer(state).fast_forward(4)
    assert optimizer.param_groups[0]["lr"] == 0.2
