"""Logs of the daemon and the command line: stderr, one line per event, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time

QUIET = ("kademlia", "rpcudp", "asyncio", "aiohttp")  # kademlia logs keys and values at INFO


_TEXT = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def setup_logging(level: str, log_format: str) -> None:
    """Send everything of `level` ("debug" … "error") and above to stderr. Called once, by a program's main function."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _TEXT)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
