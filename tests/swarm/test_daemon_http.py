"""The HTTP API: what it answers on the Unix socket, and what it refuses on TCP."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from daemons import client_of, start_daemon
from little_trainer import LittleState, LittleTrainer

from hotswarm.errors import ControlError, NoSnapshot, StoreError
from hotswarm.swarm.control import ControlClient
from hotswarm.swarm.paths import fd_socket_path

TOKEN = "0123456789abcdef0123"


def request(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture
def tcp(processes, short_dir):
    start_daemon(processes, short_dir / "state", "--http", "127.0.0.1:0", "--name", "<b>n</b>")
    return client_of(short_dir / "state").status()["http"]


def test_reading_paths_answer_on_tcp(tcp):
    assert request(tcp, "/healthz") == (200, "ok\n")
    assert request(tcp, "/readyz") == (200, "ready\n")
    status, body = request(tcp, "/api/v1/status")
    assert status == 200
    assert json.loads(body)["name"] == "<b>n</b>"
    for path, key in (("peers", "peers"), ("snapshots", "snapshots"), ("recoveries", "recoveries")):
        assert json.loads(request(tcp, f"/api/v1/{path}")[1]) == {key: []}
    assert request(tcp, "/no")[0] == 404


def test_metrics_are_in_the_format_of_prometheus(tcp):
    status, body = request(tcp, "/metrics")
    assert status == 200
    assert re.search(r"^hotswarm_trainer_attached 0\.0$", body, re.MULTILINE)
    assert re.search(r'^hotswarm_snapshots\{kind="hot"\} 0\.0$', body, re.MULTILINE)
    assert re.search(r"^hotswarm_snapshots_stored_total 0\.0$", body, re.MULTILINE)


def test_the_dashboard_is_self_contained(tcp):
    status, page = request(tcp, "/")
    assert status == 200
    assert '<script src="dashboard.js">' in page
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert request(tcp, f"/{name}")[0] == 200
    script = request(tcp, "/dashboard.js")[1]
    assert "innerHTML" not in script
    assert "http" not in script.replace("https://", "http")


def test_tcp_takes_get_only(tcp):
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert request(tcp, "/api/v1/status", method)[0] == 405
        assert request(tcp, "/api/v1/stop", method)[0] == 405


def test_doing_paths_do_not_exist_on_tcp(tcp):
    for path in ("stop", "recover", "fetch", "flush", "pin", "verify", "clock"):
        assert request(tcp, f"/api/v1/{path}")[0] == 404


def test_only_names_of_this_machine_pass_as_host_header(tcp):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]:1"):
        status, body = request(tcp, "/api/v1/status", Host=host)
        assert (status, json.loads(body)["error"]["type"]) == (403, "NotAuthorised"), host
    for host in ("localhost", "LOCALHOST:9", "127.0.0.1:1", "[::1]:5"):
        assert request(tcp, "/api/v1/status", Host=host)[0] == 200, host


def test_off_loopback_a_token_is_needed_for_all_but_health_and_metrics(processes, short_dir):
    token = short_dir / "token"
    token.write_text(TOKEN + "\n")
    flags = ("--http", "0.0.0.0:0", "--http-token-file", token, "--http-allow-hosts", "node.example")
    start_daemon(processes, short_dir / "state", *map(str, flags))
    port = client_of(short_dir / "state").status()["http"].rpartition(":")[2]
    address = f"127.0.0.1:{port}"
    assert request(address, "/healthz")[0] == 200
    assert request(address, "/metrics")[0] == 200
    assert request(address, "/api/v1/status")[0] == 401
    assert request(address, "/")[0] == 401
    assert request(address, "/api/v1/status", Authorization="Bearer wrong")[0] == 401
    assert request(address, "/api/v1/status", Authorization=f"Basic {TOKEN}")[0] == 401
    assert request(address, "/api/v1/status", Authorization=f"Bearer {TOKEN}")[0] == 200
    assert request(address, "/api/v1/status", Authorization=f"Bearer {TOKEN}", Host="node.example")[0] == 200
    assert request(address, "/healthz", Host="evil.example")[0] == 403


# ---------------------------------------------------------------- the Unix socket


def test_sockets_are_for_this_user_only(processes, short_dir):
    start_daemon(processes, short_dir / "state")
    control = client_of(short_dir / "state").socket
    for path in (control, fd_socket_path(control)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert path.parent.stat().st_mode & 0o077 == 0


AS_ANOTHER_USER = """
import os, sys
sys.path.insert(0, sys.argv[2])
import hotswarm.swarm.opened
from hotswarm.errors import HotswarmError
from hotswarm.swarm.control import ControlClient
os.setgroups([int(sys.argv[3])]); os.setgid(65534); os.setuid(65534)
client = ControlClient(sys.argv[1])
def attach():
    client.attach(4096, 4096, 1).close()
