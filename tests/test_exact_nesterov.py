"""ExactNesterov: the right formula, the same bits everywhere, and SGD's state dict."""

from __future__ import annotations

import hashlib
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from hotswarm.diloco import ExactNesterov, OuterOptimizer, exact_nesterov_
from hotswarm.errors import ConfigError
from support.forked import Forked

CPU_FLAGS = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace") if sys.platform == "linux" else ""


def drawn(count: int, seed: int, scale_bits: int = 24) -> torch.Tensor:
    """Float32 values in about [-1, 1) from integer arithmetic alone: torch.randn differs between CPU capabilities."""
    state = torch.arange(count, dtype=torch.int64) * 2654435761 + seed * 40503 + 12345
    for _ in range(3):
        state = (state * 6364136223846793005 + 1442695040888963407) & 0x7FFF_FFFF_FFFF_FFFF
        state = state ^ (state >> 29)
    return ((state & ((1 << (scale_bits + 1)) - 1)) - (1 << scale_bits)).to(torch.float32) / float(1 << scale_bits)


# ------------------------------------------------------------------ an independent reference: rational arithmetic


def to_float32(exact: Fraction) -> Fraction:
    """`exact` rounded once to the nearest float32, ties to even, by integer arithmetic (no float anywhere)."""
    if exact == 0:
        return exact
    sign, size = (-1, -exact) if exact < 0 else (1, exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - 23, -149)  # the last place; below 2^-126 it stops shrinking
    whole, rest = divmod(size, unit)
    if rest * 2 > unit or (rest * 2 == unit and whole % 2):
        whole += 1
    return sign * whole * unit


def reference_step(
    theta: list[Fraction], grad: list[Fraction], buf: list[Fraction] | None, lr: float, momentum: float, decay: float
) -> tuple[list[Fraction], list[Fraction]]:
    rate, keep, shrink = (to_float32(Fraction(number)) for number in (lr, momentum, decay))
    new_theta, new_buf = [], []
    for i, (t, g) in enumerate(zip(theta, grad, strict=True)):
        decayed = to_float32(to_float32(t * shrink) + g) if shrink else g
        b = decayed if buf is None else to_float32(to_float32(buf[i] * keep) + decayed)
        direction = to_float32(to_float32(b * keep) + decayed)
        new_theta.append(to_float32(t - to_float32(direction * rate)))
        new_buf.append(b)
    return new_theta, new_buf


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_it_equals_a_reference_in_rational_arithmetic_bit_for_bit(decay: float) -> None:
    param = drawn(400, seed=1)
    optimizer = ExactNesterov([param], lr=0.7, momentum=0.9, weight_decay=decay)
    theta, buf = [Fraction(x) for x in param.tolist()], None
    for step in range(6):
        param.grad = drawn(400, seed=100 + step) * 0.01
        theta, buf = reference_step(theta, [Fraction(x) for x in param.grad.tolist()], buf, 0.7, 0.9, decay)
        optimizer.step()
        assert [Fraction(x) for x in param.tolist()] == theta
        assert [Fraction(x) for x in optimizer.state[param]["momentum_buffer"].tolist()] == buf


def test_the_reference_rounds_as_float32_does() -> None:
    for value in (1 / 3, 2.0**-149, 2.0**-150, 3 * 2.0**-150, 1e-40, 16777217.0, 16777219.0, -0.1):
        assert to_float32(Fraction(value)) == Fraction(torch.tensor(value, dtype=torch.float32).item())


# ------------------------------------------------------------------ the same bits on every host


def digest(threads: str) -> None:
    """In a process of its own: prints the CPU capability in use and the digest of ten steps."""
    torch.set_num_threads(int(threads))
    shapes = [(300, 333), (257,), (3, 5, 7), (1,)]
    params = [drawn(torch.Size(shape).numel(), seed=i).view(shape) for i, shape in enumerate(shapes)]
    optimizer = ExactNesterov(params, lr=0.7, momentum=0.9, weight_decay=0.001)
    for step in range(10):
        for i, param in enumerate(params):
            param.grad = drawn(param.numel(), seed=1000 * step + i).view(param.shape) * 0.003
        optimizer.step()
    found = hashlib.sha256()
    for param in params:
        found.update(param.numpy().tobytes())
        found.update(optimizer.state[param]["momentum_buffer"].numpy().tobytes())
    print(torch.backends.cpu.get_cpu_capability(), found.hexdigest(), flush=True)


