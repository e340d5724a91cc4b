"""The files of deploy/: what can be checked without a container engine and without being the system's init."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from hotswarm.config import NodeConfig, load_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "swarm-node.service").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
FLAGS = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(NodeConfig)} | {"--config"}


def flags_of(words: list[str]) -> dict[str, str]:
    assert words[0] == "serve"
    return dict(zip(words[1::2], words[2::2], strict=True))


def exec_start() -> list[str]:
    line = next(line for line in UNIT.splitlines() if line.startswith("ExecStart="))
    return shlex.split(line.removeprefix("ExecStart="))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
def test_systemd_finds_nothing_to_object_to(tmp_path: Path) -> None:
    unit = tmp_path / "swarm-node.service"
    unit.write_text(UNIT.replace(exec_start()[0], sys.executable))  # verify wants the program to exist
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_unit_starts_the_daemon_with_flags_that_exist_and_without_rights() -> None:
    program, *words = exec_start()
    assert program.endswith("/swarm-node")
    assert set(flags_of(words)) <= FLAGS
    for line in (
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "ProtectSystem=strict",
        "User=hotswarm",
        "UMask=0077",
    ):
        assert line in UNIT.splitlines()


def test_settings_file_is_one_that_the_daemon_reads() -> None:
    settings = load_settings(config_file=DEPLOY / "hotswarm.toml", environ={})
    assert settings.config.peers == ("node1.example.org:7411",)


def test_image_runs_without_root_and_says_whether_it_is_well() -> None:
    last_stage = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :].splitlines()
    assert "USER 10001" in last_stage
    assert any(line.startswith("HEALTHCHECK") and '["swarm-node", "healthcheck"]' in line for line in last_stage)
    assert 'ENTRYPOINT ["swarm-node"]' in last_stage


def test_image_takes_every_dependency_but_torch() -> None:
    program = (
        DOCKERFILE.split('python -c "', 1)[1].split('"', 1)[0].replace("\\n", "\n").replace("sep='\n'", "sep='\\n'")
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert done.stdout.splitlines() == [name for name in wanted if not name.startswith("torch>")]
    assert len(wanted) - len(done.stdout.splitlines()) == 1


def test_compose_makes_three_nodes_that_know_each_other() -> None:
    services = COMPOSE["services"]
    assert len(services) == 3
    for name, service in services.items():
        flags = flags_of(service["command"])
        assert set(flags) <= FLAGS
        assert flags["--name"] == name
        assert flags["--advertise"] == f"{name}:7411"
        assert {peer.split(":")[0] for peer in flags["--peers"].split(",")} == set(services) - {name}
        assert flags["--swarm-key"] == f"/run/secrets/{service['secrets'][0]}"
        assert service["volumes"][0].split(":")[0] in COMPOSE["volumes"]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    assert set(COMPOSE["secrets"]) == {"swarm.key"}
