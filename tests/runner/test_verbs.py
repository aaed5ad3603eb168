"""Verbs: what may be asked, what is refused and in which words, and that nothing is ever half done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner import queries, verbs
from runner.errors import BadValue, Duplicate, Refused, UnknownName
from runner.lab import Lab
from runner.records import Phase, Submission, WaveRequest
from tests.runner.labs import SCRIPT, finish, make_lab


@pytest.fixture
def lab(tmp_path: Path):
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


WHO = ("cli", "mcp:claude", "mcp:codex")


def submit(lab: Lab, who: str = "cli", **fields: object) -> str:
    return verbs.submit(lab, Submission(**fields), who=who).run_ids[0]  # type: ignore[arg-type]


def test_the_first_run_of_the_trainer_is_its_baseline(lab: Lab) -> None:
    run = lab.store.run(submit(lab))
    assert run is not None and (run.purpose, run.phase, run.budget_s, run.seed) == ("baseline", "queued", 20.0, 42)


def test_an_edit_after_submission_changes_nothing(lab: Lab) -> None:
    run_id = submit(lab)
    (lab.policy().trainer.folder / "train.py").write_text("raise SystemExit\n")
    run = lab.store.run(run_id)
    assert run is not None and lab.source_text(run.source_sha) == SCRIPT


def test_an_override_is_written_into_the_source(lab: Lab) -> None:
    run = lab.store.run(submit(lab, overrides={"TOTAL_BATCH_SIZE": 2**16, "ADAM_BETAS": [0.9, 0.95]}))
    assert run is not None
    text = lab.source_text(run.source_sha)
    assert "TOTAL_BATCH_SIZE = 65536" in text and "ADAM_BETAS = (0.9, 0.95)" in text
    assert run.constants["TOTAL_BATCH_SIZE"] == 65536 and run.purpose == "experiment"


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"overrides": {"MATRIX_L": 0.1}}, UnknownName, "MATRIX_LR"),
        ({"overrides": {"matrix_lr": 0.1}}, UnknownName, "MATRIX_LR"),
        ({"overrides": {"DEPTH": "deep"}}, BadValue, "DEPTH"),
        ({"source": "def f(:\n"}, BadValue, "line 1"),
        ({"source": "x\x00"}, BadValue, "NUL"),
        ({"source": ""}, BadValue, "no statement"),
        ({"diff": "--- /dev/null\n+++ b/extra.py\n@@ -0,0 +1 @@\n+X = 1\n"}, Refused, "train.py alone"),
        ({"diff": "--- a/prepare.py\n+++ b/prepare.py\n@@ -1 +1 @@\n-SEED = 42\n+SEED = 1\n"}, Refused, "is of prepare.py"),
        ({"source": "# only words\n'''and a docstring'''\npass\n"}, BadValue, "no statement"),
        ({"budget_s": 0}, BadValue, "1 to 86400"),
        ({"budget_s": -1}, BadValue, "1 to 86400"),
        ({"budget_s": 1e9}, BadValue, "1 to 86400"),
        ({"budget_s": float("nan")}, BadValue, "number of seconds"),
        ({"base": "r9999"}, UnknownName, "r9999"),
        ({"parent": "r7"}, UnknownName, "r7"),
        ({"host": "nowhere"}, UnknownName, "local"),
        ({"path": "prepare.py"}, Refused, "Editable: train.py"),
        ({"path": "../../etc/passwd"}, Refused, "Editable: train.py"),
        ({"source": "x = 1", "path": "train.py"}, BadValue, "one way"),
        ({"seeds": 0}, BadValue, "1 to 64"),
        ({"priority": float("inf")}, BadValue, "priority"),
        ({"request_id": "with space"}, BadValue, "request_id"),
    ],
)
def test_a_wrong_request_changes_nothing(lab: Lab, fields: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        submit(lab, **fields)
    assert lab.store.count_runs() == 0 and lab.store.events() == [] and list(lab.sources_dir.iterdir()) == []


def test_the_same_request_id_never_starts_a_second_run(lab: Lab) -> None:
    first = verbs.submit(lab, Submission(request_id="k1", overrides={"DEPTH": 4}), who="mcp:a")
    again = verbs.submit(lab, Submission(request_id="k1", overrides={"DEPTH": 4}), who="mcp:a")
    assert again.replay and again.run_ids == first.run_ids and lab.store.count_runs() == 1
    with pytest.raises(Refused, match=f"another request .*{first.run_ids[0]}"):
        verbs.submit(lab, Submission(request_id="k1", overrides={"DEPTH": 5}), who="mcp:a")
    with pytest.raises(Refused, match="was used for another request"):
        verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [1]}, request_id="k1"), who="mcp:a")


def test_a_run_that_would_tell_nothing_new_is_refused(lab: Lab) -> None:
    first = submit(lab, overrides={"DEPTH": 4})
    for fields in (
        {"overrides": {"DEPTH": 4}},
        {"source": SCRIPT.replace("DEPTH = 8", "DEPTH = 4   # deeper thoughts")},
        {"overrides": {"DEPTH": 4, "SEED": 137}},
    ):
        with pytest.raises(Duplicate, match=first):
            submit(lab, **fields)
    with pytest.raises(Duplicate, match="seed"):
        submit(lab, overrides={"DEPTH": 4, "SEED": 7})
    assert submit(lab, overrides={"DEPTH": 4}, budget_s=40) != first
    finish(lab, first)  # it crashed: trying again may tell something
    assert submit(lab, overrides={"DEPTH": 4})


def test_what_ran_on_a_type_is_known_there_whatever_it_had_asked_for(lab: Lab) -> None:
    first = submit(lab)
    assert submit(lab, gpu_type="H100")  # the first waits for any type: it may end elsewhere
    finish(lab, first, 1.0, gpu_name="NVIDIA GeForce RTX 5090")
    with pytest.raises(Duplicate, match=first):
        submit(lab, gpu_type="rtx 5090")
    assert submit(lab, gpu_type="H200")


def test_a_grid_is_one_wave(lab: Lab) -> None:
    done = verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [4, 8], "MATRIX_LR": [0.02, 0.04]}, hypothesis="h"), who="mcp:a")
    runs = [lab.store.run(i) for i in done.run_ids]
    assert [r.cell for r in runs if r] == [{"DEPTH": d, "MATRIX_LR": m} for d in (4, 8) for m in (0.02, 0.04)]
    assert queries.wave_object(lab, queries.known_wave(lab, str(done.wave_id)))["total"] == 4
    assert [r.purpose for r in runs if r].count("baseline") == 1  # the cell that changes nothing


def test_a_wave_is_submitted_whole_or_not_at_all(lab: Lab) -> None:
    with pytest.raises(UnknownName, match="DEPTH"):
        verbs.submit_wave(lab, WaveRequest(cells=[{"DEPTH": 4}, {"DEPTHS": 4}]), who="cli")
    assert lab.store.count_runs() == 0 and lab.store.waves() == []


def test_repeats_take_new_seeds(lab: Lab) -> None:
    first = submit(lab)
    done = verbs.repeat(lab, first, 2, who="cli")
    seeds = [lab.store.run(i).seed for i in done.run_ids]  # type: ignore[union-attr]
    assert seeds == [43, 44]
    assert {lab.store.run(i).effective_sha for i in (first, *done.run_ids)} == {lab.store.run(first).effective_sha}  # type: ignore[union-attr]
    for name in ("H100", "H200"):
        lab.store.upsert_gpu(name, host="h", name=f"NVIDIA {name}", state="free", since=0.0)
    lab.store.update_run(first, gpu_name="NVIDIA H100")
    assert lab.store.run(verbs.repeat(lab, first, 1, who="cli").run_ids[0]).gpu_type == "NVIDIA H100"  # type: ignore[union-attr]
    wave = verbs.submit(lab, Submission(overrides={"DEPTH": 2}, seeds=3), who="cli")
    assert [lab.store.run(i).seed for i in wave.run_ids] == [42, 43, 44]  # type: ignore[union-attr]


def test_limits_are_enforced_in_words(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, policy="max_runs = 3\nmax_runs_per_agent = 2\nmax_gpu_hours = 0.02")
    submit(lab, who="mcp:a", overrides={"DEPTH": 1})
    submit(lab, who="mcp:a", overrides={"DEPTH": 2})
    with pytest.raises(Refused, match="max_runs_per_agent = 2"):
        submit(lab, who="mcp:a", overrides={"DEPTH": 3})
    with pytest.raises(Refused, match="max_gpu_hours"):
        submit(lab, who="mcp:b", overrides={"DEPTH": 3}, budget_s=60)
    submit(lab, who="mcp:b", overrides={"DEPTH": 3})
    with pytest.raises(Refused, match=r"max_runs = 3.*0 left"):
        submit(lab, who="mcp:b", overrides={"DEPTH": 4})
    lab.close()


def test_an_agent_is_paused_by_its_short_name_also_before_it_calls(lab: Lab) -> None:
    assert verbs.pause_agent(lab, "claude", True, who="cli") == "mcp:claude"
    run_id = verbs.submit(lab, Submission(), who="mcp:claude").run_ids[0]
    run = lab.store.run(run_id)
    assert run is not None and "paused" in str(queries.why_waiting(lab, run))
    verbs.pause_agent(lab, "claude", False, who="cli")
    assert queries.lab_state(lab).paused_agents == []
    assert verbs.pause_agent(lab, "cli", True, who="tui") == "cli"


def test_approval_is_asked_of_agents_only_and_given_by_humans_only(lab: Lab) -> None:
    verbs.set_approval(lab, "ask", who="tui")
    mine, theirs = submit(lab), submit(lab, who="mcp:a", overrides={"DEPTH": 2})
    other = submit(lab, who="mcp:a", overrides={"DEPTH": 3})
    assert [r.phase for r in queries.queue(lab)] == ["queued", "proposed", "proposed"]
    with pytest.raises(Refused, match="human"):
        verbs.approve(lab, [theirs], who="mcp:a")
    verbs.approve(lab, [theirs], who="tui")
    verbs.decline(lab, [other], who="tui", why="too deep")
    declined = lab.store.run(other)
    assert declined is not None and (declined.phase, declined.outcome, declined.approval_why) == (Phase.ENDED, "declined", "too deep")
    assert [r.id for r in queries.queue(lab)] == [mine, theirs]


@pytest.mark.parametrize(
    ("who", "move", "order"),
    [("c", "top", "cabd"), ("c", "up", "acbd"), ("b", "down", "acbd"), ("a", "up", "abcd"), ("d", "down", "abcd")],
)
def test_the_queue_is_reordered(lab: Lab, who: str, move: str, order: str) -> None:
    ids = {letter: submit(lab, overrides={"DEPTH": 20 + n}) for n, letter in enumerate("abcd")}
    verbs.set_priority(lab, [ids[who]], who="tui", move=move)
    assert [r.id for r in queries.queue(lab)] == [ids[x] for x in order]


def test_cancel_is_wanted_not_done(lab: Lab) -> None:
    first, second = submit(lab), submit(lab, overrides={"DEPTH": 4})
    finish(lab, second, 1.0)
    notes = verbs.cancel(lab, [first, second], who="cli", why="enough")
    run = lab.store.run(first)
    assert run is not None and (run.wanted, run.phase) == ("cancel", "queued") and notes == [f"{second} had ended (completed)."]
    with pytest.raises(UnknownName, match="r0099"):
        verbs.cancel(lab, ["r0099"], who="cli")
    assert lab.store.events(subject=first)[0].why == "enough"


def test_keep_needs_evidence_or_an_override_with_a_reason(lab: Lab) -> None:
    base = submit(lab)
    repeats = verbs.repeat(lab, base, 3, who="cli").run_ids
    for n, run_id in enumerate([base, *repeats]):
        finish(lab, run_id, 1.000 + 0.002 * n)
    near, far, crashed = (submit(lab, overrides={"DEPTH": d}) for d in (2, 3, 4))
    finish(lab, near, 1.0025)
    finish(lab, far, 0.95)
    finish(lab, crashed)
    with pytest.raises(Refused, match="within noise"):
        verbs.decide(lab, near, "keep", who="cli", why=None)
    with pytest.raises(Refused, match="needs a reason"):
        verbs.decide(lab, near, "keep", who="cli", why=" ", override=True)
    assert verbs.decide(lab, near, "keep", who="cli", why="simpler", override=True).verdict_why == "simpler"
    assert verbs.decide(lab, far, "keep", who="cli", why=None).verdict == "keep"
    assert verbs.decide(lab, far, "discard", who="mcp:a", why="changed my mind").verdict_by == "mcp:a"
    with pytest.raises(Refused, match="no result to keep"):
        verbs.decide(lab, crashed, "keep", who="cli", why="x", override=True)
    with pytest.raises(BadValue, match="keep or discard"):
        verbs.decide(lab, far, "maybe", who="cli", why=None)


def test_hostile_words_are_cleaned_before_they_are_stored(lab: Lab) -> None:
    run = lab.store.run(submit(lab, hypothesis="\x1b[31m[/bold] bigger\x07\u202e is better" + "x" * 5000))
    assert run is not None and run.hypothesis is not None
    assert run.hypothesis.startswith("[/bold] bigger is better") and len(run.hypothesis) == 2000


def test_promotion_goes_to_another_gpu_or_budget(lab: Lab) -> None:
    run_id = submit(lab, overrides={"DEPTH": 4})
    with pytest.raises(BadValue, match="GPU type or a budget"):
        verbs.promote(lab, run_id, who="cli")
    with pytest.raises(Refused, match=r"no result to promote \(queued\)"):
        verbs.promote(lab, run_id, who="cli", gpu_type="H200")
    finish(lab, run_id, 1.0)
    with pytest.raises(BadValue, match="would be shorter"):
        verbs.promote(lab, run_id, who="cli", budget_s=10, gpu_type="H200")
    with pytest.raises(BadValue, match="is a repeat"):
        verbs.promote(lab, run_id, who="cli", budget_s=20)
    lab.store.update_run(run_id, gpu_name="NVIDIA H100 80GB HBM3")
    with pytest.raises(BadValue, match="ran on NVIDIA H100 80GB HBM3 for 20 s"):
        verbs.promote(lab, run_id, who="cli", gpu_type="h100")
    run = lab.store.run(verbs.promote(lab, run_id, who="cli", gpu_type="H200", budget_s=60).run_ids[0])
    assert run is not None and (run.purpose, run.promoted_from, run.gpu_type, run.budget_s) == ("promotion", run_id, "H200", 60.0)


def test_a_request_id_belongs_to_whoever_asks(lab: Lab) -> None:
    ids = {who: verbs.submit(lab, Submission(overrides={"DEPTH": n}, request_id="1"), who=who).run_ids[0] for n, who in enumerate(WHO, 3)}
    assert len(set(ids.values())) == 3
    for n, who in enumerate(WHO, 3):
        again = verbs.submit(lab, Submission(overrides={"DEPTH": n}, request_id="1"), who=who)
        assert again.replay and again.run_ids == [ids[who]]
    assert lab.store.count_runs() == 3


def test_an_id_of_a_lab_of_before_still_answers(lab: Lab) -> None:
    run_id = submit(lab)
    lab.store.remember("old-1", "submit", {"run_ids": [run_id], "wave_id": None, "notes": []})
    again = verbs.submit(lab, Submission(request_id="old-1"), who="mcp:claude")
    assert again.replay and again.run_ids == [run_id]


def test_verdicts_and_cancellations_happen_once_for_a_request_id(lab: Lab) -> None:
    run_id, other = submit(lab, overrides={"DEPTH": 4}), submit(lab, overrides={"DEPTH": 5})
    finish(lab, run_id, 1.0)
    verbs.decide(lab, run_id, "discard", who="mcp:a", why="no gain", request_id="v1")
    verbs.decide(lab, run_id, "keep", who="tui", why="I want it", override=True)
    late = verbs.decide(lab, run_id, "discard", who="mcp:a", why="no gain", request_id="v1")
    assert late.verdict == "keep", "a repeated message does not undo what a human decided since"
    with pytest.raises(Refused, match="another request"):
        verbs.decide(lab, run_id, "discard", who="mcp:a", why="something else", request_id="v1")
    verbs.cancel(lab, [other], who="mcp:a", request_id="c1")
    lab.store.update_run(other, wanted="run")
    assert verbs.cancel(lab, [other], who="mcp:a", request_id="c1") == [verbs.ANSWERED]
    run = lab.store.run(other)
    assert run is not None and run.wanted == "run"
    assert [e.verb for e in lab.store.events()].count("decide") == 2


def test_a_run_again_says_what_it_changes(lab: Lab) -> None:
    first = verbs.submit(lab, Submission(overrides={"DEPTH": 4}), who="cli").run_ids[0]
    finish(lab, first, 1.0)
    again = [verbs.requeue(lab, first, who="cli").run_ids[0], *verbs.repeat(lab, first, 2, who="cli").run_ids]
    again += verbs.promote(lab, first, who="cli", budget_s=40).run_ids
    found = [lab.store.run(i) for i in again]
    assert [r.overrides for r in found if r] == [{"DEPTH": 4}, {"DEPTH": 4, "SEED": 43}, {"DEPTH": 4, "SEED": 44}, {"DEPTH": 4}]
    assert all(r.constants["DEPTH"] == 4 for r in found if r)


def test_a_wave_over_several_types_of_gpu_is_told_what_that_costs(lab: Lab) -> None:
    def told(**place: Any) -> bool:
        sent = verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [9, 10]}, repeats=2, **place), who="cli")
        return any("what ran on different types is not compared" in note for note in sent.notes)

    for n, name in enumerate(("NVIDIA H100", "NVIDIA H200", "NVIDIA L4")):
        lab.store.upsert_gpu(f"GPU-{n}", host="h", name=name, state="free", since=0.0)
    assert told() and told(gpu_type="H") and not told(gpu_type="H200")
