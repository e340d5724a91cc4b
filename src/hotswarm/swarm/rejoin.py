"""One recovery on the daemon's side: locate → choose → fetch → keep. The trainer then restores what was kept.

When no donor of the outer section is left, or it turns out to hold a NaN, everything from locating on begins again,
with what is known by then; chunks that are here stay here. A state whose donors do not deliver goes to the back: others
are tried before it, so that one node which promises more than it gives cannot keep a joiner from what the rest has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hotswarm.errors import HotswarmError, NotAuthorised, PeerUnavailable, RecoveryError, StoreError
from hotswarm.snapshot.manifest import SignedManifest
from hotswarm.store.files import FileStore
from hotswarm.swarm.agreement import OuterState
from hotswarm.swarm.catalog import Catalog
from hotswarm.swarm.choose import Decision, LocalSnapshot, OwnState, choose
from hotswarm.swarm.fetch import DonorsLost, Poisoned
from hotswarm.swarm.model import Description, InnerSource, RecoverOutcome, RecoverRequest, ReportData
from hotswarm.swarm.neighbours import Neighbours
from hotswarm.swarm.transfer import Ledger, Transfer, moments_of, refuse_other_model

log = logging.getLogger(__name__)

WAIT_FOR_OTHERS_S = 2.0  # for nodes that straddle a round's boundary (design.md §9)
ASK_AGAIN_S = 0.25
ATTEMPTS = 4  # at fetching, each after locating and choosing anew
PAUSE_S = 0.5  # between attempts


@dataclass
class Rejoin:
    """One recovery. `run` once."""

    node_id: str
    store: FileStore
    catalog: Catalog
    neighbours: Neighbours
    request: RecoverRequest
    ledger: Ledger
    progress: Callable[[dict[str, object]], None]
    seconds: dict[str, float] = field(default_factory=dict)
    _barred: set[OuterState] = field(default_factory=set)
    _losses: Counter[OuterState] = field(default_factory=Counter)
    _last: set[OuterState] = field(default_factory=set)  # at the back
    _undelivered: dict[str, str] = field(default_factory=dict)  # node -> reason
    _last_nodes: set[str] = field(default_factory=set)  # the same where there are no outer states

    async def run(self) -> RecoverOutcome:
        """Do it. Raises NoSnapshot, Stale, Unconfirmed, Incompatible, PeerUnavailable, NotAuthorised, LocalFailure."""
        problem: HotswarmError | None = None
        stuck = False
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE_S)
            answers = await self._locate()
            own = await self._own()
            try:
                decision = await self._decide(answers, own)
            except RecoveryError as error:
                await self._name_other_model(answers)
                raise (problem or error) from error
            if stuck and not (self._last or self._last_nodes):
                break  # there is nothing else, and it had its time
            if decision.action == "fresh":
                await self._name_other_model(answers)
            if not answers and self.ledger.rejected:
                silent = "; ".join(f"{who}: {why}" for who, why in self.ledger.rejected.items())
                decision = replace(decision, reason=f"{decision.reason}; no peer answered ({silent})")
            if self.request.dry_run or not (decision.outer_donors or decision.inner):
                if problem is not None and decision.action == "fresh":
                    raise problem  # there is a state to go on from; starting over would be a choice, and not ours
                return await self._outcome(decision)
            try:
                return await self._fetch(decision, answers, own)
            except Poisoned as error:
                problem = error
                log.warning("%s: %s; another state is looked for", decision.state, error)
                if decision.state is None:
                    raise
                self._barred.add(decision.state)
            except DonorsLost as error:
                problem = error
                log.warning("%s; looking for donors again", error)
                self._put_back(decision, error, at_once=decision.agreement != "agreed")
            except PeerUnavailable as error:
                problem, stuck = error, True
                log.warning("%s; looking for another state", error)
                self._put_back(decision, error, at_once=True)
        local = (await self._own()).captured
        if self.request.mode == "auto" and local is not None:
            reason = f"the swarm's state could not be fetched ({problem}); the own snapshot is used"
            return await self._outcome(Decision("own", reason, None, local))
        raise problem or PeerUnavailable("the swarm's state could not be fetched")

    async def _locate(self) -> list[Description]:
        self.progress({"phase": "locate"})
        started = time.monotonic()
        try:
            if self.request.peer is not None:
                return [await self.neighbours.ask_peer(self.request.peer, self.request.timeout_s)]
            found = await self.neighbours.search(self.request.timeout_s)
        except NotAuthorised:
            asked_for = self.request.peer is not None
            if asked_for or self.request.mode != "auto" or (await self._own()).newest is None:
                raise
            return []  # the own snapshot is better than none; status and log say what is wrong
        finally:
            self._took("locate", started)
        self.ledger.rejected.update(self.neighbours.problems())
        return found

    async def _own(self) -> OwnState:
        await self.catalog.refresh()
        return OwnState(self.node_id, self.catalog.local(self.request.arch), self.catalog.voucher_digests)

    async def _decide(self, answers: list[Description], own: OwnState) -> Decision:
        """Choose; what is at the back only when nothing else is offered."""
        if self._last or self._last_nodes:
            others = [answer for answer in answers if answer.node not in self._last_nodes]
            try:
                decision = await self._choose(others, own, self._barred | self._last)
            except RecoveryError as error:
                log.info("nothing but what failed before: %s", error)
            else:
                if decision.state is not None or decision.inner:
                    return decision
            self._last.clear()
            self._last_nodes.clear()
        return await self._choose(answers, own, self._barred)

    def _put_back(self, decision: Decision, error: PeerUnavailable, *, at_once: bool) -> None:
        asked = {source.node for source in (*decision.outer_donors, *decision.inner)}
        if decision.state is None and self.ledger.inner_donor:
            asked = {self.ledger.inner_donor}  # of all that could be cloned, one is asked at a time
        self._undelivered.update((node, self.ledger.rejected.get(node, str(error))) for node in asked)
        if decision.state is None:
            self._last_nodes |= asked
            return
        self._losses[decision.state] += 1
        if at_once or self._losses[decision.state] > 1:  # donors that agree may only have been restarted together
            self._last.add(decision.state)

    async def _choose(self, answers: list[Description], own: OwnState, barred: set[OuterState]) -> Decision:
        self.progress({"phase": "choose", "answers": len(answers)})
        started = time.monotonic()
        deadline = started + min(WAIT_FOR_OTHERS_S, self.request.timeout_s)
        try:
            while True:
                may_wait = time.monotonic() < deadline
                usable = self._usable(answers)
                decision = choose(usable, own, self.request, barred=barred, may_wait=may_wait)
                if not decision.wait:
                    self.ledger.rejected.update(decision.rejected)
                    return decision
                await asyncio.sleep(ASK_AGAIN_S)
                fresh = {answer.node: answer for answer in await self.neighbours.ask_again(a.node for a in answers)}
                answers[:] = [fresh.get(answer.node, answer) for answer in answers]
        finally:
            self._took("choose", started)

    async def _name_other_model(self, answers: Sequence[Description]) -> None:
        """Nothing can be taken. If that is because the others train another model: Incompatible, with a name in it."""
        for answer in answers:
            for offer in answer.offers[:1]:
                if self.request.arch and offer.arch and offer.arch != self.request.arch:
                    client = self.neighbours.client(answer.node)
                    signed = await client.manifest(offer.snapshot_id, self.request.timeout_s)
                    refuse_other_model(self.request, signed.manifest, answer.node)

    def _usable(self, answers: Sequence[Description]) -> list[Description]:
        """The answers of nodes that are not left out for what they did before."""
        usable = []
        for answer in answers:
            reason = self.ledger.strikes.reason(answer.node)
            if reason:
                self.ledger.rejected[answer.node] = reason
            else:
                usable.append(answer)
        return usable

    async def _fetch(self, decision: Decision, answers: Sequence[Description], own: OwnState) -> RecoverOutcome:
        started = time.monotonic()
        usable = self._usable(answers)
        transfer = Transfer(
            self.store, self.neighbours, self.request, self.ledger, decision, usable, own, self.progress
        )
        try:
            signed, inner = await transfer.run()
        finally:
            await transfer.close()
            self._took("fetch", started)
        await self.catalog.refresh()
        return await self._outcome(decision, signed, inner)

    def _took(self, phase: str, started: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started

    async def _outcome(
        self, decision: Decision, signed: SignedManifest | None = None, inner: InnerSource | None = None
    ) -> RecoverOutcome:
        local, ledger = decision.local, self.ledger
        fetched = signed.manifest if signed is not None else None
        from_local = local is not None and signed is None and not (decision.outer_donors or decision.inner)
        source: InnerSource = inner or "fresh"
        if inner is None and local is not None and from_local:
            source = await asyncio.to_thread(self._inner_of, local)
        snapshot_id: str | None = signed.snapshot_id if signed is not None else None
        if local is not None and from_local:
            snapshot_id = local.snapshot_id
        at = fetched or local
        report = ReportData(
            mode=self.request.mode,
            reason=decision.reason,
            donors=ledger.donors,
            bytes=sum(section.fetched for section in ledger.sections.values()),
            bytes_wasted=ledger.wasted,
            bytes_reused=ledger.reused,
            seconds=self.seconds,
            rejected={**ledger.rejected, **self._undelivered},
            agreement=decision.agreement,
            inner_donor=ledger.inner_donor,
            snapshot_id=snapshot_id,
            outer_step=at.outer_step if at else 0,
            inner_step=at.inner_step if at else 0,
            training_step=at.training_step if at else 0,
            sections=ledger.sections,
            plan=plan_in_words(decision, self.request),
        )
        private_from = local.snapshot_id if local is not None and local.own else None
        return RecoverOutcome(decision.action, snapshot_id, source, private_from, report)

    def _inner_of(self, local: LocalSnapshot) -> InnerSource:
        """What a local snapshot offers of inner state: one that was fetched may hold moments without parameters."""
        if local.own:
            return "own"
        try:
            with self.store.open(local.snapshot_id) as source:
                entry = source.manifest.sections.get("inner")
                whole = entry is not None and all(source.has_chunk("inner", i) for i in moments_of(entry))
                return "adopt" if whole else "fresh"
        except StoreError:
            return "fresh"


def plan_in_words(decision: Decision, request: RecoverRequest) -> tuple[str, ...]:
    """The plan, for `recover --dry-run` and reports."""
    lines = [f"{decision.action}: {decision.reason}"]
    if decision.outer_donors:
        section = decision.outer_donors[0].offer.section("outer")
        nbytes = section.nbytes if section else 0
        names = ", ".join(source.node[:12] for source in decision.outer_donors)
        lines.append(f"outer section of {decision.state}, {nbytes} bytes, from {names}")
    if decision.inner:
        best = decision.inner[0]
        section = best.offer.section("inner")
        what = "whole inner section" if decision.action == "clone" else f"moments: {request.inner}; buffers"
        lines.append(
            f"{what} of at most {section.nbytes if section else 0} bytes from {best.node[:12]} "
            f"(inner step {best.offer.inner_step})"
        )
    if decision.local is not None:
        lines.append(f"RNG and data position from the own snapshot {decision.local.snapshot_id}")
    return tuple(lines)
