"""Every claim of the demo holds on a healthy run, and fails on a run that is falsified in just that respect."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from healthy import NODE, H, events, healthy, record

from hotswarm.demo import claims
from hotswarm.demo.record import Json


def failed(data: Json) -> list[str]:
    return [claim.sentence for claim in claims.check(record(data)) if not claim.held]


def test_a_healthy_run_fulfils_every_claim() -> None:
    verdict = claims.check(record())
    assert [claim.detail for claim in verdict if not claim.held] == []
    assert len(verdict) == 16


def _another_loss_on_replay(data: Json) -> None:
    events(data, "b", 2, "step")[12]["loss"] = (0.5).hex()


def _only_nine_steps_replayed(data: Json) -> None:
    for step in events(data, "b", 1, "step"):
        if step["outer"] == 1 and step["inner"] > 19:
            step["ev"] = "other"


def _resumed_with_other_moments(data: Json) -> None:
    events(data, "b", 2, "recovered")[0]["digests"]["exp_avg"] = "other"


def _resumed_over_the_network(data: Json) -> None:
    events(data, "b", 2, "recovered")[0]["report"]["bytes"] = 7


def _stepped_before_it_restored(data: Json) -> None:
    life = next(life for life in data["lives"] if (life["label"], life["number"]) == ("c", 2))
    life["events"].insert(1, {"ev": "step", "t": 11.6, "outer": 0, "inner": 1, "training": 1, "loss": (1.0).hex()})


def _other_outer_momentum(data: Json) -> None:
    events(data, "c", 2, "recovered")[0]["digests"]["momentum"] = "other"


def _model_is_not_the_outer_copy(data: Json) -> None:
    events(data, "c", 2, "recovered")[0]["digests"]["params"] = "random"


def _one_neighbour_differs(data: Json) -> None:
    sync = next(sync for sync in events(data, "a", 1, "sync") if sync["outer"] == 2)
    sync["digests"]["outer"] = "other"


def _agreed_with_nobody(data: Json) -> None:
    events(data, "c", 2, "recovered")[0]["report"]["agreement"] = "unconfirmed"


def _empty_moments(data: Json) -> None:
    events(data, "c", 2, "recovered")[0]["digests"]["exp_avg_sq"] = "zeros"


def _one_donor_only(data: Json) -> None:
    del events(data, "c", 2, "recovered")[0]["report"]["donors"][NODE["a"]]


def _inner_donor_killed(data: Json) -> None:
    data["marks"][-1]["label"] = "b"


def _donor_killed_after_the_fetch(data: Json) -> None:
    data["marks"][-1]["t"] = 14.2


def _trainer_died_with_its_daemon(data: Json) -> None:
    for step in events(data, "a", 1, "step"):
        if step["t"] > 13.0:
            step["ev"] = "other"


def _chunk_fetched_twice(data: Json) -> None:
    data["daemons"]["c"]["recoveries"][0]["report"]["sections"]["outer"]["fetched_chunks"] = 12


def _heal_in_the_log_of_torchft(data: Json) -> None:
    data["lives"][0]["heal_lines"] = 1


def _heal_seen_by_the_transport(data: Json) -> None:
    data["lives"][0]["events"].append({"ev": "heal", "t": 20.0, "direction": "send"})


def _round_discarded(data: Json) -> None:
    events(data, "a", 1, "sync")[2]["committed"] = False


def _ends_with_another_momentum(data: Json) -> None:
    events(data, "b", 2, "sync")[-1]["digests"]["momentum"] = "other"


def _ends_a_round_early(data: Json) -> None:
    events(data, "b", 2, "sync")[-1]["ev"] = "other"


def _daemons_disagree(data: Json) -> None:
    data["daemons"]["c"]["snapshots"][-1]["outer_digest"] = "ff" * 32


def _daemon_is_gone(data: Json) -> None:
    del data["daemons"]["b"]


STATE = [
    (_another_loss_on_replay, "b replays its last steps with exactly the losses printed before"),
    (_only_nine_steps_replayed, "b replays its last steps with exactly the losses printed before"),
    (_resumed_with_other_moments, "b resumes from its own daemon, bit for bit, without the network"),
    (_resumed_over_the_network, "b resumes from its own daemon, bit for bit, without the network"),
    (_stepped_before_it_restored, "c holds the neighbours' outer parameters and momentum before its first step"),
    (_other_outer_momentum, "c holds the neighbours' outer parameters and momentum before its first step"),
    (_model_is_not_the_outer_copy, "c holds the neighbours' outer parameters and momentum before its first step"),
    (_one_neighbour_differs, "c holds the neighbours' outer parameters and momentum before its first step"),
    (_agreed_with_nobody, "c holds the neighbours' outer parameters and momentum before its first step"),
    (_empty_moments, "c holds the inner donor's AdamW moments before its first step"),
    (_one_donor_only, "c fetched from both neighbours at once"),
    (_inner_donor_killed, "the fetch finishes although a's daemon dies while it runs"),
    (_donor_killed_after_the_fetch, "the fetch finishes although a's daemon dies while it runs"),
    (_trainer_died_with_its_daemon, "the fetch finishes although a's daemon dies while it runs"),
    (_chunk_fetched_twice, "c fetches no verified outer chunk twice"),
    (_heal_in_the_log_of_torchft, "torchft had nothing to heal"),
    (_heal_seen_by_the_transport, "torchft had nothing to heal"),
    (_round_discarded, "no round was discarded"),
    (_ends_with_another_momentum, "all nodes end with the same outer parameters and momentum"),
    (_ends_a_round_early, "all nodes end with the same outer parameters and momentum"),
    (_daemons_disagree, "all daemons end with the same outer digest"),
    (_daemon_is_gone, "all daemons end with the same outer digest"),
]


@pytest.mark.parametrize(("falsify", "sentence"), STATE, ids=[falsify.__name__[1:] for falsify, _ in STATE])
def test_a_falsified_state_fails_its_claim_on_any_machine(falsify: Callable[[Json], None], sentence: str) -> None:
    data = healthy()
    falsify(data)
    assert sentence in failed(data)
    assert not claims.passed(claims.check(record(data)), lenient_clock=True)


def _round_missed(data: Json) -> None:
    events(data, "b", 2, "sync")[0]["outer"] = 3
    for sync in events(data, "b", 2, "sync")[1:]:
        sync["outer"] += 1
    for life in ("a", 1), ("c", 1):
        events(data, *life, "sync")[1]["participants"] = 2


def _started_at_the_snapshots_position(data: Json) -> None:
    for step, inner in zip(events(data, "c", 2, "step"), range(1, H), strict=False):
        if step["outer"] == 2:
            step["inner"] = inner


def _survivor_paused(data: Json) -> None:
    for life in ("a", 1), ("b", 2):
        for step in events(data, *life, "step"):
            if step["t"] > 16.2:
                step["t"] += 11.0


CLOCK = [
    (_round_missed, "b is back before the round's quorum closes"),
    (_started_at_the_snapshots_position, "c starts at the live round clock"),
    (_survivor_paused, "the survivors of the lost machine and donor never pause for 10 s"),
]


@pytest.mark.parametrize(("falsify", "sentence"), CLOCK, ids=[falsify.__name__[1:] for falsify, _ in CLOCK])
def test_a_late_machine_fails_a_claim_that_ci_only_prints(falsify: Callable[[Json], None], sentence: str) -> None:
    data = healthy()
    falsify(data)
    late = [claim for claim in claims.check(record(data)) if not claim.held and claim.clock_bound]
    assert sentence in [claim.sentence for claim in late]
    assert not claims.passed(late, lenient_clock=False)
    assert claims.passed(late, lenient_clock=True)


def test_a_run_that_never_came_back_fails_without_raising() -> None:
    data = healthy()
    data["lives"] = [life for life in data["lives"] if life["number"] == 1]
    assert len(failed(data)) >= 10


def test_a_log_line_cut_by_a_kill_is_left_out() -> None:
    data = healthy()
    whole = record(data)
    assert record(whole.to_json()) == whole
    from hotswarm.demo.record import Event

    assert Event.parse('{"ev": "step", "t": 3.0, "out') is None
    assert Event.parse("[1, 2]") is None
    assert Event.parse('{"ev": "step", "t": 3.0, "outer": 1}') == Event("step", 3.0, {"outer": 1})
