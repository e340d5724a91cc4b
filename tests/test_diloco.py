"""The reference trainer: the published special cases, its shape, and what an exception leaves behind."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from hotswarm.diloco import DiLoCoConfig, DiLoCoPhase, DiLoCoTrainer, OuterOptimizer
from hotswarm.errors import ConfigError, HotswarmError

H = 5


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, worker: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)


def loss_of(model: nn.Module, step: int, worker: int = 0) -> Tensor:
    x, y = batch(step, worker)
    return nn.functional.mse_loss(model(x), y)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_bitwise(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.int32), other[name].view(torch.int32)), name


# ------------------------------------------------------------------ published special cases (arXiv 2311.08105)


def far_from_zero(model: nn.Module) -> nn.Module:
    """Every parameter in [0.5, 1): no round here moves one by a factor of two, so that θ - θi is exact (Sterbenz)."""
    with torch.no_grad():
        for param in model.parameters():
            param.abs_().remainder_(0.5).add_(0.5)
    return model


def test_one_worker_with_outer_lr_1_and_no_momentum_is_plain_adamw_bit_for_bit() -> None:
    model = far_from_zero(make_model())
    plain = copy.deepcopy(model)
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=H, inner_lr=1e-3, outer_lr=1.0, outer_momentum=0.0))
    adamw = AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)
    for step in range(4 * H):
        trainer.inner_step(loss_of(model, step))
        adamw.zero_grad()
        loss_of(plain, step).backward()
        adamw.step()
        assert_bitwise(weights(model), weights(plain))
    assert trainer.stats.outer_step_count == 4


def test_near_zero_weights_it_is_adamw_up_to_the_rounding_of_one_subtraction() -> None:
    model = make_model()
    plain, rounded = copy.deepcopy(model), copy.deepcopy(model)
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=H, inner_lr=1e-2, outer_lr=1.0, outer_momentum=0.0))
    adamw, adamw_rounded = (AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (plain, rounded))
    start = weights(rounded)
    for step in range(4 * H):
        trainer.inner_step(loss_of(model, step))
        for other, optimizer in ((plain, adamw), (rounded, adamw_rounded)):
            optimizer.zero_grad()
            loss_of(other, step).backward()
            optimizer.step()
        if (step + 1) % H == 0:
            with torch.no_grad():
                for name, param in rounded.named_parameters():
                    param.copy_(start[name] - (start[name] - param))
            start = weights(rounded)
        assert_bitwise(weights(model), weights(rounded))
    for name, param in weights(plain).items():
        torch.testing.assert_close(weights(model)[name], param, rtol=1e-4, atol=1e-5)


class Meeting:
    """Averages over threads at a barrier, in worker order: what an all-reduce does, small enough to read."""

    def __init__(self, workers: int) -> None:
        self.barrier = threading.Barrier(workers, timeout=30)
        self.slots: list[dict[str, Tensor]] = [{} for _ in range(workers)]

    def average(self, worker: int, own: dict[str, Tensor]) -> dict[str, Tensor]:
        self.slots[worker] = own
        self.barrier.wait()
        averaged = {name: sum(slot[name] for slot in self.slots) / len(self.slots) for name in own}
        self.barrier.wait()
        return averaged


def train_together(workers: int, rounds: int, config: DiLoCoConfig) -> list[DiLoCoTrainer]:
    meeting = Meeting(workers)
    trainers = [
        DiLoCoTrainer(make_model(), config, average=lambda own, w=worker: meeting.average(w, own))
        for worker in range(workers)
    ]
    failures: list[BaseException] = []

    def run(worker: int) -> None:
        try:
            for step in range(rounds * config.inner_steps):
                trainers[worker].inner_step(loss_of(trainers[worker].model, step, worker))
        except Exception as error:  # noqa: BLE001  # goes to the main thread, which fails
            failures.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    return trainers


def test_outer_lr_1_without_momentum_averages_the_workers_parameters() -> None:
    trainers = train_together(3, 1, DiLoCoConfig(inner_steps=H, inner_lr=1e-3, outer_lr=1.0, outer_momentum=0.0))
    alone = []
    for worker in range(3):
        model = make_model()
        adamw = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        for step in range(H):
            adamw.zero_grad()
            loss_of(model, step, worker).backward()
            adamw.step()
        alone.append(weights(model))
    for name, got in weights(trainers[0].model).items():
        mean = torch.stack([each[name].double() for each in alone]).mean(0)
        torch.testing.assert_close(got.double(), mean, rtol=1e-6, atol=1e-7)


def test_workers_hold_the_same_outer_state_bit_for_bit_after_every_round_and_different_moments() -> None:
    trainers = train_together(3, 4, DiLoCoConfig(inner_steps=H, inner_lr=1e-2))
    for other in trainers[1:]:
        assert_bitwise(other.initial_weights, trainers[0].initial_weights)
        assert_bitwise(other.outer_optimizer.velocity, trainers[0].outer_optimizer.velocity)
    first, second = (next(iter(t.inner_optimizer.state.values()))["exp_avg"] for t in trainers[:2])
    assert not torch.equal(first, second)


def test_the_outer_update_is_sgd_nesterov_on_the_outer_copy() -> None:
    model = make_model()
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=H, inner_lr=1e-2))
    seen: list[dict[str, Tensor]] = []
    trainer.set_average(lambda own: seen.append({k: v.clone() for k, v in own.items()}) or own)
    outer = {name: param.clone().requires_grad_() for name, param in weights(model).items()}
    sgd = torch.optim.SGD(outer.values(), lr=0.7, momentum=0.9, nesterov=True)
    for step in range(3 * H):
        if trainer.inner_step(loss_of(model, step)):
            for name, param in outer.items():
                param.grad = seen[-1][name]
            sgd.step()
            for name, param in weights(model).items():
                torch.testing.assert_close(param, outer[name].detach(), rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------ the shape that a checkpointer recognises


def test_the_shape_and_the_counters_through_a_round() -> None:
    model = make_model()
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=2))
    assert trainer.initial_weights == {}
    assert trainer.phase.value == "idle"
    assert trainer.inner_optimizer.state_dict()["state"] == {}
    start = weights(model)
    assert trainer.inner_step(loss_of(model, 0)) is False
    assert_bitwise(trainer.initial_weights, start)
    stats = trainer.stats
    assert (stats.inner_step_count, stats.outer_step_count, stats.total_inner_steps) == (1, 0, 1)
    assert trainer.phase is DiLoCoPhase.INNER
    assert trainer.inner_step(loss_of(model, 1)) is True
    assert (stats.inner_step_count, stats.outer_step_count, stats.total_inner_steps) == (0, 1, 2)
    assert_bitwise(trainer.initial_weights, weights(model))
    assert set(trainer.outer_optimizer.state_dict()) == {"lr", "momentum", "weight_decay", "nesterov", "velocity"}


def test_the_callback_comes_after_the_update_and_before_the_outer_copy_is_refreshed() -> None:
    model = make_model()
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=1, inner_lr=1e-2))
    start, calls = weights(model), []

    def look() -> None:
        calls.append((trainer.stats.outer_step_count, trainer.stats.inner_step_count))
        assert_bitwise(trainer.initial_weights, start)
        assert not torch.equal(weights(model)["0.weight"], start["0.weight"])

    trainer.set_outer_step_callback(look)
    trainer.inner_step(loss_of(model, 0))
    assert calls == [(1, 0)]
    trainer.set_outer_step_callback(None)
    trainer.inner_step(loss_of(model, 1))
    assert len(calls) == 1


def test_the_lock_is_held_through_the_step_and_its_outer_step() -> None:
    model, inside, go_on, got = make_model(), threading.Event(), threading.Event(), []

    def slow_average(own: dict[str, Tensor]) -> dict[str, Tensor]:
        inside.set()
        assert go_on.wait(30)
        return own

    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=1), average=slow_average)
    thread = threading.Thread(target=lambda: trainer.inner_step(loss_of(model, 0)))
    thread.start()
    assert inside.wait(30)
    got.append(trainer._lock.acquire(timeout=0.05))
    go_on.set()
    got.append(trainer._lock.acquire(timeout=30))
    assert got == [False, True]
    assert trainer.stats.outer_step_count == 1
    trainer._lock.release()
    thread.join(30)


def test_the_scheduler_steps_once_per_inner_step_inside_the_lock() -> None:
    model = make_model()
    inner = AdamW(model.parameters(), lr=1.0)
    trainer = DiLoCoTrainer(
        model, DiLoCoConfig(inner_steps=2), inner, scheduler=LambdaLR(inner, lambda step: 1 / (1 + step))
    )
    rates = []
    for step in range(4):
        rates.append(inner.param_groups[0]["lr"])
        trainer.inner_step(loss_of(model, step))
    assert rates == [1.0, 1 / 2, 1 / 3, 1 / 4]


def test_frozen_parameters_are_no_part_of_the_outer_state() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=1))
    frozen = weights(model)["0.weight"]
    trainer.inner_step(loss_of(model, 0))
    assert set(trainer.initial_weights) == {"2.weight", "2.bias"}
    assert torch.equal(weights(model)["0.weight"], frozen)


# ------------------------------------------------------------------ failures


def test_a_failed_average_changes_nothing_and_the_outer_step_can_be_tried_again() -> None:
    model, twin = make_model(), make_model()
    config = DiLoCoConfig(inner_steps=2, inner_lr=1e-2)
    working, failing = DiLoCoTrainer(twin, config), DiLoCoTrainer(model, config)

    def no_network(own: dict[str, Tensor]) -> dict[str, Tensor]:
        raise ConnectionError("link down")

    failing.set_average(no_network)
    for step in range(2):
        working.inner_step(loss_of(twin, step))
        if step == 0:
            failing.inner_step(loss_of(model, step))
    with pytest.raises(ConnectionError):
        failing.inner_step(loss_of(model, 1))
    assert failing.phase is DiLoCoPhase.OUTER
    assert (failing.stats.inner_step_count, failing.stats.outer_step_count) == (2, 0)
    assert failing.outer_optimizer.velocity == {}
    with pytest.raises(HotswarmError, match="outer_step"):
        failing.inner_step(loss_of(model, 2))
    failing.set_average(None)
    failing.outer_step()
    assert_bitwise(weights(model), weights(twin))
    assert_bitwise(failing.outer_optimizer.velocity, working.outer_optimizer.velocity)


def test_an_average_of_another_shape_or_with_a_name_missing_is_refused_before_anything_moves() -> None:
    model = make_model()
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=1))
    trainer.set_average(lambda own: {name: grad for name, grad in own.items() if name != "2.bias"})
    with pytest.raises(HotswarmError, match=r"2\.bias"):
        trainer.inner_step(loss_of(model, 0))
    moved = weights(model)
    trainer.set_average(lambda own: {name: grad.reshape(-1)[:1] for name, grad in own.items()})
    with pytest.raises(HotswarmError, match="shapes and dtypes"):
        trainer.outer_step()
    assert_bitwise(weights(model), moved)
    assert trainer.stats.outer_step_count == 0


def test_the_outer_copy_is_refreshed_even_when_the_callback_raises() -> None:
    model = make_model()
    trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=1, inner_lr=1e-2))

    def broken() -> None:
        raise ValueError("a user's bug")

    trainer.set_outer_step_callback(broken)
    with pytest.raises(ValueError, match="bug"):
        trainer.inner_step(loss_of(model, 0))
    assert_bitwise(trainer.initial_weights, weights(model))


def test_outer_state_loads_whole_or_not_at_all() -> None:
    optimizer, buf = OuterOptimizer(lr=0.7, momentum=0.9, weight_decay=0.01), torch.ones(3)
    optimizer.load_state_dict({"lr": 0.5, "momentum": 0.8, "nesterov": True, "velocity": {"w": buf}})
    assert (optimizer.lr, optimizer.momentum, optimizer.weight_decay) == (0.5, 0.8, 0.01)
    buf.zero_()
    assert optimizer.velocity["w"].tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ConfigError):
        optimizer.load_state_dict({"lr": 0.1, "momentum": 2.0, "velocity": {}})
    assert (optimizer.lr, list(optimizer.velocity)) == (0.5, ["w"])


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"inner_steps": 0}, "inner_steps"),
        ({"outer_momentum": 1.0}, "momentum"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
    ],
)
def test_a_bad_config_names_its_field(kwargs: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DiLoCoConfig(**kwargs)
    assert caught.value.field == field
