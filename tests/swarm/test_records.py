from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswarm.swarm.identity import NodeIdentity
from hotswarm.swarm.recordbook import MEMORY_S, Outcome, RecordBook
from hotswarm.swarm.records import (
    MAX_ADDRESSES,
    MAX_TTL_S,
    MAX_VALUE_BYTES,
    SHARDS,
    Record,
    RecordError,
    Relayed,
    SignedRecord,
    decode_value,
    dht_keys,
    encode_value,
    newest,
    shard_of,
)

KEYS = dht_keys(b"s" * 32, "run")
KEY = KEYS[0]
ME, OTHER = NodeIdentity.generate(), NodeIdentity.generate()
V6 = tuple((f"2001:db8::{i}", 65535) for i in range(1, 4))


def signed(seq: int = 1, ttl_s: int = 60, who: NodeIdentity = ME, key: bytes = KEY, **more: object) -> SignedRecord:
    return SignedRecord.sign(Record(seq, ttl_s, **more), key, who)


def offer(book: RecordBook, record: SignedRecord, now: float, left: int = MAX_TTL_S, key: bytes = KEY) -> Outcome:
    return book.merge(key, Relayed(record, left), now)


# ---------------------------------------------------------------- format

records = st.builds(
    Record,
    seq=st.integers(0, 2**64 - 1),
    ttl_s=st.integers(0, MAX_TTL_S),
    addresses=st.lists(st.tuples(st.ip_addresses().map(str), st.integers(1, 65535)), max_size=MAX_ADDRESSES).map(tuple),
    outer_step=st.integers(0, 2**32 - 1),
    inner_step=st.integers(0, 2**64 - 1),
    outer_digest=st.one_of(st.just(b""), st.binary(min_size=16, max_size=16).filter(any)),
    snapshot_bytes=st.integers(0, 2**64 - 1),
)


@given(records)
def test_a_record_comes_back_as_it_was(record):
    assert Record.decode(record.encode()) == record


@given(st.binary(max_size=130))
def test_bytes_that_are_no_record_are_refused_and_nothing_else_happens(data):
    try:
        record = Record.decode(data)
    except RecordError:
        return
    assert record.encode() == data


def test_the_layout_is_what_the_docstring_says():
    body = Record(0x0102, 600, (("10.0.0.7", 7411),), 3, 4, b"d" * 32, 5).encode()
    assert body == (
        bytes([1])
        + (0x0102).to_bytes(8, "big")
        + (600).to_bytes(4, "big")
        + (3).to_bytes(4, "big")
        + (4).to_bytes(8, "big")
        + b"d" * 16
        + (5).to_bytes(8, "big")
        + bytes([1])
        + bytes([4, 10, 0, 0, 7])
        + (7411).to_bytes(2, "big")
    )


def test_a_full_record_has_about_205_bytes_and_five_fit_into_a_value():
    full = signed(addresses=V6)
    assert len(full.body) + len(full.public_key) + len(full.signature) == 204
    assert full.entry_bytes == 210
    people = [NodeIdentity.generate() for _ in range(5)]
    value = encode_value(Relayed(signed(addresses=V6, who=p), 60) for p in people)
    assert len(value) <= MAX_VALUE_BYTES
    book = RecordBook()
    for r in decode_value(value):
        assert book.merge(KEY, r, 0.0) is Outcome.STORED
    assert {r.signed.signer for r in decode_value(book.value(KEY, 0.0))} == {p.node_id for p in people}


@pytest.mark.parametrize(
    "wrong",
    [
        {"ttl_s": MAX_TTL_S + 1},
        {"ttl_s": -1},
        {"seq": 2**64},
        {"outer_step": 2**32},
        {"addresses": (*V6, ("10.0.0.1", 1))},
        {"addresses": (("a.example", 1),)},
        {"addresses": (("10.0.0.1", 0),)},
        {"addresses": (("10.0.0.1", 65536),)},
    ],
)
def test_a_field_out_of_range_is_not_signed(wrong):
    with pytest.raises(RecordError):
        signed(**{"seq": 1, "ttl_s": 60, **wrong})


def test_a_body_just_over_a_limit_is_refused():
    body = Record(1, MAX_TTL_S, V6).encode()
    assert Record.decode(body).ttl_s == MAX_TTL_S
    for bad in (
        body[:9] + (MAX_TTL_S + 1).to_bytes(4, "big") + body[13:],
        bytes([2]) + body[1:],
        body[:49] + bytes([4]) + body[50:] + body[50:69],
        body[:-1],
        body + b"\0",
        body[:50] + bytes([5]) + body[51:],
        body[:-2] + b"\0\0",
    ):
        with pytest.raises(RecordError):
            Record.decode(bad)


