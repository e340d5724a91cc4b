"""From the store's line about a snapshot to what the caller sees of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from blake3 import blake3

from hotswarm.checkpoint_types import CheckpointMetadata, CheckpointType
from hotswarm.errors import HotswarmError
from hotswarm.snapshot.manifest import Manifest
from hotswarm.store.base import SnapshotInfo

log = logging.getLogger(__name__)

PARAM_ROLES = ("param",)


def model_hash(manifest: Manifest) -> str:
    """16 hex digits over the digests of all chunks that hold live parameters: every byte of them counts."""
    inner = manifest.sections.get("inner")
    if inner is None:
        return ""
    digest = blake3()
    for index in inner.layout.chunks_of_roles(PARAM_ROLES):
        digest.update(inner.chunk_digests[index])
    return digest.hexdigest(length=8)


def layer_ids(model: object) -> list[int]:
    """`model.my_layer_ids`, where there is such a thing."""
    found = getattr(model, "my_layer_ids", ())
    return [int(layer) for layer in found] if isinstance(found, Iterable) else []


def num_params(model: object) -> int:
    """Parameters of the model, each tied one counted once."""
    listing = getattr(model, "parameters", None)
    return sum(int(param.numel()) for param in listing()) if callable(listing) else 0


class MetadataMaker:
    """Makes CheckpointMetadata for the snapshots of one model. Hashes are looked up once per snapshot."""

    KEPT = 64

    def __init__(self, model: object, node_id: str, manifest_of: Callable[[str], Manifest]) -> None:
        self._model = model
        self._node_id = node_id
        self._manifest_of = manifest_of
        self._hashes: dict[str, str] = {}

    def make(self, info: SnapshotInfo) -> CheckpointMetadata:
        """The metadata of `info`. Never raises: a snapshot that retention has taken meanwhile has an empty hash."""
        return metadata_of(
            info,
            self._hash_of(info.snapshot_id),
            num_params=num_params(self._model),
            layers=layer_ids(self._model),
            label=self._node_id if info.own else "",
        )

    def _hash_of(self, snapshot_id: str) -> str:
        known = self._hashes.get(snapshot_id)
        if known is None:
            try:
                known = model_hash(self._manifest_of(snapshot_id))
            except HotswarmError as error:
                log.debug("no hash for snapshot %s: %s", snapshot_id, error)
                return ""
            while len(self._hashes) >= self.KEPT:
                del self._hashes[next(iter(self._hashes))]
            self._hashes[snapshot_id] = known
        return known


def metadata_of(
    info: SnapshotInfo, model_digest: str, *, num_params: int, layers: list[int], label: str = ""
) -> CheckpointMetadata:
    """The caller's view of a line of the listing; `label` where the snapshot carries none."""
    return CheckpointMetadata(
        checkpoint_id=f"{info.kind}_{info.snapshot_id}",
        timestamp=info.time_ms / 1000.0,
        checkpoint_type=CheckpointType(info.kind),
        training_step=info.training_step,
        outer_step=info.outer_step,
        inner_step=info.inner_step,
        model_hash=model_digest,
        num_params=num_params,
        layer_ids=layers,
        file_path=str(info.path),
        compressed_size=info.stored_bytes,
        original_size=info.bytes,
        node_id=info.label or label,
        outer_digest=info.outer_digest.hex() if info.outer_digest else "",
        snapshot_id=info.snapshot_id,
    )


def params_in(manifest: Manifest) -> int:
    """Number of parameters that a manifest lists."""
    inner = manifest.sections.get("inner")
    placed = inner.layout.tensors if inner is not None else ()
    return sum(math.prod(tensor.spec.shape) for tensor in placed if tensor.role in PARAM_ROLES)
