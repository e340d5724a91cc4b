"""Values that the format can say and that training would die of a step later: refused, with nothing changed."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from hotswarm.checkpoint_types import CheckpointConfig
from hotswarm.checkpointer import SpeculativeCheckpointer
from hotswarm.diloco import DiLoCoConfig, DiLoCoTrainer

ALONE = {"announce_to_dht": False, "serve_to_peers": False, "auto_fetch_on_start": False}
GONE = object()


class World:
    def __init__(self, root):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.trainer = DiLoCoTrainer(self.model, DiLoCoConfig(inner_steps=3))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.trainer.inner_optimizer, 2)
        self.checkpointer = SpeculativeCheckpointer(
            self.model,
            self.trainer.inner_optimizer,
            self.trainer,
            CheckpointConfig(checkpoint_dir=root, **ALONE),
            scheduler=self.scheduler,
        )

    def step(self, count=4):
        for _ in range(count):
            self.trainer.inner_step(self.model(torch.randn(5, 4)).pow(2).mean())
            self.scheduler.step()

    def state(self):
        optimizer = self.trainer.inner_optimizer
        trees = (self.model.state_dict(), optimizer.state_dict(), self.scheduler.state_dict())
        outer = (self.trainer.initial_weights, self.trainer.outer_optimizer.state_dict())
        return copy.deepcopy((*trees, *outer, dataclasses.asdict(self.trainer.stats)))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture
def good(tmp_path):
    world = World(tmp_path / "good")
    world.step()
    saved = world.checkpointer.force_snapshot()
    return world.checkpointer.load_checkpoint(saved.file_path)


MOMENT = ("optimizer_state_dict", "state", 0)
GROUP = ("optimizer_state_dict", "param_groups", 0)
NUMPY = ("rng", "numpy")
BEYOND = 1000


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ((*MOMENT, "exp_avg"), torch.zeros(2), "exp_avg of 0.weight"),
        ((*MOMENT, "exp_avg"), torch.zeros(4, 4, dtype=torch.float64), "state of 0.weight"),
        ((*MOMENT, "exp_avg"), GONE, "exp_avg"),
        ((*MOMENT, "exp_avg_sq"), 5, "exp_avg_sq of 0.weight"),
        ((*MOMENT, "step"), None, "step of 0.weight"),
        ((*MOMENT, "step"), torch.tensor(-1.0), "step count of 0.weight"),
        ((*MOMENT, "step"), torch.tensor(float("nan")), "step count of 0.weight"),
        ((*GROUP, "lr"), None, "'lr'"),
        ((*GROUP, "lr"), float("nan"), "'lr'"),
        ((*GROUP, "betas"), [], "'betas'"),
        ((*GROUP, "betas"), (0.9, 5.0), "betas|beta parameter"),
        ((*GROUP, "amsgrad"), 5, "'amsgrad'"),
        ((*GROUP, "amsgrad"), True, "max_exp_avg_sq"),
        ((*GROUP, "foreach"), torch.zeros(2), "'foreach'"),
        (("diloco_state", "initial_weights", "1.bias"), GONE, "lacks '1.bias'"),
        (("diloco_state", "initial_weights", "1.bias"), torch.zeros(4, dtype=torch.int32), "1.bias"),
        (("hotswarm", "outer_hyper", "lr"), "x", "lr"),
        (("hotswarm", "outer_hyper", "weight_decay"), {}, "weight_decay"),
        (("hotswarm", "trainer", "stats", "inner_step_count"), [], "inner_step_count"),
        (("scheduler", "last_epoch"), "x", "last_epoch"),
        (("scheduler", "gamma"), {}, "gamma"),
        (NUMPY, None, "random state"),
        ((*NUMPY, "bit_generator"), GONE, "random state"),
        ((*NUMPY, "state"), {}, "random state"),
        ((*NUMPY, "state", "pos"), BEYOND, "rand"),
        ((*NUMPY, "gauss"), {}, "random state"),
        (("hotswarm",), torch.zeros(2), "known shape"),
        (("model_state_dict",), {}, "model_state_dict .* is empty"),
        (("model_state_dict",), GONE, "no model_state_dict"),
    ],
)  # fmt: skip
def test_a_value_that_training_would_die_of_is_refused_and_named(tmp_path, good, path, value, named):
    bad = copy.deepcopy(good)
    node = bad
    for key in path[:-1]:
        node = node[key]
    if value is GONE:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    world = World(tmp_path / "here")
    world.step(2)
    before, dice = world.state(), torch.get_rng_state()
    assert world.checkpointer.restore_from_checkpoint(bad) is False
    with pytest.raises(AssertionError, match=named):
        raise AssertionError(world.checkpointer.last_error)
    assert same(world.state(), before)
    assert torch.equal(torch.get_rng_state(), dice)
    assert world.checkpointer.recoveries_performed == 0
    assert world.checkpointer.restore_from_checkpoint(good) is True
    world.step()
    assert world.checkpointer.force_snapshot() is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True),
        lambda p: torch.optim.Adam(p, betas=(torch.tensor(0.9), torch.tensor(0.99)), lr=torch.tensor(0.01)),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0),
        lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True),
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
        torch.optim.Rprop,
        torch.optim.ASGD,
        torch.optim.LBFGS,
        lambda p: torch.optim.Muon([one for one in p if one.ndim == 2]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_torchs_own_optimizers_keep_is_taken(tmp_path, make, dtype):
    def build(name):
        torch.manual_seed(1)
        model = nn.Linear(3, 2).to(dtype)
        optimizer = make(list(model.parameters()))
        return model, optimizer, SpeculativeCheckpointer(
            model, optimizer, config=CheckpointConfig(checkpoint_dir=tmp_path / name, **ALONE)
        )  # fmt: skip

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3, dtype=dtype)).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer, checkpointer = build("a")
    step(model, optimizer)
    step(model, optimizer)
    assert checkpointer.force_snapshot() is not None, checkpointer.last_error
    checkpoint = checkpointer.load_latest_checkpoint()
    other, joiner, taker = build("b")
    assert taker.restore_from_checkpoint(checkpoint), taker.last_error
    step(model, optimizer)
    step(other, joiner)
    assert same(model.state_dict(), other.state_dict())
