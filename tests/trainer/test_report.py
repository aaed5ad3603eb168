"""What a run prints and writes: upstream's bytes, finite JSON, and one sentence when it fails."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from trainer.report import SUMMARY, BudgetClock, Report, finite

UPSTREAM_BLOCK = """---
val_bpb:          0.997900
training_seconds: 300.1
total_seconds:    325.9
peak_vram_mb:     45060.2
mfu_percent:      39.80
total_tokens_M:   499.6
num_steps:        953
num_params_M:     50.3
depth:            8
"""
VALUES = {
    "val_bpb": 0.9979,
    "training_seconds": 300.1,
    "total_seconds": 325.9,
    "peak_vram_mb": 45060.2,
    "mfu_percent": 39.8,
    "total_tokens_M": 499.6,
    "num_steps": 953,
    "num_params_M": 50.3,
    "depth": 8,
}


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.chdir(tmp_path)
    made = Report()
    yield made
    made.close()


def events() -> list[dict]:
    return [
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        for line in Path("events.jsonl").read_text().splitlines()
    ]


def test_the_summary_block_is_upstreams(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report.summary(VALUES, train_tokens_dropped_share=0.01)
    assert capsys.readouterr().out == UPSTREAM_BLOCK
    assert events()[-1] | {"t": 0} == {"t": 0, "event": "summary", **VALUES, "train_tokens_dropped_share": 0.01}


def test_missing_and_not_finite_are_a_dash_and_null(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report.summary({**VALUES, "mfu_percent": None, "val_bpb": math.nan})
    lines = capsys.readouterr().out.splitlines()
    assert "mfu_percent:      -" in lines and "val_bpb:          -" in lines
    assert events()[-1]["val_bpb"] is None and events()[-1]["mfu_percent"] is None
    assert finite({"a": [1.0, math.inf], "b": (math.nan,)}) == {"a": [1.0, None], "b": [None]}
    assert [key for key, _ in SUMMARY] == list(VALUES)


def test_progress_lines_are_upstreams_and_events_are_thinned(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    clock = BudgetClock(budget_s=1000, uncounted=1)
    for _ in range(400):
        clock.step_done()
        report.step(clock, 3.123456, 3.2, 1.0, 1_680_000.7, 39.84, 1)
    out = capsys.readouterr().out
    assert out.count("\r") == 400 and out.startswith("\rstep 00000 (0.0%) | loss: 3.123456 | lrm: 1.00 | dt: ")
    assert "| tok/sec: 1,680,000 | mfu: 39.8% | epoch: 1 | remaining: 1000s    \r" in out
    steps = [event for event in events() if event["event"] == "step"]
    assert steps[0]["step"] == 0 and len(steps) < 400
    clock.trained_s = 1000.0
    report.step(clock, 3.0, 3.0, 0.0, 1.0, None, 1)
    assert "mfu: - |" in capsys.readouterr().out and events()[-1]["step"] == 399 and events()[-1]["share"] == 1.0


@pytest.mark.parametrize("loss", [math.nan, math.inf, 100.5])
def test_a_diverged_run_ends_on_its_progress_line(report: Report, capsys: pytest.CaptureFixture[str], loss: float) -> None:
    clock = BudgetClock(10, 1)
    clock.step_done()
    report.step(clock, 5.0, 5.0, 1.0, 1.0, None, 1)
    with pytest.raises(SystemExit) as stopped:
        report.check_loss(1, loss)
    assert stopped.value.code == 1 and capsys.readouterr().out.endswith("s    FAIL\n")
    assert events()[-1]["event"] == "error" and events()[-1]["cause"] == "diverged"


def test_a_full_disk_costs_the_events_not_the_run(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    real, report._file = report._file, open("/dev/full", "w")
    full = report._file
    try:
        report.note("one")
        report.summary(VALUES)
    finally:
        with pytest.raises(OSError, match="No space"):
            full.close()
        report._file = real
    captured = capsys.readouterr()
    assert UPSTREAM_BLOCK in captured.out and captured.err.count("No space left on device") == 1


def test_the_clock_counts_after_the_warm_up_only() -> None:
    clock = BudgetClock(budget_s=1e-9, uncounted=2)
    clock.step_done()
    clock.step_done()
    assert clock.trained_s == 0 and not clock.done and clock.share == 0
    clock.step_done()
    assert clock.trained_s > 0 and clock.done and clock.share == 1 and clock.remaining_s == 0


def test_events_that_cannot_be_written_do_not_cost_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(str(tmp_path / "nowhere" / "events.jsonl"))
    assert "training goes on without events" in capsys.readouterr().err
    report.note("still here")
    report.close()
    assert capsys.readouterr().out == "still here\n"
