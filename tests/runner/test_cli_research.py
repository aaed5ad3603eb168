"""The research commands: noise floor, replayed pruning."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import verbs
from runner.lab import Lab
from runner.records import Point, Submission, WaveRequest
from tests.runner.commands import overnight
from tests.runner.labs import finish, make_lab


@pytest.fixture
def lab(tmp_path: Path):
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


def test_the_noise_floor_of_each_class_and_what_would_be_clear(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert overnight(capsys, "--lab", lab.path, "noise").code == 0
    assert overnight(capsys, "--lab", lab.path, "noise", "--repeats", 3).code == 2
    ids = verbs.submit(lab, Submission(seeds=3, purpose="baseline"), who="cli").run_ids
    assert f"The baseline {ids[0]} has not ended yet" in overnight(capsys, "--lab", lab.path, "noise", "--repeats", 3).err
    for run_id, value in zip(ids, (1.00, 1.02, 1.04), strict=True):
        finish(lab, run_id, value)
    (row,) = overnight(capsys, "--lab", lab.path, "noise", "--json").object["classes"]
    assert row["noise_sd"] == pytest.approx(0.02) and row["noise_n"] == 2 and row["baseline"] == ids[0]
    # two-sided 95 % of Student's t with 2 degrees of freedom is 4.303; one run against the mean of three
    assert row["smallest_clear_gain"] == pytest.approx(4.303 * 0.02 * (1 + 1 / 3) ** 0.5, rel=1e-3)
    assert "0.020000" in overnight(capsys, "--lab", lab.path, "noise").out


def test_replayed_pruning_says_what_it_would_have_saved_and_lost(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert overnight(capsys, "--lab", lab.path, "pruning", "replay", "--json").object["replays"] == []
    ids = [verbs.submit(lab, Submission(overrides={"DEPTH": n}), who="cli").run_ids[0] for n in range(11, 35)]
    for n, run_id in enumerate(ids):
        final = 1.0 + n % 12 / 20 + (1.0 if n > 20 else 0.0)
        curve = [(s, s / 50, 2 * final + 2 * (1 - s / 50)) for s in range(51)]
        points = [Point(step=s, t=None, share=share, loss=loss, tok_s=None, dt_ms=None, mfu=None) for s, share, loss in curve]
        lab.store.add_points(run_id, points)
        finish(lab, run_id, final, ended_at=1000.0 + n)
    replays = {r["mode"]: r for r in overnight(capsys, "--lab", lab.path, "pruning", "replay", "--json").object["replays"]}
    assert set(replays) == {"cautious", "eager"} and replays["eager"]["runs"] == 24
    assert replays["eager"]["pruned"] >= replays["cautious"]["pruned"] >= 1 and replays["eager"]["wrong"] == 0
    stopped = {s["id"] for s in replays["eager"]["stops"]}
    assert set(ids[21:]) <= stopped and 0 < replays["eager"]["saved_s"] < replays["eager"]["total_s"] == 24 * 20
    assert "eager" in overnight(capsys, "--lab", lab.path, "pruning", "replay").out
    lab.store.update_run(ids[0], trust="refuted")
    lab.store.update_run(ids[1], repeat_of="r0009")
    assert overnight(capsys, "--lab", lab.path, "pruning", "replay", "--json").object["replays"][0]["runs"] == 22


def test_a_wave_says_its_factors_and_the_cell_that_never_ran(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    wave = verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [4, 8], "MATRIX_LR": [0.02, 0.04]}, repeats=2), who="cli")
    for run_id in wave.run_ids:
        run = lab.store.run(run_id)
        assert run is not None
        c = run.constants
        value = 1.0 + 0.01 * (c["DEPTH"] == 8) + 0.02 * (c["MATRIX_LR"] == 0.04) + 0.001 * (run.seq % 3)
        finish(lab, run_id, value if (c["DEPTH"], c["MATRIX_LR"]) != (4, 0.02) else None)
    told = overnight(capsys, "--lab", lab.path, "analyze", wave.wave_id, "--json").object["analysis"]
    assert (told["runs"], told["completed"]) == (8, 6)
    assert told["predicted_best"]["cell"] == {"DEPTH": 4, "MATRIX_LR": 0.02} and told["predicted_best"]["ran"] is False
    said = overnight(capsys, "--lab", lab.path, "analyze", wave.wave_id).out
    assert "6 of 8 runs have a result that counts" in said
    assert "MATRIX_LR" in said and "clear" in said
    assert "Best predicted: DEPTH 4, MATRIX_LR 0.02" in said and "(never ran)" in said
    assert overnight(capsys, "--lab", lab.path, "analyze", "w9").code == 2


def test_where_all_results_are_held_the_leaderboard_says_so(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert overnight(capsys, "--lab", lab.path, "leaderboard").out == "No results yet.\n"
    (run_id,) = verbs.submit(lab, Submission(), who="cli").run_ids
    finish(lab, run_id, 1.0, trust_why="held: it ran for 0.1 s")
    said = overnight(capsys, "--lab", lab.path, "leaderboard").out
    assert "No results" not in said and f"not ranked: {run_id} held: it ran for 0.1 s" in said
    assert f"The baseline {run_id} is not ranked" in overnight(capsys, "--lab", lab.path, "noise", "--repeats", 3).err
    (other,) = verbs.submit(lab, Submission(overrides={"DEPTH": 3}), who="cli").run_ids
    finish(lab, other, 1.0)
    assert "There are results of cpu at 20 s." in overnight(capsys, "--lab", lab.path, "leaderboard", "--budget", 77).out
