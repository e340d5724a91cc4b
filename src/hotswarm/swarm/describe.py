r"""A node's signed answer to `Describe`: encoding, signing, and the checks of whoever receives one. Pure.

The signature covers "hotswarm-describe-v1\0" and the body; the body holds the asker's nonce, so an old answer cannot
be replayed, and the node id, which must be the key's hash. What it claims is still only that node's word.
"""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from hotswarm._proto import recovery_pb2 as pb
from hotswarm.errors import PeerMisbehaved
from hotswarm.ids import is_snapshot_id
from hotswarm.snapshot.limits import MAX_STEP
from hotswarm.snapshot.signing import Signer, node_id_of, signature_is_good
from hotswarm.swarm.agreement import VOUCHERS_KEPT
from hotswarm.swarm.model import Description, LiveClock, Offer, SectionOffer, Voucher

SIGNED_PREFIX = b"hotswarm-describe-v1\0"
NONCE_BYTES = (16, 64)  # least and most
MAX_OFFERS = 32
MAX_ADDRESSES = 8
MAX_TEXT_BYTES = 256
DIGEST_BYTES = 32
MAX_SPEED = 1e6  # steps per second; more is a lie or a fault


def sign_description(description: Description, signer: Signer) -> pb.SignedDescription:
    """The answer, as this node's."""
    body = _to_proto(description).SerializeToString()
    return pb.SignedDescription(body=body, public_key=signer.public_key, signature=signer.sign(SIGNED_PREFIX + body))


def _to_proto(description: Description) -> pb.Description:
    clock = description.clock
    return pb.Description(
        nonce=description.nonce,
        node=description.node,
        name=description.name,
        run=description.run,
        live=description.live,
        clock=None
        if clock is None
        else pb.Live(
            outer_step=clock.outer_step,
            inner_step=clock.inner_step,
            training_step=clock.training_step,
            steps_per_s=clock.steps_per_s,
            round_length=clock.round_length,
        ),
        offers=[_offer_to_proto(offer) for offer in description.offers],
        vouchers=[
            pb.Voucher(outer_step=voucher.outer_step, digest=voucher.digest, servable=voucher.servable)
            for voucher in description.vouchers
        ],
        streams_active=description.streams_active,
        streams_max=description.streams_max,
        addresses=description.addresses,
        seq=description.seq,
    )


def _offer_to_proto(offer: Offer) -> pb.Offer:
    return pb.Offer(
        snapshot_id=offer.snapshot_id,
        kind=offer.kind,
        outer_step=offer.outer_step,
        inner_step=offer.inner_step,
        training_step=offer.training_step,
        seq=offer.seq,
        age_ms=offer.age_ms,
        arch=offer.arch,
        sections=[pb.SectionOffer(name=s.name, digest=s.digest, bytes=s.nbytes) for s in offer.sections],
        own=offer.own,
    )


def check_description(answer: pb.SignedDescription, *, nonce: bytes, run: str, peer: str) -> Description:
    """The answer of `peer` (an address or id, for messages), checked in everything that can be checked.

    PeerMisbehaved names what is wrong. Whether the node is the one that was dialled is the caller's to compare.
    """

    def refuse(what: str) -> PeerMisbehaved:
        return PeerMisbehaved(peer, f"its description {what}")

    if not signature_is_good(answer.public_key, SIGNED_PREFIX + answer.body, answer.signature):
        raise refuse("has a wrong signature")
    try:
        body = pb.Description.FromString(answer.body)
    except DecodeError as error:
        raise refuse("cannot be read") from error
    if body.node != node_id_of(answer.public_key):
        raise refuse("is signed by another node than it names")
    if body.nonce != nonce:
        raise refuse("answers another question: a replay")
    if body.run != run:
        raise refuse(f"is of run {body.run[:64]!r}")
    if len(body.offers) > MAX_OFFERS or len(body.vouchers) > VOUCHERS_KEPT or len(body.addresses) > MAX_ADDRESSES:
        raise refuse("lists too much")
    texts = [body.name, *body.addresses, *(offer.kind for offer in body.offers)]
    if any(len(text.encode()) > MAX_TEXT_BYTES for text in texts):
        raise refuse("holds a text that is too long")
    problem = _problem(body)
    if problem:
        raise refuse(problem)
    return _from_proto(body)


def _problem(body: pb.Description) -> str | None:
    counters: list[int] = [voucher.outer_step for voucher in body.vouchers]
    for offer in body.offers:
        counters += [offer.outer_step, offer.inner_step, offer.training_step]
        names = [section.name for section in offer.sections]
        if not is_snapshot_id(offer.snapshot_id) or len(offer.arch) not in (0, DIGEST_BYTES):
            return "offers a snapshot without a proper id or fingerprint"
        if len(set(names)) != len(names) or not set(names) <= {"outer", "inner", "private"}:
            return "offers unknown sections"
    digests = [voucher.digest for voucher in body.vouchers]
    digests += [section.digest for offer in body.offers for section in offer.sections]
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        return "holds a digest of a wrong length"
    if len({voucher.outer_step for voucher in body.vouchers}) != len(body.vouchers):
        return "vouches twice for one outer step"
    if body.HasField("clock"):
        counters += [body.clock.outer_step, body.clock.inner_step, body.clock.training_step]
        if not 0 <= body.clock.steps_per_s <= MAX_SPEED:
            return "claims an impossible speed"
    if any(not 0 <= counter <= MAX_STEP for counter in counters):
        return "holds a step that is out of range"
    return None


def _from_proto(body: pb.Description) -> Description:
    clock = None
    if body.HasField("clock"):
        clock = LiveClock(
            body.clock.outer_step,
            body.clock.inner_step,
            body.clock.training_step,
            body.clock.steps_per_s,
            body.clock.round_length,
            body.node,
        )
    return Description(
        node=body.node,
        name=body.name,
        run=body.run,
        live=body.live,
        clock=clock,
        offers=tuple(_offer_from_proto(offer) for offer in body.offers),
        vouchers=tuple(Voucher(v.outer_step, v.digest, v.servable) for v in body.vouchers),
        streams_active=body.streams_active,
        streams_max=body.streams_max,
        addresses=tuple(body.addresses),
        seq=body.seq,
        nonce=body.nonce,
    )


def _offer_from_proto(offer: pb.Offer) -> Offer:
    sections: Sequence[pb.SectionOffer] = offer.sections
    return Offer(
        snapshot_id=offer.snapshot_id,
        kind=offer.kind,
        outer_step=offer.outer_step,
        inner_step=offer.inner_step,
        training_step=offer.training_step,
        seq=offer.seq,
        age_ms=offer.age_ms,
        arch=offer.arch,
        sections=tuple(SectionOffer(s.name, s.digest, s.bytes) for s in sections),
        own=offer.own,
    )
