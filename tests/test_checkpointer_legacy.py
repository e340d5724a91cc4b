"""Files of the older checkpointer: read without running them, and without believing their size."""

from __future__ import annotations

import gzip
import os
import pickle
import tracemalloc
from pathlib import Path

import pytest
import torch

from hotswarm.errors import StoreError
from hotswarm.legacy import is_legacy, load_legacy


def old_dict() -> dict[str, object]:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {
        "checkpoint_type": "hot",
        "timestamp": 1.5,
        "node_id": "n",
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "training_step": 7,
        "outer_step": 1,
        "inner_step": 2,
    }


@pytest.mark.parametrize("suffix", [".pt", ".pt.gz"])
def test_an_old_file_loads(suffix: str, tmp_path: Path) -> None:
    saved, path = old_dict(), tmp_path / f"hot_1700000000_node{suffix}"
    opener = gzip.open if suffix.endswith("gz") else open
    with opener(path, "wb") as file:
        torch.save(saved, file)
    loaded = load_legacy(path)
    assert is_legacy(path)
    assert loaded.keys() == saved.keys()
    assert torch.equal(loaded["model_state_dict"]["weight"], saved["model_state_dict"]["weight"])
    assert loaded["training_step"] == 7


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, ("touch /tmp/hotswarm-must-not-exist",))


@pytest.mark.parametrize("writer", [pickle.dump, torch.save], ids=["pickle", "torch.save"])
def test_a_file_that_would_run_code_is_refused_and_runs_none(writer: object, tmp_path: Path) -> None:
    path = tmp_path / "evil.pt"
    with path.open("wb") as file:
        writer({"model_state_dict": Payload()}, file)
    with pytest.raises(StoreError, match=r"evil\.pt"):
        load_legacy(path)
    assert not Path("/tmp/hotswarm-must-not-exist").exists()


def test_a_small_file_that_unpacks_to_gigabytes_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match="unpacks to more than 8388608 bytes"):
            load_legacy(path, max_bytes=8 << 20)
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_damaged_file_is_named(size: int, tmp_path: Path) -> None:
    whole = tmp_path / "whole.pt"
    torch.save(old_dict(), whole)
    for path in (tmp_path / "cut.pt", tmp_path / "cut.pt.gz"):
        data = whole.read_bytes()[:size]
        path.write_bytes(gzip.compress(data)[:-9] if path.suffix == ".gz" and size else data)
        with pytest.raises(StoreError, match="cut"):
            load_legacy(path)


def test_a_missing_file_and_a_file_without_a_dict_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"gone\.pt"):
        load_legacy(tmp_path / "gone.pt")
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    with pytest.raises(StoreError, match="holds a Tensor"):
        load_legacy(tmp_path / "tensor.pt")
