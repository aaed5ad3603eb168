"""results.tsv in and out: by header, exact, never ranked beside measured runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import queries, verbs
from runner.errors import BadValue
from runner.lab import Lab
from runner.records import Submission
from runner.research import results
from tests.runner.commands import overnight
from tests.runner.labs import finish, make_lab

UPSTREAM = (
    "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"
    "a1b2c3d\t0.997900\t44.0\tkeep\tbaseline\n"
    "b2c3d4e\t0.993200\t44.2\tkeep\tincrease LR to 0.04\n"
    "c3d4e5f\t1.005000\t44.0\tdiscard\tswitch to GeLU activation\n"
    "d4e5f6g\t0.000000\t0.0\tcrash\tdouble model width (OOM)\n"
)
SKYPILOT = (
    "experiment_id\tstatus\tval_bpb\tmemory_gb\tdescription\n"
    "exp-01\tkeep\t0.997900\t44.0\tbaseline\n"
    "exp-02\tcrash\t0.000000\t0.0\ttoo wide\n"
)


@pytest.fixture
def lab(tmp_path: Path):
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


def given(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "results.tsv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("text", "layout"), [(UPSTREAM, "upstream"), (SKYPILOT, "skypilot")])
def test_what_comes_in_goes_out_again_byte_for_byte(lab: Lab, tmp_path: Path, text: str, layout: str) -> None:
    assert results.import_results(lab, given(tmp_path, text), who="cli") == (text.count("\n") - 1, 0)
    assert results.export_results(lab, layout) == text


def test_columns_are_found_by_their_names(lab: Lab, tmp_path: Path) -> None:
    mixed = "description\tstatus\tcommit\tval_bpb\nwider\tkeep\tabc1234\t0.98\n"
    results.import_results(lab, given(tmp_path, mixed), who="cli")
    (run,) = lab.store.runs()
    assert (run.val_bpb, run.hypothesis, run.verdict, run.attributes["name"]) == (0.98, "wider", "keep", "abc1234")  # type: ignore[index]


def test_the_same_file_twice_adds_nothing(lab: Lab, tmp_path: Path) -> None:
    path = given(tmp_path, UPSTREAM)
    results.import_results(lab, path, who="cli")
    assert results.import_results(lab, path, who="cli") == (0, 4) and lab.store.count_runs() == 4


def test_imported_runs_are_a_class_of_their_own_and_crashes_are_never_ranked(lab: Lab, tmp_path: Path) -> None:
    results.import_results(lab, given(tmp_path, UPSTREAM), who="cli")
    mine = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    finish(lab, mine, 1.1)
    board = queries.leaderboard(lab, class_key="cpu", budget_s=20.0)
    assert [r["id"] for r in board["rows"]] == [mine]
    imported = queries.leaderboard(lab, class_key="imported", budget_s=20.0)
    assert [r["val_bpb"] for r in imported["rows"]] == [0.9932, 0.9979, 1.005]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "val_bpb"), ("commit\tdescription\n", "val_bpb"), ("val_bpb\tstatus\n1\tkeep\n", "commit or experiment_id"),
        ("commit\tval_bpb\tstatus\na\tfast\tkeep\n", "line 2"), ("commit\tval_bpb\tstatus\na\t1.0\tkeep\nb\t1.0\tmaybe\n", "line 3"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_whole_with_its_line(lab: Lab, tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadValue) as refused:
        results.import_results(lab, given(tmp_path, text), who="cli")
    assert named in str(refused.value) and lab.store.count_runs() == 0


def test_not_a_number_is_no_result(lab: Lab, tmp_path: Path) -> None:
    results.import_results(lab, given(tmp_path, "commit\tval_bpb\tstatus\na\tnan\tdiscard\nb\tinf\tdiscard\n"), who="cli")
    assert [(r.val_bpb, r.outcome) for r in lab.store.runs()] == [(None, "crashed"), (None, "crashed")]


def test_measured_runs_are_exported_as_upstream_writes_them(lab: Lab) -> None:
    wishes = [Submission(overrides=o, hypothesis="a\ttab\nand a line") for o in ({}, {"DEPTH": 9})]
    base, crash = (verbs.submit(lab, wish, who="cli").run_ids[0] for wish in wishes)
    finish(lab, base, 0.9979, peak_vram_mb=45060.2)
    finish(lab, crash, None, cause_text="out of memory")
    verbs.decide(lab, base, "keep", who="cli", why="first")
    header, first, second = results.export_results(lab, "upstream").splitlines()
    assert header == "commit\tval_bpb\tmemory_gb\tstatus\tdescription"
    assert first.split("\t")[1:] == ["0.997900", "44.0", "keep", "a tab and a line"]
    assert second.split("\t")[1:4] == ["0.000000", "0.0", "crash"] and "DEPTH=9" in second and "out of memory" in second


def test_the_commands(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = given(tmp_path, UPSTREAM)
    assert overnight(capsys, "--lab", lab.path, "results", "import", path, "--json").object["added"] == 4
    assert overnight(capsys, "--lab", lab.path, "results", "export").out == UPSTREAM
    assert overnight(capsys, "--lab", lab.path, "results", "export", tmp_path / "out.tsv").code == 0
    assert (tmp_path / "out.tsv").read_text() == UPSTREAM
    assert overnight(capsys, "--lab", lab.path, "results", "export", "--layout", "mine").code == 2
    assert overnight(capsys, "--lab", lab.path, "results", "import", tmp_path / "nothing.tsv").code == 2
