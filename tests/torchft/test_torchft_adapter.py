"""The adapter on a real torchft Manager and DiLoCo: one replica, in this process."""

from __future__ import annotations

import copy
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft_cluster import SWARM_NODE

from hotswarm import CheckpointConfig, SpeculativeCheckpointer
from hotswarm.capture.diloco import Counters
from hotswarm.diloco import ExactNesterov
from hotswarm.errors import CaptureError, ConfigError, Incompatible, RecoveryError
from hotswarm.swarm.control import ControlClient
from hotswarm.torchft import SwarmCheckpointTransport, TorchftAdapter, attach

H = 4


class Replica:
    """A small model under DiLoCo, with the adapter attached before `with diloco`: the order that hooks dislike."""

    def __init__(
        self, manager: Manager, *, seed: int = 0, fragments: int = 1, outer: Any = None, **diloco: Any
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.manager = manager
        self.inner = AdamW(self.model.parameters(), lr=1e-2)
        parts = [self.model] if fragments == 1 else [self.model[0], self.model[2]]
        make = outer or (lambda params: ExactNesterov(params, lr=0.7, momentum=0.9))
        self.outer = [make(part.parameters()) for part in parts]
        self.diloco = DiLoCo(manager, parts, self.inner, self.outer, sync_every=H * fragments, **diloco)
        self.adapter = TorchftAdapter(manager, self.diloco, self.model)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 4, generator=generator)
        self.inner.zero_grad()
        nn.functional.mse_loss(self.model(x), x[:, :2]).backward()
        self.inner.step()

    def names(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters()}


@pytest.fixture
def replica(managers: Callable[..., Manager]) -> Iterator[Callable[..., Replica]]:
    with ExitStack() as stack:

        def make(**kwargs: Any) -> Replica:
            made = Replica(managers(), **kwargs)
            stack.enter_context(made.diloco)
            stack.callback(made.adapter.detach)
            return made

        yield make


