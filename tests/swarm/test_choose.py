"""Which state a joiner takes. Answers are written as {node: {outer step: digest}}; the last two steps can be served."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswarm.errors import NoSnapshot, Stale, Unconfirmed
from hotswarm.swarm.agreement import OuterState, judge
from hotswarm.swarm.choose import Decision, LocalSnapshot, OwnState, choose, choose_inner
from hotswarm.swarm.model import Description, LiveClock, Offer, RecoverRequest, SectionOffer, Voucher

ARCH = b"A" * 32


def node_id(letter: str) -> str:
    return letter * 40


def digest(text: str) -> bytes:
    return text.encode().ljust(32, b".")


def peer(
    letter: str,
    history: dict[int, str],
    *,
    live: bool = True,
    inner_step: int = 3,
    arch: bytes = ARCH,
    load: int = 0,
    clock: int | None = None,
    inner: bool = True,
) -> Description:
    steps = sorted(history, reverse=True)
    sections = {step: [SectionOffer("outer", digest(history[step]), 100)] for step in steps}
    offers = tuple(
        Offer(
            f"{letter}{step:031x}",
            "hot",
            step,
            inner_step,
            step * 10 + inner_step,
            step,
            0,
            arch,
            tuple(sections[step] + ([SectionOffer("inner", digest(f"{letter}{step}"), 100)] if inner else [])),
        )
        for step in steps[:2]
    )
    vouchers = tuple(Voucher(step, digest(history[step]), step in steps[:2]) for step in steps)
    at = LiveClock(clock if clock is not None else steps[0], inner_step) if steps else None
    return Description(node_id(letter), letter, "run", live, at, offers, vouchers, load, 4)


def same(*steps: int, mark: str = "S") -> dict[int, str]:
    return {step: f"{mark}{step}" for step in steps}


def own_state(history: dict[int, str], *, inner_step: int = 3) -> OwnState:
    snapshots = tuple(
        LocalSnapshot(f"{step:032x}", step, inner_step, step * 10 + inner_step, step, digest(text), True, True)
        for step, text in history.items()
    )
    return OwnState(node_id("0"), snapshots, {step: digest(text) for step, text in history.items()})


def ask(answers: list[Description], own: OwnState | None = None, **request: object) -> Decision:
    may_wait = bool(request.pop("may_wait", False))
    return choose(answers, own or OwnState(node_id("0")), RecoverRequest(**request), may_wait=may_wait)  # type: ignore[arg-type]


def test_the_only_peer_ahead_of_this_node_is_taken_unconfirmed() -> None:
    decision = ask([peer("a", same(5, 4)), peer("b", same(12, 11))], own_state(same(9)))
    assert decision.action == "outer"
    assert decision.state == OuterState(12, digest("S12"))
    assert decision.agreement == "unconfirmed"
    assert "nobody confirms" in decision.reason
    assert "behind this node's own 9" in decision.rejected[node_id("a")]


def test_peers_behind_this_node_leave_it_its_own_snapshot() -> None:
    decision = ask([peer("a", same(5, 4))], own_state(same(9)))
    assert (decision.action, decision.local.outer_step) == ("own", 9)


def test_peers_behind_this_node_are_stale_when_their_state_is_asked_for() -> None:
    with pytest.raises(Stale, match="behind"):
        ask([peer("a", same(5, 4))], own_state(same(9)), mode="outer")


def test_rollback_goes_back_only_when_told() -> None:
    answers = [peer("a", same(5)), peer("b", same(5))]
    decision = ask(answers, own_state(same(9)), mode="outer", allow_rollback=True)
    assert decision.state == OuterState(5, digest("S5"))
    assert decision.agreement == "agreed"


def test_the_trainers_own_word_about_its_outer_step_is_a_floor() -> None:
    with pytest.raises(Stale):
        ask([peer("a", same(5)), peer("b", same(5))], own_outer_step=6)
    assert ask([peer("a", same(6)), peer("b", same(6))], own_outer_step=6).state.outer_step == 6


def test_the_majoritys_digest_is_taken_and_the_third_donor_named() -> None:
    decision = ask([peer("a", same(9)), peer("b", {9: "evil"}), peer("c", same(9))])
    assert decision.state == OuterState(9, digest("S9"))
    assert decision.agreement == "agreed"
    assert {source.node for source in decision.outer_donors} == {node_id("a"), node_id("c")}
    assert set(decision.rejected) == {node_id("b")}
    assert "not" in decision.rejected[node_id("b")]
    assert digest("S9").hex()[:12] in decision.rejected[node_id("b")]


def test_two_of_three_at_the_next_step_win_over_the_step_all_share() -> None:
    decision = ask([peer("a", same(8, 7)), peer("b", same(9, 8)), peer("c", same(9, 8))])
    assert decision.state.outer_step == 9
    assert decision.agreement == "agreed"


def test_one_of_three_a_step_ahead_is_waited_for_and_then_left() -> None:
    answers = [peer("a", same(8, 7)), peer("b", same(8, 7)), peer("c", same(9, 8))]
    first = ask(answers, may_wait=True)
    assert first.wait
    assert first.state.outer_step == 8
    assert not ask(answers).wait
    joined = [peer("a", same(9, 8)), peer("b", same(8, 7)), peer("c", same(9, 8))]
    assert ask(joined, may_wait=True).state.outer_step == 9


def test_a_live_clock_a_step_ahead_of_all_snapshots_is_waited_for() -> None:
    answers = [peer("a", same(8, 7), clock=9), peer("b", same(8, 7), clock=9)]
    assert ask(answers, may_wait=True).wait


def test_a_divergent_swarm_gives_one_donors_section_whole() -> None:
    answers = [peer(letter, {9: letter + "9", 8: letter + "8"}) for letter in "abc"]
    decision = ask(answers)
    assert decision.agreement == "divergent"
    assert len(decision.outer_donors) == 1
    assert decision.inner[0].node == decision.outer_donors[0].node


def test_two_that_disagree_are_unconfirmed_not_divergent() -> None:
    decision = ask([peer("a", {9: "x"}), peer("b", {9: "y"})])
    assert decision.agreement == "unconfirmed"
    assert len(decision.outer_donors) == 1


def test_of_two_that_disagree_the_one_that_continues_our_history_is_taken() -> None:
    own = own_state({7: "S7"})
    honest, other = peer("a", same(8, 7)), peer("b", {9: "Z9", 8: "Z8", 7: "Z7"})
    assert ask([honest, other], own).state == OuterState(8, digest("S8"))
    assert ask([honest, other]).state == OuterState(9, digest("Z9"))


def test_min_agree_makes_an_unconfirmed_state_an_error() -> None:
    with pytest.raises(Unconfirmed, match="1 of the 2"):
        ask([peer("a", same(9))], min_agree=2)
    with pytest.raises(Unconfirmed):
        ask([peer("a", same(9)), peer("b", same(9))], min_agree=3)
    assert ask([peer("a", same(9)), peer("b", same(9))], min_agree=2).agreement == "agreed"
    assert ask([peer("a", same(9))], min_agree=1).agreement == "unconfirmed"


def test_resume_applies_in_the_current_round() -> None:
    decision = ask([peer("a", same(9, 8)), peer("b", same(9, 8))], own_state(same(9, 8)))
    assert (decision.action, decision.local.outer_step, decision.agreement) == ("resume", 9, "agreed")


def test_a_round_that_ended_meanwhile_is_entered_by_outer_with_own_private_state() -> None:
    decision = ask([peer("a", same(10, 9)), peer("b", same(10, 9))], own_state(same(9, 8)))
    assert decision.action == "outer"
    assert decision.local.outer_step == 9
    with pytest.raises(Stale, match="use mode outer"):
        ask([peer("a", same(10, 9)), peer("b", same(10, 9))], own_state(same(9, 8)), mode="resume")


def test_a_node_alone_resumes_its_own_snapshot() -> None:
    decision = ask([], own_state(same(9, 8)))
    assert (decision.action, decision.agreement) == ("resume", None)
    assert "no peer answered" in decision.reason


def test_a_node_with_nothing_anywhere_starts_fresh_or_says_so() -> None:
    assert ask([]).action == "fresh"
    for mode in ("outer", "clone", "resume"):
        with pytest.raises(NoSnapshot):
            ask([], mode=mode)


def test_more_live_voters_with_another_digest_mean_forked_and_theirs_is_adopted() -> None:
    answers = [peer("a", same(9, 8)), peer("b", same(9, 8))]
    decision = ask(answers, own_state({9: "mine", 8: "S8"}))
    assert (decision.action, decision.agreement) == ("outer", "forked")
    assert decision.state == OuterState(9, digest("S9"))


def test_a_single_peer_never_outvotes_this_node() -> None:
    decision = ask([peer("a", same(9, 8))], own_state({9: "mine", 8: "S8"}))
    assert (decision.action, decision.local.outer_step) == ("resume", 9)


def test_in_a_divergent_swarm_the_own_snapshot_of_the_current_round_is_resumed() -> None:
    answers = [peer(letter, {9: letter + "9", 8: letter + "8"}) for letter in "abc"]
    decision = ask(answers, own_state({9: "m9", 8: "m8"}))
    assert (decision.action, decision.agreement) == ("resume", "divergent")


def test_nodes_without_a_trainer_vote_only_when_no_trainer_lives() -> None:
    idle = [peer(letter, {9: "idle"}, live=False) for letter in "ab"]
    assert ask([*idle, peer("c", same(8))]).state == OuterState(8, digest("S8"))
    assert ask(idle).state == OuterState(9, digest("idle"))


def test_this_node_never_votes_for_itself() -> None:
    me = peer("0", same(9))
    assert judge([me, peer("a", same(9))], self_id=node_id("0")).agreement == "unconfirmed"


def test_a_voucher_that_cannot_be_served_is_no_vote() -> None:
    old = peer("a", same(9, 8, 7, 6))
    assert judge([old, peer("b", same(6))]).state == OuterState(9, digest("S9"))
    assert judge([old, peer("b", same(6))]).agreement == "unconfirmed"


def test_the_inner_donor_is_the_furthest_then_the_least_loaded() -> None:
    answers = [
        peer("a", same(9), inner_step=4),
        peer("b", same(9), inner_step=7, load=3),
        peer("c", same(9), inner_step=7),
    ]
    assert [source.node[0] for source in ask(answers).inner] == ["c", "b", "a"]


def test_another_architecture_is_refused_by_name() -> None:
    decision = ask([peer("a", same(9), arch=b"B" * 32), peer("b", same(9)), peer("c", same(9))], arch=ARCH)
    assert decision.agreement == "agreed"
    assert "architecture" in decision.rejected[node_id("a")]
    with pytest.raises(NoSnapshot, match="architecture"):
        ask([peer("a", same(9), arch=b"B" * 32)], arch=ARCH, mode="outer")


def test_a_state_found_bad_is_not_taken_again() -> None:
    answers = [peer("a", same(9, 8)), peer("b", same(9, 8))]
    bad = OuterState(9, digest("S9"))
    decision = choose(answers, OwnState(), RecoverRequest(), barred=[bad], may_wait=False)
    assert decision.state == OuterState(8, digest("S8"))


def plain(letter: str, training_step: int) -> Description:
    """A peer of a run without an outer optimizer."""
    section = SectionOffer("inner", digest(letter), 100)
    offer = Offer(letter * 32, "hot", 0, training_step, training_step, 1, 0, ARCH, (section,))
    return Description(node_id(letter), letter, "run", True, LiveClock(0, training_step), (offer,), ())


def plain_own(training_step: int) -> OwnState:
    mine = LocalSnapshot("f" * 32, 0, training_step, training_step, 1, None, True, True)
    return OwnState(node_id("0"), (mine,))


@pytest.mark.parametrize("mode", ["auto", "outer", "clone"])
def test_without_an_outer_optimizer_the_furthest_donor_is_cloned_unconfirmed(mode: str) -> None:
    decision = ask([plain("a", 10), plain("b", 900)], plain_own(500), mode=mode)
    assert (decision.action, decision.agreement) == ("clone", "unconfirmed")
    assert decision.inner[0].node == node_id("b")
    assert "behind this node's own 500" in decision.rejected[node_id("a")]


def test_without_an_outer_optimizer_the_own_snapshot_wins_when_it_is_further() -> None:
    decision = ask([plain("a", 10)], plain_own(500))
    assert (decision.action, decision.local.training_step) == ("resume", 500)
    with pytest.raises(Stale):
        ask([plain("a", 10)], plain_own(500), mode="clone")


def test_moments_are_adopted_when_that_takes_under_a_tenth_of_a_round() -> None:
    def auto(seconds: float | None, round_s: float | None, *, has_own: bool = True, donors: int = 1) -> str:
        return choose_inner("auto", donors=donors, has_own=has_own, adopt_seconds=seconds, round_seconds=round_s)[0]

    assert auto(9.9, 100.0) == "adopt"
    assert auto(10.0, 100.0) == "own"
    assert auto(10.0, 100.0, has_own=False) == "fresh"
    assert auto(None, None) == "adopt"
    assert auto(1.0, 100.0, donors=0) == "own"


def test_asked_for_moments_that_do_not_exist_become_fresh() -> None:
    assert choose_inner("own", donors=1, has_own=False, adopt_seconds=None, round_seconds=None)[0] == "fresh"
    assert choose_inner("adopt", donors=0, has_own=True, adopt_seconds=None, round_seconds=None)[0] == "own"


histories = st.dictionaries(st.integers(0, 4), st.sampled_from(["S", "T"]), min_size=1, max_size=5)


@given(
    peers=st.lists(st.tuples(histories, st.booleans()), max_size=5),
    own=st.one_of(st.none(), histories),
    mode=st.sampled_from(["auto", "outer", "clone", "resume"]),
)
def test_whatever_the_answers_the_choice_is_served_by_someone_and_never_goes_back(
    peers: list[tuple[dict[int, str], bool]], own: dict[int, str] | None, mode: str
) -> None:
    answers = [
        peer("abcde"[index], {step: f"{mark}{step}" for step, mark in history.items()}, live=live)
        for index, (history, live) in enumerate(peers)
    ]
    mine = own_state({step: f"{mark}{step}" for step, mark in own.items()}) if own else None
    try:
        decision = ask(answers, mine, mode=mode)
    except (NoSnapshot, Stale):
        return
    floor = max(own) if own else -1
    if decision.outer_donors:
        assert decision.state.outer_step >= floor
        for source in decision.outer_donors:
            assert source.offer.outer_digest == decision.state.digest
        holders = {
            answer.node
            for answer in answers
            for voucher in answer.vouchers
            if (voucher.outer_step, voucher.digest) == (decision.state.outer_step, decision.state.digest)
        }
        assert {source.node for source in decision.outer_donors} <= holders
    else:
        assert decision.action in ("resume", "own", "fresh")
        assert (decision.local is not None) == (decision.action != "fresh")


def test_a_round_that_the_swarm_has_left_is_not_resumed() -> None:
    own = own_state(same(9, 8))
    inside = [peer("a", same(9, 8)), peer("b", same(9, 8))]
    past = [peer("a", same(9, 8), clock=10), peer("b", same(9, 8), clock=10)]  # they are still writing what came of it
    assert ask(inside, own).action == "resume"
    assert ask(past, own, may_wait=True).wait
    decision = ask(past, own)
    assert (decision.action, decision.state) == ("outer", OuterState(9, digest("S9")))
    one_of_them = [peer("a", same(9, 8), clock=10), peer("b", same(9, 8))]
    assert ask(one_of_them, own).action == "outer"
    a_liar = [*inside, peer("c", same(9, 8), clock=1_000_000)]
    assert ask(a_liar, own).action == "resume"
