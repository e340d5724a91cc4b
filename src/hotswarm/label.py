"""A name for a node whose owner gave none: made once, kept beside the snapshots. For people, never an identity."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from pathlib import Path

FILE_NAME = "node.label"
MAX_BYTES = 256

log = logging.getLogger(__name__)


def kept_label(directory: Path) -> str:
    """The label that lies in `directory`, or a new one, which is put there where that is possible."""
    path = directory / FILE_NAME
    kept = _read(path)
    if kept:
        return kept
    label = f"node-{secrets.token_hex(4)}"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return label
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(label + "\n")
    return label


def _read(path: Path) -> str:
    """What lies there, or "" when there is none, or nothing that can be a label: a bad name must not end a training."""
    try:
        # neither a link that leads elsewhere nor a pipe that nobody writes to may be followed or waited for
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""  # the first time here
    except OSError as trouble:
        log.warning("%s cannot be read (%s); this node gets a name for this start only", path, trouble.strerror)
        return ""
    try:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        raw = os.read(fd, MAX_BYTES + 1) if regular else b""
    except OSError as trouble:
        log.warning("%s cannot be read (%s); this node gets a name for this start only", path, trouble.strerror)
        return ""
    finally:
        os.close(fd)
    text = raw.decode("utf-8", "replace").strip()
    if regular and text and len(raw) <= MAX_BYTES and text.isprintable() and "\ufffd" not in text:
        return text
    if raw or not regular:
        log.warning("%s holds no name; delete it, and this node keeps a name again", path)
    return ""
