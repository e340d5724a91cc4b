"""Which tensors are captured, under which names, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from capture_kit import everything, fingerprint, raw, restore, snap
from torch import nn

from hotswarm.capture.state import TrainingState
from hotswarm.capture.tensors import NAME_OF_DTYPE
from hotswarm.errors import CaptureError, Incompatible
from hotswarm.snapshot.dtypes import ITEMSIZE
from hotswarm.snapshot.tree import Alias, TensorSpec

# ---------------------------------------------------------------- names


def model_names(source):
    leaves = source.manifest.sections["inner"].leaves
    return sorted(leaf.path[1] for leaf in leaves if len(leaf.path) == 2 and leaf.path[0] == "model")


class Wrapper(nn.Module):
    """What DistributedDataParallel does to names, without processes."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def compiled(model):
    return torch.compile(model, backend="eager")


def test_names_are_the_same_for_plain_compiled_and_wrapped_models():
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    expected = sorted(plain.state_dict())
    source = snap(TrainingState(plain, [torch.optim.SGD(plain.parameters(), 0.1)]))
    assert model_names(source) == expected
    wrappings = [compiled, Wrapper, lambda m: Wrapper(compiled(m)), lambda m: compiled(Wrapper(m))]
    for wrap in wrappings:
        inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model = wrap(inner)
        state = TrainingState(model, [torch.optim.SGD(model.parameters(), 0.1)])
        restore(state, source)
        assert fingerprint(dict(inner.state_dict())) == fingerprint(dict(plain.state_dict()))
        again = snap(state)
        assert model_names(again) == expected
        assert again.manifest.arch == source.manifest.arch
        source = again  # eager → compiled → … → eager, each from the one before
    last = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    restore(TrainingState(last, [torch.optim.SGD(last.parameters(), 0.1)]), source)
    assert everything(last) == everything(plain)


def test_a_layer_that_is_really_called_module_keeps_its_place():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 2)
            self.module = nn.Linear(3, 3)

    source = snap(TrainingState(Odd()))
    assert model_names(source) == ["bias", "head.bias", "head.weight", "weight"]

    class Clash(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2, bias=False)
            self.weight = nn.Parameter(torch.ones(1))

    with pytest.raises(CaptureError, match="two different tensors"):
        snap(TrainingState(Clash()))


