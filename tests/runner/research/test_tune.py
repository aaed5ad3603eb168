"""The tuning loop on a known surface: it finds the batch, survives being stopped, and ends in report 1's table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from runner.errors import BadValue, Refused
from runner.lab import Lab
from runner.research.tune import BATCH, RATE, Plan, Tune
from tests.runner.labs import finish, make_lab

SCRIPT = "SEED = 42\nTOTAL_BATCH_SIZE = 2**19\nDEVICE_BATCH_SIZE = 128\nMATRIX_LR = 0.04\nEMBEDDING_LR = 0.6\nDEPTH = 8\n"
PLAN = Plan(20.0, (80.0,), waves=4, size=8)


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    opened = make_lab(tmp_path, script=SCRIPT)
    (opened.policy().trainer.folder / "prepare.py").write_text("TIME_BUDGET = 300\nMAX_SEQ_LEN = 2048\n")
    yield opened
    opened.close()


def truth(constants: dict[str, Any], budget_s: float) -> float:
    batch, rate = math.log2(constants["TOTAL_BATCH_SIZE"]), math.log2(constants["MATRIX_LR"] / 0.04)
    return 1.1 + 0.008 * (batch - 17.2) ** 2 + 0.004 * (rate - 0.4) ** 2 - 0.05 * math.log2(budget_s / 20)


def play(lab: Lab, tune: Tune) -> None:
    """Bring what is pending to its end, with a little noise that depends on the seed alone."""
    for run in tune.pending():
        c = run.constants
        assert c["TOTAL_BATCH_SIZE"] % (c["DEVICE_BATCH_SIZE"] * 2048) == 0  # no slot is spent on an assert that must fail
        finish(lab, run.id, truth(c, run.budget_s) + 0.0005 * math.sin(run.seq), budget_s=run.budget_s, tokens_m=50.0, num_steps=100)


def test_it_finds_the_batch_and_promotes_along_the_budget(lab: Lab) -> None:
    steps = 0
    while Tune(lab, PLAN).advance():  # a new object at every step: everything is in the lab
        play(lab, Tune(lab, PLAN))
        steps += 1
        assert steps < 20
    tune = Tune(lab, PLAN)
    best = tune.best()
    assert best is not None
    assert best.constants["TOTAL_BATCH_SIZE"] == 2**17
    assert {r.purpose for r in tune.runs()} == {"baseline", "repeat", "tune"}
    rows = tune.table()
    assert [r["budget_s"] for r in rows] == sorted(r["budget_s"] for r in rows)
    short = [r for r in rows if r["budget_s"] == 20.0]
    assert short[-1]["val_bpb"] < next(r for r in short if r["badge"] == "baseline")["val_bpb"] - 0.01
    assert short[-1]["badge"] == "clear"
    longest = [r for r in rows if r["budget_s"] == 80.0]
    assert longest[0]["badge"] == "baseline"
    assert longest[-1]["batch"] == 2**17
    assert longest[-1]["val_bpb"] < short[-1]["val_bpb"]


def test_a_point_becomes_constants_that_fit(lab: Lab) -> None:
    tune = Tune(lab, PLAN)
    assert tune.overrides({BATCH: None, RATE: 1.0}) == {}
    assert tune.overrides({BATCH: 2**17, RATE: 0.5}) == {
        "TOTAL_BATCH_SIZE": 2**17,
        "DEVICE_BATCH_SIZE": 64,
        "MATRIX_LR": 0.02,
        "EMBEDDING_LR": 0.3,
    }


def test_nothing_is_asked_twice_while_runs_are_pending(lab: Lab) -> None:
    tune = Tune(lab, PLAN)
    assert tune.advance()
    assert tune.advance()
    assert lab.store.count_runs() == 2
    assert Tune(lab, PLAN, restart=True).runs() == []


def test_what_cannot_be_tuned_says_so(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="optimizer"):
        Tune(lab, Plan(20.0, (), optimizer="magic"))
    tune = Tune(lab, PLAN)
    tune.advance()
    for run in tune.pending():
        finish(lab, run.id, None)
    (lab.policy().trainer.folder / "train.py").write_text(SCRIPT.replace("2**19", "None"))
    with pytest.raises(Refused, match="baseline has no result"):
        Tune(lab, PLAN).advance()
    other = make_lab(tmp_path / "other", script="DEPTH = 8\n")
    with pytest.raises(Refused, match="TOTAL_BATCH_SIZE"):
        Tune(other, PLAN)
    other.close()


def test_a_small_machine_has_small_batches(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, script=SCRIPT.replace("2**19", "None").replace("DEVICE_BATCH_SIZE = 128", "DEVICE_BATCH_SIZE = None"))
    tune = Tune(lab, PLAN)
    tune.advance()
    for run in tune.pending():
        finish(lab, run.id, 1.68, attributes={"total_batch": 2048})
    tune.advance()
    batches = {r.constants["TOTAL_BATCH_SIZE"] for r in tune.pending()}
    assert batches == {1024, 2048, 4096}
    lab.close()
