"""`swarm-node` as people and programs use it: verbs, exit codes, one-line errors, JSON."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "swarm"))
from daemons import SWARM_NODE, client_of, run_cli, start_daemon
from little_trainer import LittleState, LittleTrainer

from hotswarm import NodeConfig, SwarmNode
from hotswarm.cli import exits, inspect, options
from hotswarm.cli.main import main, with_default_verb
from hotswarm.config import option_names
from hotswarm.store.files import FileStore


def store_steps(state_dir: Path, *numbers: int) -> list[str]:
    """A daemon's work: snapshots of these steps; their ids."""
    trainer = LittleTrainer(state_dir, LittleState())
    trainer.attach()
    found = [trainer.session.flush(trainer.capture(number), 20.0).snapshot_id for number in numbers]
    trainer.session.close()
    return found


def damage(state_dir: Path, snapshot_id: str) -> None:
    """Flip a bit in the middle of a pack of the snapshot."""
    with FileStore(state_dir).open(snapshot_id) as source:
        pack = state_dir / "runs" / "default" / "packs" / source.stored.placements["inner"].pack
    with open(pack, "r+b") as file:
        file.seek(pack.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.fixture
def cli(capsys):
    """Run a verb in this process: its exit code and what it printed."""

    class Done:
        def __init__(self, *words: str | Path) -> None:
            self.returncode = main([str(word) for word in words])
            self.stdout, self.stderr = capsys.readouterr()

    return Done


# ---------------------------------------------------------------- shape


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([], ["serve"]),
        (["--peers", "a:1"], ["serve", "--peers", "a:1"]),
        (["--version"], ["version"]),
        (["--help"], ["--help"]),
        (["status", "--json"], ["status", "--json"]),
        (["serve"], ["serve"]),
    ],
)
def test_serve_is_the_verb_that_need_not_be_written(given, meant):
    assert with_default_verb(given) == meant


def test_every_option_has_a_flag_with_a_help_text():
    assert set(options.HELP) == set(option_names())
    text = run_cli("serve", "--help", env={**os.environ, "COLUMNS": "200"}).stdout
    for name in option_names():
        assert "--" + name.replace("_", "-") in text
    assert run_cli("--help").returncode == 0


def test_version_is_quick_and_imports_nothing_heavy():
    done = run_cli("version")
    assert done.returncode == 0
    assert done.stdout.startswith("swarm-node 0.")
    assert "torch" in json.loads(run_cli("version", "--json").stdout)
    code = (
        "import sys\nfrom hotswarm.cli.main import main\nmain(['version'])\n"
        "print([name for name in ('torch', 'grpc', 'aiohttp', 'uvloop', 'kademlia', 'blake3') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--peers", "nonsense"], 2, "peers: 'nonsense' is not HOST:PORT"),
        (["--pers", "a:1"], 2, "--peers"),
        (["statsu"], 2, "status"),
        (["--run", "../x"], 2, "run name"),
        (["--http", "0.0.0.0:1"], 2, "--http-token-file"),
        (["--join", "secret"], 2, "stdin"),
        (["status"], 1, "no daemon runs"),
        (["healthcheck"], 1, "no daemon runs"),
        (["verify"], 10, "holds no snapshot"),
        (["verify", "abcd"], 10, "abcd"),
        (["recover", "--mode", "best"], 2, "auto, resume, outer, clone"),
        (["recover", "--inner", "best"], 2, "adopt"),
        (["recover", "--timeout", "soon"], 2, "--timeout"),
        (["config", "show", "--upload-slots", "0"], 2, "at least 1"),
        (["keygen", "--join-file", "j"], 2, "--peers"),
    ],
)
def test_a_mistake_is_one_line_with_its_exit_code(short_dir, monkeypatch, capsys, words, code, says):
    monkeypatch.chdir(short_dir)
    assert main(words) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("swarm-node: ")
    assert says in err
    assert err.count("\n") == 1
    assert list(short_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--listen", "10.1.2.3:7411"], 12, "swarm key"),
        (["--peers", "node.example:7411", "--listen", "127.0.0.1:0"], 12, "keygen"),
        (["--swarm-key", "/nonexistent/key", "--listen", "127.0.0.1:0"], 12, "/nonexistent/key"),
        (["--socket-group", "no-such-group", "--listen", "127.0.0.1:0"], 2, "no group"),
    ],
)
def test_a_node_that_cannot_start_says_why_in_one_line(short_dir, words, code, says):
    done = run_cli(*words, "--state-dir", short_dir / "state")
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("swarm-node: ")]
    assert len(lines) == 1
    assert says in lines[0]
    assert "Traceback" not in done.stderr


