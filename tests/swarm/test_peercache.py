from __future__ import annotations

import asyncio
import json
import os
import stat
import time

import pytest

from hotswarm.swarm.peercache import MAX_PEERS, PeerCache
from hotswarm.swarm.resolve import Resolver
from support.dhtkit import LOOPS, run

ID = "ab" * 20


def saved(tmp_path, **more) -> PeerCache:
    cache = PeerCache.load(tmp_path)
    cache.seq = 17
    cache.note(ID, ("10.0.0.7", 7411), 5)
    for key, value in more.items():
        setattr(cache, key, value)
    cache.write(cache.render())
    return cache


def test_peers_come_back_after_a_restart(tmp_path):
    saved(tmp_path)
    again = PeerCache.load(tmp_path)
    assert again.seq == 17
    (peer,) = again.peers()
    assert (peer.node_id, peer.address, peer.seen_ms) == (ID, ("10.0.0.7", 7411), 5)
    assert stat.S_IMODE((tmp_path / "peers.json").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["peers.json"]


def test_only_a_change_is_worth_a_write(tmp_path):
    cache = saved(tmp_path)
    assert cache.render() is None
    cache.note(ID, ("10.0.0.7", 7411), 6)
    assert cache.render() is not None


def test_the_most_recently_seen_256_are_kept(tmp_path):
    cache = PeerCache.load(tmp_path)
    for i in range(MAX_PEERS + 40):
        cache.note(f"{i:040x}", ("10.0.0.7", 1 + i), i)
    assert len(cache.peers()) == MAX_PEERS
    assert [p.seen_ms for p in cache.peers()] == list(range(MAX_PEERS + 39, 39, -1))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        json.dumps({"version": 2, "seq": 1, "peers": []}).encode(),
        json.dumps({"version": 1, "seq": -1, "peers": []}).encode(),
        json.dumps({"version": 1, "seq": "1", "peers": []}).encode(),
        json.dumps({"version": 1, "seq": 1, "peers": {}}).encode(),
        json.dumps({"version": 1, "seq": 1, "peers": ["x"]}).encode(),
        b'{"version": 1, "seq": 1, "peers": [' + b" " * (1 << 20) + b"]}",
    ],
)
def test_a_damaged_cache_is_set_aside_and_the_node_starts(tmp_path, caplog, content):
    (tmp_path / "peers.json").write_bytes(content)
    cache = PeerCache.load(tmp_path)
    assert cache.peers() == []
    assert "damaged" in caplog.text
    assert (tmp_path / "peers.json.bad").read_bytes() == content
    saved(tmp_path)
    assert len(PeerCache.load(tmp_path).peers()) == 1


def test_entries_that_cannot_be_called_are_left_out(tmp_path):
    good = {"id": ID, "host": "10.0.0.7", "port": 7411, "seen_ms": 1}
    bad = [
        {**good, "id": "../x"},
        {**good, "id": None},
        {**good, "host": "a.example"},
        {**good, "host": ["10.0.0.7"]},
        {**good, "port": 0},
        {**good, "port": True},
        {**good, "seen_ms": "1"},
        {},
    ]
    (tmp_path / "peers.json").write_text(json.dumps({"version": 1, "seq": 1, "peers": [*bad, good]}))
    assert len(PeerCache.load(tmp_path).peers()) == 1


def test_a_link_in_its_place_is_not_followed(tmp_path, caplog):
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "peers.json").symlink_to(tmp_path / "secret")
    assert PeerCache.load(tmp_path).peers() == []
    assert (tmp_path / "secret").read_text() == "{}"


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    cache = saved(tmp_path)
    cache.note("cd" * 20, ("10.0.0.8", 1), 9)
    good = cache.render()
    (tmp_path / "elsewhere").mkdir()
    cache.path = tmp_path / "elsewhere" / "gone" / "peers.json"
    with pytest.raises(OSError, match="gone"):
        cache.write(good)
    assert len(PeerCache.load(tmp_path).peers()) == 1
    assert cache.render() is not None, "still to be written"


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("loop", LOOPS)
def test_names_and_literals_are_resolved_and_failures_left_out(loop):
    async def main():
        found = await Resolver().resolve([("localhost", 5), ("10.0.0.7", 6), ("no-such-host.invalid", 7)])
        assert ("10.0.0.7", 6) in found
        assert ("127.0.0.1", 5) in found or ("::1", 5) in found
        assert {port for _, port in found} == {5, 6}

    run(loop, main())


def test_a_resolver_that_hangs_holds_up_nothing_and_gets_one_thread_a_name(monkeypatch):
    calls = []

    def hang(host, *_, **__):
        calls.append(host)
        time.sleep(1.0)
        return []

    async def main():
        monkeypatch.setattr("hotswarm.swarm.resolve.socket.getaddrinfo", hang)
        resolver = Resolver()
        began = time.monotonic()
        for _ in range(3):
            found = await resolver.resolve([("slow.example", 5), ("10.0.0.7", 6)], timeout_s=0.05)
            assert found == [("10.0.0.7", 6)]
        assert time.monotonic() - began < 0.9
        assert calls == ["slow.example"]
        ticks = 0
        async with asyncio.timeout(0.3):
            while ticks < 10:
                await asyncio.sleep(0.01)
                ticks += 1

    run("asyncio", main())
