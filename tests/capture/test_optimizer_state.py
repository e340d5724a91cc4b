"""Optimizer state follows parameter names, is never cast, and is emptied where the snapshot has none."""

from __future__ import annotations

import pytest
import torch
from capture_kit import everything, fingerprint, raw, restore, snap
from torch import nn

from hotswarm.capture.restore import JOIN, RESUME, RestoreParts
from hotswarm.capture.state import TrainingState
from hotswarm.errors import Incompatible


def steps(model, optimizer, count=3, seed=0):
    for k in range(count):
        torch.manual_seed(seed + k)
        optimizer.zero_grad()
        width = next(p for p in model.parameters() if p.dim() == 2).shape[1]
        dtype = next(model.parameters()).dtype
        model(torch.randn(4, width).to(dtype)).float().square().mean().backward()
        optimizer.step()


def by_name(model, optimizer):
    """{parameter name: fingerprint of its state}, by an own walk over the modules."""
    return {name: fingerprint(dict(optimizer.state.get(param, {}))) for name, param in model.named_parameters()}


def test_all_group_settings_come_along_with_their_types():
    model = nn.Linear(3, 2)
    donor = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
    donor.param_groups[0].update(tag="x", counter=58, pair=(1, 2.5), flag=True)
    steps(model, donor)
    source = snap(TrainingState(model, [donor]))
    other = nn.Linear(3, 2)
    joiner = torch.optim.SGD(other.parameters(), lr=0.75, momentum=0.1)
    restore(TrainingState(other, [joiner]), source)
    mine, theirs = dict(joiner.param_groups[0]), dict(donor.param_groups[0])
    del mine["params"], theirs["params"]
    assert mine == theirs
    assert {key: type(value) for key, value in mine.items()} == {key: type(value) for key, value in theirs.items()}


def test_betas_stay_a_tuple_and_a_tensor_learning_rate_a_tensor():
    model = nn.Linear(3, 2)
    donor = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.25), betas=(0.5, 0.75), foreach=False)
    source = snap(TrainingState(model, [donor]))
    other = nn.Linear(3, 2)
    joiner = torch.optim.AdamW(other.parameters(), lr=torch.tensor(1.0))
    lr = joiner.param_groups[0]["lr"]
    restore(TrainingState(other, [joiner]), source)
    group = joiner.param_groups[0]
    assert group["betas"] == (0.5, 0.75)
    assert type(group["betas"]) is tuple
    assert group["lr"] is lr  # filled in place: a compiled step may hold it
    assert float(lr) == 0.25
    assert group["amsgrad"] is False
    assert group["foreach"] is False


def test_never_stepped_optimizers_on_either_side():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    cold = TrainingState(model, [torch.optim.AdamW(model.parameters())])
    warm = TrainingState(other, [torch.optim.AdamW(other.parameters())])
    steps(other, warm.optimizers[0])
    warm_source, cold_source = snap(warm), snap(cold)
    restore(cold, warm_source)
    assert everything(model, cold.optimizers) == everything(other, warm.optimizers)
    restore(warm, cold_source)
    assert len(warm.optimizers[0].state) == 0  # emptied, not kept
    steps(other, warm.optimizers[0])


