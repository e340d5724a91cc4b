"""The README's code runs as it stands there, its commands exist, and what it links to is in the repository."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotswarm import DiLoCoConfig, DiLoCoTrainer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SWARM_NODE = Path(sys.executable).with_name("swarm-node")


def test_python_example_protects_a_trainer(short_dir, processes, wait_until, monkeypatch) -> None:
    monkeypatch.chdir(short_dir)
    daemon = processes.start([SWARM_NODE, "serve", "--state-dir", "checkpoints", "--listen", "127.0.0.1:0"])
    wait_until(
        lambda: subprocess.run([SWARM_NODE, "healthcheck"], check=False, capture_output=True).returncode == 0, 20
    )
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)

    model = torch.nn.Linear(4, 1)
    diloco_trainer = DiLoCoTrainer(model, DiLoCoConfig(inner_steps=3))
    loader = torch.utils.data.DataLoader(torch.arange(28.0).reshape(7, 4), batch_size=1)
    names = {
        "model": model,
        "optimizer": diloco_trainer.inner_optimizer,
        "diloco_trainer": diloco_trainer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(diloco_trainer.inner_optimizer, lambda step: 1 / (1 + step)),
        "loader": loader,
        "train_step": lambda batch: diloco_trainer.inner_step(model(batch).square().mean()),
    }
    exec(code, names)
    checkpointer = names["checkpointer"]
    assert checkpointer.snapshots_saved >= 2, checkpointer.last_error
    assert (checkpointer.outer_step, checkpointer.training_step) == (2, 7)
    listed = subprocess.run([SWARM_NODE, "snapshots", "--json"], check=True, capture_output=True, text=True).stdout
    assert '"training_step": 7' in listed, processes.log_of(daemon)


@pytest.mark.parametrize("verb", sorted(set(re.findall(r"`(?:swarm-node )?([a-z]+)(?: [^`]*)?`(?=[^|\n]*\|)", README))))
def test_commands_of_the_table_exist(verb: str) -> None:
    done = subprocess.run([SWARM_NODE, verb, "--help"], check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for line in re.findall(r"\$ make ([a-z -]+)", README) for word in line.split()}
    assert named
    assert named <= targets