@pytest.mark.parametrize(
    "value", [None, {}, {"a": 1}, [], "x", 7, b"x", bytes(MAX_VALUE_BYTES + 1), bytes(102), bytes(103)]
)
def test_a_value_that_is_none_is_refused_whatever_its_type(value):
    if value == bytes(103):  # one entry with an empty body: no record, though it has the form of a value
        with pytest.raises(RecordError):
            RecordBook().merge(KEY, decode_value(value)[0], 0.0)
    else:
        with pytest.raises(RecordError):
            decode_value(value)


# ---------------------------------------------------------------- whose it is


def test_a_forged_or_altered_record_changes_nothing():
    book = RecordBook()
    assert offer(book, signed(5), 0.0) is Outcome.STORED
    good = signed(9)
    forgeries = [
        SignedRecord(good.body, OTHER.public_key, good.signature),
        SignedRecord(good.body, good.public_key, OTHER.sign(b"hotswarm-record-v1\0" + KEY + good.body)),
        SignedRecord(good.body, good.public_key, bytes(64)),
        SignedRecord(good.body, bytes(33), good.signature),
        SignedRecord(Record(10, 60).encode(), good.public_key, good.signature),
        signed(9, key=KEYS[1]),
        signed(9, key=dht_keys(b"s" * 32, "another-run")[0]),
    ]
    for forged in forgeries:
        with pytest.raises(RecordError):
            offer(book, forged, 1.0)
    assert [r.signed.record.seq for r in book.records(KEY, 1.0)] == [5]


def test_keys_of_a_run_are_blinded_and_spread_over_16_shards():
    assert len(set(KEYS)) == SHARDS == 16
    assert {len(k) for k in KEYS} == {20}
    assert not set(KEYS) & set(dht_keys(b"s" * 32, "run2"))
    assert not set(KEYS) & set(dht_keys(b"t" * 32, "run"))
    assert shard_of("f" + "0" * 39) == 15


# ---------------------------------------------------------------- the book


def test_the_highest_seq_of_a_signer_wins_in_any_order():
    for seqs in ([1, 3, 2], [3, 2, 1], [2, 1, 3]):
        book = RecordBook()
        for seq in seqs:
            offer(book, signed(seq), 0.0)
        assert [r.signed.record.seq for r in book.records(KEY, 0.0)] == [3]


def test_a_relay_passes_on_what_is_left_and_never_more():
    book = RecordBook()
    offer(book, signed(ttl_s=600), 0.0, left=100)
    assert [r.ttl_left_s for r in book.records(KEY, 0.0)] == [100]
    assert [r.ttl_left_s for r in book.records(KEY, 40.5)] == [59]
    assert offer(book, signed(ttl_s=600), 50.0, left=600) is Outcome.KNOWN
    assert [r.ttl_left_s for r in book.records(KEY, 50.0)] == [50]
    assert book.records(KEY, 99.5) == []
    assert book.value(KEY, 99.5) is None
    short = RecordBook()
    offer(short, signed(ttl_s=10), 0.0, left=600)
    assert [r.ttl_left_s for r in short.records(KEY, 0.0)] == [10], "never over what the signer gave it"


def test_an_expired_record_does_not_come_back_for_as_long_as_it_could_live():
    book = RecordBook()
    record = signed(ttl_s=MAX_TTL_S)
    offer(book, record, 0.0, left=10)
    for now in (10.0, 11.0, 3600.0, MEMORY_S - 1):
        book.sweep(now)
        assert offer(book, record, now) is Outcome.EXPIRED
        assert book.records(KEY, now) == []
    assert offer(book, signed(seq=2), 20.0) is Outcome.STORED, "a new announcement of the same node is welcome"


def test_a_withdrawal_takes_effect_at_once_and_outlasts_late_copies():
    book = RecordBook()
    offer(book, signed(seq=1), 0.0)
    assert offer(book, signed(seq=2, ttl_s=0), 1.0, left=0) is Outcome.EXPIRED
    assert len(book) == 0
    assert offer(book, signed(seq=1), 2.0) is Outcome.OLDER
    assert offer(book, signed(seq=2, ttl_s=0), 2.0) is Outcome.EXPIRED
    assert offer(book, signed(seq=3), 3.0) is Outcome.STORED