def copied(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        "params": {name: tensor.clone() for name, tensor in tree["params"].items()},
        "momentum": {name: tensor.clone() for name, tensor in tree["momentum"].items()},
        "hyper": tree["hyper"],
    }


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("fragments", [1, 2])
def test_the_outer_tree_names_every_parameter_and_has_momentum_from_the_first_sync_on(
    replica: Callable[..., Replica], fragments: int
) -> None:
    r = replica(fragments=fragments)
    start = {name: param.detach().clone() for name, param in r.model.named_parameters()}
    tree = r.adapter.outer_tree()
    assert_same(tree["params"], start)
    assert tree["momentum"] == {}
    hyper = {"lr": 0.7, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": True}
    assert tree["hyper"] == (hyper if fragments == 1 else {"fragment.0": hyper, "fragment.1": hyper})
    assert tree["outer_step"] == 0
    for step in range(H * fragments):
        r.step(step)
    tree = r.adapter.outer_tree()
    assert set(tree["momentum"]) == r.names()
    assert r.adapter.counters() == Counters(fragments, 0, H * fragments)
    live = dict(r.model[2].named_parameters())  # the fragment that was synced last still stands on its originals
    assert torch.equal(tree["params"]["2.weight"], live["weight"])


def test_counters_and_callbacks_at_the_end_of_a_round_whatever_the_order_of_hooks(
    replica: Callable[..., Replica],
) -> None:
    r, seen = replica(), []

    def look() -> None:
        originals = r.adapter.outer_tree()["params"]
        assert_same(originals, {name: param.detach() for name, param in r.model.named_parameters()})
        seen.append((r.adapter.counters(), r.adapter.in_outer_step(), threading.get_ident()))

    r.adapter.on_outer_step(look)
    for step in range(2 * H + 1):
        r.step(step)
    here = threading.get_ident()
    assert seen == [(Counters(1, 0, H), False, here), (Counters(2, 0, 2 * H), False, here)]
    assert r.adapter.counters() == Counters(2, 1, 2 * H + 1)


def test_during_the_outer_step_nothing_may_be_captured_and_the_lock_is_held(replica: Callable[..., Replica]) -> None:
    r, seen = replica(), []

    def inside(*_: object) -> None:
        taken: list[bool] = []
        thread = threading.Thread(target=lambda: taken.append(r.adapter._lock.acquire(timeout=0.05)))
        thread.start()
        thread.join()
        seen.append((r.adapter.in_outer_step(), taken[0]))

    r.outer[0].register_step_post_hook(inside)
    for step in range(H):
        assert not r.adapter.in_outer_step()
        r.step(step)
    assert seen == [(True, False)]
    with r.adapter.lock():
        assert not r.adapter.in_outer_step()


def test_a_streaming_all_reduce_in_flight_counts_as_the_outer_step(replica: Callable[..., Replica]) -> None:
    r = replica(fragments=2, fragment_sync_delay=2)
    inside = []
    for step in range(2 * H):
        r.step(step)
        inside.append(r.adapter.in_outer_step())
    assert inside == [False, True, True, False] * 2


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_replica_with_other_weights_and_settings_becomes_the_donor_and_trains_on_as_it_would(
    replica: Callable[..., Replica], fragments: int
) -> None:
    donor = replica(fragments=fragments)
    rounds = 2 * fragments
    for step in range(rounds * H):
        donor.step(step)
    saved, counters = copied(donor.adapter.outer_tree()), donor.adapter.counters()
    joiner = replica(seed=99, fragments=fragments, outer=lambda params: ExactNesterov(params, lr=0.1, momentum=0.5))
    joiner.adapter.load_outer(saved)
    joiner.adapter.set_counters(counters)
    joiner.model.load_state_dict(donor.model.state_dict())
    joiner.inner.load_state_dict(copy.deepcopy(donor.inner.state_dict()))  # else the two share moments
    assert joiner.manager.current_step() == rounds
    for key in ("params", "momentum"):
        assert_same(joiner.adapter.outer_tree()[key], saved[key])
    assert joiner.adapter.outer_tree()["hyper"] == saved["hyper"]
    for step in range(rounds * H, (rounds + fragments) * H):
        donor.step(step)
        joiner.step(step)
    for key in ("params", "momentum"):
        assert_same(joiner.adapter.outer_tree()[key], donor.adapter.outer_tree()[key])
    assert joiner.adapter.counters() == donor.adapter.counters()


def test_momentum_that_the_snapshot_lacks_is_dropped(replica: Callable[..., Replica]) -> None:
    fresh, stepped = replica(), replica()
    saved = copied(fresh.adapter.outer_tree())
    for step in range(H):
        stepped.step(step)
    assert stepped.adapter.outer_tree()["momentum"]
    stepped.adapter.load_outer(saved)
    assert stepped.adapter.outer_tree()["momentum"] == {}
    assert_same(stepped.adapter.outer_tree()["params"], saved["params"])


def test_tensors_are_installed_by_reference_and_the_next_sync_uses_them(replica: Callable[..., Replica]) -> None:
    donor, joiner = replica(), replica()
    for step in range(H):
        donor.step(step)
    saved = copied(donor.adapter.outer_tree())
    joiner.adapter.load_outer(saved)
    tree = joiner.adapter.outer_tree()
    for key in ("params", "momentum"):
        assert all(tree[key][name] is tensor for name, tensor in saved[key].items())
    joiner.adapter.load_outer(tree)
    assert joiner.adapter.outer_tree()["params"]["0.weight"] is saved["params"]["0.weight"]


@pytest.mark.parametrize(
    ("inner", "delay", "stands_at"), [(2, 0, 2), (H, 0, H - 1), (H + 9, 0, H - 1), (3, 2, 1), (-1, 0, 0)]
)
def test_the_position_stays_below_the_step_that_prepares_the_sync(
    replica: Callable[..., Replica], inner: int, delay: int, stands_at: int
) -> None:
    r = replica(fragment_sync_delay=delay)
    r.adapter.set_counters(Counters(5, inner, 77))
    assert r.adapter.counters() == Counters(5, stands_at, 77)
    for step in range(H - stands_at):
        r.step(step)
    assert r.adapter.counters() == Counters(6, 0, 77 + H - stands_at)


@pytest.mark.parametrize("fragments", [1, 2])
def test_what_does_not_fit_is_refused_and_nothing_changes(replica: Callable[..., Replica], fragments: int) -> None:
    r = replica(fragments=fragments)
    for step in range(H):
        r.step(step)
    live, before = r.adapter.outer_tree(), copied(r.adapter.outer_tree())
    bad_shape = {**before, "params": {**before["params"], "2.bias": torch.ones(3)}}
    bad_dtype = {**before, "params": {**before["params"], "2.bias": torch.ones(2).double()}}
    missing = {**before, "params": {name: t for name, t in before["params"].items() if name != "0.bias"}}
    extra = {**before, "momentum": {**before["momentum"], "9.weight": torch.ones(3)}}
    groups = {**before, "hyper": {"fragment.0": before["hyper"]} if fragments == 1 else {}}
    last = {**before, "hyper": {"fragment.0": {"lr": 9.0}, "fragment.1": {"0": {}}}}
    for tree, reason in [
        (bad_shape, r"2\.bias: \(3,\)"),
        (bad_dtype, r"2\.bias: \(2,\) torch.float64"),
        (missing, r"0\.bias"),
        (extra, r"9\.weight"),
        (groups, "another number"),
        (last, "number"),
        (None, "no outer state"),
    ]:
        with pytest.raises(Incompatible, match=reason):
            r.adapter.load_outer(tree)
        assert r.adapter.outer_tree()["hyper"] == before["hyper"]
        for key in ("params", "momentum"):
            assert all(r.adapter.outer_tree()[key][name] is tensor for name, tensor in live[key].items())


def test_an_outer_optimizer_with_more_than_momentum_is_refused_by_name(replica: Callable[..., Replica]) -> None:
    r = replica(outer=lambda params: Adam(params, lr=0.1))
    for step in range(H):
        r.step(step)
    with pytest.raises(CaptureError, match=r"Adam keeps .*0\.weight"):
        r.adapter.outer_tree()


def test_plain_sgd_with_nesterov_is_captured_too(replica: Callable[..., Replica]) -> None:
    r = replica(outer=lambda params: SGD(params, lr=0.5, momentum=0.8, nesterov=True))
    for step in range(H):
        r.step(step)
    tree = r.adapter.outer_tree()
    assert set(tree["momentum"]) == r.names()
    assert tree["hyper"]["momentum"] == 0.8


def test_objects_that_do_not_belong_together_are_refused(
    replica: Callable[..., Replica], managers: Callable[..., Manager]
) -> None:
    r = replica()
    with pytest.raises(ConfigError, match="another Manager"):
        TorchftAdapter(managers(), r.diloco, r.model)
    with pytest.raises(ConfigError, match="whole model"):
        TorchftAdapter(r.manager, r.diloco, nn.Linear(4, 6))
    with pytest.raises(ConfigError, match="DiLoCo"):
        TorchftAdapter(r.manager, r.model, r.model)


def test_a_step_that_raised_leaves_the_lock_usable_by_its_thread(replica: Callable[..., Replica]) -> None:
    r = replica()

    def broken(*_: object) -> None:
        raise ValueError("a user's hook")

    handle = r.inner.register_step_post_hook(broken)
    with pytest.raises(ValueError, match="hook"):
        r.step(0)
    handle.remove()
    r.step(1)
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(r.adapter._lock.acquire(timeout=1)))
    thread.start()
    thread.join()
    assert taken == [True]


