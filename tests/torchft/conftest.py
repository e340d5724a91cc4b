"""A lighthouse on loopback and Managers that reach nothing else."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torchft", reason="the torchft extra is not installed")

import torch.distributed as dist
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

HOST = "localhost"


def loopback_store() -> dist.TCPStore:
    """A TCPStore that listens on 127.0.0.1 only; by itself it takes every interface."""
    listener = socket.create_server(("127.0.0.1", 0))
    return dist.TCPStore(
        HOST, listener.getsockname()[1], is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


@pytest.fixture
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What children inherit, so that gloo binds and advertises loopback."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("HOST", HOST)
    monkeypatch.setenv("HOSTNAME", HOST)


@pytest.fixture
def lighthouse(loopback: None) -> Iterator[Callable[..., str]]:
    """A function that starts a lighthouse and gives its address; all are shut down at the end."""
    running: list[LighthouseServer] = []

    def start(min_replicas: int = 1, join_timeout_ms: int = 2000, heartbeat_timeout_ms: int = 5000) -> str:
        server = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=min_replicas,
            join_timeout_ms=join_timeout_ms,
            heartbeat_timeout_ms=heartbeat_timeout_ms,
        )
        running.append(server)
        return f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"

    yield start
    for server in running:
        server.shutdown()


@pytest.fixture
def managers(lighthouse: Callable[..., str]) -> Iterator[Callable[..., Manager]]:
    """A function that makes a Manager alone in its lighthouse, in this process; all are shut down at the end."""
    made: list[tuple[Manager, dist.TCPStore]] = []

    def make(**kwargs: Any) -> Manager:
        store = loopback_store()
        manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
            load_state_dict=lambda _: None,
            state_dict=dict,
            min_replica_size=1,
            use_async_quorum=False,
            replica_id=f"r_{len(made)}",
            rank=0,
            world_size=1,
            store_addr=HOST,
            store_port=store.port,
            lighthouse_addr=lighthouse(join_timeout_ms=100),
            hostname=HOST,
            timeout=timedelta(seconds=20),
            quorum_timeout=timedelta(seconds=20),
            **kwargs,
        )
        made.append((manager, store))
        return manager

    yield make
    for manager, _store in made:
        manager.shutdown(wait=False)
