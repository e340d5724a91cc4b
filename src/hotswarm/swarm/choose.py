"""What a node that (re)joins should do: resume its own snapshot, take the swarm's outer state, clone, or start fresh.

Pure: the answers to `Describe`, what lies in the own store and the request go in, a Decision comes out. `agreement.py`
judges which outer state is the swarm's; this module turns the verdict into an action by the mode that was asked for:

    resume   the own snapshot, if it belongs to the swarm's current round
    outer    the swarm's outer state from several donors, moments and buffers from one of them
    clone    the same, and one donor's live inner state with it
    auto     resume where it applies, else outer, else the own snapshot, else fresh

A run without an outer optimizer has no outer sections; then auto and outer mean clone, from the donor with the highest
training step, reported unconfirmed. Nothing goes back behind the outer step that this node has, unless told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hotswarm.errors import NoSnapshot, Stale, Unconfirmed
from hotswarm.swarm.agreement import OuterState, Verdict, judge
from hotswarm.swarm.clocks import swarm_clock
from hotswarm.swarm.model import ActionName, AgreementName, Description, InnerName, InnerSource, Offer, RecoverRequest

ADOPT_MAX_ROUND_SHARE = 0.10  # inner="auto" adopts moments when that takes less of a round than this (design.md §4)


@dataclass(frozen=True, slots=True)
class LocalSnapshot:
    """A complete snapshot in the own store, of the live model's architecture."""

    snapshot_id: str
    outer_step: int
    inner_step: int
    training_step: int
    seq: int
    outer_digest: bytes | None
    has_inner: bool
    own: bool  # captured here, not fetched

    @property
    def order_key(self) -> tuple[int, int, int]:
        """(outer_step, training_step, seq)."""
        return (self.outer_step, self.training_step, self.seq)


@dataclass(frozen=True, slots=True)
class OwnState:
    """What this node knows of itself."""

    node: str = ""
    snapshots: tuple[LocalSnapshot, ...] = ()
    vouchers: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def captured(self) -> LocalSnapshot | None:
        """The newest snapshot that was captured here."""
        return max((s for s in self.snapshots if s.own), key=lambda s: s.order_key, default=None)

    @property
    def newest(self) -> LocalSnapshot | None:
        """The newest snapshot here, fetched ones included; at a tie the captured one."""
        return max(self.snapshots, key=lambda s: (s.outer_step, s.training_step, s.own, s.seq), default=None)


@dataclass(frozen=True, slots=True)
class Source:
    """A snapshot at a peer."""

    node: str
    offer: Offer


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why. `inner` is sorted best first; `outer_donors` all hold the same section."""

    action: ActionName
    reason: str
    agreement: AgreementName | None = None
    local: LocalSnapshot | None = None
    state: OuterState | None = None
    outer_donors: tuple[Source, ...] = ()
    inner: tuple[Source, ...] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)
    wait: bool = False  # ask again in a moment: nodes straddle a round's boundary


def choose(
    answers: Iterable[Description],
    own: OwnState,
    request: RecoverRequest,
    *,
    barred: Iterable[OuterState] = (),
    may_wait: bool = True,
) -> Decision:
    """Decide. Raises NoSnapshot, Stale or Unconfirmed; in mode auto a fresh start is a decision, not an error.

    `barred`: states known to be bad. With `may_wait`, a decision that a moment's patience could better says `wait`.
    """
    rejected: dict[str, str] = {}
    usable = _of_this_model(answers, request.arch, rejected)
    floor = None if request.allow_rollback else _floor(own, request)
    verdict = judge(usable, self_id=own.node, own=own.vouchers, floor=floor, min_agree=request.min_agree, barred=barred)
    for node, step in verdict.below_floor.items():
        rejected[node] = f"its newest outer step is {step}, behind this node's own {floor}"
    if not _swarm_has_outer(verdict, own):
        return _choose_clone(verdict, own, request, rejected)
    _name_the_different(verdict, rejected)
    if request.mode == "resume" or (request.mode == "auto" and _resume_applies(verdict, own)):
        return _resume(verdict, own, rejected, wait=may_wait and verdict.ahead)
    if verdict.state is not None:
        return _take_outer(verdict, own, request, rejected, wait=may_wait and verdict.ahead)
    if request.mode == "auto":
        return _without_peers(verdict, own, request, rejected)
    if verdict.below_floor:
        raise Stale(
            f"every peer is behind this node's own outer step {floor}: {_list(rejected)}; allow_rollback would go back"
        )
    raise NoSnapshot(f"no peer that answered offers an outer state of this run{_because(rejected)}")


def choose_inner(
    asked: InnerName, *, donors: int, has_own: bool, adopt_seconds: float | None, round_seconds: float | None
) -> tuple[InnerSource, str]:
    """Where the inner optimizer's moments come from, and why. None means: not known."""
    fallback: InnerSource = "own" if has_own else "fresh"
    if asked == "fresh":
        return "fresh", "asked for"
    if asked == "own":
        return (fallback, "asked for" if has_own else "no own snapshot holds moments")
    if not donors:
        return fallback, "no donor offers its inner state"
    if asked == "adopt":
        return "adopt", "asked for"
    if adopt_seconds is None or not round_seconds:
        return "adopt", "the length of a round is not known"
    share = adopt_seconds / round_seconds
    text = f"the transfer is estimated at {adopt_seconds:.1f} s, {share:.0%} of a round"
    return ("adopt", text) if share < ADOPT_MAX_ROUND_SHARE else (fallback, text)