def test_with_json_errors_are_json(short_dir):
    done = run_cli("status", "--json", "--state-dir", short_dir)
    assert done.returncode == 1
    error = json.loads(done.stderr)["error"]
    assert (error["type"], error["exit_code"]) == ("ControlError", 1)
    done = run_cli("snapshots", "--json", "--nonsense")
    assert (done.returncode, json.loads(done.stderr)["error"]["exit_code"]) == (2, 2)
    assert exits.wants_json(["a", "--json"])
    assert not exits.wants_json(["run", "--", "--json"])


def test_an_unknown_key_in_a_file_names_the_nearest(short_dir):
    (short_dir / "hotswarm.toml").write_text("peeers = 'a:1'\n")
    done = run_cli("config", "show", cwd=short_dir)
    assert done.returncode == 2
    assert "did you mean 'peers'?" in done.stderr


# ---------------------------------------------------------------- looking


def test_config_show_says_where_each_value_comes_from(short_dir, cli, monkeypatch):
    (short_dir / "hotswarm.yaml").write_text("run: from-file\n")
    monkeypatch.chdir(short_dir)
    monkeypatch.setenv("HOTSWARM_NAME", "from-env")
    done = cli("config", "show", "--origin", "--json", "--upload-slots", "9")
    shown = json.loads(done.stdout)
    assert shown["run"] == {"value": "from-file", "origin": f"file {short_dir / 'hotswarm.yaml'}"}
    assert shown["name"] == {"value": "from-env", "origin": "env HOTSWARM_NAME"}
    assert shown["upload_slots"] == {"value": 9, "origin": "flag --upload-slots"}
    assert shown["peers"] == {"value": [], "origin": "default"}
    text = cli("config", "show", "--origin").stdout
    assert "from-env" in text
    assert "env HOTSWARM_NAME" in text


def test_the_state_of_a_node_with_and_without_its_daemon(processes, short_dir, cli):
    state_dir = short_dir / "state"
    daemon = start_daemon(processes, state_dir, "--name", "alice")
    at = ("--state-dir", state_dir)
    assert cli("snapshots", *at).stdout.strip() == "no snapshots of run 'default' yet"
    ids = store_steps(state_dir, 5, 6)
    status = json.loads(cli("status", "--json", *at).stdout)
    assert (status["name"], status["pid"], status["snapshots"]) == ("alice", daemon.pid, 2)
    assert status["listen"].startswith("127.0.0.1:")
    assert status["newest"]["snapshot_id"] == ids[1]
    text = cli("status", *at).stdout
    assert "alice" in text
    assert "outer 1, inner 2" in text
    assert cli("healthcheck", *at).returncode == 0
    assert json.loads(cli("healthcheck", "--json", *at).stdout)["ready"] is True
    for alive in (True, False):
        listed = json.loads(cli("snapshots", "--json", *at).stdout)["snapshots"]
        assert [item["snapshot_id"] for item in listed] == ids
        assert ids[0] in cli("snapshots", *at).stdout
        verified = json.loads(cli("verify", "--json", *at).stdout)["snapshots"]
        assert [item["error"] for item in verified] == [None, None]
        assert cli("verify", ids[0][:8], *at).returncode == 0
        if alive:
            daemon.send_signal(signal.SIGTERM)
            assert daemon.wait(20) == 0
    damage(state_dir, ids[1])
    done = cli("verify", *at)
    assert done.returncode == 13
    assert ids[1] in done.stdout
    assert "chunk" in done.stdout
    assert cli("verify", ids[0], *at).returncode == 0
    assert cli("healthcheck", *at).returncode == 1


