"""results.tsv by header, in both orders, exactly, and back again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner import queries, verbs
from runner.board import trust_word
from runner.errors import BadValue
from runner.lab import Lab
from runner.records import Submission, WaveRequest
from runner.research.results import export_results, import_results
from tests.runner.labs import finish, make_lab

UPSTREAM = (
    "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"
    "a1b2c3d\t0.997900\t44.0\tkeep\tbaseline\n"
    "b2c3d4e\t0.993200\t44.2\tkeep\tincrease LR to 0.04\n"
    "c3d4e5f\t1.005000\t44.0\tdiscard\tswitch to GeLU\n"
    "d4e5f6a\t0.000000\t0.0\tcrash\tdouble width (OOM)\n"
)
SKYPILOT = "experiment_id\tstatus\tval_bpb\tmemory_gb\tdescription\nexp-01\tkeep\t0.974\t60.1\twider\nexp-02\tcrash\t\t\ttoo wide\n"


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


def test_upstreams_file_comes_back_as_it_was(lab: Lab) -> None:
    sent = import_results(lab, UPSTREAM, who="cli")
    assert len(sent.run_ids) == 4
    assert export_results(lab) == UPSTREAM
    again = import_results(lab, UPSTREAM, who="cli")
    assert again.replay
    assert again.run_ids == sent.run_ids
    assert lab.store.count_runs() == 4


def test_the_header_counts_and_not_the_position(lab: Lab) -> None:
    ids = import_results(lab, SKYPILOT, who="cli").run_ids
    runs = [lab.store.run(i) for i in ids]
    assert [(r.val_bpb, r.outcome, r.verdict) for r in runs if r] == [(0.974, "completed", "keep"), (None, "crashed", None)]
    sky = export_results(lab, "skypilot").splitlines()
    assert sky[0].split("\t") == SKYPILOT.splitlines()[0].split("\t")
    assert sky[1].split("\t") == ["exp-01", "keep", "0.974000", "60.1", "wider"]


def test_rows_that_are_not_taken_as_they_say_are_named(lab: Lab) -> None:
    assert len(import_results(lab, UPSTREAM, who="cli").notes) == 1
    odd = "val_bpb\tstatus\n0.9\tpromising\n\tkeep\nnan\tdiscard\n0.0\tcrash\n0.8\tKEEP\n"
    _, status, empty = import_results(lab, odd, who="cli").notes
    assert "(1, first: 'promising' in line 2) counts as undecided" in status
    assert empty.startswith("No val_bpb in line 3, 4:")


def test_the_runs_of_a_wave_are_told_apart(lab: Lab) -> None:
    for run_id in verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [4, 6]}, hypothesis="deeper"), who="cli").run_ids:
        finish(lab, run_id, 1.0)
    assert [line.split("\t")[4] for line in export_results(lab).splitlines()[1:]] == ["DEPTH = 4; deeper", "DEPTH = 6; deeper"]


@pytest.mark.parametrize("budget_s", [0.0, -3.0, math.nan, math.inf])
def test_a_budget_is_a_number_of_seconds(lab: Lab, budget_s: float) -> None:
    with pytest.raises(BadValue, match="budget of the imported runs"):
        import_results(lab, UPSTREAM, who="cli", budget_s=budget_s)


def test_crashes_are_never_ranked_and_history_has_a_class_of_its_own(lab: Lab) -> None:
    import_results(lab, UPSTREAM, who="cli")
    own = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    finish(lab, own, 1.2)
    assert [r["id"] for r in queries.leaderboard(lab, class_key="cpu")["rows"]] == [own]
    imported = queries.leaderboard(lab, class_key="imported")
    assert [r["val_bpb"] for r in imported["rows"]] == [0.9932, 0.9979, 1.005]
    assert {trust_word(r) for r in imported["rows"]} == {"unverifiable"}  # nothing speaks against history, and nothing can verify it


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("commit\tdescription\nx\ty\n", "no column val_bpb"),
        ("status\tval_bpb\nkeep\tgood\n", "Line 2.*not a number"),
        ("a,b,c\n1,2,3\n", "no column"),
    ],
)
def test_what_cannot_be_read_names_the_line_and_keeps_nothing(lab: Lab, text: str, says: str) -> None:
    with pytest.raises(BadValue, match=says):
        import_results(lab, text, who="cli")
    assert lab.store.count_runs() == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.floats(0.01, 20), st.text(max_size=60))
def test_numbers_are_exact_and_text_stays_in_its_cell(lab: Lab, value: float, words: str) -> None:
    run_id = verbs.submit(lab, Submission(hypothesis=words, allow_duplicate=True, seeds=1), who="cli").run_ids[0]
    finish(lab, run_id, value)
    lines = export_results(lab).splitlines()
    assert len(lines) == 1 + lab.store.count_runs()
    assert all(len(line.split("\t")) == 5 for line in lines)
    assert float(lines[-1].split("\t")[1]) == value


def test_memory_of_imported_rows_goes_out_as_it_came(lab: Lab) -> None:
    head = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"
    rows = f"{head}a1\t0.990000\t12.25\tkeep\tx\nb2\t0.980000\t\tkeep\ty\nc3\t0.000000\t0.0\tcrash\tz\n"
    import_results(lab, rows, who="cli")
    assert export_results(lab) == rows
    own = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    finish(lab, own, 1.0, peak_vram_mb=45060.2)
    assert export_results(lab).splitlines()[-1].split("\t")[2] == "44.0"