class Loose(nn.Module):
    """Layers that no state_dict() knows, and parameters that nobody knows."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = {3: nn.Linear(4, 4), 7: nn.Linear(4, 4)}
        self.tail = [nn.Linear(4, 2)]
        self.inner = type("Holder", (), {})()
        self.inner.scale = nn.Parameter(torch.ones(1))

    def everything_trained(self):
        yield from self.parameters()
        for layer in [*self.layers.values(), *self.tail]:
            yield from layer.parameters()
        yield self.inner.scale

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return self.tail[0](x) * self.inner.scale


def test_parameters_that_only_the_optimizer_knows_are_captured_and_restored_by_their_place():
    def trained(seed, backwards=False):
        torch.manual_seed(seed)
        model = Loose()
        params = list(model.everything_trained())
        optimizer = torch.optim.AdamW(params[::-1] if backwards else params)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(5)).square().mean().backward()
            optimizer.step()
        return model, optimizer

    model, optimizer = trained(1)
    source = snap(TrainingState(model, [optimizer]))
    assert model_names(source) == [
        "embed.weight",
        "inner.scale",
        "layers.3.bias",
        "layers.3.weight",
        "layers.7.bias",
        "layers.7.weight",
        "tail.0.bias",
        "tail.0.weight",
    ]
    other, joiner = trained(2, backwards=True)
    restore(TrainingState(other, [joiner]), source)
    for mine, theirs in zip(other.everything_trained(), model.everything_trained(), strict=True):
        assert raw(mine) == raw(theirs)
        assert fingerprint(dict(joiner.state[mine])) == fingerprint(dict(optimizer.state[theirs]))


def test_a_parameter_that_hangs_nowhere_is_captured_by_its_position():
    model, loose = nn.Linear(2, 2), nn.Parameter(torch.full((3,), 7.0))
    source = snap(TrainingState(model, [torch.optim.SGD([*model.parameters(), loose], 0.1)]))
    assert "~loose.0" in model_names(source)
    other, target = nn.Linear(2, 2), nn.Parameter(torch.zeros(3))
    restore(TrainingState(other, [torch.optim.SGD([*other.parameters(), target], 0.1)]), source)
    assert target.tolist() == [7.0] * 3


def test_buffers_come_along_and_those_that_are_no_state_do_not():
    class Buffered(nn.Module):
        def __init__(self, fill):
            super().__init__()
            self.register_buffer("kept", torch.full((2,), fill))
            self.register_buffer("cache", torch.full((2,), fill), persistent=False)

    source = snap(TrainingState(Buffered(1.0)))
    other = Buffered(2.0)
    restore(TrainingState(other), source)
    assert other.kept.tolist() == [1.0, 1.0]
    assert other.cache.tolist() == [2.0, 2.0]


# ---------------------------------------------------------------- tied weights


class Tied(nn.Module):
    def __init__(self, *, tie=True):
        super().__init__()
        self.emb, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        if tie:
            self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(self.emb(x))


def test_tied_weights_are_stored_once_and_stay_tied():
    model, other = Tied(), Tied()
    optimizer, joiner = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    model(torch.arange(9)).square().mean().backward()
    optimizer.step()
    source = snap(TrainingState(model, [optimizer], rng=False))
    assert source.manifest.raw_bytes == 64 * 32 * 4 * 3 + 4  # weight, two moments, a step: each once
    kept = [id(p) for group in joiner.param_groups for p in group["params"]]
    restore(TrainingState(other, [joiner]), source)
    assert other.emb.weight is other.head.weight
    assert [id(p) for group in joiner.param_groups for p in group["params"]] == kept
    assert everything(other, [joiner]) == everything(model, [optimizer])
    with pytest.raises(Incompatible, match="one tensor on one side"):
        restore(TrainingState(Tied(tie=False)), snap(TrainingState(model)))
    with pytest.raises(Incompatible, match="one tensor on one side"):
        restore(TrainingState(Tied()), snap(TrainingState(Tied(tie=False))))


def test_weights_tied_through_one_storage_are_stored_once_too():
    def made():
        model = Tied(tie=False)
        model.head.weight = nn.Parameter(model.emb.weight.data)
        return model

    model, other = made(), made()
    source = snap(TrainingState(model, rng=False))
    assert source.manifest.raw_bytes == 64 * 32 * 4
    restore(TrainingState(other, rng=False), source)
    assert other.emb.weight.data_ptr() == other.head.weight.data_ptr()
    assert everything(other) == everything(model)


# ---------------------------------------------------------------- shapes, strides, dtypes


def test_scalars_empty_tensors_empty_lists_and_none_come_back_exactly():
    extra = {
        "f": torch.tensor(1.5),
        "i": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "list": [],
        "none": None,
        "dict": {},
        "tuple": (),
        5: {
            "size": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
            "bytes": b"\0\xff",
            "big": 2**200,
            "nan": float("nan"),
        },
        "text": "ß∂\0",
        "minus": -0.0,
    }
    source = snap(TrainingState(nn.Linear(1, 1), extra=extra))
    back = dict.fromkeys(extra) | {"f": torch.tensor(0.0), "dict": {}, "list": []}
    restore(TrainingState(nn.Linear(1, 1), extra=back), source)
    assert fingerprint(back) == fingerprint(extra)
    assert back["empty"].shape == (0, 4)
    assert back["f"].shape == ()


def test_views_cost_only_their_own_bytes_and_restore_into_contiguous_tensors():
    big = torch.arange(100_000, dtype=torch.float32)
    grid = torch.arange(60.0).reshape(6, 10)
    values = {
        "slice": big[:10],
        "transposed": grid.t(),
        "strided": big[0:200:7],
        "expanded": torch.tensor([3.0]).expand(50),
        "flipped": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negated": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "scalar view": big[77],
        "first": big[:40],
        "second": big[20:60],
    }
    state = TrainingState(nn.Linear(1, 1), extra=values, rng=False)
    source = snap(state)
    assert source.manifest.raw_bytes < 4000
    targets = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in values.items()}
    live = dict(targets)
    restore(TrainingState(nn.Linear(1, 1), extra=targets, rng=False), source)
    for key, value in values.items():
        assert targets[key] is live[key]
        assert targets[key].tolist() == value.tolist()
    restore(state, source)  # into the views themselves; the expanded one cannot be written and is replaced
    assert values["expanded"].tolist() == [3.0] * 50
    assert big[20:60].tolist() == list(map(float, range(20, 60)))


def odd_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Elements whose bits are as wild as the dtype allows: NaN payloads, infinities, negative zero."""
    generator = torch.Generator().manual_seed(5)
    size = ITEMSIZE[NAME_OF_DTYPE[dtype]]
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    return torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("dtype", list(NAME_OF_DTYPE), ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype):
    flat = odd_bits(dtype, 24)
    grid = odd_bits(dtype, 24).view(4, 6)
    extra = {"flat": flat, "turned": grid.t(), "every other": grid[::2]}
    expected = copy.deepcopy(fingerprint({"flat": flat, "every": list(raw(flat))}))
    wanted = [raw(flat), turned_bytes(grid)]
    source = snap(TrainingState(nn.Linear(1, 1), extra=extra, rng=False))
    back = {
        "flat": torch.zeros(24 * flat.element_size(), dtype=torch.uint8).view(dtype),
        "turned": None,
        "every other": None,
    }
    restore(TrainingState(nn.Linear(1, 1), extra=back, rng=False), source)
    assert [raw(back["flat"]), raw(back["turned"])] == wanted
    assert back["turned"].dtype is dtype
    assert back["turned"].shape == (6, 4)
    assert fingerprint({"flat": flat, "every": list(raw(flat))}) == expected  # the donor's was not touched


