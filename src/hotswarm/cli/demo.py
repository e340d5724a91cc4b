"""`swarm-node demo`: the whole product on this machine, on real training, with every claim checked."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer

from hotswarm.errors import ConfigError


def demo(
    fast: Annotated[
        bool, typer.Option("--fast", help="Lose the donor while the machine is rebuilt: one act less.")
    ] = False,
    report_dir: Annotated[
        Path, typer.Option("--report-dir", help="Where report.json, losses.png and the logs go.")
    ] = Path("demo-report"),
) -> None:
    """Three DiLoCo trainers lose a process, a machine and a donor; exit 0 only when every claim held.

    With CI=true in the environment the claims that depend on the clock are printed but do not fail the run.
    """
    missing = [name for name in ("torchft", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {' and '.join(missing)}; install the extra: pip install 'hotswarm[demo]'")
    from rich.console import Console

    from hotswarm.demo import scenario

    options = scenario.Options(fast=fast, report_dir=report_dir, lenient_clock=os.environ.get("CI") == "true")
    raise typer.Exit(scenario.run(options, Console(highlight=False, soft_wrap=False)))