def test_doctor_finds_nothing_wrong_here_and_what_is_wrong_elsewhere(processes, short_dir, cli):
    done = cli("doctor", "--state-dir", short_dir / "state", "--listen", "127.0.0.1:0")
    assert done.returncode == 0, done.stdout
    start_daemon(processes, short_dir / "one")
    listen = client_of(short_dir / "one").status()["listen"]
    done = cli("doctor", "--json", "--state-dir", short_dir / "two", "--listen", listen, "--swarm-key", "/no/key")
    assert done.returncode == 1
    findings = {item["check"]: item for item in json.loads(done.stdout)["findings"]}
    assert findings["swarm key"]["state"] == "failed"
    assert findings["TCP port"]["state"] == "failed"
    assert "in use" in findings["TCP port"]["detail"]
    assert not (short_dir / "two").exists()


def test_verify_has_a_damaged_snapshot_put_into_quarantine(processes, short_dir, cli):
    state_dir = short_dir / "state"
    start_daemon(processes, state_dir)
    ids = store_steps(state_dir, 1, 2)
    damage(state_dir, ids[1])
    done = cli("verify", "--state-dir", state_dir)
    assert done.returncode == 13
    assert ids[1] in done.stdout
    assert [info.snapshot_id for info in client_of(state_dir).snapshots()] == [ids[0]]
    assert client_of(state_dir).status()["health"]["state"] == "yellow"
    assert ids[1] in client_of(state_dir).status()["health"]["reasons"][0]
    assert cli("verify", "--state-dir", state_dir).returncode == 0


# ---------------------------------------------------------------- keys


def test_keygen_makes_a_key_once_and_a_join_file_for_it(short_dir, cli, monkeypatch):
    monkeypatch.chdir(short_dir)
    done = cli("keygen", "--peers", "10.0.0.5:7411,10.0.0.6:7411")
    assert done.returncode == 0, done.stderr
    key, join = short_dir / "swarm.key", short_dir / "swarm.join"
    for path in (key, join):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = key.read_text().splitlines()[-1]
    assert len(base64.b64decode(secret, validate=True)) == 32
    assert secret in join.read_text()
    assert "10.0.0.6:7411" in join.read_text()
    assert secret not in done.stdout + done.stderr
    assert cli("keygen").returncode == 0
    assert key.read_text().splitlines()[-1] == secret
    assert cli("keygen", "--peers", "a:1").returncode == 2
    second = cli("keygen", "--json", "--peers", "a:1", "--join-file", "second.join")
    assert json.loads(second.stdout) == {"swarm_key": "swarm.key", "made": False, "join_file": "second.join"}
    assert secret in (short_dir / "second.join").read_text()


def test_a_join_token_comes_from_stdin_and_stays_in_the_state_directory(processes, short_dir):
    assert run_cli("keygen", "--peers", "127.0.0.1:9", cwd=short_dir).returncode == 0
    state_dir = short_dir / "state"
    with (short_dir / "swarm.join").open() as token:
        start_daemon(processes, state_dir, "--join", "-", stdin=token)
    kept = state_dir / "swarm.join"
    assert kept.read_text() == (short_dir / "swarm.join").read_text()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    done = run_cli("serve", "--join", "-", "--state-dir", short_dir / "other", input="nonsense\n")
    assert done.returncode == 12
    assert "nonsense" not in done.stderr


# ---------------------------------------------------------------- serving


def test_logs_can_be_json_and_stdout_stays_empty(processes, short_dir):
    state_dir = short_dir / "state"
    with (short_dir / "out").open("wb") as out, (short_dir / "err").open("wb") as err:
        daemon = start_daemon(processes, state_dir, "--log-format", "json", stdout=out, stderr=err)
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(20) == 0
    assert (short_dir / "out").read_bytes() == b""
    lines = [json.loads(line) for line in (short_dir / "err").read_text().splitlines()]
    assert any("listens on" in line["message"] for line in lines)
    assert {"time", "level", "logger", "message"} <= lines[0].keys()


