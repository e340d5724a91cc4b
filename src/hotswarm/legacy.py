"""Files that the older checkpointer wrote: `torch.save`, plain (`.pt`) or gzipped (`.pt.gz`).

They are read with `weights_only=True`, so that no byte of them is run as code, and unpacked under a bound, so that a
small file cannot fill the machine's memory.
"""

from __future__ import annotations

import gzip
import io
import os
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

from hotswarm.errors import StoreError

SUFFIXES = (".pt", ".pth", ".pt.gz", ".pth.gz")
READ_BYTES = 1 << 20
MEMORY_SHARE = 0.5  # of the memory that is available now: an unpacked file and the tensors made of it must both fit
SPOOL_BYTES = 64 << 20  # unpacked files above this go to a temporary file


def is_legacy(path: Path) -> bool:
    """Whether the name is that of a file of the older checkpointer."""
    return path.name.endswith(SUFFIXES)


def load_legacy(path: Path, *, max_bytes: int | None = None) -> dict[str, Any]:
    """The dict in that file, tensors on the CPU.

    `max_bytes` bounds the unpacked size; by default half of the available memory. Raises StoreError: unreadable,
    damaged, too large, or holding objects other than tensors and plain values.
    """
    import torch

    limit = max_bytes if max_bytes is not None else int(available_memory() * MEMORY_SHARE)
    try:
        with _opened(path, limit) as file:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing: there is no such file; check the path") from error
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, zlib.error, zipfile.BadZipFile) as error:
        raise StoreError(f"{path} is damaged or no checkpoint: {_first_line(error)}; use another one") from error
    except Exception as error:  # torch raises pickle's own error, whose class is of no interest here
        raise StoreError(
            f"{path} holds objects other than tensors and plain values, which are never loaded: {_first_line(error)}"
        ) from error
    if not isinstance(loaded, dict):
        raise StoreError(f"{path} holds a {type(loaded).__name__}, not a checkpoint; use another one")
    return loaded


def pack_legacy(checkpoint: dict[str, Any], level: int) -> bytes:
    """A checkpoint dict in the older class's file format. Parts that its loader has no use for are left out."""
    import torch

    kept = {key: value for key, value in checkpoint.items() if key not in {"rng", "dataloader"}}
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    return gzip.compress(buffer.getbuffer(), compresslevel=max(level, 1))


def _opened(path: Path, limit: int) -> IO[bytes]:
    if not path.name.endswith(".gz"):
        if path.stat().st_size > limit:
            raise StoreError(f"{path} has {path.stat().st_size} bytes, more than the {limit} that may be loaded here")
        return path.open("rb")
    unpacked = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 - handed to the caller, who closes it
    try:
        size = 0
        with gzip.open(path, "rb") as packed:
            while block := packed.read(READ_BYTES):
                size += len(block)
                if size > limit:
                    raise StoreError(f"{path} unpacks to more than {limit} bytes, which is all that may be used here")
                unpacked.write(block)
        unpacked.seek(0)
    except BaseException:
        unpacked.close()
        raise
    return unpacked


def available_memory() -> int:
    """Bytes that could be used now without swapping; physical memory where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
