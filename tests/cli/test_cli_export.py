"""`swarm-node export`: what it writes is read back here by readers of our own, numpy and torch, not by hotswarm."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from hotswarm import CheckpointConfig, DiLoCoConfig, DiLoCoTrainer, SpeculativeCheckpointer
from hotswarm.cli.main import main
from hotswarm.snapshot.manifest import SignedManifest
from hotswarm.store.files import FileStore
from support.snapshots import KeySigner, Raw, draft

NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?", "BF16": "<u2"}


def read_safetensors(path: Path):
    """({name: array}, metadata), by the format's description; bfloat16 as its 16 bits."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    body = data[8 + length :]
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert [0, *(end for _, end in spans)] == [*(begin for begin, _ in spans), len(body)], "no gaps, no overlaps"
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = np.dtype(NUMPY[entry["dtype"]])
        assert begin % dtype.itemsize == 0
        arrays[name] = np.frombuffer(body[begin:end], dtype).reshape(entry["shape"])
    return arrays, metadata


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.brain = nn.Parameter(torch.arange(3, dtype=torch.bfloat16))
        self.again = self.first  # tied

    def forward(self, x):
        return self.norm(self.first(x)) * self.brain.float().sum()


@pytest.fixture
def trained(short_dir):
    """A trainer after two rounds and one more step, with a snapshot of it; (checkpointer, trainer, metadata)."""
    torch.manual_seed(1)
    model = Net()
    trainer = DiLoCoTrainer(
        model, DiLoCoConfig(inner_steps=2), torch.optim.AdamW(model.parameters(), lr=0.01), average=lambda grads: grads
    )
    config = CheckpointConfig(checkpoint_dir=str(short_dir / "state"), announce_to_dht=False, serve_to_peers=False)
    checkpointer = SpeculativeCheckpointer(model, trainer.inner_optimizer, trainer, config)
    for step in range(5):
        loss = model(torch.full((4, 7), float(step)) + torch.randn(4, 7)).square().mean()
        trainer.inner_step(loss)
    taken = checkpointer.force_snapshot()
    assert taken is not None, checkpointer.last_error
    checkpointer.stop()
    return checkpointer, trainer, taken


@pytest.fixture
def cli(capsys):
    def run(*words):
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


def test_the_model_as_safetensors(trained, short_dir, cli):
    checkpointer, _, taken = trained
    to = short_dir / "out.safetensors"
    code, out, err = cli("export", taken.snapshot_id[:12], "--to", to, "--state-dir", short_dir / "state")
    assert (code, err) == (0, "")
    assert taken.snapshot_id in out
    arrays, metadata = read_safetensors(to)
    live = checkpointer.model.state_dict()
    assert arrays.keys() == live.keys(), "tied names too"
    for name, tensor in live.items():
        bits = tensor.view(torch.int16).numpy().view("<u2") if tensor.dtype == torch.bfloat16 else tensor.numpy()
        assert np.array_equal(arrays[name], bits), name
    assert metadata["snapshot_id"] == taken.snapshot_id
    assert (metadata["outer_step"], metadata["inner_step"], metadata["parameters"]) == ("2", "1", "live")


