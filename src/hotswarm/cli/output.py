"""What people see: tables, sizes, ages. Programs get `--json`, one object on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class OutputClosedError(Exception):
    """Nobody reads stdout any more (`… | head`). Not a BrokenPipeError, which typer would turn into exit code 1."""


def line(text: str) -> None:
    """One line on stdout."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise OutputClosedError from None


def print_json(data: Any) -> None:
    """One JSON object (indented when a person looks at it)."""
    line(json.dumps(data, indent=2 if sys.stdout.isatty() else None))


def console() -> Console:
    """stdout; without colours, and wide, when it is no terminal."""
    from rich.console import Console

    class Honest(Console):
        def on_broken_pipe(self) -> None:
            raise OutputClosedError  # rich would exit with 1

    return Honest(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> RenderableType:
    """A plain table; a column whose name begins with `>` is aligned to the right."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        side: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        last = number == len(columns) - 1  # it may hold a sentence
        made.add_column(column.lstrip(">"), justify=side, no_wrap=not last, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def pairs(rows: Iterable[tuple[str, str]]) -> RenderableType:
    """Names and values, one a line."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, value)
    return made


def size(count: float) -> str:
    """Bytes in binary units: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def age(seconds: float) -> str:
    """Seconds in words: 12 s, 3 min, 5.2 h, 2.0 d."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"
