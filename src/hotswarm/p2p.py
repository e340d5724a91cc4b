"""Announcing snapshots through a peer-to-peer manager that the caller's program already has.

hotswarm's own daemon does not need it; programs written for the older checkpointer look for `checkpoint_{node_id}` in
their own DHT, and so they still find it there. Two shapes of manager are known:

* `dht.store(str, str)`, `dht.lookup_value(str)`, `get_peers()`
* `dht.announce(...)`, `dht.lookup_key(str)`, `known_peers`, `get_sync_peers()`

The value is JSON, with the address and the digest that a reader needs. Nothing that comes back is trusted: an address
found here is only somewhere to dial; what is fetched from it is verified like everything else.
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from hotswarm.checkpoint_types import CheckpointMetadata

log = logging.getLogger(__name__)

MAX_VALUE_BYTES = 8192  # of a foreign value that is parsed
LOOKUP_BUDGET_S = 2.0  # start() waits for it
MAX_PEERS = 64  # looked up in one go


class P2PManager:
    """The caller's manager, whichever of the two shapes it has. `manager` None: every call does nothing.

    The manager is foreign code: what it raises is logged, once per kind of call, and never reaches training.
    """

    def __init__(self, manager: Any, node_id: str) -> None:
        self._manager = manager
        self._node_id = node_id
        self._complained: set[str] = set()
        self._guard = threading.Lock()
        self._announcing = False
        self._waiting: tuple[CheckpointMetadata, str, tuple[str, ...]] | None = None

    def announce(self, metadata: CheckpointMetadata, *, node: str = "", addresses: Iterable[str] = ()) -> bool:
        """Publish where `metadata`'s snapshot can be had. May block on the network; returns whether it was accepted."""
        dht = getattr(self._manager, "dht", None)
        if dht is None:
            return False
        key = f"checkpoint_{self._node_id}"
        value = json.dumps(
            {
                "checkpoint_id": metadata.checkpoint_id,
                "snapshot_id": metadata.snapshot_id,
                "timestamp": metadata.timestamp,
                "announced": time.time(),
                "training_step": metadata.training_step,
                "outer_step": metadata.outer_step,
                "inner_step": metadata.inner_step,
                "model_hash": metadata.model_hash,
                "outer_digest": metadata.outer_digest,
                "bytes": metadata.original_size,
                "node": node,
                "addresses": list(addresses),
            }
        )
        if callable(getattr(dht, "store", None)):
            return bool(self._call("store", dht.store, key, value))
        if callable(getattr(dht, "announce", None)):
            arguments = (key, value) if _takes_two(dht.announce) else (key,)
            return bool(self._call("announce", dht.announce, *arguments))
        return False

    def lookup(self, peer_id: str) -> dict[str, Any] | None:
        """What `peer_id` announced, or None."""
        dht = getattr(self._manager, "dht", None)
        for name in ("lookup_value", "lookup_key"):
            method = getattr(dht, name, None)
            if callable(method):
                return _parse(self._call(name, method, f"checkpoint_{peer_id}"))
        return None

    def peers(self) -> list[str]:
        """The ids of the peers that the manager knows, at most MAX_PEERS, itself left out."""
        found: object = None
        for name in ("get_peers", "get_sync_peers"):
            method = getattr(self._manager, name, None)
            if callable(method):
                found = self._call(name, method)
                break
        else:
            found = getattr(self._manager, "known_peers", None)
        if not isinstance(found, Iterable) or isinstance(found, str | bytes):
            return []
        ids = [peer if isinstance(peer, str) else str(getattr(peer, "node_id", peer)) for peer in found]
        return [peer for peer in ids if peer != self._node_id][:MAX_PEERS]

    def addresses(self, budget_s: float = LOOKUP_BUDGET_S) -> list[str]:
        """`host:port` of hotswarm nodes that the manager's peers announced: those found within `budget_s` seconds."""
        if self._manager is None:
            return []
        found: list[str] = []

        def look() -> None:
            for peer in self.peers():
                found.extend(addresses_of(self.lookup(peer)))

        looking = threading.Thread(target=look, name="hotswarm-p2p", daemon=True)  # foreign code: it may never return
        looking.start()
        looking.join(budget_s)
        return list(dict.fromkeys(found[:]))

    def announce_soon(self, metadata: CheckpointMetadata, node: str, addresses: Iterable[str]) -> None:
        """`announce` on a thread of its own; while that is at it, only the newest waits."""
        with self._guard:
            self._waiting = (metadata, node, tuple(addresses))
            if self._announcing:
                return
            self._announcing = True
        threading.Thread(target=self._announce_waiting, name="hotswarm-p2p", daemon=True).start()

    def _announce_waiting(self) -> None:
        while True:
            with self._guard:
                waiting, self._waiting = self._waiting, None
                if waiting is None:
                    self._announcing = False
                    return
            metadata, node, addresses = waiting
            self.announce(metadata, node=node, addresses=addresses)

    def _call(self, what: str, method: Callable[..., Any], *arguments: str) -> object:
        try:
            result = method(*arguments)
            if inspect.iscoroutine(result):  # an async manager: nobody here runs its loop
                result.close()
                raise TypeError(f"{what} is a coroutine function; hotswarm calls plain functions only")
        except Exception as error:  # noqa: BLE001 - foreign code
            level = logging.DEBUG if what in self._complained else logging.WARNING
            log.log(level, "the p2p manager's %s failed: %s; training and hotswarm's own network go on", what, error)
            self._complained.add(what)
            return None
        return True if result is None else result


def addresses_of(announcement: dict[str, Any] | None) -> list[str]:
    """The addresses in an announcement that look like `host:port`."""
    listed = (announcement or {}).get("addresses", ())
    if not isinstance(listed, list):
        return []
    return [a for a in listed[:8] if isinstance(a, str) and a.rpartition(":")[2].isdigit() and len(a) < 256]


def _parse(value: object) -> dict[str, Any] | None:
    if isinstance(value, (list, tuple)) and value:
        value = value[-1]
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    if not isinstance(value, str) or len(value) > MAX_VALUE_BYTES:
        return None
    try:
        parsed = json.loads(value)
    except ValueError:
        return None  # written by the older class: str(dict), which holds no address anyway
    return parsed if isinstance(parsed, dict) else None


def _takes_two(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind("key", "value")
    except (TypeError, ValueError):
        return False
    return True
