"""When a step is over: which signal counts, and that the state at that moment is that of a whole step."""

from __future__ import annotations

import pytest
import torch
from capture_kit import snap
from torch import nn
from torch.utils.data import DataLoader

from hotswarm.capture.boundary import Boundary
from hotswarm.capture.position import Position
from hotswarm.capture.state import TrainingState
from hotswarm.errors import ConfigError


class Loop:
    """A training loop whose parts can be switched on; notes what the scheduler said at each boundary."""

    def __init__(self, *, loader=False, explicit=False, forward=True, micro=1, in_outer_step=lambda: False):
        self.model = nn.Linear(2, 1) if forward else None
        self.param = nn.Parameter(torch.ones(2))
        params = self.model.parameters() if self.model else [self.param]
        self.optimizer = torch.optim.SGD(params, lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: 1 / (1 + k))
        self.loader = DataLoader(torch.ones(12, 2), batch_size=1)
        position = Position(self.loader) if loader else None
        self.seen = []
        self.boundary = Boundary(
            self.model if self.model is not None else object(),
            [self.optimizer],
            position,
            lambda exact: self.seen.append((self.steps, self.scheduler.last_epoch, exact)),
            in_outer_step=in_outer_step,
        )
        self.boundary.attach()
        self.explicit, self.micro, self.steps = explicit, micro, 0

    def loss(self, batch):
        return (self.model(batch) if self.model is not None else batch @ self.param).sum()

    def run(self, batches):
        for number, batch in enumerate(self.loader, start=1):
            self.loss(batch).backward()
            if number % self.micro == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.steps += 1
                self.scheduler.step()
                if self.explicit:
                    self.boundary.explicit()
            if number == batches:
                break


def test_the_loaders_next_is_the_boundary_and_the_scheduler_has_stepped_by_then():
    loop = Loop(loader=True)
    loop.run(4)
    assert loop.seen == [(1, 1, True), (2, 2, True), (3, 3, True)]
    assert loop.boundary.steps == 4


def test_without_a_loader_the_next_training_forward_is_the_boundary():
    loop = Loop()
    loop.run(4)
    assert loop.seen == [(1, 1, True), (2, 2, True), (3, 3, True)]
    loop.model.eval()
    loop.model(torch.ones(1, 2))
    loop.model.train()
    with torch.no_grad():
        loop.model(torch.ones(1, 2))
    assert len(loop.seen) == 3  # evaluation is no boundary
    loop.model(torch.ones(1, 2))
    assert loop.seen[3] == (4, 4, True)


def test_an_explicit_step_silences_every_other_signal():
    loop = Loop(loader=True, explicit=True)
    loop.run(4)
    assert loop.seen == [(1, 1, True), (2, 2, True), (3, 3, True), (4, 4, True)]


def test_with_nothing_but_the_hook_the_capture_is_marked_as_not_exact():
    loop = Loop(forward=False)
    loop.run(4)
    assert [exact for _, _, exact in loop.seen] == [False] * 3
    assert loop.seen[0][:2] == (1, 1)  # called within the second step's hook, before its scheduler


def test_micro_batches_between_two_steps_are_no_boundaries():
    loop = Loop(loader=True, micro=3)
    loop.run(9)
    assert loop.seen == [(1, 1, True), (2, 2, True)]


def test_nothing_is_heard_during_an_outer_step_and_after_detach():
    inside = [True]
    loop = Loop(loader=True, in_outer_step=lambda: inside[0])
    loop.run(3)
    assert loop.seen == []
    inside[0] = False
    loop.run(2)
    assert len(loop.seen) == 1
    loop.boundary.detach()
    loop.run(3)
    assert len(loop.seen) == 1
    assert type(loop.loader) is DataLoader


def test_an_explicit_step_during_an_outer_step_leaves_the_boundary_to_the_next_event():
    inside = [False]
    loop = Loop(in_outer_step=lambda: inside[0])
    loop.run(1)
    inside[0] = True
    loop.boundary.explicit()
    assert loop.seen == []
    inside[0] = False
    loop.run(1)  # its forward
    assert loop.seen == [(1, 1, True)]
    loop.boundary.explicit()
    assert len(loop.seen) == 2


