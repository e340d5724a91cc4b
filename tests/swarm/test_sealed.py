"""Two or three channels driven against each other, with no sockets and no clock."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswarm.swarm.sealed import (
    HELLO,
    KNOCK_EVERY_S,
    MAX_HELLOS_PER_S,
    OVERHEAD,
    WAIT_S,
    ReplayWindow,
    SealedChannel,
    canonical,
)

K1, K2 = b"1" * 32, b"2" * 32
A, B, C, OUTSIDER = ("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3), ("10.9.9.9", 9)


def channel(address, *keys: bytes, name: bytes = b"") -> SealedChannel:
    return SealedChannel(keys or (K1,), name.ljust(20, b"n"), lambda meant: meant == address)


class Net:
    """Channels at addresses; everything that is sent is recorded and, unless dropped, delivered at once."""

    def __init__(self, **channels: SealedChannel) -> None:
        self.at = {globals()[name]: c for name, c in channels.items()}
        self.log: list[tuple[bytes, tuple, tuple]] = []
        self.got: list[tuple[tuple, bytes, bytes]] = []

    def send(self, source, message: bytes, to, now: float = 0.0) -> None:
        self.deliver(source, self.at[source].send(message, to, now), now)

    def deliver(self, source, datagrams, now: float) -> None:
        for datagram, to in datagrams:
            self.log.append((datagram, source, to))
            if to in self.at:
                received = self.at[to].receive(datagram, source, now)
                if received.message is not None:
                    self.got.append((to, received.message, received.sender_id))
                self.deliver(to, received.replies, now)


def talk() -> Net:
    """A and B have exchanged a message each."""
    net = Net(A=channel(A, name=b"a"), B=channel(B, name=b"b"))
    net.send(A, b"question", B)
    net.send(B, b"answer", A)
    assert net.got == [(B, b"question", b"a".ljust(20, b"n")), (A, b"answer", b"b".ljust(20, b"n"))]
    return net


def test_a_first_message_waits_for_the_hello_and_then_arrives():
    net = talk()
    assert [(source, to) for _, source, to in net.log] == [(A, B), (B, A), (A, B), (B, A)]
    net.send(A, b"again", B)
    assert net.got[-1][1] == b"again"
    assert len(net.log) == 5, "no further handshake"
    assert net.at[A].node_at(B) == b"b".ljust(20, b"n")


def test_an_address_gets_no_more_bytes_than_it_sent_before_it_has_shown_that_it_receives_there():
    net = talk()
    knock, hello = net.log[0][0], net.log[1][0]
    assert len(hello) <= len(knock)


def test_replays_get_no_answer_from_anybody_and_from_no_address():
    net = talk()
    net.at[C] = channel(C, name=b"c")
    net.send(C, b"hi", A)
    net.send(C, b"hi", B)
    for captured, source, _ in list(net.log):
        for victim in net.at.values():
            for claimed in (OUTSIDER, source, A, B, C):
                received = victim.receive(captured, claimed, 0.5)
                assert received.replies == () or list(received.replies) == []
                assert received.message is None
    assert all(c.node_at(OUTSIDER) is None for c in net.at.values())


def test_a_captured_datagram_that_was_never_delivered_is_bound_to_its_path():
    net = talk()
    lost = net.at[A].send(b"secret", B, 1.0)[0][0]
    assert net.at[B].receive(lost, OUTSIDER, 1.0).message is None
    assert net.at[B].receive(lost, A, 1.0).message == b"secret"
    assert net.at[B].receive(lost, A, 1.0).message is None, "once"


def test_a_restarted_node_answers_an_old_knock_at_most_and_with_no_more_bytes():
    net = talk()
    net.at[B] = channel(B, name=b"b")
    answers = []
    for captured, _, _ in list(net.log):
        received = net.at[B].receive(captured, OUTSIDER, 9.0)
        assert received.message is None
        answers += [(captured, d) for d, _ in received.replies]
    assert len(answers) == 1, "one knock was captured"
    assert all(len(reply) <= len(captured) for captured, reply in answers)
    assert net.at[B].node_at(OUTSIDER) is None


def test_after_a_restart_of_the_other_side_one_forgotten_call_brings_it_back():
    net = talk()
    net.at[B] = channel(B, name=b"b")
    net.send(A, b"lost", B, 1.0)
    assert net.got[-1][1] == b"answer", "sealed for the run before"
    net.at[A].forget(B)
    net.send(A, b"found", B, 2.0)
    assert net.got[-1][1] == b"found"


def test_what_is_not_sealed_with_the_key_is_nothing():
    b = channel(B)
    stranger = channel(A, K2)
    for datagram in [
        b"",
        b"\0" * 22,
        os.urandom(100),
        os.urandom(OVERHEAD - 1),
        os.urandom(5000),
        stranger.send(b"x", B, 0.0)[0][0],
    ]:
        received = b.receive(datagram, A, 0.0)
        assert not received.replies
        assert received.message is None
    assert b.dropped == 6


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_one_flipped_bit_anywhere_is_nothing(where, flip):
    net = talk()
    good = bytearray(net.at[A].send(b"message", B, 0.0)[0][0])
    good[where % len(good)] ^= flip
    received = net.at[B].receive(bytes(good), A, 0.0)
    assert received.message is None
    assert not received.replies


def test_a_reflected_datagram_is_nothing():
    a = SealedChannel((K1,), bytes(20), lambda _: True)
    knock = a.send(b"x", B, 0.0)[0][0]
    assert not a.receive(knock, B, 0.0).replies
    assert not a.receive(knock, A, 0.0).replies


def test_messages_wait_a_while_and_knocks_are_not_repeated_at_once():
    a, b = channel(A), channel(B)
    first = a.send(b"1", B, 0.0)
    assert len(first) == 1
    assert a.send(b"2", B, 0.0) == []
    assert len(a.send(b"3", B, KNOCK_EVERY_S)) == 1
    hello = b.receive(first[0][0], A, 0.0).replies[0][0]
    late = a.receive(hello, B, WAIT_S + 0.1)
    assert len(late.replies) == 1, "only the message that was still fresh"


def test_hellos_to_one_address_are_rationed():
    b = channel(B)
    knocks = [channel(A).send(b"x", B, 0.0)[0][0] for _ in range(2 * MAX_HELLOS_PER_S)]
    answered = sum(len(b.receive(k, A, 5.0).replies) for k in knocks)
    assert answered == MAX_HELLOS_PER_S
    assert b.receive(channel(A).send(b"x", B, 0.0)[0][0], A, 6.0).replies, "the next second"
    assert b.receive(channel(C).send(b"x", B, 0.0)[0][0], C, 5.0).replies, "another address"


@pytest.mark.parametrize(
    ("ours", "theirs"), [((K1,), (K1, K2)), ((K2, K1), (K1,)), ((K1, K2), (K2, K1)), ((K2,), (K1, K2))]
)
def test_while_a_key_is_replaced_old_and_new_members_understand_each_other(ours, theirs):
    for first, second in ((ours, theirs), (theirs, ours)):
        net = Net(A=channel(A, *first), B=channel(B, *second))
        net.send(A, b"question", B)
        net.send(B, b"answer", A)
        assert [m for _, m, _ in net.got] == [b"question", b"answer"]


def test_the_hello_is_not_accepted_from_an_address_that_was_not_knocked():
    a, b = channel(A), SealedChannel((K1,), bytes(20), lambda _: True)
    knock = a.send(b"x", B, 0.0)[0][0]
    hello = b.receive(knock, A, 0.0).replies[0][0]
    assert not a.receive(hello, OUTSIDER, 0.0).replies
    assert a.receive(hello, B, 0.0).replies
    assert HELLO == 2


@given(st.lists(st.integers(0, 60), max_size=80))
def test_the_replay_window_agrees_with_a_set(counters):
    window = ReplayWindow(size=16)
    seen: set[int] = set()
    for c in counters:
        expected = c not in seen and (not seen or c > max(seen) - 16)
        assert window.accept(c) is expected
        if expected:
            seen.add(c)


def test_a_huge_jump_of_the_counter_costs_nothing():
    window = ReplayWindow()
    assert window.accept(3)
    assert window.accept(2**64 - 1)
    assert not window.accept(3)
    assert window.accept(2**64 - 2)


@pytest.mark.parametrize(
    ("ip", "port"),
    [
        (None, None),
        ("127.0.0.1", 70000),
        ("127.0.0.1", "9"),
        ("127.0.0.1", 0),
        ("127.0.0.1", True),
        ("127.0.0.1", 9.0),
        ("host.example", 9),
        ("0.0.0.0", 9),
        ("::", 9),
        ("224.0.0.1", 9),
        ("255.255.255.255", 9),
        ("fe80::1%eth0", 9),
        ("127.1", 9),
        (b"127.0.0.1", 9),
    ],
)
def test_an_address_that_no_socket_takes_is_none(ip, port):
    assert canonical(ip, port) is None


def test_a_mapped_address_is_its_ipv4_self():
    assert canonical("::ffff:10.0.0.7", 9) == ("10.0.0.7", 9)
    assert canonical("2001:DB8:0::1", 9) == ("2001:db8::1", 9)