def _of_this_model(
    answers: Iterable[Description], arch: bytes | None, rejected: dict[str, str]
) -> tuple[Description, ...]:
    """The answers without the nodes that train another model."""
    usable = []
    for answer in answers:
        if arch and answer.offers and all(offer.arch and offer.arch != arch for offer in answer.offers):
            rejected[answer.node] = "it trains another model architecture"
        else:
            usable.append(answer)
    return tuple(usable)


def _floor(own: OwnState, request: RecoverRequest) -> int | None:
    steps = [snapshot.outer_step for snapshot in own.snapshots if snapshot.outer_digest is not None]
    if request.own_outer_step is not None:
        steps.append(request.own_outer_step)
    return max(steps, default=None)


def _swarm_has_outer(verdict: Verdict, own: OwnState) -> bool:
    mine = own.newest is not None and own.newest.outer_digest is not None
    theirs = any(offer.outer_digest for voter in verdict.voters for offer in voter.offers)
    return mine or theirs


def _name_the_different(verdict: Verdict, rejected: dict[str, str]) -> None:
    """Report by name each voter that is not in the chosen group."""
    state = verdict.state
    if state is None:
        return
    group = verdict.votes[state]
    for voter in verdict.voters:
        if voter.node in group or voter.node in rejected:
            continue
        voucher = voter.voucher_at(state.outer_step)
        if voucher is None:
            rejected[voter.node] = f"it does not hold {state}"
        elif voucher.digest != state.digest:
            rejected[voter.node] = (
                f"its outer digest at step {state.outer_step} is {voucher.digest.hex()[:12]}, "
                f"not {state.digest.hex()[:12]} that {len(group)} hold"
            )


def _resume_applies(verdict: Verdict, own: OwnState) -> bool:
    """Whether the newest own snapshot belongs to the swarm's current round, or is ahead of all."""
    mine, state = own.captured, verdict.state
    if mine is None or mine != own.newest or mine.outer_digest is None:
        return False
    if state is None:
        return not verdict.voters
    if verdict.forked or mine.outer_step < state.outer_step:
        return False
    if mine.outer_step > state.outer_step:
        return True
    clock = swarm_clock(verdict.voters, own.vouchers)
    if clock is not None and clock.outer_step > mine.outer_step:
        return False  # its round is over, though nobody can serve what came of it yet
    # Nobody outvotes this node's digest: equal, or a swarm whose members compute different ones, or one against one.
    return mine.outer_digest == state.digest or verdict.agreement != "agreed"


def _resume(verdict: Verdict, own: OwnState, rejected: Mapping[str, str], wait: bool) -> Decision:
    mine, state = own.captured, verdict.state
    if mine is None:
        raise NoSnapshot(f"this node has no snapshot of its own to resume from{_because(rejected)}")
    if verdict.forked:
        raise Stale(f"the swarm does not share this node's outer step {mine.outer_step}; use mode outer")
    if state is not None and mine.outer_step < state.outer_step:
        raise Stale(f"the own snapshot is of outer step {mine.outer_step}, the swarm is at {state}; use mode outer")
    if state is None:
        reason = "no peer answered with a state to compare with" if not verdict.below_floor else "the peers are behind"
    elif mine.outer_digest == state.digest:
        reason = f"the own snapshot is of the swarm's current round, {state}"
    else:
        reason = f"nobody outvotes the own snapshot of outer step {mine.outer_step}"
    agreement = verdict.agreement if state is not None and mine.outer_step == state.outer_step else None
    return Decision("resume", reason, agreement, mine, state, rejected=rejected, wait=wait)


