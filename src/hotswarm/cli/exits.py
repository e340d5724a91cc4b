"""Exit codes and error lines: the one place that maps what went wrong to what the shell sees.

    0 ok   1 failed   2 usage or configuration   3 done but partial or older than asked   10 no snapshot found
    11 locked   12 not authorised   13 integrity   75 try again   130 interrupted

Errors are one line on stderr; with `--json` that line is `{"error": {"type", "message", "exit_code"}}`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from hotswarm.cli.output import OutputClosedError
from hotswarm.errors import HotswarmError

OK, FAILED, USAGE, PARTIAL, NO_SNAPSHOT, LOCKED = 0, 1, 2, 3, 10, 11
NOT_AUTHORISED, INTEGRITY, TRY_AGAIN, INTERRUPTED = 12, 13, 75, 130


def wants_json(argv: Sequence[str]) -> bool:
    """Whether errors are to be JSON: known before the arguments are parsed, because parsing can fail."""
    return "--json" in argv[: argv.index("--")] if "--" in argv else "--json" in argv


def report(error_type: str, message: str, exit_code: int, *, as_json: bool) -> int:
    """Print one error; returns its exit code."""
    line = " ".join(message.split())
    if as_json:
        line = json.dumps({"error": {"type": error_type, "message": line, "exit_code": exit_code}})
    else:
        line = f"swarm-node: {line}"
    print(line, file=sys.stderr, flush=True)
    return exit_code


def run_mapped(run: Callable[[], int], *, as_json: bool) -> int:
    """`run()`'s exit code, or that of the error that came out of it, reported."""
    import typer
    from typer.exceptions import TyperException

    try:
        return run()
    except HotswarmError as error:
        return report(type(error).__name__, str(error), error.exit_code, as_json=as_json)
    except typer.Exit as error:
        return error.exit_code
    except TyperException as error:  # a flag or a verb that does not exist, or takes another value
        context = getattr(error, "ctx", None)
        hint = f"; see `{context.command_path} --help`" if context is not None else ""
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        return report("UsageError", f"{message.rstrip('.')}{hint}", USAGE, as_json=as_json)
    except (KeyboardInterrupt, typer.Abort):
        return report("Interrupted", "interrupted", INTERRUPTED, as_json=as_json)
    except OutputClosedError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return OK
    except Exception as error:  # noqa: BLE001  an unknown failure is a failure, told in one line like any other
        if os.environ.get("HOTSWARM_DEBUG"):
            traceback.print_exc()
        message = f"{type(error).__name__}: {error}; this is a fault of hotswarm, HOTSWARM_DEBUG=1 shows where"
        return report("InternalError", message, FAILED, as_json=as_json)
