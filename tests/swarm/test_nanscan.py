from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotswarm.swarm.nanscan import find_nan

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
    torch.float8_e5m2fnuz,
    torch.complex64,
    torch.complex128,
]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_bit_pattern_agrees_with_torch(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    if dtype.itemsize == 1:
        data = np.arange(256, dtype=np.uint8).tobytes()
    elif dtype.itemsize == 2:
        data = np.arange(65536, dtype=np.uint16).tobytes()
    else:
        data = rng.integers(0, 256, 200_000 * dtype.itemsize, dtype=np.uint8).tobytes()
    numbers = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
    bad = torch.isnan(numbers.to(torch.complex128 if dtype.is_complex else torch.float64)).nonzero().flatten().tolist()
    found = find_nan(str(dtype).removeprefix("torch."), memoryview(data))
    assert (found is None) == (not bad)
    if found is not None:
        assert found // dtype.itemsize == bad[0]


@given(st.lists(st.floats(width=32), max_size=200))
def test_floats_agree_with_python(numbers: list[float]) -> None:
    data = np.array(numbers, dtype="<f4").tobytes()
    first = next((i for i, number in enumerate(numbers) if math.isnan(number)), None)
    assert find_nan("float32", data) == (None if first is None else first * 4)


def test_infinities_and_huge_numbers_are_no_nan() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        numbers = torch.tensor(
            [float("inf"), -float("inf"), torch.finfo(dtype).max, -torch.finfo(dtype).max], dtype=dtype
        )
        assert find_nan(str(dtype).removeprefix("torch."), raw(numbers)) is None


def test_integers_have_no_nan() -> None:
    assert find_nan("int64", b"\xff" * 64) is None
    assert find_nan("bool", b"\x01" * 64) is None
