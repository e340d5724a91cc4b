"""The two shapes of p2p manager that callers bring, and what a broken one must not break."""

from __future__ import annotations

import json
import logging

import pytest

from hotswarm.checkpoint_types import CheckpointMetadata, CheckpointType
from hotswarm.p2p import P2PManager, addresses_of

METADATA = CheckpointMetadata(
    checkpoint_id="c-1",
    timestamp=12.5,
    checkpoint_type=CheckpointType.HOT,
    training_step=30,
    outer_step=3,
    inner_step=1,
    model_hash="ab",
    num_params=10,
    layer_ids=[],
    file_path="/x",
    compressed_size=1,
    original_size=2,
    node_id="me",
    outer_digest="cd",
    snapshot_id="0" * 32,
)


class TableOfStrings:
    """`store` and `lookup_value`, strings only."""

    def __init__(self) -> None:
        self.table: dict[str, str] = {}

    def store(self, key: str, value: str) -> bool:
        assert isinstance(key, str)
        assert isinstance(value, str)
        self.table[key] = value
        return True

    def lookup_value(self, key: str) -> str | None:
        return self.table.get(key)


class AnnouncingTable:
    """`announce` and `lookup_key`."""

    def __init__(self) -> None:
        self.table: dict[str, str] = {}

    def announce(self, key: str, value: str) -> None:
        self.table[key] = value

    def lookup_key(self, key: str) -> str | None:
        return self.table.get(key)


class FirstShape:
    def __init__(self) -> None:
        self.dht = TableOfStrings()

    def get_peers(self) -> list[str]:
        return ["me", "you"]


class SecondShape:
    def __init__(self) -> None:
        self.dht = AnnouncingTable()
        self.known_peers = {"me": {}, "you": {}}

    def get_sync_peers(self) -> list[str]:
        return ["me", "you"]


class OnlyKnownPeers:
    def __init__(self) -> None:
        self.dht = None
        self.known_peers = {"me": {}, "you": {}}


@pytest.mark.parametrize("shape", [FirstShape, SecondShape])
def test_an_announcement_is_json_under_the_nodes_key_and_comes_back(shape: type) -> None:
    manager = shape()
    assert P2PManager(manager, "me").announce(METADATA, node="f" * 40, addresses=["10.0.0.5:7411"])
    value = json.loads(manager.dht.table["checkpoint_me"])
    assert value["checkpoint_id"] == "c-1"
    assert (value["training_step"], value["outer_step"], value["outer_digest"]) == (30, 3, "cd")
    assert value["addresses"] == ["10.0.0.5:7411"]
    assert addresses_of(P2PManager(manager, "other").lookup("me")) == ["10.0.0.5:7411"]


@pytest.mark.parametrize("shape", [FirstShape, SecondShape, OnlyKnownPeers])
def test_peers_are_listed_without_oneself(shape: type) -> None:
    assert P2PManager(shape(), "me").peers() == ["you"]


def test_addresses_of_all_peers() -> None:
    manager = FirstShape()
    P2PManager(manager, "you").announce(METADATA, addresses=["10.0.0.6:1", "not an address"])
    assert P2PManager(manager, "me").addresses() == ["10.0.0.6:1"]


@pytest.mark.parametrize(
    "stored",
    [
        "{'checkpoint_id': 'hot_1', 'timestamp': 1.0}",  # str(dict), as the older class wrote it
        "[1]",
        "nonsense",
        "9" * 100_000,
        b"\xff\xfe",
        7,
        None,
        '{"addresses": "10.0.0.5:7411"}',
        '{"addresses": [1, null, "noport", "x:y"]}',
    ],
)
def test_a_foreign_value_that_makes_no_sense_gives_no_address(stored: object) -> None:
    manager = FirstShape()
    manager.dht.table["checkpoint_you"] = stored  # type: ignore[assignment]
    assert P2PManager(manager, "me").addresses() == []


def test_no_manager_and_one_without_a_table_do_nothing() -> None:
    for manager in (None, object(), OnlyKnownPeers()):
        assert P2PManager(manager, "me").announce(METADATA) is False
        assert P2PManager(manager, "me").lookup("you") is None


def test_a_manager_that_raises_is_logged_once_and_never_heard_of_again(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FirstShape):
        def get_peers(self) -> list[str]:
            raise RuntimeError("no network")

    def fails(*_: str) -> bool:
        raise ZeroDivisionError("division by zero")

    manager = Broken()
    manager.dht.store = fails  # type: ignore[method-assign]
    p2p = P2PManager(manager, "me")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert p2p.announce(METADATA) is False
            assert p2p.peers() == []
    assert len(caplog.records) == 2
    assert "division by zero" in caplog.text


def test_a_manager_of_coroutines_is_refused_in_words() -> None:
    class Async(FirstShape):
        async def get_peers(self) -> list[str]:  # type: ignore[override]
            return ["you"]

    assert P2PManager(Async(), "me").peers() == []
