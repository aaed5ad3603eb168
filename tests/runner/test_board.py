"""Ranking: a property of the runs alone, whatever the order of arrival, ties, crashes or non-finite values."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path

import pytest

from runner import board, queries, verbs
from runner.errors import Refused
from runner.lab import Lab, open_lab
from runner.records import Submission
from runner.text import bpb, signed
from tests.runner.labs import finish, make_lab


@pytest.fixture
def lab(tmp_path: Path):
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


def runs(lab: Lab, n: int, first: int = 100) -> list[str]:
    return [verbs.submit(lab, Submission(overrides={"DEPTH": first + i}), who="cli").run_ids[0] for i in range(n)]


def test_rank_does_not_depend_on_order_of_arrival(lab: Lab) -> None:
    ids = runs(lab, 8)
    values = dict(zip(ids, [1.2, 1.1, 1.1, 0.9, None, 1.5, 1.0, 1.3], strict=True))
    order = ids[:]
    random.Random(3).shuffle(order)
    for run_id in order:
        finish(lab, run_id, values[run_id])
    found = [r["id"] for r in queries.leaderboard(lab)["rows"]]
    assert found == [i for i in sorted((i for i in ids if values[i] is not None), key=lambda i: (values[i], i))]


def test_nothing_without_a_finite_value_is_ranked(lab: Lab) -> None:
    a, b, c = runs(lab, 3)
    finish(lab, a, 1.0)
    finish(lab, b, float("inf"))
    finish(lab, c, 0.5, trust="refuted", trust_why="recomputed 1.4")
    shown = queries.leaderboard(lab)
    assert [r["id"] for r in shown["rows"]] == [a]
    assert {u["id"]: u["reason"] for u in shown["unranked"]} == {b: "no finite val_bpb", c: "recomputed 1.4"}


def test_classes_and_budgets_are_never_mixed(lab: Lab) -> None:
    a, b, c = runs(lab, 3)
    finish(lab, a, 1.0, class_key="H100")
    finish(lab, b, 0.9, class_key="H200")
    finish(lab, c, 0.8, class_key="H100", budget_s=60.0)
    assert [r["id"] for r in queries.leaderboard(lab, class_key="H100", budget_s=20.0)["rows"]] == [a]
    assert [r["id"] for r in queries.leaderboard(lab, class_key="H200")["rows"]] == [b]
    assert [(s["budget_s"], s["id"]) for s in queries.leaderboard(lab, class_key="H100")["ladder"]] == [(20.0, a), (60.0, c)]


def test_repeats_count_as_one_source(lab: Lab) -> None:
    base = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    ids = [base, *verbs.repeat(lab, base, 3, who="cli").run_ids]
    values = [1.00, 1.02, 0.98, 1.01]
    for run_id, value in zip(ids, values, strict=True):
        finish(lab, run_id, value)
    shown = queries.leaderboard(lab)
    assert [(r["id"], r["seed_n"], r["badge"]) for r in shown["rows"]] == [(base, 4, "baseline")]
    assert shown["rows"][0]["val_bpb"] == pytest.approx(statistics.mean(values))
    assert shown["noise_sd"] == pytest.approx(statistics.stdev(values)) and shown["noise_n"] == 3


def test_pooled_noise_is_the_textbook_one() -> None:
    groups = [[1.0, 1.2, 1.1], [2.0, 2.3], [5.0]]
    expected = ((2 * statistics.variance(groups[0]) + statistics.variance(groups[1])) / 3) ** 0.5
    found = board.pooled(groups)
    assert found.sd == pytest.approx(expected) and found.dof == 3
    assert board.pooled([[1.0], [2.0]]) == board.Noise(None, 0)


def test_the_ladder_and_the_scopes_count_no_claim_that_is_not_ranked(lab: Lab) -> None:
    a, b, c = runs(lab, 3)
    finish(lab, a, 1.0, budget_s=60.0)
    finish(lab, b, 0.1, budget_s=60.0, trust_why="held: too good to be true")
    finish(lab, c, 0.2, budget_s=60.0, trust="refuted")
    finish(lab, runs(lab, 1, 200)[0], 1.1)
    shown = queries.leaderboard(lab, budget_s=20.0)
    assert [(s["budget_s"], s["id"], s["val_bpb"]) for s in shown["ladder"]][1] == (60.0, a, 1.0)
    assert {s["budget_s"]: s["best"] for s in shown["classes"]} == {60.0: 1.0, 20.0: 1.1}


def test_keeping_needs_evidence_against_the_parent(lab: Lab) -> None:
    base = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    again = verbs.repeat(lab, base, 3, who="cli").run_ids
    for run_id, value in zip([base, *again], (1.000, 1.004, 0.998, 1.002), strict=True):
        finish(lab, run_id, value)
    good = verbs.submit(lab, Submission(base=base, overrides={"DEPTH": 12}), who="cli").run_ids[0]
    finish(lab, good, 0.950)
    worse = verbs.submit(lab, Submission(base=good, overrides={"DEPTH": 13}), who="cli").run_ids[0]
    finish(lab, worse, 0.970)
    close = verbs.submit(lab, Submission(base=good, overrides={"DEPTH": 14}), who="cli").run_ids[0]
    finish(lab, close, 0.949)
    lone = verbs.submit(lab, Submission(base=good, overrides={"DEPTH": 15}), who="cli").run_ids[0]
    finish(lab, lone, 0.900, trust="unverifiable")
    assert verbs.decide(lab, good, "keep", who="cli", why=None).verdict == "keep"
    for run_id, says in ((worse, "worse than"), (close, "within noise"), (lone, "ran once")):
        with pytest.raises(Refused, match=says):
            verbs.decide(lab, run_id, "keep", who="cli", why=None)
    with pytest.raises(Refused, match="reason"):
        verbs.decide(lab, close, "keep", who="cli", override=True, why=" ")
    assert verbs.decide(lab, close, "keep", who="cli", override=True, why="simpler").verdict == "keep"


def test_the_leader_is_never_a_discarded_source(lab: Lab) -> None:
    best, second = runs(lab, 2)
    finish(lab, best, 0.9)
    finish(lab, second, 1.0)
    assert f"best 0.900000 ({best})" in queries.lab_line(lab)
    verbs.decide(lab, best, "discard", who="tui", why="it reads the validation text")
    assert f"best 1.000000 ({second})" in queries.lab_line(lab)
    assert [r["id"] for r in queries.leaderboard(lab)["rows"]] == [best, second], "the ranking itself shows the verdict"
    verbs.decide(lab, second, "discard", who="tui", why="not worth it")
    assert "no result stands" in queries.lab_line(lab)
    verbs.decide(lab, best, "keep", who="tui", why="it did not", override=True)
    assert f"({best})" in queries.lab_line(lab)


def test_the_state_counts_what_ended_and_what_goes_on(lab: Lab) -> None:
    a, b, c = runs(lab, 3)
    finish(lab, a, 1.0, wall_s=3600.0)
    lab.store.update_run(b, phase="running", stage="training")
    for _ in range(2):
        state = queries.lab_state(lab)
        assert (state.ended, state.completed, state.running, state.queued, state.gpu_hours_used) == (1, 1, 1, 1, 1.0)
    finish(lab, c, None, wall_s=1800.0)
    state = queries.lab_state(lab)
    assert (state.ended, state.completed, state.queued, state.gpu_hours_used) == (2, 1, 0, 1.5)


def test_runs_an_hour_are_those_that_ran(lab: Lab) -> None:
    a, b, c = runs(lab, 3)
    now = time.time()
    lab.store.update_run(a, phase="ended", outcome="completed", started_at=now - 300, ended_at=now)
    lab.store.update_run(b, phase="ended", outcome="cancelled", started_at=now - 60, ended_at=now)
    lab.store.update_run(c, phase="ended", outcome="cancelled", ended_at=now)  # it waited, and never ran
    assert queries.lab_state(lab).runs_last_hour == 2


def test_labs_that_share_a_memo_see_each_others_changes(lab: Lab) -> None:
    other = open_lab(lab.path)
    other.memo = lab.memo
    (a, b) = runs(lab, 2)
    finish(lab, a, 1.0)
    assert [r["id"] for r in queries.leaderboard(other)["rows"]] == [a]
    finish(lab, b, 0.9)
    assert [r["id"] for r in queries.leaderboard(other)["rows"]] == [b, a]
    with pytest.raises(RuntimeError), lab.store.transaction():
        lab.store.update_run(a, val_bpb=0.5)
        assert [r["id"] for r in queries.leaderboard(lab)["rows"]] == [a, b]
        raise RuntimeError
    finish(other, b, 0.8)  # moves the counter to where the transaction that was rolled back had it
    assert queries.leaderboard(lab)["rows"][0]["val_bpb"] == 0.8
    other.close()


def test_the_state_line_says_what_a_human_changed(lab: Lab) -> None:
    runs(lab, 2)
    verbs.pause_queue(lab, True, who="tui")
    verbs.set_approval(lab, "ask", who="tui")
    line = queries.lab_line(lab)
    assert "2 queued" in line and "paused the queue" in line and "approval mode" in line and "daemon is not running" in line


def test_run_objects_have_exactly_the_documented_keys(lab: Lab) -> None:
    text = (Path(board.__file__).parent / "FORMAT.md").read_text()
    section = text[text.index("**Run object**") : text.index("| command | object |")]
    documented = {w for part in section.split("`")[1::2] for w in part.replace("(list of {kind, severity, evidence})", "").split()}
    assert set(queries.run_object(lab, lab.store.run(runs(lab, 1)[0]))) == documented  # type: ignore[arg-type]


def test_a_standby_waits_and_is_counted_so(lab: Lab) -> None:
    a, b, c = runs(lab, 3)
    lab.store.update_run(a, phase="running", stage="training")
    lab.store.update_run(b, phase="starting", stage="standby")
    state = queries.lab_state(lab)
    assert (state.running, state.queued) == (1, 2)
    assert [r.id for r in queries.queue(lab)] == [b, c] and [r.id for r in queries.live_runs(lab)] == [a]
    assert [o["queue_position"] for o in queries.run_objects(lab, queries.queue(lab))] == [1, 2]
    verbs.set_priority(lab, [c], who="cli", move="top")
    assert [r.id for r in queries.queue(lab)] == [c, b]


def test_an_absurd_claim_keeps_to_its_column() -> None:
    assert bpb(1e308) == "1.00e+308" and signed(-1e300) == "-1.00e+300"


def test_the_ladder_ranks_each_budget_as_its_own_board_does(lab: Lab) -> None:
    a, lucky, again, steady = runs(lab, 4)
    sha = {r.id: r.effective_sha for r in lab.store.runs()}
    finish(lab, a, 1.0)
    finish(lab, lucky, 0.80, budget_s=60.0)
    finish(lab, again, 0.90, budget_s=60.0, effective_sha=sha[lucky])
    finish(lab, steady, 0.84, budget_s=60.0)
    assert queries.leaderboard(lab, budget_s=20.0)["ladder"][1] == {"budget_s": 60.0, "id": steady, "val_bpb": 0.84}


def test_diminishing_returns_are_said_in_the_line_that_ends_every_answer_to_an_agent(lab: Lab) -> None:
    lab.store.raise_flag("lab", "diminishing_returns", "info", "none of the last 20 experiments beat the best")
    assert " · none of the last 20 experiments beat the best" in queries.lab_line(lab)
    lab.store.clear_flag("lab", "diminishing_returns")
    assert "experiments" not in queries.lab_line(lab)
