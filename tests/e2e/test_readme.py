"""The README's code and commands run as they stand there, and what it links to is in the repository.

Only addresses are replaced: 10.0.0.5:7411 by that of a daemon of the test, 0.0.0.0:7411 by a free loopback port.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hotswarm import DiLoCoTrainer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
CONSOLE = "\n".join(re.findall(r"```console\n(.*?)```", README, re.DOTALL))
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^\$ (swarm-node .*)$", CONSOLE, re.MULTILINE)]
SWARM_NODE = Path(sys.executable).with_name("swarm-node")


def swarm_node(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SWARM_NODE, *words], check=False, capture_output=True, text=True, timeout=60)


@pytest.fixture
def node(short_dir, processes, wait_until, monkeypatch) -> str:
    """The two commands of "Use it" in a fresh folder: a swarm key, and a daemon on ./checkpoints. Its address."""
    monkeypatch.chdir(short_dir)
    keygen, serve, *_ = COMMANDS
    done = swarm_node(*keygen)
    assert done.returncode == 0, done.stderr
    words = [word.replace("0.0.0.0:7411", "127.0.0.1:0").replace("10.0.0.5:7411", "127.0.0.1:1") for word in serve]
    daemon = processes.start([SWARM_NODE, *words])

    def answers() -> bool:
        assert daemon.poll() is None, processes.log_of(daemon)
        return swarm_node("healthcheck", "--state-dir", "checkpoints").returncode == 0

    wait_until(answers, 30, "a daemon that serves")
    return json.loads(swarm_node("status", "--json", "--state-dir", "checkpoints").stdout)["listen"]


def a_run(**more) -> dict[str, object]:
    """What the examples take as given: a model, a loader of 7 batches and two ways to make a loss of them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def loss_of(batch):
        return model(batch).square().mean()

    def train_step(batch) -> None:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
        scheduler.step()

    loader = torch.utils.data.DataLoader(torch.arange(28.0).reshape(7, 4), batch_size=1, shuffle=True)
    return {**locals(), **more}


def test_plain_trainer_resumes_and_stops_where_it_meant_to(node) -> None:
    first = a_run(EPOCHS=1)
    exec(PYTHON[0], first)
    assert first["checkpointer"].training_step == 7, first["checkpointer"].last_error
    again = a_run(EPOCHS=2)  # at the end of an epoch, which is where a loop over epoch numbers would go wrong
    exec(PYTHON[0], again)
    assert again["checkpointer"].training_step == 14
    assert again["checkpointer"].last_report.action == "resume"
    assert again["scheduler"].last_epoch == 14


def test_diloco_trainer_and_a_neighbour_that_fetches_its_state(node) -> None:
    # one process stands for all workers: the mean of one is itself
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = a_run(ROUNDS=1)
        exec(PYTHON[1], run)
    finally:
        dist.destroy_process_group()
    trainer, checkpointer = run["trainer"], run["checkpointer"]
    assert isinstance(trainer, DiLoCoTrainer)
    assert trainer.stats.outer_step_count == 1
    assert checkpointer.snapshots_saved >= 1, checkpointer.last_error

    other = a_run()
    other["optimizer"] = torch.optim.AdamW(other["model"].parameters())
    exec(PYTHON[3].replace("10.0.0.5:7411", node), other)
    outer = other["snapshot"].manifest.outer_step
    assert outer == 1
    assert torch.equal(other["model"].weight, trainer.initial_weights["weight"])


def test_torchft_example_names_things_that_exist() -> None:
    compile(PYTHON[2], "README.md", "exec")
    trainer = (ROOT / "src/hotswarm/demo/trainer.py").read_text()
    assert "attach(manager, diloco, trainer.checkpointer)" in trainer
    assert "DiLoCo(manager, [model], inner, outer, sync_every=" in trainer


def test_commands_for_operating_run(node) -> None:
    done = [(words, swarm_node(*words)) for words in COMMANDS[2:] if words[0] != "demo"]
    assert len(done) >= 6
    # nothing was trained here, so there is nothing to verify or to recover: exit 10 says just that
    assert [(words, ran.stderr) for words, ran in done if ran.returncode not in (0, 10)] == []


def test_verbs_of_the_table_exist() -> None:
    table = README[README.index("| command |") : README.index("`--http ")]
    rows = [row for row in table.splitlines()[2:] if row.startswith("|")]
    named = {verb for row in rows for verb in re.findall(r"`([a-z]+)`", row.split("|")[1])}
    shown = swarm_node("--help").stdout
    assert len(named) >= 12
    assert [verb for verb in sorted(named) if not re.search(rf"\b{verb}\b", shown)] == []


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r"`((?:src|deploy|proto)/[^`\s]*)`", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for line in re.findall(r"\$ make ([a-z -]+)", README) for word in line.split()}
    assert named
    assert named <= targets
