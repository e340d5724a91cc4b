from __future__ import annotations

import pytest
import torch

from hotswarm.snapshot.dtypes import ITEMSIZE


def _viewable():
    found = {}
    for value in vars(torch).values():
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.quint")):
            try:
                found[str(value).removeprefix("torch.")] = torch.empty(4, dtype=value).view(torch.uint8).numel() // 4
            except (RuntimeError, TypeError):
                continue
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_table_has_every_torch_dtype_that_views_as_bytes_and_its_size():
    assert {name: size for name, size in _viewable().items() if ITEMSIZE.get(name) != size} == {}


def test_every_name_of_the_table_is_a_torch_dtype():
    assert [name for name in ITEMSIZE if not isinstance(getattr(torch, name, None), torch.dtype)] == []


def test_quantized_dtypes_are_not_in_it():
    assert not {"qint8", "quint8", "qint32"} & ITEMSIZE.keys()
