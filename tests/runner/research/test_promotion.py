"""The two-stage rule: what is ready, who is promoted and why, never twice; and a rule that cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner import verbs
from runner.errors import PolicyError
from runner.lab import Lab
from runner.records import Submission, WaveRequest
from runner.research import promotion
from tests.runner.labs import finish, make_lab

RULE = 'promote = {from = "H100", to = "H200", top = 2, seeds = 1}'


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    opened = make_lab(tmp_path, policy=RULE)
    base = verbs.submit(opened, Submission(), who="cli").run_ids[0]
    for run_id, value in zip([base, *verbs.repeat(opened, base, 3, who="cli").run_ids], (1.0, 1.001, 0.999, 1.0), strict=True):
        finish(opened, run_id, value, class_key="H100", gpu_name="NVIDIA H100")
    yield opened
    opened.close()


def wave(lab: Lab, values: list[float | None], gpu: str = "NVIDIA H100") -> list[str]:
    sent = verbs.submit_wave(lab, WaveRequest(base="r0001", factors={"DEPTH": list(range(20, 20 + len(values)))}), who="cli")
    for run_id, value in zip(sent.run_ids, values, strict=True):
        finish(lab, run_id, value, class_key="H100", gpu_name=gpu)
    return sent.run_ids


def test_the_best_beyond_doubt_are_promoted_and_only_once(lab: Lab) -> None:
    ids = wave(lab, [0.95, 0.999, 0.97, 0.96, 1.2, None])
    found = promotion.due(lab)
    assert [d.run_id for d in found] == [ids[0], ids[3]]
    assert all(d.gpu_type == "H200" and "over r0001" in d.why for d in found)
    assert promotion.due(lab) == []  # looked at, whether or not it came to anything


def test_a_wave_is_not_judged_before_its_last_run(lab: Lab) -> None:
    ids = wave(lab, [0.95, 0.96])
    lab.store.update_run(ids[1], phase="running", outcome=None, ended_at=None)
    assert promotion.due(lab) == []
    finish(lab, ids[1], 0.94, class_key="H100", gpu_name="NVIDIA H100")
    assert [d.run_id for d in promotion.due(lab)] == [ids[1], ids[0]]


def test_what_is_within_noise_held_or_on_another_type_stays(lab: Lab) -> None:
    wave(lab, [0.9995, 1.0005])
    assert promotion.due(lab) == []
    other = verbs.submit(lab, Submission(overrides={"DEPTH": 40}), who="cli").run_ids[0]
    finish(lab, other, 0.9, class_key="A100", gpu_name="NVIDIA A100")
    held = verbs.submit(lab, Submission(overrides={"DEPTH": 41}), who="cli").run_ids[0]
    finish(lab, held, 0.2, class_key="H100", gpu_name="NVIDIA H100", trust_why="held: too good")
    assert promotion.due(lab) == []


def test_a_source_that_was_promoted_by_hand_is_not_promoted_again(lab: Lab) -> None:
    best = wave(lab, [0.95])[0]
    verbs.promote(lab, best, who="tui", gpu_type="H200")
    assert promotion.due(lab) == []


def test_what_ran_on_the_target_is_not_sent_there_again(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, policy='promote = {to = "H200"}')
    base = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    finish(lab, base, 1.0, class_key="H100", gpu_name="NVIDIA H200")
    wave(lab, [0.95, 0.94], gpu="NVIDIA H200")
    assert promotion.due(lab) == []
    (other,) = verbs.submit(lab, Submission(overrides={"DEPTH": 40}), who="cli").run_ids
    finish(lab, other, 0.93, class_key="H100", gpu_name="NVIDIA A100")
    assert [d.run_id for d in promotion.due(lab)] == [other]
    lab.close()


def test_a_rule_never_promotes_to_a_shorter_budget(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, policy='promote = {from = "H100", to = "H200", budget_s = 30, top = 1}')
    for budget_s in (20.0, 60.0):
        base = verbs.submit(lab, Submission(purpose="baseline", budget_s=budget_s, allow_duplicate=True), who="cli").run_ids[0]
        finish(lab, base, 1.0, class_key="H100", gpu_name="NVIDIA H100")
        better = verbs.submit(lab, Submission(overrides={"DEPTH": 30}, budget_s=budget_s), who="cli").run_ids[0]
        finish(lab, better, 0.9, class_key="H100", gpu_name="NVIDIA H100")
    assert [(d.run_id, d.budget_s) for d in promotion.due(lab)] == [("r0002", 30)]
    lab.close()


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ('{from = "H100"}', "neither `to` nor `budget_s`"),
        ('{to = "H200", best = 3}', "unknown key 'best'"),
        ('{to = "H200", top = 0}', "top is 0"),
        ('{to = "H200", seeds = true}', "seeds is True"),
        ("{to = 3}", "to is 3"),
        ('{from = "H100", to = "h100"}', "from and to are both"),
        ('{budget_s = "long"}', "budget_s is 'long'"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_when_it_is_read(tmp_path: Path, rule: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        make_lab(tmp_path, policy=f"promote = {rule}").policy()


def test_a_promotion_to_where_no_baseline_ran_says_so(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    (base,) = verbs.submit(lab, Submission(purpose="baseline"), who="cli").run_ids
    finish(lab, base, 1.0, class_key="H100", gpu_name="NVIDIA H100")
    (run_id,) = verbs.submit(lab, Submission(overrides={"DEPTH": 9}), who="cli").run_ids
    finish(lab, run_id, 0.9, class_key="H100", gpu_name="NVIDIA H100")
    assert "No baseline ran on H200 at 20 s" in " ".join(verbs.promote(lab, run_id, who="cli", gpu_type="H200").notes)
    assert "No baseline ran on H100 at 80 s" in " ".join(verbs.promote(lab, run_id, who="cli", budget_s=80).notes)
    verbs.submit(lab, Submission(purpose="baseline", budget_s=90), who="cli")
    assert not any("baseline" in note for note in verbs.promote(lab, run_id, who="cli", budget_s=90).notes)  # it is to run
    lab.close()


def test_a_promotion_to_a_longer_budget_stays_on_the_type_of_gpu_that_its_run_had(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, policy="promote = {budget_s = 80, top = 1, seeds = 2}")
    for n, name in enumerate(("NVIDIA H100", "NVIDIA H200")):
        lab.store.upsert_gpu(f"GPU-{n}", host="h", name=name, state="free", since=0.0)
    (base,) = verbs.submit(lab, Submission(purpose="baseline"), who="cli").run_ids
    finish(lab, base, 1.0, class_key="H100", gpu_name="NVIDIA H100")
    (run_id,) = verbs.submit(lab, Submission(overrides={"DEPTH": 9}), who="cli").run_ids
    finish(lab, run_id, 0.9, class_key="H100", gpu_name="NVIDIA H100")
    sent = verbs.promote(lab, run_id, who="cli", budget_s=80, seeds=2)
    assert [r.gpu_type for i in sent.run_ids if (r := lab.store.run(i))] == ["NVIDIA H100"] * 2
    assert promotion.due(lab) == []  # by hand it was done already
    lab.close()
