"""Which outer state is the swarm's? Pure: descriptions in, a verdict out (no clock, no I/O).

Voters are the nodes with a live trainer, or all that answered when none has one; never this node itself. A vote is a
voucher (outer step, outer digest) whose section the voter can serve now. Older vouchers are no votes: they show whether
a peer's history continues this node's own.

    agreed       at least `min_agree` nodes vote for one digest; the highest such step is taken
    divergent    three or more answered, and no two of them hold equal digests of any one step: the hardware or the
                 engine does not compute equal outer states; one donor's section is taken, whole
    unconfirmed  anything less: one voter, or two that disagree
    forked       this node's own digest differs from what strictly more live voters hold; theirs is the swarm's

Agreement finds faults and mistakes. It is no defence against a holder of the swarm key who invents voters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hotswarm.swarm.model import AgreementName, Description

DEFAULT_MIN_AGREE = 2
MIN_DIVERGENT = 3  # with two that disagree, one of them may simply be wrong
VOUCHERS_KEPT = 16  # outer steps


@dataclass(frozen=True, slots=True, order=True)
class OuterState:
    """An outer step and the digest of the outer section after it."""

    outer_step: int
    digest: bytes

    def __str__(self) -> str:
        return f"outer step {self.outer_step} ({self.digest.hex()[:12]})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the swarm's outer state is, as far as the answers tell. `state` is None when nobody offers a usable one."""

    state: OuterState | None
    agreement: AgreementName | None
    votes: Mapping[OuterState, frozenset[str]]  # of this node's floor and above
    voters: tuple[Description, ...]
    below_floor: Mapping[str, int]  # nodes whose newest servable step is behind this node's own
    ahead: bool  # somebody shows the step after `state`: waiting a moment may settle it
    forked: bool


def voters_of(answers: Iterable[Description], self_id: str) -> tuple[Description, ...]:
    """The answers that count: those of live trainers, or all when no trainer lives."""
    others = [answer for answer in answers if answer.node != self_id]
    live = [answer for answer in others if answer.live]
    return tuple(sorted(live or others, key=lambda answer: answer.node))


def servable_states(answer: Description) -> set[OuterState]:
    """The outer states that this node both vouches for and can serve now."""
    offered = {OuterState(offer.outer_step, offer.outer_digest) for offer in answer.offers if offer.outer_digest}
    vouched = {OuterState(voucher.outer_step, voucher.digest) for voucher in answer.vouchers}
    return offered & vouched


def continues(own: Mapping[int, bytes], answer: Description) -> bool:
    """Whether the newest step that both this node and that peer vouch for has one digest."""
    common = [voucher for voucher in answer.vouchers if voucher.outer_step in own]
    if not common:
        return False
    newest = max(common, key=lambda voucher: voucher.outer_step)
    return own[newest.outer_step] == newest.digest


def is_divergent(voters: Sequence[Description]) -> bool:
    """Three or more answered, some can be compared, and no two digests of one step are equal."""
    if len(voters) < MIN_DIVERGENT:
        return False
    held: dict[int, list[bytes]] = defaultdict(list)
    for voter in voters:
        for step, digest in {(voucher.outer_step, voucher.digest) for voucher in voter.vouchers}:
            held[step].append(digest)
    compared = [digests for digests in held.values() if len(digests) > 1]
    return bool(compared) and all(len(set(digests)) == len(digests) for digests in compared)


def is_forked(own: Mapping[int, bytes], voters: Sequence[Description]) -> bool:
    """Whether, at the newest step both sides know, strictly more live voters hold one other digest than hold ours.

    This node counts for its own digest, so a single peer never outvotes it.
    """
    live = [voter for voter in voters if voter.live]
    known = {voucher.outer_step for voter in live for voucher in voter.vouchers}
    common = known & set(own)
    if not common:
        return False
    step = max(common)
    held = Counter(voucher.digest for voter in live for voucher in voter.vouchers if voucher.outer_step == step)
    ours = 1 + held.pop(own[step], 0)
    return max(held.values(), default=0) > ours


def judge(
    answers: Iterable[Description],
    *,
    self_id: str = "",
    own: Mapping[int, bytes] | None = None,
    floor: int | None = None,
    min_agree: int | None = None,
    barred: Iterable[OuterState] = (),
) -> Verdict:
    """Judge the answers.

    `own`: this node's vouchers. `floor`: lower steps are no candidates. `barred`: states known to be bad.
    """
    own = own or {}
    needed = DEFAULT_MIN_AGREE if min_agree is None else max(1, min_agree)
    voters = voters_of(answers, self_id)
    barred_states = frozenset(barred)
    votes: dict[OuterState, set[str]] = defaultdict(set)
    below: dict[str, int] = {}
    for voter in voters:
        states = servable_states(voter) - barred_states
        usable = {state for state in states if floor is None or state.outer_step >= floor}
        for servable in usable:
            votes[servable].add(voter.node)
        if states and not usable:
            below[voter.node] = max(servable.outer_step for servable in states)
    forked = is_forked(own, voters)
    divergent = is_divergent(voters)
    state, agreement = _take(votes, voters, own, needed)
    if agreement == "unconfirmed" and divergent:
        agreement = "divergent"
    if forked and state is not None:
        agreement = "forked"
    return Verdict(
        state=state,
        agreement=agreement,
        votes={voted: frozenset(nodes) for voted, nodes in votes.items()},
        voters=voters,
        below_floor=below,
        ahead=_ahead(state, agreement, votes, voters),
        forked=forked,
    )


def _take(
    votes: Mapping[OuterState, set[str]], voters: Sequence[Description], own: Mapping[int, bytes], needed: int
) -> tuple[OuterState | None, AgreementName | None]:
    """The state to take, before forks and divergence are named."""
    if not votes:
        return None, None
    for step in sorted({state.outer_step for state in votes}, reverse=True):
        ranked = sorted((len(nodes), state) for state, nodes in votes.items() if state.outer_step == step)
        count, state = ranked[-1]
        tied = len(ranked) > 1 and ranked[-2][0] == count
        if count >= needed and not tied:
            return state, "agreed" if count >= DEFAULT_MIN_AGREE else "unconfirmed"
    continuing = {voter.node for voter in voters if continues(own, voter)}

    def rank(state: OuterState) -> tuple[bool, int, int, bytes]:
        return (bool(votes[state] & continuing), state.outer_step, len(votes[state]), state.digest)

    return max(votes, key=rank), "unconfirmed"


def _ahead(
    state: OuterState | None,
    agreement: AgreementName | None,
    votes: Mapping[OuterState, set[str]],
    voters: Sequence[Description],
) -> bool:
    """Whether the picture is likely to change within a moment, because nodes straddle the boundary of a round."""
    if state is None:
        return False
    shown = {voted.outer_step for voted in votes}
    shown |= {voter.clock.outer_step for voter in voters if voter.live and voter.clock is not None}
    if state.outer_step + 1 in shown:
        return True
    newest = [max((s.outer_step for s in servable_states(voter)), default=-1) for voter in voters]
    return agreement == "unconfirmed" and len(voters) > 1 and state.outer_step - 1 in newest