for call in (client.status, attach, lambda: client.open_snapshot("0" * 32)):
    try:
        call()
        print("worked")
    except HotswarmError as error:
        print(type(error).__name__)
"""


def as_another_user(control, group: int) -> list[str]:
    source = str(Path(__file__).parents[2] / "src")
    argv = [sys.executable, "-c", AS_ANOTHER_USER, str(control), source, str(group)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_is_refused_even_where_file_modes_would_let_it_in(processes, short_dir):
    start_daemon(processes, short_dir / "state")
    control = client_of(short_dir / "state").socket
    for path in (control, fd_socket_path(control)):
        path.chmod(0o666)
    control.parent.chmod(0o755)
    control.parent.parent.chmod(0o755)
    assert as_another_user(control, 65534) == ["NotAuthorised"] * 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_members_of_the_configured_group_are_let_in(processes, short_dir):
    start_daemon(processes, short_dir / "state", "--socket-group", "54321")
    control = client_of(short_dir / "state").socket
    control.parent.parent.chmod(0o755)  # the test's own folder around the runtime folder
    assert as_another_user(control, 54321) == ["worked", "worked", "NoSnapshot"]
    assert as_another_user(control, 54322) == ["ControlError"] * 3  # the kernel refuses


def test_errors_arrive_as_the_class_that_the_daemon_raised(processes, short_dir):
    start_daemon(processes, short_dir / "state")
    client = client_of(short_dir / "state")
    with pytest.raises(NoSnapshot, match="32 hex digits"):
        client.verify("nonsense")
    with pytest.raises(NoSnapshot, match="holds no snapshot"):
        client.pin("0" * 32)
    with pytest.raises(ControlError, match="not durable after"):
        client.flush(99, 0.2)
    with pytest.raises(ControlError, match="does not fit"):
        client.post("/api/v1/flush", {"seq": "x", "timeout": 1})
    with pytest.raises(ControlError, match="Not Found"):
        client.get("/api/v1/nothing")
    with pytest.raises(ControlError, match="JSON object"):
        client.post("/api/v1/flush", [1])


def test_a_client_without_a_daemon_says_what_to_do(short_dir):
    with pytest.raises(ControlError, match="swarm-node serve"):
        ControlClient(short_dir / "no.sock").status()
    assert ControlClient.find(short_dir) is None


def test_garbage_on_the_descriptor_socket_hurts_nobody(processes, short_dir):
    start_daemon(processes, short_dir / "state")
    client = client_of(short_dir / "state")
    for data in (b"not json", b"[1]", b"{}", b'{"op":"attach","slot_bytes":-1}', b'{"op":"open"}', b"x" * 70_000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(10)
            sock.connect(str(fd_socket_path(client.socket)))
            sock.send(data)
            assert b'"error"' in sock.recv(65536)
    assert client.status()["ready"]


def test_something_else_given_as_an_arena_is_refused(processes, short_dir):
    start_daemon(processes, short_dir / "state")
    client = client_of(short_dir / "state")
    with open(os.devnull) as null, pytest.raises(StoreError, match="memfd"):
        client.attach(4096, 4096, 1, arena_fd=null.fileno())
    assert client.status()["trainer"] is None


def test_pins_survive_retention_and_verify_checks_digests(processes, short_dir):
    state_dir = short_dir / "state"
    start_daemon(processes, state_dir, "--max-hot-snapshots", "1")
    client = client_of(state_dir)
    trainer = LittleTrainer(state_dir, LittleState())
    trainer.attach()
    first = trainer.session.flush(trainer.capture(1), 20.0)
    client.pin(first.snapshot_id)
    for step in (2, 3):
        trainer.session.flush(trainer.capture(step), 20.0)
    assert [info.training_step for info in client.snapshots()] == [1, 3]
    assert client.verify(first.snapshot_id)["sections"] == ["outer", "inner"]
    assert client.snapshots()[0].pinned
    trainer.session.close()
