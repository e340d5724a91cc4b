"""`runs/<run>/vouchers.json`: which outer digest this node held after which outer step, for the last 16 steps.

    {"version": 1, "vouchers": {"9": "<64 hex>", "8": "<64 hex>"}, "abandoned": ["<snapshot id>", …]}

A node signs the vouchers in its answers to `Describe`. They outlive the snapshots that they speak of, so that a node's
history can be compared with another's. `abandoned` are the snapshots that were ahead when this node was told to go
back: they stay on disk as long as retention lets them, and are neither resumed, nor offered, nor a floor for later
recoveries.

Written to a temporary file, fsynced, renamed. A damaged file is set aside and said so: the history begins anew from
the snapshots that are there, which costs an agreement at most one vote.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from hotswarm.ids import is_snapshot_id
from hotswarm.snapshot.limits import MAX_STEP
from hotswarm.swarm.agreement import VOUCHERS_KEPT

log = logging.getLogger(__name__)

FILE = "vouchers.json"
VERSION = 1
ABANDONED_KEPT = 64
DIGEST_BYTES = 32
_MAX_FILE_BYTES = 1 << 16


class VoucherBook:
    """The file's content in memory. `note` writes it when something changed."""

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self._path = path
        self._held: dict[int, bytes] = {}
        self.abandoned: frozenset[str] = frozenset()
        try:
            self._held, self.abandoned = self._read()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s is damaged (%s): set aside; this node's outer history begins anew", path, error)
            try:
                os.replace(path, path.with_name(f"{FILE}.bad"))
            except OSError:
                pass  # it is replaced by the next write

    def __getitem__(self, outer_step: int) -> bytes:
        return self._held[outer_step]

    @property
    def held(self) -> Mapping[int, bytes]:
        """Digests by outer step, at most 16."""
        return dict(self._held)

    def note(self, states: Mapping[int, bytes]) -> bool:
        """This node holds these states now: digests by outer step, the latest word counts. True when it was news.

        A failing disk is logged, no more: the vouchers stay in memory.
        """
        wanted = {**self._held, **states}
        kept = {step: wanted[step] for step in sorted(wanted, reverse=True)[:VOUCHERS_KEPT]}
        if kept == self._held:
            return False
        self._held = kept
        self._save()
        return True

    def go_back(self, outer_step: int, ahead: Iterable[str]) -> None:
        """This node was told to go back to that step: what it held later, and the snapshots `ahead`, are given up."""
        self._held = {step: digest for step, digest in self._held.items() if step <= outer_step}
        self.abandoned = frozenset(sorted({*self.abandoned, *ahead})[-ABANDONED_KEPT:])
        self._save()

    def _save(self) -> None:
        try:
            self._write()
        except OSError as error:
            log.warning("cannot write %s: %s; the next snapshot tries again", self._path, error.strerror or error)

    def _read(self) -> tuple[dict[int, bytes], frozenset[str]]:
        fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ValueError("too large")
        content = json.loads(data)
        if not isinstance(content, dict) or content.get("version") != VERSION:
            raise ValueError("not of this version")
        held: dict[int, bytes] = {}
        entries = content.get("vouchers")
        if not isinstance(entries, dict):
            raise ValueError("without vouchers")  # noqa: TRY004  the file's fault, not the caller's
        for step, digest in entries.items():
            number = int(step)
            raw = bytes.fromhex(str(digest))
            if not 0 <= number <= MAX_STEP or len(raw) != DIGEST_BYTES:
                raise ValueError(f"an entry for step {number} that is none")
            held[number] = raw
        abandoned = content.get("abandoned", [])
        if not isinstance(abandoned, list) or not all(isinstance(i, str) and is_snapshot_id(i) for i in abandoned):
            raise ValueError("abandoned snapshots that are none")
        return {step: held[step] for step in sorted(held, reverse=True)[:VOUCHERS_KEPT]}, frozenset(abandoned)

    def _write(self) -> None:
        content = {
            "version": VERSION,
            "vouchers": {str(step): digest.hex() for step, digest in self._held.items()},
            "abandoned": sorted(self.abandoned),
        }
        temporary = self._path.with_name(f".{FILE}.{os.getpid()}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(json.dumps(content, indent=1).encode("ascii"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