def test_the_service_manager_is_told_when_the_node_is_ready(processes, short_dir):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short_dir / "notify"))
        manager.settimeout(20)
        env = {**os.environ, "NOTIFY_SOCKET": str(short_dir / "notify")}
        start_daemon(processes, short_dir / "state", env=env)
        assert manager.recv(100) == b"READY=1"


def test_a_service_manager_that_is_gone_does_not_stop_the_node(processes, short_dir):
    env = {**os.environ, "NOTIFY_SOCKET": str(short_dir / "gone")}
    daemon = start_daemon(processes, short_dir / "state", env=env)
    assert client_of(short_dir / "state").status()["ready"]
    assert "could not tell the service manager" in processes.log_of(daemon)


def test_a_daemon_that_a_program_started_is_seen_by_name_and_ended_by_a_verb(short_dir, cli):
    at = ("--state-dir", short_dir / "state")
    node = SwarmNode(NodeConfig(state_dir=short_dir / "state", run="my-run", listen="127.0.0.1:0")).start()
    try:
        assert psutil.Process(node.pid).cmdline()[-2:] == ["my-run", str(short_dir / "state")]
        text = cli("status", *at).stdout
        assert re.search(rf"^process +{node.pid}, up ", text, re.MULTILINE), text
        done = cli("stop", *at)
        assert (done.returncode, done.stdout) == (0, f"process {node.pid} has ended\n")
        assert not node.running
        assert cli("stop", *at).returncode == 1
    finally:
        node.stop()


def test_the_status_says_the_step_of_a_trainer_without_rounds(processes, short_dir, cli):
    data = {"outer_step": 0, "inner_step": 0, "training_step": 209}
    assert inspect._position(data, None) == inspect._position(data, 0) == "step 209"
    rounds = {"outer_step": 2, "inner_step": 7, "training_step": 27}
    assert inspect._position(rounds, 10) == "outer 2, inner 7 of 10, step 27"
    start_daemon(processes, short_dir / "state")
    store_steps(short_dir / "state", 6)
    assert "outer 1, inner 2, step 6, taken" in cli("status", "--state-dir", short_dir / "state").stdout


def test_a_wrong_directory_and_a_wrong_run_are_said(tmp_path, cli):
    done = cli("snapshots", "--state-dir", tmp_path / "typo")
    assert (done.returncode, "there is no state directory" in done.stderr) == (10, True), done.stderr
    with FileStore(tmp_path / "state", "alpha"):
        pass
    done = cli("snapshots", "--state-dir", tmp_path / "state", "--run", "alhpa")
    assert (done.returncode, "there are those of 'alpha'" in done.stdout) == (0, True)
    done = cli("verify", "--state-dir", tmp_path / "state", "--run", "alhpa")
    assert (done.returncode, "there are those of 'alpha'" in done.stderr) == (10, True)


def test_in_a_narrow_terminal_no_option_s_name_is_cut_off():
    text = run_cli("serve", "--help", env={**os.environ, "COLUMNS": "80"}).stdout
    assert "…" not in text
    for name in option_names():
        assert "--" + name.replace("_", "-") in text


def test_top_shows_the_status_until_it_is_interrupted(processes, short_dir, wait_until):
    state_dir = short_dir / "state"
    start_daemon(processes, state_dir, "--name", "bob")
    top = processes.start([*SWARM_NODE, "top", "--state-dir", state_dir, "--every", "0.1"])
    wait_until(lambda: "bob" in processes.log_of(top), 30, "the status")
    top.send_signal(signal.SIGINT)
    assert top.wait(20) == 130


def test_closing_the_pipe_early_is_no_error(processes, short_dir):
    for words in (["config", "show", "--origin"], ["config", "show", "--json"], ["version"]):
        with open(short_dir / "err", "w+b") as err:
            process = subprocess.Popen([*SWARM_NODE, *words], stdout=subprocess.PIPE, stderr=err, cwd=short_dir)
            process.stdout.close()
            assert process.wait(30) == 0, words
            err.seek(0)
            assert err.read() == b"", words
