"""What a manifest may at most contain. Each limit is tested at -1, 0 and +1."""

from __future__ import annotations

MAX_MANIFEST_BYTES = 16 << 20
"""A serialised SignedManifest. It bounds everything else that is repeated."""

MAX_TENSORS = 200_000
"""Tensors of one manifest, all sections together."""

MAX_LEAVES = 500_000
"""Leaves of one manifest: tensors, values, containers and aliases."""

MAX_NDIM = 32

MAX_NBYTES = (1 << 63) - 1
"""Bytes of one tensor, and of one packed stream: what a signed 64-bit size can say."""

MAX_PATH_BYTES = 4096
"""One encoded path."""

MAX_DEPTH = 64
"""Keys in one path."""

MAX_ROLE_BYTES = 64
MAX_LABEL_BYTES = 4096
MAX_ENGINE_BYTES = 64

MAX_INTEGER_BYTES = 65536
"""One integer value; Python's own integers have no end."""

MAX_SECTIONS = 3
MAX_STEP = (1 << 63) - 1
