"""DiLoCo trainers recognised by shape: the reference trainer, and one that clones wherever it can."""

from __future__ import annotations

import copy
import enum
import threading
from dataclasses import dataclass

import pytest
import torch
from capture_kit import fingerprint, raw, restore, snap
from torch import nn

from hotswarm.capture.diloco import Counters, SeedAdapter, is_diloco_shaped
from hotswarm.capture.restore import CLONE, JOIN, joining
from hotswarm.capture.state import TrainingState
from hotswarm.capture.verify import differences
from hotswarm.diloco import DiLoCoConfig, DiLoCoTrainer
from hotswarm.errors import CaptureError, Incompatible
from hotswarm.snapshot.tree import TensorSpec

H = 4


class Phase(enum.Enum):
    IDLE = "idle"
    INNER_LOOP = "inner_loop"
    SYNCING = "syncing"
    OUTER_STEP = "outer_step"


@dataclass
class Stats:
    inner_step_count: int = 0
    outer_step_count: int = 0
    total_inner_steps: int = 0
    inner_loss_sum: float = 0.0


class CloningOuter:
    """state_dict() and load_state_dict() clone; weight_decay is in neither."""

    def __init__(self, lr=0.7, momentum=0.9, weight_decay=0.0):
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self.velocity = {}

    def step(self, model, deltas):
        with torch.no_grad():
            for name, param in model.named_parameters():
                delta = deltas[name] + self.weight_decay * param
                v = self.velocity.setdefault(name, torch.zeros_like(delta))
                v.mul_(self.momentum).add_(delta)
                param.add_(self.lr * (self.momentum * v + delta))

    def state_dict(self):
        clones = {name: v.clone() for name, v in self.velocity.items()}
        return {"lr": self.lr, "momentum": self.momentum, "velocity": clones}

    def load_state_dict(self, state):
        self.lr, self.momentum = state["lr"], state["momentum"]
        self.velocity = {name: v.clone() for name, v in state["velocity"].items()}


