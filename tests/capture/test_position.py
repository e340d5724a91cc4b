"""The data position: the next batches are those that the uninterrupted run would have got."""

# ruff: noqa: NPY002  # numpy's global generator is what is captured

from __future__ import annotations

import copy
import logging
import random

import numpy as np
import pytest
import torch
from capture_kit import restore, snap
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hotswarm.capture.position import Position
from hotswarm.capture.rng import apply_rng, capture_rng
from hotswarm.capture.state import TrainingState
from hotswarm.errors import Incompatible


class Numbers(Dataset):
    def __init__(self, count=12):
        self.count = count
        self.fetched = 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.fetched += 1
        return index


class Stream(IterableDataset):
    """Draws from its worker's random state as it goes."""

    def __iter__(self):
        for index in range(10):
            yield index * 1000 + int(torch.randint(0, 1000, ()))


def shuffled(**kwargs):
    return DataLoader(Numbers(), batch_size=2, shuffle=True, **kwargs)


def own_generator():
    return shuffled(generator=torch.Generator().manual_seed(3))


def sampled(sampler):
    return DataLoader(Numbers(), batch_size=2, sampler=sampler)


class PythonShuffle:
    """A sampler that uses Python's random numbers."""

    def __len__(self):
        return 12

    def __iter__(self):
        order = list(range(12))
        random.shuffle(order)
        return iter(order)


class OwnLoader:
    """No DataLoader: shuffles when iteration begins."""

    def __iter__(self):
        for index in torch.randperm(12).tolist():
            yield index + int(torch.randint(0, 1, ()))

    def __len__(self):
        return 12


LOADERS = {
    "plain": lambda: DataLoader(Numbers(), batch_size=2),
    "shuffled": shuffled,
    "own generator": own_generator,
    "with replacement": lambda: sampled(RandomSampler(Numbers(), replacement=True, num_samples=40)),
    "subset": lambda: sampled(SubsetRandomSampler(range(12))),
    "weighted": lambda: sampled(WeightedRandomSampler([1.0] * 12, 12)),
    "python shuffle": lambda: sampled(PythonShuffle()),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(RandomSampler(Numbers()), 2, True)),
    "workers": lambda: shuffled(num_workers=2, multiprocessing_context="fork"),
    "workers and generator": lambda: shuffled(
        num_workers=2, multiprocessing_context="fork", generator=torch.Generator().manual_seed(3)
    ),
    "persistent workers": lambda: shuffled(num_workers=2, multiprocessing_context="fork", persistent_workers=True),
    "iterable": lambda: DataLoader(Stream(), batch_size=2),
    "iterable with workers": lambda: DataLoader(Stream(), batch_size=2, num_workers=2, multiprocessing_context="fork"),
    "no DataLoader": OwnLoader,
}


class Training:
    """Takes batches over epochs without end; each step draws from the random states."""

    def __init__(self, loader):
        self.loader = loader
        self.iterator = None

    def step(self):
        while True:
            if self.iterator is None:
                self.iterator = iter(self.loader)
            try:
                batch = next(self.iterator)
            except StopIteration:
                self.iterator = None
                continue
            torch.rand(3)
            random.random()
            return batch.tolist() if isinstance(batch, torch.Tensor) else batch

    def steps(self, count):
        return [self.step() for _ in range(count)]


def seeded(seed):
    torch.manual_seed(seed)
    random.seed(seed)


def followed(name, seed):
    seeded(seed)
    loader = LOADERS[name]()
    position = Position(loader)
    position.attach()
    return Training(loader), position


@pytest.mark.parametrize("name", list(LOADERS))
@pytest.mark.parametrize("cut", [1, 3, 6, 8])  # 6 batches an epoch for most: within, at its end, in the second
def test_the_next_batches_are_those_of_the_uninterrupted_run(name, cut):
    whole, position = followed(name, 1)
    whole.steps(cut)
    tree, rng = position.capture(), capture_rng()
    expected = whole.steps(9)  # from the very iterator: no restore is involved

    again, other = followed(name, 2)
    again.steps(2)  # a past of its own
    again.iterator = None
    other.check(tree)
    other.restore(tree, rng)
    apply_rng(rng)
    assert other.capture() == tree
    assert again.steps(9) == expected


def test_a_map_style_dataset_is_not_read_again_to_get_there():
    seeded(1)
    loader = shuffled()
    position = Position(loader)
    position.attach()
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    tree = position.capture()
    fresh = shuffled()
    other = Position(fresh)
    other.attach()
    other.restore(tree, None)
    rest = [batch.tolist() for batch in fresh]
    assert rest == [batch.tolist() for batch in iterator]
    assert fresh.dataset.fetched == 4


def test_the_end_of_an_epoch_is_a_position_of_its_own():
    seeded(1)
    loader = DataLoader(Numbers(6), batch_size=2)
    position = Position(loader)
    position.attach()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    at_end = position.capture()
    assert list(iterator) == []
    between = position.capture()
    for tree, first in ((at_end, []), (between, [[0, 1], [2, 3], [4, 5]])):
        fresh = DataLoader(Numbers(6), batch_size=2)
        other = Position(fresh)
        other.attach()
        other.restore(tree, None)
        assert [batch.tolist() for batch in fresh] == first  # at the end: the code after the epoch runs now
        assert len(list(fresh)) == 3


def test_an_epoch_that_was_left_early_is_not_gone_on_with():
    loader = DataLoader(Numbers(), batch_size=2)
    position = Position(loader)
    position.attach()
    for number, _ in enumerate(loader):
        if number == 2:
            break
    tree = position.capture()
    assert tree["active"] is False
    other = Position(DataLoader(Numbers(), batch_size=2))
    other.attach()
    other.restore(tree, None)
    assert len(list(other._loader)) == 6


