"""A snapshot as the dict that DiLoCo code passes around, and back."""

from __future__ import annotations

import io

import pytest
import torch
from capture_kit import everything, fingerprint, snap
from torch import nn

from hotswarm.capture.diloco import Counters, SeedAdapter
from hotswarm.capture.exchange import as_outer, from_dict, to_dict
from hotswarm.capture.restore import CLONE, JOIN, RESUME, RestoreParts, Restorer
from hotswarm.capture.state import TrainingState
from hotswarm.diloco import DiLoCoConfig, DiLoCoTrainer
from hotswarm.errors import Incompatible


class Worker:
    def __init__(self, seed, steps=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False))
        self.model[2].weight = self.model[0].weight
        self.trainer = DiLoCoTrainer(self.model, DiLoCoConfig(inner_steps=3, inner_lr=0.01))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.trainer.inner_optimizer, 0.9)
        self.extra = {"note": "x"}
        self.state = TrainingState(
            self.model,
            [self.trainer.inner_optimizer],
            adapter=SeedAdapter(self.trainer),
            scheduler=self.scheduler,
            extra=self.extra,
        )
        self.train(steps)

    def train(self, steps):
        for _ in range(steps):
            self.trainer.inner_step(self.model(torch.arange(6)).square().mean())
            self.scheduler.step()

    def picture(self):
        return [
            everything(self.model, [self.trainer.inner_optimizer], self.scheduler),
            fingerprint(self.trainer.initial_weights),
            fingerprint(self.trainer.outer_optimizer.state_dict()),
            str(self.trainer.stats),
            self.trainer.phase,
        ]


def through_torch_save(checkpoint):
    data = io.BytesIO()
    torch.save(checkpoint, data)
    data.seek(0)
    return torch.load(data, weights_only=True)


def test_the_dict_has_the_known_keys_and_shapes():
    worker = Worker(1, steps=4)
    checkpoint = to_dict(snap(worker.state))
    assert set(checkpoint) >= {
        "checkpoint_type", "timestamp", "node_id", "model_state_dict", "optimizer_state_dict", "optimizer_param_names",
        "training_step", "outer_step", "inner_step", "diloco_state", "scheduler", "rng", "extra",
    }  # fmt: skip
    assert (checkpoint["checkpoint_type"], checkpoint["node_id"]) == ("hot", "label")
    assert [checkpoint[key] for key in ("training_step", "outer_step", "inner_step")] == [4, 1, 1]
    assert fingerprint(checkpoint["model_state_dict"]) == fingerprint(dict(worker.model.state_dict()))
    assert fingerprint(checkpoint["optimizer_state_dict"]) == fingerprint(worker.trainer.inner_optimizer.state_dict())
    assert checkpoint["optimizer_param_names"] == [name for name, _ in worker.model.named_parameters()]
    diloco = checkpoint["diloco_state"]
    assert set(diloco) == {"initial_weights", "outer_optimizer", "stats", "phase"}
    assert fingerprint(diloco["initial_weights"]) == fingerprint(worker.trainer.initial_weights)
    assert diloco["stats"] == {"inner_step_count": 1, "outer_step_count": 1, "total_inner_steps": 4}
    assert diloco["phase"] == worker.trainer.phase.value
    # code that knows nothing of hotswarm loads its parts
    plain = Worker(5)
    plain.model.load_state_dict(checkpoint["model_state_dict"])
    plain.trainer.inner_optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    plain.trainer.outer_optimizer.load_state_dict(diloco["outer_optimizer"])
    assert everything(plain.model, [plain.trainer.inner_optimizer]) == everything(
        worker.model, [worker.trainer.inner_optimizer]
    )


@pytest.mark.parametrize("way", [lambda d: d, through_torch_save], ids=["as it is", "through torch.save"])
def test_the_way_back_is_exact(way):
    worker = Worker(1, steps=4)
    checkpoint = way(to_dict(snap(worker.state)))
    other = Worker(2, steps=7)
    other.extra["note"] = "y"
    Restorer(other.state).apply(from_dict(checkpoint, other.state), RESUME)
    assert other.picture() == worker.picture()
    assert other.extra == {"note": "x"}
    assert other.model[0].weight is other.model[2].weight
    worker.train(3)
    other.train(3)
    assert other.picture() == worker.picture()