def test_counters_and_committed_batches_go_with_the_inner_state(replica: Callable[..., Replica]) -> None:
    donor, joiner = replica(), replica()
    for step in range(3 * H + 1):
        donor.step(step)
    tree = donor.adapter.inner_tree()
    assert tree == {"step": 3, "local_step": 1, "training_step": 3 * H + 1, "batches_committed": 3}
    joiner.adapter.load_inner(tree)
    assert joiner.manager.batches_committed() == 3
    assert joiner.adapter.counters() == donor.adapter.counters()
    with pytest.raises(Incompatible, match="torchft"):
        joiner.adapter.load_inner({"stats": {}, "phase": "inner"})
    assert joiner.adapter.counters() == donor.adapter.counters()


def test_attach_ends_torchfts_own_transport_and_its_port(replica: Callable[..., Replica], tmp_path: Path) -> None:
    r = replica()
    r.adapter.detach()
    address = r.manager._checkpoint_transport.metadata()
    port = int(address.split(":")[2].split("/")[0])
    config = CheckpointConfig(checkpoint_dir=tmp_path, announce_to_dht=False, serve_to_peers=False)
    adapter = attach(r.manager, r.diloco, SpeculativeCheckpointer(r.model, r.inner, config=config))
    adapter.detach()
    assert isinstance(r.manager._checkpoint_transport, SwarmCheckpointTransport)
    assert r.manager._checkpoint_transport.metadata() == "hotswarm:"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_transport_that_is_not_attached_says_so() -> None:
    with pytest.raises(RecoveryError, match="attach"):
        SwarmCheckpointTransport().recv_checkpoint(0, "hotswarm:", 1, timedelta(seconds=1))


@pytest.mark.parametrize(
    ("metadata", "peer"),
    [
        ("hotswarm:" + "ab" * 20, "ab" * 20),
        ("hotswarm:", None),
        ("hotswarm:../../x", None),
        ("http://evil:1/checkpoint/", None),
        ("ab" * 20, None),
    ],
)
def test_a_peers_metadata_is_a_hint_of_one_form_only(metadata: str, peer: str | None) -> None:
    assert SwarmCheckpointTransport()._peer(metadata) == peer


def test_a_donor_whose_daemon_hangs_does_not_hold_up_its_own_round(
    replica: Callable[..., Replica], short_dir: Path, processes: Any, wait_until: Callable[..., object]
) -> None:
    r = replica()
    r.adapter.detach()
    daemon = processes.start([*SWARM_NODE, "serve", "--state-dir", short_dir, "--listen", "127.0.0.1:0"])

    def answers() -> bool:
        client = ControlClient.find(short_dir)
        return client is not None and client.status()["pid"] == daemon.pid

    wait_until(answers, 30, "the daemon")
    config = CheckpointConfig(checkpoint_dir=short_dir, auto_fetch_on_start=False, snapshot_interval=3600.0)
    checkpointer = SpeculativeCheckpointer(r.model, r.inner, config=config)
    adapter = attach(r.manager, r.diloco, checkpointer)
    transport = r.manager._checkpoint_transport
    checkpointer.start()
    try:
        for step in range(H):
            r.step(step)
        checkpointer.step()
        transport.send_checkpoint([1], 1, None, timedelta(seconds=5))
        wait_until(lambda: [m.outer_step for m in checkpointer.hot_snapshots][-1:] == [1], 10, "a snapshot of step 1")
        daemon.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        transport.send_checkpoint([1], 7, None, timedelta(seconds=5))
        assert time.monotonic() - began < 5
        assert transport.sent == 2
    finally:
        daemon.send_signal(signal.SIGCONT)
        checkpointer.stop()
        adapter.detach()