def _take_outer(
    verdict: Verdict, own: OwnState, request: RecoverRequest, rejected: Mapping[str, str], wait: bool
) -> Decision:
    state = verdict.state
    assert state is not None
    votes = len(verdict.votes[state])
    if request.min_agree is not None and votes < request.min_agree and not wait:
        raise Unconfirmed(
            f"{votes} of the {request.min_agree} nodes that min_agree asks for vouch for {state}{_because(rejected)}"
        )
    group = [voter for voter in verdict.voters if voter.node in verdict.votes[state]]
    outer = _sources(group, state)
    inner = tuple(source for source in outer if source.offer.section("inner"))
    by_progress = sorted(inner, key=lambda s: (-s.offer.inner_step, _load(group, s.node), s.node))
    words = {
        "agreed": f"{votes} nodes agree on {state}",
        "divergent": f"no two nodes hold equal outer states; one donor's {state} is taken whole",
        "forked": f"{votes} nodes hold {state}; this node's own history differs",
    }
    reason = words.get(verdict.agreement or "", f"{votes} node(s) vouch for {state}; nobody confirms it")
    action: ActionName = "clone" if request.mode == "clone" else "outer"
    if action == "clone" and not inner:
        raise NoSnapshot(f"no donor of {state} offers its inner state{_because(rejected)}")
    return Decision(action, reason, verdict.agreement, own.captured, state, outer, tuple(by_progress), rejected, wait)


def _sources(group: Sequence[Description], state: OuterState) -> tuple[Source, ...]:
    """The newest offer with that outer section of each node, and the newest own one where a fetched copy is newer."""
    found = []
    for answer in group:
        offers = [offer for offer in answer.offers if OuterState(offer.outer_step, offer.outer_digest or b"") == state]
        with_inner = [offer for offer in offers if offer.own and offer.section("inner")]
        best = max(with_inner or offers, key=lambda offer: offer.order_key)
        found.append(Source(answer.node, best))
    return tuple(found)


def _load(group: Sequence[Description], node: str) -> float:
    answer = next(answer for answer in group if answer.node == node)
    return answer.streams_active / max(1, answer.streams_max)


def _without_peers(verdict: Verdict, own: OwnState, request: RecoverRequest, rejected: Mapping[str, str]) -> Decision:
    """Mode auto, and no peer offers a usable outer state."""
    agreement: AgreementName | None = "forked" if verdict.forked else None
    local = own.newest
    if local is not None:
        why = "the peers that answered are behind" if verdict.below_floor else "no peer offers an outer state"
        if local.own:
            return Decision("own", f"{why}; the own snapshot is the newest", agreement, local, rejected=rejected)
        return Decision("outer", f"{why}; the state fetched before is the newest", agreement, local, rejected=rejected)
    if verdict.below_floor:
        raise Stale(f"every peer is behind outer step {request.own_outer_step} of this trainer: {_list(rejected)}")
    return Decision("fresh", f"no snapshot here and none at a peer{_because(rejected)}", rejected=rejected)


def _choose_clone(verdict: Verdict, own: OwnState, request: RecoverRequest, rejected: dict[str, str]) -> Decision:
    """A run without an outer optimizer: whoever has trained longest, unconfirmed."""
    mine = own.captured or own.newest
    sources = [
        Source(voter.node, offer)
        for voter in verdict.voters
        for offer in voter.offers
        if offer.section("inner") and not offer.outer_digest
    ]
    best: dict[str, Source] = {}
    for source in sorted(sources, key=lambda s: (s.offer.training_step, s.offer.seq)):
        best[source.node] = source
    ranked = sorted(best.values(), key=lambda s: (-s.offer.training_step, _load(verdict.voters, s.node), s.node))
    floor = mine.training_step if mine is not None and not request.allow_rollback else -1
    ahead = [source for source in ranked if source.offer.training_step >= floor]
    for source in ranked:
        if source not in ahead:
            rejected[source.node] = f"its training step {source.offer.training_step} is behind this node's own {floor}"
    if mine is not None and (
        request.mode == "resume"
        or (request.mode == "auto" and (not ahead or ahead[0].offer.training_step <= mine.training_step))
    ):
        action: ActionName = "resume" if mine.own else "clone"
        reason = f"no peer has trained further than this node's step {mine.training_step}"
        return Decision(action, reason, None, mine, rejected=rejected)
    if request.mode == "resume":
        raise NoSnapshot(f"this node has no snapshot of its own to resume from{_because(rejected)}")
    if ahead:
        if request.min_agree is not None and request.min_agree > 1:
            raise Unconfirmed("without an outer optimizer no two nodes hold equal states, so min_agree cannot be met")
        reason = (
            f"{ahead[0].node[:12]} has trained furthest, {ahead[0].offer.training_step} steps; nobody can confirm it"
        )
        return Decision("clone", reason, "unconfirmed", mine, inner=tuple(ahead), rejected=rejected)
    if ranked:
        raise Stale(f"every peer is behind this node's own training step {floor}: {_list(rejected)}")
    if request.mode == "auto":
        return Decision("fresh", f"no snapshot here and none at a peer{_because(rejected)}", rejected=rejected)
    raise NoSnapshot(f"no peer that answered offers a snapshot of this run{_because(rejected)}")


def _list(rejected: Mapping[str, str]) -> str:
    return "; ".join(f"{node[:12]}: {reason}" for node, reason in rejected.items()) or "none answered"


def _because(rejected: Mapping[str, str]) -> str:
    return f" ({_list(rejected)})" if rejected else ""