def turned_bytes(grid: torch.Tensor) -> bytes:
    """Row-major bytes of grid.t(), element by element, without torch's copy kernels."""
    rows, columns = grid.shape
    size = grid.element_size()
    data = grid.reshape(-1).view(torch.uint8).numpy().tobytes()
    return b"".join(
        data[(row * columns + column) * size : (row * columns + column + 1) * size]
        for column in range(columns)
        for row in range(rows)
    )


def test_numpy_scalars_are_taken_as_numbers_and_their_like_not():
    import numpy as np

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    optimizer.param_groups[0]["n"] = np.int64(3)
    source = snap(TrainingState(model, [optimizer]))
    joiner = torch.optim.SGD(model.parameters(), lr=0.1)
    restore(TrainingState(model, [joiner]), source)
    assert (joiner.param_groups[0]["lr"], joiner.param_groups[0]["n"]) == (0.25, 3)
    assert type(joiner.param_groups[0]["lr"]) is float


class Subclass(torch.Tensor):
    pass


def cycle():
    ring = {}
    ring["again"] = ring
    return ring


REFUSED = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "sparse"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "sparse"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "qint8"),
    "subclass": (lambda: torch.ones(3).as_subclass(Subclass), "Subclass"),
    "lazy": (lambda: nn.LazyLinear(3).weight, "UninitializedParameter"),
    "meta": (lambda: torch.ones(3, device="meta"), "meta"),
    "object": (object, "builtins.object"),
    "set": (lambda: {1, 2}, "builtins.set"),
    "array": (lambda: __import__("numpy").ones(3), "numpy.ndarray"),
    "function": (lambda: len, "builtin_function_or_method"),
    "surrogate": (lambda: "\ud800", "surrogate"),
    "key": (lambda: {(1, 2): 3}, "key of type tuple"),
    "cycle": (cycle, "cycle"),
    "quantized dtype": (lambda: torch.qint8, "qint8"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", list(REFUSED))
def test_what_cannot_be_captured_is_refused_by_path_and_type_and_training_goes_on(kind):
    make, named = REFUSED[kind]
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extra = {"fine": 1, "odd": {"deep": [make()]}}
    state = TrainingState(model, [optimizer], extra=extra)
    with pytest.raises(CaptureError) as refused:
        state.collect()
    assert "extra/odd/deep" in str(refused.value) or kind == "cycle"
    assert named in str(refused.value)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    del extra["odd"]
    assert snap(state).manifest.sections["inner"]


def test_a_leaf_stays_the_same_object_while_nothing_about_it_changes():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = TrainingState(model, [optimizer], rng=False)
    first = state.collect().sections["inner"].leaves
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    second = state.collect().sections["inner"].leaves
    changed = [new.path for old, new in zip(first, second, strict=True) if old is not new]
    assert changed == [("optimizer", "param_groups", 0, "lr")]


def test_values_that_compare_equal_but_are_not_the_same_are_told_apart():
    model = nn.Linear(1, 1)
    extra = {"v": 1}
    state = TrainingState(model, extra=extra)
    seen = set()
    for value in (1, 1.0, True, 0.0, -0.0, float("nan"), "1", b"1", None, [], (), {}):
        extra["v"] = value
        source = snap(state)
        seen.add(source.manifest.sections["inner"].digest)
        back = {"v": "?"}
        restore(TrainingState(model, extra=back), source)
        assert fingerprint(back["v"]) == fingerprint(value)
    assert len(seen) == 12


def test_an_alias_and_its_target_are_two_leaves_and_one_payload():
    source = snap(TrainingState(Tied()))
    leaves = {leaf.path: leaf.what for leaf in source.manifest.sections["inner"].leaves}
    assert type(leaves["model", "emb.weight"]) is TensorSpec
    assert leaves["model", "head.weight"] == Alias(("model", "emb.weight"))
