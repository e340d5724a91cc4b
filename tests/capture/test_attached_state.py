"""`extra`: objects that save themselves, generators, plain trees; and restores that are refused change nothing."""

from __future__ import annotations

import ctypes
from collections import OrderedDict

import pytest
import torch
from capture_kit import Camera, everything, fingerprint, raw, restore, snap, spread_ram
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hotswarm.capture.diloco import Counters
from hotswarm.capture.incoming import find_nan, incoming_from_source
from hotswarm.capture.restore import RESUME, Restorer
from hotswarm.capture.state import TrainingState
from hotswarm.errors import Incompatible, LocalFailure, StoreError


class Ema:
    def __init__(self, values):
        self.values = values
        self.steps = 0

    def state_dict(self):
        return {"values": self.values, "steps": self.steps}

    def load_state_dict(self, state):
        if state["steps"] < 0:
            raise RuntimeError("negative steps")
        self.values, self.steps = state["values"], state["steps"]


def test_modules_in_extra_are_filled_in_place_and_other_objects_loaded():
    def made(fill):
        torch.manual_seed(fill)
        base = nn.Linear(3, 3)
        ema = AveragedModel(base)
        own = Ema([torch.full((2,), float(fill)), {"n": fill}])
        return base, {"swa": ema, "own": own, "gen": torch.Generator().manual_seed(fill), "plain": {"best": fill}}

    base, donor = made(1)
    donor["swa"].update_parameters(base)
    donor["own"].steps = 5
    other, joiner = made(2)
    module, first = joiner["swa"], next(joiner["swa"].parameters())
    restore(TrainingState(other, extra=joiner), snap(TrainingState(base, extra=donor)))
    assert joiner["swa"] is module
    assert next(joiner["swa"].parameters()) is first
    assert everything(joiner["swa"]) == everything(donor["swa"])
    assert int(joiner["swa"].n_averaged) == 1
    assert joiner["own"].steps == 5
    assert fingerprint(joiner["own"].values) == fingerprint(donor["own"].values)
    assert torch.rand(3, generator=joiner["gen"]).tolist() == torch.rand(3, generator=donor["gen"]).tolist()
    assert joiner["plain"] == {"best": 1}


def test_an_object_alone_a_list_and_a_growing_history_are_fine_as_extra():
    one, other = Ema(1), Ema(2)
    restore(TrainingState(nn.Linear(1, 1), extra=other), snap(TrainingState(nn.Linear(1, 1), extra=one)))
    assert other.values == 1
    donor = {"history": [0.5, 0.25, 0.125], "pair": (Ema(3), 4), "order": OrderedDict(b=1, a=2)}
    joiner = {"history": [], "pair": (Ema(0), 0), "order": OrderedDict(), "mine": 7}
    history = joiner["history"]
    restore(TrainingState(nn.Linear(1, 1), extra=joiner), snap(TrainingState(nn.Linear(1, 1), extra=donor)))
    assert joiner["history"] is history
    assert history == [0.5, 0.25, 0.125]
    assert (joiner["pair"][0].values, joiner["pair"][1]) == (3, 4)
    assert joiner["order"] == OrderedDict(b=1, a=2)
    assert type(joiner["order"]) is OrderedDict
    assert joiner["mine"] == 7


def test_objects_that_are_missing_or_of_another_shape_are_refused():
    model = nn.Linear(1, 1)
    with_ema = snap(TrainingState(model, extra={"ema": Ema(1)}))
    without = snap(TrainingState(model, extra={}))
    with pytest.raises(Incompatible, match=r"extra/ema \(Ema\) is not in the snapshot"):
        restore(TrainingState(model, extra={"ema": Ema(1)}), without)
    with pytest.raises(Incompatible, match="extra/ema is a torch"):
        restore(TrainingState(model, extra={"ema": torch.Generator()}), with_ema)
    with pytest.raises(Incompatible, match=r"extra/ema .* differs"):
        restore(TrainingState(model, extra={"ema": nn.Linear(2, 2)}), with_ema)
    modules = snap(TrainingState(model, extra={"m": nn.Linear(2, 2)}))
    with pytest.raises(Incompatible, match="extra/m/weight is 3x2 float32 here and 2x2 float32 in the snapshot"):
        restore(TrainingState(model, extra={"m": nn.Linear(2, 3)}), modules)


# ---------------------------------------------------------------- refusals change nothing


class Whole:
    def __init__(self, seed, *, width=4, scheduler=True):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9) if scheduler else None
        self.extra = {"ema": Ema([seed])}
        self.state = TrainingState(self.model, [self.optimizer], scheduler=self.scheduler, extra=self.extra, rng=True)
        self.state.counters = Counters(seed, seed, seed)
        for _ in range(seed):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 3)).sum().backward()
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()

    def picture(self):
        more = [self.scheduler] if self.scheduler is not None else []
        rng = torch.get_rng_state()
        return everything(self.model, [self.optimizer], *more, self.extra["ema"], rng, {"c": str(self.state.counters)})


def refused(joiner, source, match):
    before = joiner.picture()
    with pytest.raises(Incompatible, match=match):
        restore(joiner.state, source, RESUME)
    with pytest.raises(Incompatible, match=match):
        Restorer(joiner.state).apply(incoming_from_source(source), RESUME)  # apply alone is as careful
    assert joiner.picture() == before