@pytest.mark.parametrize(("weights", "moments"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_moments_keep_their_dtype_and_bits(weights, moments):
    model = nn.Linear(5, 3).to(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optimizer.state[param]["momentum_buffer"] = torch.randn(param.shape, dtype=torch.float64).to(moments)
    expected = by_name(model, optimizer)
    other = nn.Linear(5, 3).to(weights)
    joiner = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    restore(TrainingState(other, [joiner]), snap(TrainingState(model, [optimizer])))
    assert by_name(other, joiner) == expected
    assert all(state["momentum_buffer"].dtype is moments for state in joiner.state.values())


@pytest.mark.parametrize("settings", [{"foreach": True}, {"fused": False}, {"capturable": False}, {"fused": True}])
def test_step_is_a_scalar_on_the_right_device_and_the_next_step_works(settings):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    joiner = torch.optim.AdamW(other.parameters(), **settings)
    steps(model, optimizer)
    restore(TrainingState(other, [joiner]), snap(TrainingState(model, [optimizer])))
    for state in joiner.state.values():
        assert state["step"].shape == ()
        assert state["step"].dtype is torch.float32
        assert state["step"].device.type == "cpu"
        assert float(state["step"]) == 3
    steps(model, optimizer, 1, seed=50)
    steps(other, joiner, 1, seed=50)
    assert everything(other, [joiner]) == everything(model, [optimizer])


def test_state_follows_names_when_the_joiner_lists_its_parameters_backwards():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # equal shapes: positions would swap silently
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    joiner = torch.optim.AdamW(list(other.parameters())[::-1])
    restore(TrainingState(other, [joiner]), snap(TrainingState(model, [optimizer])))
    assert by_name(other, joiner) == by_name(model, optimizer)


def two_groups(model, *, swapped=False):
    decay = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups[::-1] if swapped else groups)


def test_groups_in_another_order_are_matched_by_their_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = two_groups(model)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.5, 0.25
    steps(model, optimizer)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    joiner = two_groups(other, swapped=True)
    restore(TrainingState(other, [joiner]), snap(TrainingState(model, [optimizer])))
    assert by_name(other, joiner) == by_name(model, optimizer)
    assert [(g["weight_decay"], g["lr"]) for g in joiner.param_groups] == [(0.0, 0.25), (0.1, 0.5)]


def test_another_split_into_groups_is_refused_with_both_lists():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer, joiner = two_groups(model), torch.optim.AdamW(other.parameters())
    before = everything(other, [joiner])
    with pytest.raises(Incompatible, match=r"\[0.weight, 0.bias, .*here, \[0.weight, 1.weight\] \| \[0.bias, 1.bias\]"):
        restore(TrainingState(other, [joiner]), snap(TrainingState(model, [optimizer])))
    assert everything(other, [joiner]) == before


def test_another_kind_of_optimizer_is_refused_and_nothing_changes():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    joiner = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    steps(model, optimizer)
    steps(other, joiner)
    before = everything(other, [joiner])
    with pytest.raises(Incompatible, match="SGD here and AdamW in the snapshot"):
        restore(TrainingState(other, [joiner]), snap(TrainingState(model, [optimizer])))
    with pytest.raises(Incompatible, match="AdamW here and SGD in the snapshot"):
        restore(TrainingState(model, [optimizer]), snap(TrainingState(other, [joiner])))
    assert everything(other, [joiner]) == before


def test_state_of_lbfgs_and_amsgrad_with_lists_and_none_survives():
    for make in (
        lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, history_size=3),
        lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
        lambda m: torch.optim.Adagrad(m.parameters()),
        lambda m: torch.optim.Rprop(m.parameters()),
    ):
        model, other = nn.Linear(3, 2), nn.Linear(3, 2)
        optimizer, joiner = make(model), make(other)
        data = torch.ones(4, 3)

        def step(model, optimizer, data=data):
            def closure():
                optimizer.zero_grad()
                loss = model(data).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

        for _ in range(2):
            step(model, optimizer)
        restore(TrainingState(other, [joiner]), snap(TrainingState(model, [optimizer])))
        assert fingerprint(joiner.state_dict()) == fingerprint(optimizer.state_dict())
        step(model, optimizer)
        step(other, joiner)
        assert everything(other, [joiner]) == everything(model, [optimizer])


def test_two_optimizers_each_get_their_own_state():
    def made():
        model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 3)})
        return model, [torch.optim.AdamW(model["g"].parameters()), torch.optim.SGD(model["d"].parameters(), 0.1, 0.9)]

    model, optimizers = made()
    for part, optimizer in zip(("g", "d"), optimizers, strict=True):
        steps(model[part], optimizer)
    other, joiners = made()
    restore(TrainingState(other, joiners), snap(TrainingState(model, optimizers)))
    assert everything(other, joiners) == everything(model, optimizers)
    with pytest.raises(Incompatible, match="1 optimizers here and more"):
        restore(TrainingState(other, joiners[:1]), snap(TrainingState(model, optimizers)))


def test_live_tensors_are_filled_in_place_and_keep_their_identity():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, joiner = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    steps(model, optimizer)
    steps(other, joiner, 5)
    params = list(other.parameters())
    places = [p.data_ptr() for p in params]
    moments = [joiner.state[p]["exp_avg"] for p in params]
    restore(TrainingState(other, [joiner]), snap(TrainingState(model, [optimizer])))
    assert [id(p) for p in other.parameters()] == [id(p) for p in params]
    assert [p.data_ptr() for p in params] == places
    assert all(a is joiner.state[p]["exp_avg"] for a, p in zip(moments, params, strict=True))
    assert everything(other, [joiner]) == everything(model, [optimizer])


@pytest.mark.parametrize("mode", ["keep", "empty"])
def test_own_or_fresh_moments_with_the_snapshots_learning_rate(mode):
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, joiner = torch.optim.AdamW(model.parameters(), lr=0.5), torch.optim.AdamW(other.parameters(), lr=0.125)
    steps(model, optimizer)
    steps(other, joiner, 2)
    own = by_name(other, joiner)
    parts = RestoreParts(optimizer=mode)
    restore(TrainingState(other, [joiner]), snap(TrainingState(model, [optimizer])), parts)
    assert joiner.param_groups[0]["lr"] == 0.5
    assert by_name(other, joiner) == (own if mode == "keep" else {"weight": {}, "bias": {}})
    assert raw(other.weight) == raw(model.weight)


def test_shared_step_tensors_stay_one_object():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, joiner = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    steps(model, optimizer)
    shared = torch.tensor(3.0)
    for state in optimizer.state.values():
        state["step"] = shared
    restore(TrainingState(other, [joiner]), snap(TrainingState(model, [optimizer])))
    a, b = (state["step"] for state in joiner.state.values())
    assert a is b
    assert float(a) == 3


def test_frozen_parameters_and_adapters():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(4, 4, bias=False)
            self.base.weight.requires_grad_(False)
            self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x):
            return self.base(x) + self.b(self.a(x))

    model, other = Adapted(), Adapted()
    optimizer, joiner = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    steps(model, optimizer)
    source = snap(TrainingState(model, [optimizer]))
    restore(TrainingState(other, [joiner]), source)
    assert [p.requires_grad for p in other.parameters()] == [False, True, True]
    assert len(joiner.state) == 2
    assert everything(other, [joiner]) == everything(model, [optimizer])
    other.base.weight.requires_grad_(True)
    with pytest.raises(Incompatible, match=r"base\.weight is trained here and frozen in the snapshot"):
        restore(TrainingState(other, [joiner]), source)
    other.base.weight.requires_grad_(False)
    other.a.weight.requires_grad_(False)
    with pytest.raises(Incompatible, match=r"a\.weight is frozen here and trained in the snapshot"):
        restore(TrainingState(other, [joiner]), source, RESUME)
    with pytest.raises(Incompatible, match=r"a\.weight"):
        restore(TrainingState(other, [joiner]), source, JOIN)
