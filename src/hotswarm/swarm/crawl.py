"""The lookup: the nodes nearest to an id, and every value met on the way.

Kademlia's iterative search (Maymounkov and Mazieres 2002, section 2.3). Unlike the package's it goes on as answers
arrive instead of waiting for the slowest of each round, asks all of the K nearest, and hands over every value, where
the package stops at the first round with one and takes the most frequent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kademlia.node import Node

from hotswarm.swarm.kad import ID_BYTES, K, Reply, SealedProtocol
from hotswarm.swarm.records import MAX_VALUE_BYTES

ALPHA = 8  # calls in flight; most of a small swarm at once, so that dead nodes cost little
MAX_ASKED = 64  # nodes asked, however many closer ones a liar invents


async def crawl(protocol: SealedProtocol, target: bytes, on_value: Callable[[bytes], None] | None = None) -> list[Node]:
    """The nodes nearest to `target` that answer, nearest first, at most K; with `on_value`, each value met on the way.

    Ends within MAX_ASKED / ALPHA times a call's two timeouts, whatever peers reply.
    """
    goal = Node(target)
    known: dict[bytes, Node] = {n.id: n for n in protocol.router.find_neighbors(goal, k=K)}
    asked: set[bytes] = set()
    answered: set[bytes] = set()
    failed: set[bytes] = set()
    running: dict[asyncio.Task[Reply], Node] = {}
    call = protocol.call_find_node if on_value is None else protocol.call_find_value

    def take(node: Node, reply: Reply) -> None:
        ok, data = reply
        value = None
        if isinstance(data, dict):
            value, data = data.get("value"), data.get("nodes", [])
            ok = ok and isinstance(value, bytes) and len(value) <= MAX_VALUE_BYTES
        nodes = parse_nodes(protocol, data) if ok else None
        if nodes is None:
            protocol.hostile += reply[0]
            failed.add(node.id)
            return
        answered.add(node.id)
        for n in nodes:
            known.setdefault(n.id, n)
        if value is not None and on_value is not None:
            on_value(value)

    try:
        while True:
            live = sorted((n for n in known.values() if n.id not in failed), key=goal.distance_to)[:K]
            for node in live:
                if node.id not in asked and len(running) < ALPHA and len(asked) < MAX_ASKED:
                    asked.add(node.id)
                    running[asyncio.get_running_loop().create_task(call(node, goal))] = node
            if not running:
                return [n for n in live if n.id in answered]
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                take(running.pop(task), task.result())
    finally:
        for task in running:
            task.cancel()


def parse_nodes(protocol: SealedProtocol, nodes: object) -> list[Node] | None:
    """The usable nodes of a peer's list, or None when no honest node sends that."""
    if not isinstance(nodes, list) or len(nodes) > K:
        return None
    out = []
    for entry in nodes:
        if (
            not isinstance(entry, list)
            or len(entry) != 3
            or not isinstance(entry[0], bytes)
            or len(entry[0]) != ID_BYTES
        ):
            return None
        address = protocol.usable(entry[1], entry[2])
        if address is not None and entry[0] != protocol.source_node.id:
            out.append(Node(entry[0], *address))
    return out