def test_the_epoch_of_a_distributed_sampler_comes_back():
    def made():
        sampler = DistributedSampler(Numbers(), num_replicas=2, rank=1, seed=5)
        loader = DataLoader(Numbers(), batch_size=1, sampler=sampler)
        position = Position(loader)
        position.attach()
        return loader, sampler, position

    loader, sampler, position = made()
    sampler.set_epoch(7)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    tree = position.capture()
    fresh, fresh_sampler, other = made()
    other.restore(tree, None)
    fresh_sampler.set_epoch(0)  # the script begins its loop anew
    assert [batch.item() for batch in fresh] == [batch.item() for batch in iterator]
    assert fresh_sampler.epoch == 7


def test_a_loader_that_keeps_its_own_position_is_asked_for_it():
    class Stateful(DataLoader):
        def __init__(self):
            super().__init__(Numbers(), batch_size=2)
            self.at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    loader = Stateful()
    position = Position(loader)
    position.attach()
    loader.at = 4
    tree = position.capture()
    other = Stateful()
    Position(other).restore(tree, None)
    assert other.at == 4
    with pytest.raises(Incompatible, match="keeps its own"):
        Position(other).check(Position(shuffled()).capture())
    with pytest.raises(Incompatible, match="has none"):
        Position(shuffled()).check(tree)


def test_other_data_is_refused_and_shrunken_data_said():
    position = Position(DataLoader(Numbers(), batch_size=2))
    with pytest.raises(Incompatible, match="12 batches here and 6 in the snapshot"):
        Position(DataLoader(Numbers(), batch_size=1)).check(position.capture())
    with pytest.raises(Incompatible, match="number of generators"):
        Position(own_generator()).check(position.capture())


def test_a_stream_that_ends_earlier_than_before_is_said_and_ends_the_epoch(caplog):
    class Short(IterableDataset):
        def __init__(self, count):
            self.count = count

        def __iter__(self):
            return iter(range(self.count))

    loader = DataLoader(Short(10))
    position = Position(loader)
    position.attach()
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    tree = position.capture()
    fresh = DataLoader(Short(4))
    other = Position(fresh)
    other.attach()
    other.restore(tree, None)
    with caplog.at_level(logging.ERROR):
        assert list(fresh) == []
    assert "ended before batch 6" in caplog.text
    assert len(list(fresh)) == 4


def test_detaching_in_mid_epoch_leaves_the_loop_running_and_attaching_twice_is_once():
    loader = DataLoader(Numbers(), batch_size=2)
    position = Position(loader)
    position.attach()
    position.attach()
    assert type(loader).__name__ == "DataLoader"
    assert type(loader) is not DataLoader
    seen = []
    for number, batch in enumerate(loader):
        seen.append(batch.tolist())
        if number == 1:
            position.detach()
    assert len(seen) == 6
    assert type(loader) is DataLoader
    position.attach()
    assert len(list(loader)) == 6


def test_a_copy_of_the_loader_is_not_mistaken_for_it():
    loader = DataLoader(Numbers(), batch_size=2)
    position = Position(loader)
    position.attach()
    iterator = iter(loader)
    next(iterator)
    assert len(list(copy.deepcopy(loader))) == 6
    assert position.capture()["consumed"] == 1
    assert len(list(iterator)) == 5


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_numpys_generator_whichever_it_is_goes_on_where_it_stood(name: str) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(getattr(np.random, name)(5))
    try:
        np.random.standard_normal(3)  # leaves half a pair behind
        state = snap(TrainingState(nn.Linear(1, 1)))
        expected = np.random.standard_normal(5).tolist(), np.random.randint(0, 1 << 31, 5).tolist()
        np.random.seed(99) if name == "MT19937" else np.random.standard_normal(7)
        restore(TrainingState(nn.Linear(1, 1)), state)
        assert (np.random.standard_normal(5).tolist(), np.random.randint(0, 1 << 31, 5).tolist()) == expected
        np.random.set_bit_generator(np.random.MT19937(1) if name != "MT19937" else np.random.PCG64(1))
        other = np.random.get_state(legacy=False)
        restore(TrainingState(nn.Linear(1, 1)), state)  # another generator: left alone
        assert str(np.random.get_state(legacy=False)) == str(other)
    finally:
        np.random.set_bit_generator(before)


class Unreadable(torch.Generator):
    """Draws, but does not tell its state while `broken`."""

    broken = True

    def get_state(self):
        if self.broken:
            raise RuntimeError("no state")
        return super().get_state()


@pytest.mark.parametrize("broken_from", [0, 1])  # at iter(), and only at the first next()
def test_a_position_that_cannot_be_noted_is_unknown_for_this_epoch_and_the_loop_goes_on(broken_from, caplog):
    generator = Unreadable()
    loader = shuffled(generator=generator)
    position = Position(loader)
    position.attach()
    generator.broken = broken_from == 0
    stream = iter(loader)
    generator.broken = True
    assert len([int(index) for batch in stream for index in batch]) == 12
    assert position.capture() == {"kind": "unknown", "epoch": 1}
    assert len([record for record in caplog.records if "not known any more" in record.message]) == 1
    lost = snap(TrainingState(nn.Linear(1, 1), position=position))
    other = Position(shuffled())
    other.attach()
    restore(TrainingState(nn.Linear(1, 1), position=other), lost)
    assert "this epoch begins anew" in caplog.text
    generator.broken = False
    next(iter(loader))
    assert position.capture()["kind"] == "replay"
