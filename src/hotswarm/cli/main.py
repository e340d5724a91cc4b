"""`swarm-node`: verbs, with `serve` as the one that need not be written."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hotswarm.cli import exits

if TYPE_CHECKING:
    import typer

HELP_FLAGS = ("--help", "-h", "--install-completion", "--show-completion")


def with_default_verb(argv: Sequence[str]) -> list[str]:
    """`swarm-node --peers a:1` means `swarm-node serve --peers a:1`; so does `swarm-node` alone."""
    if argv and argv[0] == "--version":
        return ["version", *argv[1:]]
    if not argv or (argv[0].startswith("-") and argv[0] not in HELP_FLAGS):
        return ["serve", *argv]
    return list(argv)


def build_app() -> typer.Typer:
    """The command tree. Verbs import what they need when they run."""
    import typer

    from hotswarm.cli import inspect, setup
    from hotswarm.cli.demo import demo
    from hotswarm.cli.doctor import doctor
    from hotswarm.cli.export import export
    from hotswarm.cli.recover import recover

    app = typer.Typer(
        name="swarm-node",
        help="Hot snapshots of a training run, served to neighbours, so that a crashed node is back in seconds. "
        "Without a verb: serve.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # rich cuts the names of options off in a terminal of 80 columns
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for verb in (
        setup.serve,
        setup.stop,
        inspect.status,
        inspect.peers,
        inspect.snapshots,
        recover,
        inspect.verify,
        export,
        setup.keygen,
        doctor,
        inspect.healthcheck,
        inspect.top,
        demo,
        setup.version,
    ):
        app.command()(verb)
    app.add_typer(setup.config_app, name="config")
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stdout is None:  # started with stdout closed, as some supervisors do
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  for the life of the process

    def run() -> int:
        import typer.main

        command = typer.main.get_command(build_app())
        result = command.main(with_default_verb(arguments), prog_name="swarm-node", standalone_mode=False)
        return result if isinstance(result, int) else exits.OK

    return exits.run_mapped(run, as_json=exits.wants_json(arguments))


if __name__ == "__main__":
    sys.exit(main())
