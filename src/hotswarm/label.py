"""A name for a node whose owner gave none: made once, kept beside the snapshots. For people, never an identity."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

FILE_NAME = "node.label"
MAX_BYTES = 256


def kept_label(directory: Path) -> str:
    """The label that lies in `directory`, or a new one, which is put there where that is possible."""
    path = directory / FILE_NAME
    try:
        kept = path.read_bytes()[:MAX_BYTES].decode("utf-8", "replace").strip()
        if kept:
            return kept
    except OSError:
        pass  # the first time here, or a directory that cannot be read: then nothing is kept
    label = f"node-{secrets.token_hex(4)}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return label
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(label + "\n")
    return label