def test_a_neighbours_dict_puts_the_outer_parameters_into_the_model():
    donor, joiner = Worker(1, steps=5), Worker(2, steps=1)
    checkpoint = to_dict(snap(donor.state), kind="recovery", model="outer")
    assert checkpoint["checkpoint_type"] == "recovery"
    outer = fingerprint(donor.trainer.initial_weights)
    given = {name: checkpoint["model_state_dict"][name] for name in donor.trainer.initial_weights}
    assert fingerprint(given) == outer
    rng = torch.get_rng_state()
    Restorer(joiner.state).apply(from_dict(checkpoint, joiner.state), JOIN)
    assert fingerprint({name: p.data for name, p in joiner.model.named_parameters()}) == outer
    assert fingerprint(joiner.trainer.initial_weights) == outer
    assert torch.equal(torch.get_rng_state(), rng)


def test_a_dict_of_the_older_class_without_names_is_matched_by_position():
    worker, other = Worker(1, steps=2), Worker(2)
    old = {
        "checkpoint_type": "hot",
        "model_state_dict": worker.model.state_dict(),
        "optimizer_state_dict": worker.trainer.inner_optimizer.state_dict(),
        "training_step": 2,
        "outer_step": 0,
        "inner_step": 2,
        "diloco_state": {
            "initial_weights": dict(worker.trainer.initial_weights),
            "outer_optimizer": worker.trainer.outer_optimizer.state_dict(),
            "stats": {"inner_step_count": 2, "outer_step_count": 0, "total_inner_steps": 2},
            "phase": worker.trainer.phase.value,
        },
    }
    other.state.scheduler = other.state.extra = None
    parts = RestoreParts(private=False)
    Restorer(other.state).apply(from_dict(through_torch_save(old), other.state), parts)
    assert everything(other.model, [other.trainer.inner_optimizer]) == everything(
        worker.model, [worker.trainer.inner_optimizer]
    )
    assert other.state.adapter.counters() == Counters(0, 2, 2)


def test_a_dict_whose_model_is_all_there_is_can_serve_as_outer_copy():
    donor, joiner = Worker(1, steps=5), Worker(2)
    checkpoint = to_dict(snap(donor.state))
    del checkpoint["diloco_state"], checkpoint["hotswarm"]
    incoming = as_outer(from_dict(checkpoint, joiner.state))
    Restorer(joiner.state).apply(incoming, JOIN)
    assert fingerprint(joiner.trainer.initial_weights) == fingerprint(
        {name: p.data for name, p in donor.model.named_parameters()}
    )


def weights(checkpoint):
    return checkpoint["diloco_state"]["initial_weights"]


def buffers(checkpoint):
    return checkpoint["diloco_state"]["outer_optimizer"]["velocity"]


BROKEN = {
    "empty": lambda d: d.clear(),
    "no model": lambda d: d.pop("model_state_dict"),
    "empty model": lambda d: d.update(model_state_dict={}),
    "model is a list": lambda d: d.update(model_state_dict=[1]),
    "another name": lambda d: d["model_state_dict"].update(extra=d["model_state_dict"].pop("1.bias")),
    "another shape": lambda d: d["model_state_dict"].update({"1.bias": torch.ones(3)}),
    "no optimizer": lambda d: d.pop("optimizer_state_dict"),
    "optimizer is text": lambda d: d.update(optimizer_state_dict="x"),
    "too few names": lambda d: d["optimizer_param_names"].pop(),
    "unknown phase": lambda d: d["hotswarm"]["trainer"].update(phase="dancing"),
    "no stats": lambda d: d["diloco_state"].pop("stats"),
    "steps are text": lambda d: d.update(outer_step="many"),
    "sparse": lambda d: d["model_state_dict"].update({"1.bias": torch.ones(4).to_sparse()}),
    "scheduler of another kind": lambda d: d["scheduler"].update(other=1),
    "an outer parameter of another shape": lambda d: weights(d).update({"1.bias": torch.ones(9)}),
    "outer momentum of another shape": lambda d: buffers(d).update({"1.bias": torch.ones(9)}),
    "an unknown outer parameter": lambda d: weights(d).update({"9.bias": torch.ones(9)}),
}


@pytest.mark.parametrize("how", list(BROKEN))
def test_a_dict_that_does_not_fit_changes_nothing(how):
    worker, other = Worker(1, steps=4), Worker(2, steps=2)
    checkpoint = to_dict(snap(worker.state))
    BROKEN[how](checkpoint)
    before = other.picture()
    with pytest.raises(Incompatible):
        Restorer(other.state).apply(from_dict(checkpoint, other.state), CLONE)
    assert other.picture() == before
