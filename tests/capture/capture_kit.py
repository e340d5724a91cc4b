"""Snapshots of live objects without a daemon: stage into an arena, hash and sign as it would, read from the slot."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property

import torch
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

from hotswarm.capture.incoming import incoming_from_source
from hotswarm.capture.restore import RESUME, Restored, RestoreParts, Restorer
from hotswarm.capture.staging import Label, Stager
from hotswarm.capture.state import TrainingState
from hotswarm.ids import NodeId
from hotswarm.snapshot.chunks import layout
from hotswarm.snapshot.draft import parse_draft
from hotswarm.snapshot.manifest import SectionEntry, SignedManifest
from hotswarm.snapshot.signing import node_id_of
from hotswarm.store.arena import Arena, Slot
from hotswarm.store.packing import hash_stream
from hotswarm.store.slotsource import SlotSource


class KitSigner:
    """A node key of its own."""

    @cached_property
    def _key(self) -> ec.EllipticCurvePrivateKey:
        return ec.generate_private_key(ec.SECP256R1())

    @cached_property
    def public_key(self) -> bytes:
        form = serialization.PublicFormat.CompressedPoint
        return self._key.public_key().public_bytes(serialization.Encoding.X962, form)

    @property
    def node_id(self) -> NodeId:
        return node_id_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        r, s = decode_dss_signature(self._key.sign(message, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(32, "big") + s.to_bytes(32, "big")


SIGNER = KitSigner()


def sealed(arena: Arena, slot: Slot) -> SlotSource:
    """What the daemon does with a READY slot, less the writing."""
    assert slot.take()
    draft = parse_draft(slot.table())
    streams = slot.streams()
    entries = {
        name: SectionEntry.of(section, hash_stream(streams[name], layout(section.leaves).chunks))
        for name, section in draft.sections.items()
    }
    signed = SignedManifest.sign(draft.with_sections(entries, NodeId("")), SIGNER)
    slot.hold()
    return SlotSource(arena, slot, SignedManifest.parse(signed.to_bytes()))


class Camera:
    """Takes snapshots of one TrainingState, each in an arena of its own unless one is given."""

    def __init__(self, state: TrainingState) -> None:
        self.state = state
        self.stager = Stager()
        self.seq = 0

    def snap(self, arena: Arena | None = None) -> SlotSource:
        tree = self.state.collect()
        if arena is None:
            need = self.stager.need(tree)
            arena = Arena.create(need.slot_bytes, need.table_bytes, 1)
        self.seq += 1
        staged = self.stager.stage(tree, arena, Label("run", "label"), self.seq)
        assert staged is not None
        return sealed(arena, staged.slot)


def snap(state: TrainingState) -> SlotSource:
    return Camera(state).snap()


def restore(state: TrainingState, source: SlotSource, parts: RestoreParts = RESUME) -> Restored:
    incoming = incoming_from_source(source)
    restorer = Restorer(state)
    restorer.check(incoming, parts)
    return restorer.apply(incoming, parts)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order, by numpy where it can, else element by element through integers."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if not flat.numel():
        return b""
    return flat.view(torch.uint8).numpy().tobytes()


def fingerprint(node: object) -> object:
    """A nested state with tensors as (dtype, shape, bytes) and floats by repr: equal means bitwise equal."""
    if isinstance(node, torch.Tensor):
        return (str(node.dtype), tuple(node.shape), raw(node))
    if isinstance(node, dict):
        return {key: fingerprint(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return (type(node).__name__, [fingerprint(value) for value in node])
    return (type(node).__name__, repr(node))


def everything(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), *more: object) -> object:
    """Bitwise picture of model and optimizers (positional: same process layout on both sides), and further objects."""
    return [
        fingerprint(dict(model.state_dict())),
        [fingerprint(optimizer.state_dict()) for optimizer in optimizers],
        [fingerprint(one.state_dict() if hasattr(one, "state_dict") else one) for one in more],
    ]


def spread_ram() -> int:
    """Anonymous resident memory of this process, bytes."""
    with open(f"/proc/{os.getpid()}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))