def test_an_engine_that_cannot_be_asked_costs_snapshots_and_nothing_else(caplog):
    def broken():
        raise AttributeError("phase")

    loop = Loop(loader=True, in_outer_step=broken)
    loop.run(4)
    loop.boundary.explicit()
    assert loop.seen == []
    assert len([record for record in caplog.records if "no snapshots until it does" in record.message]) == 1


def test_another_optimizers_steps_are_not_counted():
    loop = Loop(loader=True)
    other = nn.Parameter(torch.ones(2))
    outer = torch.optim.SGD([other], lr=1.0)
    other.grad = torch.ones(2)
    for _ in range(3):
        outer.step()
    assert loop.boundary.steps == 0
    assert loop.seen == []


def test_a_gan_with_two_optimizers_has_one_boundary_per_iteration():
    model = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)})
    optimizers = [torch.optim.SGD(model[k].parameters(), 0.1) for k in "gd"]
    loader = DataLoader(torch.ones(5, 2))
    seen = []
    boundary = Boundary(model, optimizers, Position(loader), seen.append)
    boundary.attach()
    for batch in loader:
        for part, optimizer in zip("gd", optimizers, strict=True):
            model[part](batch).sum().backward()
            optimizer.step()
    assert seen == [True] * 5  # the fifth when the loader is asked for a sixth batch
    assert boundary.steps == 5


def test_without_a_loader_the_forward_between_a_gans_two_optimizers_is_no_boundary():
    model = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)})
    model.forward = lambda part, x: model[part](x)
    optimizers = [torch.optim.SGD(model[k].parameters(), 0.1) for k in "gd"]
    seen, steps = [], []
    boundary = Boundary(model, optimizers, None, lambda exact: seen.append((exact, tuple(steps))))
    boundary.attach()
    for part, optimizer in [*zip("dg", reversed(optimizers), strict=True)] * 3:
        model(part, torch.ones(1, 2)).sum().backward()
        optimizer.step()
        steps.append(part)
    assert seen == [(True, ("d", "g")), (True, ("d", "g", "d", "g"))]
    for _ in range(2):  # five steps of one for one of the other: the second in a row is not an exact one
        model("d", torch.ones(1, 2)).sum().backward()
        optimizers[1].step()
    assert [exact for exact, _ in seen[2:]] == [True, False]


def test_scaler_and_scheduler_have_their_published_values_at_the_boundary():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    loader = DataLoader(torch.ones(4, 2))
    state = TrainingState(model, [optimizer], scheduler=scheduler, scaler=scaler)
    seen = []

    def look(exact):
        leaves = {leaf.path: leaf.what for leaf in snap(state).manifest.sections["inner"].leaves}
        seen.append((leaves["optimizer", "param_groups", 0, "lr"], leaves["scaler", "scale"]))

    boundary = Boundary(model, [optimizer], Position(loader), look)
    boundary.attach()
    for batch in loader:
        optimizer.zero_grad()
        scaler.scale(model(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
    assert [scale for _, scale in seen] == [16.0, 32.0, 64.0, 128.0]
    assert [lr for lr, _ in seen] == [1 / 2, 1 / 3, 1 / 4, 1 / 5]


def test_the_rate_is_measured():
    loop = Loop(loader=True)
    assert loop.boundary.steps_per_s == 0.0
    loop.run(6)
    assert 1 < loop.boundary.steps_per_s < 1e6


@pytest.mark.parametrize("wrong", [iter([1]), (x for x in [1]), 5, [1, 2]])
def test_what_cannot_be_followed_as_a_loader_is_a_config_error(wrong):
    with pytest.raises(ConfigError) as error:
        Position(wrong).attach()
    assert error.value.field == "dataloader"


def test_a_loader_whose_follower_is_gone_works_as_before():
    loader = DataLoader(torch.ones(3, 2))
    Position(loader).attach()
    assert len(list(loader)) == 3
    assert isinstance(loader, DataLoader)