def test_another_architecture_is_refused_with_the_first_difference_and_nothing_changes():
    source = snap(Whole(1).state)
    refused(Whole(2, width=5), source, r"0.weight is 5x3 float32 here and 4x3 float32 in the snapshot")
    double = Whole(2)
    double.model.double()
    refused(double, source, r"0.weight is 4x3 float64 here and 4x3 float32")
    more = Whole(2)
    more.model.append(nn.Linear(4, 1))
    refused(more, source, r"2.bias is only here \(9 tensors here, 7 there\)")
    refused(Whole(2, scheduler=True), snap(Whole(1, scheduler=False).state), "scheduler here and none in the snapshot")
    other = Whole(2)
    other.state.scheduler = torch.optim.lr_scheduler.StepLR(other.optimizer, 3)
    refused(other, source, r"the scheduler \(StepLR\) differs: 'step_size' is only here")


def test_a_loader_that_fails_late_puts_everything_back():
    donor, joiner = Whole(3), Whole(2)
    donor.extra["ema"].steps = -1
    refused(joiner, snap(donor.state), "extra/ema refused the state .*negative steps")


def test_chunks_that_were_not_fetched_are_refused_and_ones_that_are_not_needed_are_not_missed():
    donor, joiner = Whole(3), Whole(2)
    source = snap(donor.state)

    class Partial:
        def __init__(self, missing):
            self.manifest, self.snapshot_id = source.manifest, source.snapshot_id
            self.read_into, self.chunk = source.read_into, source.chunk
            self.has_chunk = lambda section, index: (section, index) not in missing

    layout = source.manifest.sections["inner"].layout
    moments = {("inner", i) for i in layout.chunks_of_roles(["exp_avg_sq"])}
    before = joiner.picture()
    with pytest.raises(Incompatible, match=r"1 of .* chunks that this restore needs"):
        Restorer(joiner.state).check(incoming_from_source(Partial(moments)))
    assert joiner.picture() == before
    from hotswarm.capture.restore import RestoreParts

    parts = RestoreParts(optimizer="empty", private=False)
    Restorer(joiner.state).apply(incoming_from_source(Partial(moments)), parts)
    assert len(joiner.optimizer.state) == 0
    assert everything(joiner.model) == everything(donor.model)


def test_a_source_that_fails_in_the_last_copies_says_that_the_state_is_mixed():
    donor, joiner = Whole(3), Whole(2)
    source = snap(donor.state)
    real, reads = source.read_into, []

    def failing(section, offset, out):
        if len(out) > 4:  # the step counts, 4 bytes each, are read by the check
            reads.append(section)
        if len(reads) > 8 and section == "inner":
            raise StoreError("the disk is gone")
        real(section, offset, out)

    source.read_into = failing
    with pytest.raises(LocalFailure, match=r"mixture.*the disk is gone"):
        restore(joiner.state, source)


def test_a_tree_of_another_program_is_a_reason_not_a_crash():
    whole = Whole(1)
    incoming = incoming_from_source(snap(whole.state))
    for damage in (
        lambda inner: inner.pop("model"),
        lambda inner: inner.update(model=5),
        lambda inner: inner["optimizer"].pop("param_groups"),
        lambda inner: inner.update(optimizer=[1]),
        lambda inner: inner["optimizer"].update(state=None),
        lambda inner: inner["model"].update({"0.weight": "text"}),
        lambda inner: inner.pop("extra"),
    ):
        broken = incoming_from_source(snap(whole.state))
        damage(broken.sections["inner"])
        before = whole.picture()
        with pytest.raises(Incompatible):
            Restorer(whole.state).apply(broken)
        assert whole.picture() == before
    Restorer(whole.state).apply(incoming)


def test_a_nan_in_the_outer_state_is_found_by_name():
    from hotswarm.capture.diloco import SeedAdapter
    from hotswarm.diloco import DiLoCoConfig, DiLoCoTrainer

    model = nn.Linear(3, 2)
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=2))
    state = TrainingState(model, adapter=SeedAdapter(trainer))
    for _ in range(3):
        trainer.inner_step(model(torch.ones(1, 3)).sum())
    assert find_nan(incoming_from_source(snap(state))) is None
    trainer.outer_optimizer.velocity["bias"][1] = float("nan")
    assert find_nan(incoming_from_source(snap(state))) == "momentum/bias"


# ---------------------------------------------------------------- memory


def test_a_restore_takes_little_memory_beyond_the_state_itself():
    torch.manual_seed(0)

    def made():
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])  # 64 MiB, 192 with moments
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    for param in model.parameters():
        optimizer.state[param] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.randn_like(param),
            "exp_avg_sq": torch.rand_like(param),
        }
    source = Camera(TrainingState(model, [optimizer], rng=False)).snap()
    size = source.manifest.raw_bytes
    expected = everything(model, [optimizer])
    del model, optimizer
    other, joiner = made()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator kept of the first model would hide what comes now
    state = TrainingState(other, [joiner], rng=False)
    before, peak = spread_ram(), [0]
    real = source.read_into

    def watched(section, offset, out):
        real(section, offset, out)
        peak[0] = max(peak[0], spread_ram())

    source.read_into = watched
    restore(state, source)
    after = spread_ram()
    assert everything(other, [joiner]) == expected
    assert after - before > size * 0.6  # the moments are there now
    assert max(peak[0], after) - after < 0.15 * size
    assert after - before < size * (2 / 3 + 0.15)
    assert raw(next(other.parameters()))
