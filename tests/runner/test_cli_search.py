"""The research commands: what they print, their JSON, and one sentence for a bad wish."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner import cli, daemonctl, verbs
from runner.lab import Lab
from runner.records import Point, Submission
from tests.runner.commands import overnight
from tests.runner.labs import finish, make_lab


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(daemonctl, "ensure_daemon", lambda lab: None)
    monkeypatch.setattr("runner.cli_search.ensure_daemon", lambda lab: None)
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


def run(lab: Lab, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = cli.main(["--lab", str(lab.path), *args])
    out = capsys.readouterr()
    return code, out.out, out.err


def results(lab: Lab, gpu: str, values: list[float]) -> list[str]:
    ids = []
    for n, value in enumerate(values):
        wish = Submission(overrides={"DEPTH": 8 + n} if n else {}, gpu_type=gpu, allow_duplicate=True)
        run_id = verbs.submit(lab, wish, who="cli").run_ids[0]
        lab.store.add_points(run_id, [Point(i, None, (i + 1) / 20, 3 * value + 1 - i / 20, None, None, None) for i in range(20)])
        finish(lab, run_id, value, class_key=f"{gpu} · torch 2", gpu_name=gpu, purpose="baseline" if n == 0 else "experiment")
        ids.append(run_id)
    return ids


def test_two_types_are_compared_by_rank_and_relative_gain(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    results(lab, "H100", [1.00, 0.97, 0.98])
    results(lab, "H200", [0.99, 0.97, 0.96])
    found = json.loads(run(lab, capsys, "compare", "H100", "H200", "--budget", "20", "--json")[1])
    assert [(r["rank_a"], r["rank_b"]) for r in found["rows"]] == [(1, 2), (2, 1), (3, 3)]
    assert found["rows"][0]["percent_a"] == pytest.approx(3.0)
    assert [(f["first"], f["second"], f["clear"]) for f in found["flips"]] == [("r0002", "r0003", False)]
    said = run(lab, capsys, "compare", "H100", "H200", "--budget", "20")[1]
    assert "Flip within noise: r0002 against r0003: +0.010000 on H100, -0.010000 on H200." in said and "another order" not in said
    code, _, err = run(lab, capsys, "compare", "H100", "B200")
    assert code == 2
    assert "B200" in err
    code, _, err = run(lab, capsys, "compare", "H100", "h100")
    assert code == 2 and "one class here (H100)" in err
    assert "`overnight promote ID --gpu H200`" in run(lab, capsys, "compare", "H100", "H200", "--budget", "77")[1]


def test_two_types_that_agree_say_so_and_each_board_names_the_other(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    results(lab, "H100", [1.00, 0.97, 0.98])
    results(lab, "H200", [0.99, 0.95, 0.96])
    assert "No pair of these is in another order there." in run(lab, capsys, "compare", "H100", "H200", "--budget", "20")[1]
    for part, own, other in (("h200", "H200 · torch 2", "H100 · torch 2"), ("H100", "H100 · torch 2", "H200 · torch 2")):
        said = run(lab, capsys, "leaderboard", "--class", part)[1]
        assert said.startswith(f"class {own},") and f"Not comparable with it: {other} (--class shows one)." in said
    lab.store.update_run("r0002", promoted_from="r0001")
    assert "DEPTH=9; promoted from r0001" in run(lab, capsys, "leaderboard", "--class", "H100")[1]
    code, _, err = run(lab, capsys, "leaderboard", "--class", "torch")
    assert code == 2 and "is part of 2 classes" in err
    assert run(lab, capsys, "leaderboard", "--class", "B200")[0] == 2


def test_results_go_out_and_come_in(lab: Lab, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    results(lab, "H100", [1.0, 0.97])
    file = tmp_path / "results.tsv"
    assert run(lab, capsys, "export", str(file))[0] == 0
    assert run(lab, capsys, "export", "--style", "skypilot")[1].startswith("experiment_id\tstatus\t")
    sent = json.loads(run(lab, capsys, "import", str(file), "--json")[1])
    assert len(sent["runs"]) == 2
    for args in (("import", str(tmp_path / "none.tsv")), ("export", "--style", "excel"), ("import", str(tmp_path))):
        code, _, err = run(lab, capsys, *args)
        assert code == 2
        assert err.count("\n") == 1


def test_tune_prints_its_table_and_goes_on_with_what_was_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_lab(tmp_path, policy="max_runs = 24")

    def daemon(_: Lab) -> None:
        for run in lab.store.active_runs():
            depth, seed = run.constants["DEPTH"], run.constants["SEED"]
            finish(lab, run.id, 1.0 + 0.01 * abs(depth - 6) + 0.0001 * (seed % 7) - 0.002 * (run.budget_s > 20))

    monkeypatch.setattr("runner.cli_search.ensure_daemon", daemon)
    command = ("tune", "--budget", 20, "--longer", 40, "--waves", 1, "--size", 4, "--knob", "DEPTH")
    said = overnight(capsys, "--lab", lab.path, *command)
    assert said.code == 0
    assert "Tuning DEPTH." in said.out and "the script's own" in said.out and "DEPTH 6" in said.out and "clear" in said.out
    rows = overnight(capsys, "--lab", lab.path, "tune", "--json").object["rows"]
    assert {r["budget_s"] for r in rows} == {20.0, 40.0}
    assert rows[-1]["changes"] == {"DEPTH": 6} and rows[-1]["badge"] == "clear"
    assert "notes" not in said.out and "asked for now" not in said.out
    told = overnight(capsys, "--lab", lab.path, "tune", "--budget", 30, "--longer", 60, "--knob", "DEPTH", "--gpu", "Z9").out
    assert "This is the tune that has ended, with --budget 20 (asked for now: 30), --longer 40 (asked for now: 60)" in told
    assert "--gpu any (asked for now: Z9)" in told and "--knob" not in told
    assert "--restart" in overnight(capsys, "--lab", lab.path, "tune", "--json").object["notes"][0]
    shorter = overnight(capsys, "--lab", lab.path, "tune", "--budget", 20, "--longer", 20, "--restart")
    assert shorter.code == 2 and "longer than the short one" in shorter.err
    refused = overnight(capsys, "--lab", lab.path, *command, "--waves", 20, "--restart")
    assert refused.code == 2 and "max_runs" in refused.err and "the script's own" in refused.out
    assert overnight(capsys, "--lab", lab.path, "tune", "--knob", "NAME", "--restart").code == 2
    lab.close()