def test_the_digest_is_the_same_under_every_cpu_capability_and_thread_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = [("default", 1), ("default", 2)]
    if "avx2" in CPU_FLAGS:
        variants.append(("avx2", 2))
    if "avx512vl" in CPU_FLAGS and "avx512dq" in CPU_FLAGS:
        variants.append(("avx512", 1))
    said = []
    for number, (capability, threads) in enumerate(variants):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)  # read when the child runs its first kernel
        out = tmp_path / f"{number}.out"
        child = Forked(digest, str(threads), out, tmp_path / f"{number}.err")
        try:
            assert child.wait(100) == 0, (tmp_path / f"{number}.err").read_text()
        finally:
            child.end()
        said.append(out.read_text().split())
    assert [name for name, _ in said[:2]] == ["DEFAULT", "DEFAULT"]
    assert len({name for name, _ in said}) == len({capability for capability, _ in variants})
    assert len({found for _, found in said}) == 1, said


# ------------------------------------------------------------------ and it is SGD with Nesterov momentum


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_agrees_with_sgd_nesterov_within_rounding(momentum: float, decay: float) -> None:
    ours, theirs = drawn(5000, seed=3), drawn(5000, seed=3)
    exact = ExactNesterov([ours], lr=0.7, momentum=momentum, weight_decay=decay)
    sgd = torch.optim.SGD([theirs], lr=0.7, momentum=momentum, nesterov=momentum > 0, weight_decay=decay)
    for step in range(20):
        ours.grad = drawn(5000, seed=step) * 0.01
        theirs.grad = ours.grad.clone()
        exact.step()
        sgd.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert ("momentum_buffer" in exact.state[ours]) == (momentum > 0)


def test_state_dicts_pass_between_it_and_sgd() -> None:
    param = drawn(100, seed=5)
    param.grad = drawn(100, seed=6)
    sgd = torch.optim.SGD([param], lr=0.3, momentum=0.8, nesterov=True)
    sgd.step()
    exact = ExactNesterov([param], lr=0.7)
    exact.load_state_dict(sgd.state_dict())
    assert exact.param_groups[0]["lr"] == 0.3
    assert torch.equal(exact.state[param]["momentum_buffer"], sgd.state[param]["momentum_buffer"])
    exact.step()
    sgd.load_state_dict(exact.state_dict())
    sgd.step()


def test_gradients_are_left_as_they_were_and_parameters_without_one_stay() -> None:
    with_grad, without = drawn(64, seed=7), drawn(64, seed=8)
    with_grad.grad = drawn(64, seed=9)
    grad, still = with_grad.grad.clone(), without.clone()
    optimizer = ExactNesterov([with_grad, without], lr=0.5, momentum=0.9, weight_decay=0.1)
    optimizer.step()
    optimizer.step()
    assert torch.equal(with_grad.grad, grad)
    assert torch.equal(without, still)
    assert without not in optimizer.state


def test_the_named_form_gives_the_same_bits() -> None:
    a, b = drawn(300, seed=1), drawn(300, seed=1)
    optimizer, named = ExactNesterov([a], lr=0.7, momentum=0.9), OuterOptimizer(lr=0.7, momentum=0.9)
    for step in range(4):
        a.grad = drawn(300, seed=50 + step)
        optimizer.step()
        named.step({"w": b}, {"w": a.grad})
    assert torch.equal(a, b)
    assert torch.equal(optimizer.state[a]["momentum_buffer"], named.velocity["w"])


def test_reduced_precision_rounds_once_per_operation() -> None:
    param, grad = drawn(500, seed=2).bfloat16(), drawn(500, seed=4).bfloat16()
    wide, wide_grad = param.float(), grad.float()
    direction = ((wide_grad * 0.9).bfloat16().float() + wide_grad).bfloat16()
    step = (direction.float() * torch.tensor(0.7)).bfloat16()
    exact_nesterov_(param, grad, None, lr=0.7, momentum=0.9)
    assert torch.equal(param, (wide - step.float()).bfloat16())


@pytest.mark.parametrize(
    ("kwargs", "field"),
    [
        ({"lr": -0.1}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"momentum": -0.1}, "momentum"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(kwargs: dict[str, float], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ExactNesterov([torch.zeros(1)], **kwargs)
    assert caught.value.field == field


def test_a_state_of_another_rule_is_refused_and_changes_nothing() -> None:
    param = torch.zeros(2)
    exact = ExactNesterov([param], lr=0.7)
    damped = torch.optim.SGD([param], lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(ConfigError, match="dampening"):
        exact.load_state_dict(damped.state_dict())
    assert exact.param_groups[0]["lr"] == 0.7


def test_sparse_gradients_are_refused() -> None:
    param = torch.zeros(4)
    param.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([1.0]), (4,), check_invariants=True)
    with pytest.raises(TypeError, match="sparse"):
        ExactNesterov([param], lr=0.1).step()