class HidingOuter(CloningOuter):
    """Its buffers can be reached through state_dict() and load_state_dict() alone."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._hidden = self.velocity

    def step(self, model, deltas):
        self.velocity = self._hidden
        super().step(model, deltas)
        self._hidden = self.velocity
        del self.velocity

    def state_dict(self):
        clones = {name: v.clone() for name, v in self._hidden.items()}
        return {"lr": self.lr, "momentum": self.momentum, "velocity": clones}

    def load_state_dict(self, state):
        self.lr, self.momentum = state["lr"], state["momentum"]
        self._hidden = {name: v.clone() for name, v in state["velocity"].items()}
        vars(self).pop("velocity", None)


class ShapedTrainer:
    """The shape, written for this test: weights are moved by the outer update where they stand."""

    def __init__(self, model, outer):
        self.model = model
        self.config = type("Config", (), {"inner_steps": H})()
        self.inner_optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.outer_optimizer = outer
        self.initial_weights = {}
        self.stats = Stats()
        self.phase = Phase.IDLE
        self._lock = threading.RLock()
        self._on_outer_step = None

    def set_outer_step_callback(self, callback):
        self._on_outer_step = callback

    def _begin(self):
        self.initial_weights = {name: p.data.clone() for name, p in self.model.named_parameters() if p.requires_grad}
        self.stats.inner_step_count = 0
        self.phase = Phase.INNER_LOOP

    def inner_step(self, loss):
        with self._lock:
            if self.phase is Phase.IDLE:
                self._begin()
            loss.backward()
            self.inner_optimizer.step()
            self.inner_optimizer.zero_grad()
            self.stats.inner_step_count += 1
            self.stats.total_inner_steps += 1
            self.stats.inner_loss_sum += loss.item()
            if self.stats.inner_step_count == H:
                self.phase = Phase.OUTER_STEP
                deltas = {n: p.data - self.initial_weights[n] for n, p in self.model.named_parameters()}
                self.outer_optimizer.step(self.model, deltas)
                self.stats.outer_step_count += 1
                if self._on_outer_step:
                    self._on_outer_step(self.stats)
                self._begin()


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def reference(net):
    return DiLoCoTrainer(net, DiLoCoConfig(inner_steps=H, inner_lr=0.01))


KINDS = {
    "reference": reference,
    "cloning": lambda net: ShapedTrainer(net, CloningOuter(weight_decay=0.01)),
    "hiding": lambda net: ShapedTrainer(net, HidingOuter()),
    "torch": lambda net: ShapedTrainer(net, TorchOuter(net)),
}


class TorchOuter(torch.optim.SGD):
    """A torch optimizer as the outer one."""

    def __init__(self, net):
        super().__init__(net.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def step(self, net, deltas):
        grads = {name: p.grad for name, p in net.named_parameters()}
        for name, p in net.named_parameters():
            p.grad = -deltas[name]
        super().step()
        for name, p in net.named_parameters():
            p.grad = grads[name]


class Worker:
    def __init__(self, kind, seed):
        self.model = model(seed)
        self.trainer = KINDS[kind](self.model)
        self.adapter = SeedAdapter(self.trainer)
        self.state = TrainingState(self.model, [self.trainer.inner_optimizer], adapter=self.adapter)

    def train(self, steps, start=0):
        for k in range(start, start + steps):
            torch.manual_seed(1000 + k)
            self.trainer.inner_step(self.model(torch.randn(5, 4)).square().mean())

    def picture(self):
        outer = self.trainer.outer_optimizer.state_dict()
        names = {
            name: fingerprint(dict(self.trainer.inner_optimizer.state.get(p, {})))
            for name, p in self.model.named_parameters()
        }
        return [
            fingerprint(dict(self.model.state_dict())),
            names,
            fingerprint(self.trainer.initial_weights),
            fingerprint(outer),
            fingerprint(
                vars(self.trainer.stats) if hasattr(self.trainer.stats, "__dict__") else str(self.trainer.stats)
            ),
            self.trainer.phase.value,
        ]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("cut", [1, 3, 4, 6])  # first round, its end, second round
def test_a_resumed_trainer_equals_the_uninterrupted_one_through_the_next_outer_steps(kind, cut):
    whole = Worker(kind, 1)
    whole.train(11)
    first = Worker(kind, 1)
    first.train(cut)
    source = snap(first.state)
    assert source.manifest.engine == "diloco"
    assert (source.manifest.outer_step, source.manifest.inner_step) == (cut // H, cut % H)
    assert source.manifest.training_step == cut
    second = Worker(kind, 2)
    second.train(5)
    restore(second.state, source, CLONE)
    assert differences(second.state.collect(), source.manifest) == []
    second.train(11 - cut, start=cut)
    assert second.picture() == whole.picture()


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("stepped", [False, True])
def test_a_joiner_trains_on_from_the_outer_copy_and_both_copies_and_momentum_are_the_donors(kind, stepped):
    donor = Worker(kind, 1)
    donor.train(6)  # two steps into the second round: live and outer weights differ
    source = snap(donor.state)
    joiner = Worker(kind, 2)
    if stepped:
        joiner.train(7)
    restore(joiner.state, source, joining("take", Counters(1, 3, 7)))
    outer = fingerprint(donor.trainer.initial_weights)
    assert fingerprint(joiner.trainer.initial_weights) == outer
    assert fingerprint({name: p.data for name, p in joiner.model.named_parameters()}) == outer
    assert fingerprint(joiner.trainer.outer_optimizer.state_dict()) == fingerprint(
        donor.trainer.outer_optimizer.state_dict()
    )
    assert joiner.adapter.counters() == Counters(1, 3, 7)
    assert joiner.trainer.phase.value.startswith("inner")
    # inner lr 0 to the next sync: what the outer step makes of it must equal the donor's outer copy treated alike
    for worker in (joiner, donor):
        for group in worker.trainer.inner_optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
    control = copy.deepcopy(fingerprint(joiner.trainer.initial_weights))
    joiner.train(1)
    assert joiner.adapter.counters().outer_step == 2
    assert control == outer
    with torch.no_grad():
        for name, p in donor.model.named_parameters():
            p.copy_(donor.trainer.initial_weights[name])
    donor.train(2)
    assert fingerprint(joiner.trainer.initial_weights) == fingerprint(donor.trainer.initial_weights)
    assert fingerprint(dict(joiner.model.state_dict())) == fingerprint(dict(donor.model.state_dict()))
    assert fingerprint(joiner.trainer.outer_optimizer.state_dict()) == fingerprint(
        donor.trainer.outer_optimizer.state_dict()
    )


def test_right_after_an_outer_step_live_and_outer_parameters_cut_into_the_same_chunks():
    worker = Worker("reference", 1)
    worker.train(H)
    source = snap(worker.state)
    inner, outer = source.manifest.sections["inner"], source.manifest.sections["outer"]
    mine = [inner.chunk_digests[i] for i in inner.layout.chunks_of_roles(["param"])]
    theirs = [outer.chunk_digests[i] for i in outer.layout.chunks_of_roles(["param"])]
    assert mine == theirs


def test_the_outer_section_is_the_whitelist_and_nothing_else():
    worker = Worker("cloning", 1)
    worker.train(H + 1)
    leaves = snap(worker.state).manifest.sections["outer"].leaves
    names = set(worker.trainer.initial_weights)
    paths = {leaf.path for leaf in leaves if type(leaf.what) is TensorSpec}
    assert paths == {(kind, name) for kind in ("params", "momentum") for name in names}
    values = {leaf.path: leaf.what for leaf in leaves if leaf.path and leaf.path[0] in {"hyper", "outer_step"}}
    del values["hyper",]
    assert values == {
        ("hyper", "lr"): 0.7,
        ("hyper", "momentum"): 0.9,
        ("hyper", "weight_decay"): 0.01,  # left out by its state_dict
        ("outer_step",): 1,
    }


def test_two_workers_with_other_inner_states_have_the_same_outer_digest():
    a, b = Worker("reference", 1), Worker("reference", 1)
    averaged = {}

    def average(own):
        averaged.setdefault("first", own)
        return averaged["first"]

    a.trainer.set_average(average)
    b.trainer.set_average(average)
    a.train(H)
    b.train(H - 1)
    b.train(1, start=500)
    assert fingerprint(a.trainer.inner_optimizer.state_dict()) != fingerprint(b.trainer.inner_optimizer.state_dict())
    sources = snap(a.state), snap(b.state)
    assert sources[0].manifest.outer_digest == sources[1].manifest.outer_digest
    assert sources[0].manifest.sections["inner"].digest != sources[1].manifest.sections["inner"].digest


def test_before_the_first_step_there_is_no_outer_section_and_a_restore_of_that_empties_the_outer_copy():
    fresh, trained = Worker("reference", 1), Worker("reference", 2)
    trained.train(6)
    source = snap(fresh.state)
    assert set(source.manifest.sections) == {"inner", "private"}
    with pytest.raises(Incompatible, match="no 'outer' section"):
        restore(trained.state, source, JOIN)
    restore(trained.state, source, CLONE)
    assert trained.picture() == fresh.picture()
    fresh.train(6)
    trained.train(6)
    assert trained.picture() == fresh.picture()


def test_the_optimizer_that_really_trains_is_captured_not_the_one_given():
    worker = Worker("reference", 1)
    given = torch.optim.SGD(worker.model.parameters(), lr=0.1)
    state = TrainingState(worker.model, [given], adapter=worker.adapter)
    worker.train(2)
    kinds = [leaf.what for leaf in snap(state).manifest.sections["inner"].leaves if leaf.path == ("optimizer", "class")]
    assert kinds == ["AdamW"]


def test_a_failing_load_puts_engine_and_all_back():
    donor, joiner = Worker("cloning", 1), Worker("cloning", 2)
    donor.train(6)
    joiner.train(7)

    class Fails:
        def __init__(self):
            self.value = 5

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]
            if state["value"] != 5:
                raise ValueError("no")

    joiner.state.extra = {"a": Fails(), "b": torch.Generator().manual_seed(3)}
    donor.state.extra = {"a": Fails(), "b": torch.Generator().manual_seed(4)}
    donor.state.extra["a"].value = 6
    joiner.adapter.load_inner = lambda tree: (_ for _ in ()).throw(RuntimeError("late"))
    generator = raw(joiner.state.extra["b"].get_state())
    before = joiner.picture()
    with pytest.raises(Incompatible, match=r"extra/a refused .*ValueError: no"):
        restore(joiner.state, snap(donor.state), CLONE)
    assert joiner.picture() == before
    donor.state.extra["a"].value = 5
    with pytest.raises(Incompatible, match=r"the trainer refused .*late"):
        restore(joiner.state, snap(donor.state), CLONE)
    assert joiner.picture() == before
    assert raw(joiner.state.extra["b"].get_state()) == generator
    assert joiner.state.extra["a"].value == 5


def test_an_outer_step_callback_is_chained_and_the_phase_tells_an_outer_step():
    worker = Worker("cloning", 1)
    heard = []
    worker.trainer.set_outer_step_callback(lambda stats: heard.append(("users", stats.outer_step_count)))
    worker.adapter.on_outer_step(lambda: heard.append(("ours", worker.adapter.in_outer_step())))
    worker.train(2 * H)
    assert heard == [("users", 1), ("ours", True), ("users", 2), ("ours", True)]
    assert not worker.adapter.in_outer_step()
    reference_worker = Worker("reference", 1)
    reference_worker.adapter.on_outer_step(lambda: heard.append("reference"))
    reference_worker.train(H)
    assert heard[-1] == "reference"


def test_other_objects_are_not_taken_for_a_trainer_and_other_outer_state_is_refused():
    assert not is_diloco_shaped(object())
    with pytest.raises(CaptureError, match="no DiLoCo trainer"):
        SeedAdapter(object())
    net = model(1)
    trainer = ShapedTrainer(net, torch.optim.Adam(net.parameters()))
    trainer._begin()
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    trainer.outer_optimizer.step()
    state = TrainingState(net, adapter=SeedAdapter(trainer))
    with pytest.raises(CaptureError, match="only momentum"):
        state.collect()


def test_a_peers_hyper_parameters_are_restored_and_its_config_is_not():
    donor, joiner = Worker("cloning", 1), Worker("cloning", 2)
    donor.trainer.outer_optimizer.lr = 0.5
    donor.trainer.outer_optimizer.weight_decay = 0.25
    donor.trainer.config.inner_steps = 77
    donor.train(2)
    restore(joiner.state, snap(donor.state), JOIN)
    assert joiner.trainer.outer_optimizer.lr == 0.5
    assert joiner.trainer.outer_optimizer.weight_decay == 0.25
    assert joiner.trainer.config.inner_steps == H
