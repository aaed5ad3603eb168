"""Claims that are believed, held, or asked about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner import queries, verbs
from runner.errors import Refused
from runner.lab import Lab
from runner.records import Submission
from runner.research import trust
from tests.runner.labs import finish, make_lab


@pytest.fixture
def lab(tmp_path: Path):
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


def ended(lab: Lab, depth: int, val_bpb: float | None, **observed: Any):
    run_id = verbs.submit(lab, Submission(overrides={"DEPTH": depth}), who="cli").run_ids[0]
    usual = {"trust": None, "training_s": 20.1, "wall_s": 26.0, "loss": 2.9 * val_bpb if val_bpb else None}
    finish(lab, run_id, val_bpb, **{**usual, **observed})
    run = lab.store.run(run_id)
    assert run is not None
    lab.store.update_run(run_id, **trust.settled(lab, run))
    found = lab.store.run(run_id)
    assert found is not None
    return found


def with_verifier(lab: Lab) -> None:
    (lab.policy().trainer.folder / "verify.py").write_text("")


def test_upstream_cannot_be_verified_and_is_ranked_so(lab: Lab) -> None:
    run = ended(lab, 1, 1.0)
    assert (run.trust, run.trust_why) == ("unverifiable", None)
    assert [r["id"] for r in queries.leaderboard(lab)["rows"]] == [run.id]
    assert trust.wants_verification(lab, run) is None


@pytest.mark.parametrize(
    ("val", "facts", "says"),
    [
        (0.3, {"wall_s": 2.0, "training_s": None, "loss": None}, "ran for 2.0 s of a budget"),
        (0.9, {"wall_s": 3.0, "training_s": 300.1}, "claims 300.1 s of training and ran for 3.0 s"),
    ],
)
def test_an_impossible_time_is_held_until_it_is_verified_or_a_human_accepts_it(lab: Lab, val: float, facts: Any, says: str) -> None:
    upstream = ended(lab, 1, val, **facts)
    assert upstream.trust == "unverifiable"
    assert says in str(upstream.trust_why)
    assert [u["id"] for u in queries.leaderboard(lab)["unranked"]] == [upstream.id]
    with pytest.raises(Refused, match="only a human"):
        verbs.decide(lab, upstream.id, "keep", who="mcp:agent", why="great", override=True)
    verbs.decide(lab, upstream.id, "keep", who="cli", why="the clock was wrong", override=True)
    accepted = queries.leaderboard(lab)["rows"]
    assert [r["id"] for r in accepted] == [upstream.id] and says in accepted[0]["doubt"]
    with_verifier(lab)
    ours = ended(lab, 2, val, **facts)
    assert ours.trust == "claimed"
    assert says in str(ours.trust_why)
    assert [u["id"] for u in queries.leaderboard(lab)["unranked"]] == [ours.id]


def test_a_script_without_a_budget_is_not_held_for_ending_early(lab: Lab) -> None:
    lab.accept(lab.hosts_file.read_text().replace('folder = "trainer"', 'folder = "trainer"\nbudget = ""'))
    run = ended(lab, 1, 1.0, wall_s=1.0, training_s=None)
    assert run.trust_why is None and [r["id"] for r in queries.leaderboard(lab)["rows"]] == [run.id]
    assert "ran for 1.0 s" in str(ended(lab, 2, 1.0, wall_s=1.0, training_s=20.0).trust_why)  # its own word against our clock


def test_a_machine_that_slept_is_named_where_its_clock_agrees_with_the_claim(lab: Lab) -> None:
    slept = ended(lab, 1, 1.0, training_s=30.0, wall_s=20.0, started_at=1000.0, ended_at=1031.0)
    assert str(slept.trust_why).endswith("its machine slept, or its clock was set, for 11 s meanwhile; run it again")
    lied = ended(lab, 2, 1.0, training_s=300.0, wall_s=20.0, started_at=1000.0, ended_at=1031.0)
    assert "slept" not in str(lied.trust_why) and "claims 300.0 s" in str(lied.trust_why)


@pytest.mark.parametrize("val", [-1.0, 0.0])
def test_no_text_takes_no_bits(lab: Lab, val: float) -> None:
    run = ended(lab, 1, val, loss=None)
    assert run.trust == "refuted"
    assert queries.leaderboard(lab, class_key="cpu", budget_s=20.0)["rows"] == []


def test_a_claim_that_does_not_go_with_its_loss_is_doubted(lab: Lab) -> None:
    for depth, val in enumerate((1.0, 1.1, 0.95)):
        assert ended(lab, depth, val).trust_why is None
    cheat = ended(lab, 9, 0.3, loss=2.8)
    assert "does not go with" in str(cheat.trust_why)
    assert ended(lab, 10, 0.9, loss=2.7).trust_why is None


def test_a_first_result_that_is_no_baseline_is_a_new_best(lab: Lab) -> None:
    with_verifier(lab)
    first = ended(lab, 1, 1.0)
    assert trust.wants_verification(lab, first) == "it is the new best"
    lab.store.update_run(first.id, purpose="baseline")
    baseline = lab.store.run(first.id)
    assert baseline is not None and trust.wants_verification(lab, baseline) is None


def test_an_implausible_gain_waits_where_it_can_be_verified(lab: Lab) -> None:
    with_verifier(lab)
    base = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    for run_id, val in zip([base, *verbs.repeat(lab, base, 2, who="cli").run_ids], (1.0, 1.002, 0.998), strict=True):
        finish(lab, run_id, val)
    plausible = ended(lab, 2, 0.99, loss=None)
    assert (plausible.trust, plausible.trust_why) == ("claimed", None)
    assert trust.wants_verification(lab, plausible) == "it is the new best"
    miracle = ended(lab, 3, 0.9, loss=None)
    assert "verify it" in str(miracle.trust_why)
    assert trust.wants_verification(lab, miracle) == "its claim is held"
    assert queries.leaderboard(lab)["rows"][0]["id"] == plausible.id


def test_no_result_no_trust(lab: Lab) -> None:
    assert ended(lab, 1, None).trust is None
    refuted = ended(lab, 2, 1.0, trust="refuted", trust_why="recomputed 1.4")
    assert refuted.trust == "refuted"


def test_more_training_than_the_budget_is_held_by_its_own_word_and_by_our_clock(lab: Lab) -> None:
    with_verifier(lab)
    (lab.policy().trainer.folder / "prepare.py").write_text("TIME_BUDGET = 300\n")
    now = 1_800_000_000.0
    clocks = {"first_step_at": now, "dt_ms": 100.0}
    for depth in range(2, 6):
        ended(lab, depth, 1.0, ended_at=now + 20.1 + 5.0 + depth / 10, **clocks)
    own_word = ended(lab, 7, 0.99, training_s=41.0, wall_s=47.0, ended_at=now + 46.0, **clocks)
    assert own_word.trust_why == "held: it trained for 41.0 s, of a budget of 20 s"
    a_third_more = ended(lab, 11, 0.99, training_s=27.5, wall_s=34.0, ended_at=now + 33.0, **clocks)
    assert a_third_more.trust_why == "held: it trained for 27.5 s, of a budget of 20 s"
    one_endless_step = ended(lab, 12, 0.99, training_s=200.0, wall_s=206.0, ended_at=now + 205.0, first_step_at=now, dt_ms=200_000.0)
    assert one_endless_step.trust_why == "held: it trained for 200.0 s, of a budget of 20 s"
    our_clock = ended(lab, 8, 0.99, training_s=20.1, wall_s=68.0, ended_at=now + 66.0, **clocks)  # three times the budget, clock slowed
    assert "took 46 s beyond the training it counts; the runs of its class take 5 s" in str(our_clock.trust_why)
    assert "or others had the machine; run it again" in str(our_clock.trust_why)
    slow_evaluation = ended(lab, 9, 0.99, training_s=20.1, wall_s=45.0, ended_at=now + 20.1 + 18.0, **clocks)
    assert slow_evaluation.trust_why is None
    long_steps = ended(lab, 10, 0.99, training_s=37.0, wall_s=45.0, ended_at=now + 42.0, first_step_at=now, dt_ms=9000.0)
    assert long_steps.trust_why is None


def test_a_doubtful_claim_is_no_measure_until_it_was_repeated(lab: Lab) -> None:
    base = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    for run_id, val in zip([base, *verbs.repeat(lab, base, 2, who="cli").run_ids], (1.0, 1.002, 0.998), strict=True):
        finish(lab, run_id, val, trust="unverifiable")
    absurd = ended(lab, 3, 0.3, loss=None)
    assert "verify it" in str(absurd.trust_why)
    assert "verify it" in str(ended(lab, 4, 0.9, loss=None).trust_why)
    (again,) = verbs.repeat(lab, absurd.id, 1, who="cli").run_ids
    finish(lab, again, 0.3, trust="unverifiable")
    assert ended(lab, 5, 0.95, loss=None).trust_why is None