def test_everything_as_a_file_that_torch_reads_without_running_code(trained, short_dir, cli):
    checkpointer, trainer, taken = trained
    to = short_dir / "out.pt"
    code, out, _ = cli("export", taken.snapshot_id, "--to", to, "--json", "--state-dir", short_dir / "state")
    assert code == 0
    assert json.loads(out)["path"] == str(to)
    state = torch.load(to, weights_only=True)
    assert (state["training_step"], state["outer_step"], state["inner_step"]) == (5, 2, 1)
    fresh = Net()
    fresh.load_state_dict(state["model_state_dict"])
    for mine, theirs in zip(checkpointer.model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    optimizer.load_state_dict(state["optimizer_state_dict"])
    for mine, theirs in zip(checkpointer.model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(trainer.inner_optimizer.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    for name, tensor in trainer.initial_weights.items():
        assert torch.equal(state["diloco_state"]["initial_weights"][name], tensor)


def test_everything_as_a_folder(trained, short_dir, cli):
    checkpointer, trainer, taken = trained
    to = short_dir / "out"
    assert cli("export", taken.snapshot_id, "--to", f"{to}/", "--state-dir", short_dir / "state")[0] == 0
    assert sorted(path.name for path in to.iterdir()) == ["model.safetensors", "snapshot.json", "state.safetensors"]
    model, _ = read_safetensors(to / "model.safetensors")
    state, _ = read_safetensors(to / "state.safetensors")
    assert np.array_equal(model["first.weight"], checkpointer.model.first.weight.detach().numpy())
    weights = checkpointer.model.first.weight
    moment = trainer.inner_optimizer.state[weights]["exp_avg"].numpy()
    assert np.array_equal(state["inner/optimizer/state/first.weight/exp_avg"], moment)
    assert np.array_equal(state["outer/params/first.weight"], trainer.initial_weights["first.weight"].numpy())
    listed = json.loads((to / "snapshot.json").read_text())
    places = {(leaf["tensor"]["file"], leaf["tensor"]["name"]) for tree in listed["sections"].values() for leaf in tree
              if "tensor" in leaf}  # fmt: skip
    assert len(places) == len(model) + len(state) - 2, "the tied weight and bias are one tensor each in the tree"
    groups = [leaf for leaf in listed["sections"]["inner"] if leaf["path"] == ["optimizer", "param_groups", 0, "lr"]]
    assert [leaf["value"] for leaf in groups] == [0.01]


def test_the_daemon_s_side_needs_no_torch(trained, short_dir):
    _, _, taken = trained
    to = short_dir / "out.safetensors"
    words = ["export", taken.snapshot_id, "--to", str(to), "--state-dir", str(short_dir / "state")]
    code = f"""
import sys
from hotswarm.cli.main import main
assert main({words!r}) == 0
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert to.exists()


def fetched(folder: Path, *inner_chunks: int):
    """A store with a snapshot of another node, of which the outer section and these chunks of the inner one came.

    Chunk 0 is `b~/`, which the outer section lacks, 1 and 2 are `w`, the last two its moment.
    """
    ones, twos = np.full(400_000, 1, "<f4"), np.full(400_000, 2, "<f4")
    made, streams = draft(
        3, 7,
        inner={"model": {"w": twos, "b~/": Raw("bfloat16", (3,), b"\x80\x3f" * 3)}, "exp_avg": {"w": twos}},
        outer={"params": {"w": ones}, "outer_step": 3},
    )  # fmt: skip
    theirs = FileStore(folder / "theirs")
    with theirs:
        info = theirs.write(made, streams, KeySigner())
        signed = SignedManifest.parse(theirs.signed(info.snapshot_id).to_bytes())
        with FileStore(folder / "state") as store, theirs.open(info.snapshot_id) as source:
            partials = {}
            for name, entry in signed.manifest.sections.items():
                partials[name] = store.partial(entry)
                for index in range(len(entry.chunk_digests)):
                    if name == "outer" or index in inner_chunks:
                        partials[name].put(index, source.chunk(name, index))
            return store.add_fetched(signed, partials).snapshot_id


def test_of_a_snapshot_fetched_in_part_the_model_is_the_outer_copy(short_dir, cli):
    snapshot_id = fetched(short_dir, 0, 1, 4)
    code, out, _ = cli("export", snapshot_id, "--to", short_dir / "m.safetensors", "--state-dir", short_dir / "state")
    assert (code, "outer copy" in out) == (0, True)
    arrays, metadata = read_safetensors(short_dir / "m.safetensors")
    assert metadata["parameters"] == "outer"
    assert arrays["b~/"].tolist() == [0x3F80] * 3
    assert set(arrays["w"]) == {1.0}
    assert cli("export", snapshot_id, "--to", short_dir / "folder", "--state-dir", short_dir / "state")[0] == 0
    state, _ = read_safetensors(short_dir / "folder" / "state.safetensors")
    assert state == {}, "half of the moment is not a moment"


def test_of_a_snapshot_fetched_whole_the_model_is_the_live_one(short_dir, cli):
    snapshot_id = fetched(short_dir, *range(5))
    at = ("--state-dir", short_dir / "state")
    assert cli("export", snapshot_id, "--to", short_dir / "m.safetensors", *at)[0] == 0
    arrays, metadata = read_safetensors(short_dir / "m.safetensors")
    assert metadata["parameters"] == "live"
    assert set(arrays["w"]) == {2.0}


def test_without_a_part_of_the_model_nothing_is_written(short_dir, cli):
    snapshot_id = fetched(short_dir, 1, 2)
    to = short_dir / "m.safetensors"
    code, _, err = cli("export", snapshot_id, "--to", to, "--state-dir", short_dir / "state")
    assert (code, "b~/ is not here" in err) == (1, True), err
    assert [path.name for path in short_dir.iterdir() if "safetensors" in path.name] == []


def test_a_target_that_exists_or_says_nothing_is_a_usage_error(trained, short_dir, cli):
    _, _, taken = trained
    at = ("--state-dir", short_dir / "state")
    (short_dir / "there.pt").write_bytes(b"mine")
    for to, message in (
        (short_dir / "there.pt", "exists already"),
        (short_dir, "exists already"),
        (short_dir / "x.bin", "ends in .safetensors or .pt"),
    ):
        code, _, err = cli("export", taken.snapshot_id, "--to", to, *at)
        assert (code, message in err, err.count("\n")) == (2, True, 1), err
    assert (short_dir / "there.pt").read_bytes() == b"mine"
    assert cli("export", "0" * 32, "--to", short_dir / "y.pt", *at)[0] == 10
    code, _, err = cli("export", taken.snapshot_id, "--to", short_dir / "no" / "y.pt", *at)
    assert (code, "No such file or directory" in err) == (1, True)


def test_a_damaged_snapshot_is_not_exported(trained, short_dir, cli):
    _, _, taken = trained
    for pack in (short_dir / "state" / "runs" / "default" / "packs").iterdir():
        with pack.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
    to = short_dir / "out.safetensors"
    code, _, err = cli("export", taken.snapshot_id, "--to", to, "--state-dir", short_dir / "state")
    assert (code, to.exists()) == (13, False), err