def test_a_relay_that_says_nothing_is_left_cannot_bar_the_signers_own_copy():
    book = RecordBook()
    assert offer(book, signed(), 0.0, left=0) is Outcome.EXPIRED
    assert offer(book, signed(), 0.1) is Outcome.STORED


def test_a_full_value_evicts_at_random_but_never_the_holders_own():
    people = [NodeIdentity.generate() for _ in range(12)]
    survivors = set()
    for seed in range(20):
        book = RecordBook(keep=people[0].node_id, rng=random.Random(seed))
        for p in people:
            offer(book, signed(who=p, addresses=V6), 0.0)
        here = {r.signed.signer for r in book.records(KEY, 0.0)}
        assert len(here) == 5
        assert people[0].node_id in here
        assert len(book.value(KEY, 0.0)) <= MAX_VALUE_BYTES
        survivors |= here
    assert survivors == {p.node_id for p in people}


def test_an_evicted_record_comes_back_with_its_first_expiry():
    book = RecordBook(max_value_bytes=250)
    offer(book, signed(who=ME), 0.0, left=50)
    offer(book, signed(who=OTHER), 0.0, left=50)
    assert len(book) == 1
    for who in (ME, OTHER, ME, OTHER):
        offer(book, signed(who=who), 10.0, left=60)
        assert [r.ttl_left_s for r in book.records(KEY, 10.0)] == [40]


def test_keys_and_memory_are_bounded():
    book = RecordBook(max_keys=8, max_remembered=20, keep=ME.node_id, rng=random.Random(1))
    own_key = b"o" * 20
    offer(book, signed(key=own_key), 0.0, key=own_key)
    for i in range(40):
        key = bytes([i]) * 20
        offer(book, signed(who=OTHER, key=key), 0.0, key=key)
    assert len(book) == 8
    assert book.records(own_key, 0.0), "not the one with this node's own record"
    assert len(book._memory) == 20
    for key in (b"", b"k", bytes(19), bytes(32)):
        with pytest.raises(RecordError):
            offer(book, signed(key=key), 0.0, key=key)


def test_sweeping_forgets_all_in_the_end():
    book = RecordBook()
    offer(book, signed(), 0.0)
    book.sweep(MEMORY_S + 1)
    assert len(book) == len(book._memory) == 0


@given(st.integers(0, 2**32))
def test_a_dead_nodes_record_dies_everywhere_after_one_ttl_however_it_is_relayed(seed):
    """Holders that pass on all they have to each other, at random, with delays: none has it after its time."""
    rng = random.Random(seed)
    ttl = rng.randint(5, 600)
    holders = [RecordBook() for _ in range(rng.randint(2, 8))]
    record = signed(ttl_s=ttl)
    offer(holders[0], record, 0.0, left=ttl)
    now, longest_delay = 0.0, 0.0
    while now < 4 * ttl:
        now += rng.uniform(0.0, ttl / 20)
        sender, receiver = rng.sample(holders, 2)
        for relayed in sender.records(KEY, now):
            delay = rng.uniform(0.0, 0.5)
            longest_delay = max(longest_delay, delay)
            receiver.merge(KEY, relayed, now + delay)
        if now > ttl + 0.5 * len(holders):  # each hop can add its delay once, never twice
            assert not any(h.records(KEY, now) for h in holders), f"alive at {now} of {ttl}"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 30)), max_size=30), st.randoms())
def test_the_book_agrees_with_a_slow_twin_and_order_does_not_matter_to_who_wins(offers, rng):
    """At one instant, with room for all: per signer the highest seq, as a dictionary would keep it."""
    people = [ME, OTHER, NodeIdentity.generate()]
    twin: dict[str, int] = {}
    for who, seq, _ in offers:
        twin[people[who].node_id] = max(seq, twin.get(people[who].node_id, -1))
    rng.shuffle(offers)
    book = RecordBook()
    for who, seq, left in offers:
        offer(book, signed(seq, who=people[who]), 0.0, left=left)
    assert {r.signed.signer: r.signed.record.seq for r in book.records(KEY, 0.0)} == twin


def test_newest_keeps_one_record_for_each_signer():
    some = [Relayed(signed(2), 5), Relayed(signed(3), 1), Relayed(signed(1), 9), Relayed(signed(1, who=OTHER), 2)]
    assert {(r.signed.signer, r.signed.record.seq) for r in newest(some)} == {(ME.node_id, 3), (OTHER.node_id, 1)}
