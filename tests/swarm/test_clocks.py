"""By whose clock a joiner goes. (outer, inner) of each live node in, the clock that is taken out."""

from __future__ import annotations

import itertools

import pytest

from hotswarm.swarm.clocks import swarm_clock
from hotswarm.swarm.model import Description, LiveClock, Voucher


def node(number: int, outer: int, inner: int, *, live: bool = True, digest: bytes = b"d", **clock: int) -> Description:
    said = {"training_step": outer * 10 + inner, "round_length": 10, **clock}
    return Description(
        node=f"{number:040x}", name="", run="r", live=live,
        clock=LiveClock(outer, inner, steps_per_s=1.0, **said),
        offers=(), vouchers=(Voucher(2, digest, True),),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("places", "taken"),
    [
        ([(3, 4)], (3, 4)),
        ([(3, 4), (3, 8)], (3, 8)),
        ([(3, 4), (3, 8), (3, 6)], (3, 6)),
        ([(3, 9), (4, 0)], (4, 0)),
        ([(3, 9), (3, 9), (4, 0)], (4, 0)),
        ([(2, 2), (2, 2), (1_000_000, 4)], (2, 2)),
        ([(2, 2), (1_000_000, 4)], (2, 2)),
        ([(2, 2), (2, 3), (2, 10)], (2, 3)),
        ([(2, 2), (2, 3), (0, 0)], (2, 3)),
        ([], None),
    ],
)
def test_the_furthest_round_that_is_not_alone_and_the_middle_of_it(places, taken):
    for order in itertools.permutations(places):
        clock = swarm_clock([node(number, *place) for number, place in enumerate(order)])
        assert (clock and (clock.outer_step, clock.inner_step)) == taken


def test_nodes_of_another_history_do_not_count_while_there_are_others():
    theirs = [node(1, 3, 9, digest=b"x"), node(2, 3, 9, digest=b"x"), node(3, 3, 9, digest=b"x")]
    mine = node(4, 3, 2)
    assert swarm_clock([*theirs, mine], {2: b"d"}).inner_step == 2
    assert swarm_clock(theirs, {2: b"d"}).inner_step == 9
    assert swarm_clock([*theirs, mine], {}).inner_step == 9


def test_what_cannot_be_does_not_count():
    right = node(1, 3, 2)
    for wrong in (node(2, 3, 11), node(2, 3, 9, live=False)):
        assert swarm_clock([right, wrong]) == right.clock
        assert swarm_clock([wrong]) is None
