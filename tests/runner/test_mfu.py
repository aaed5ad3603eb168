"""MFU derived on reading: warm-up left out, true against reported, at the clock the card had, and steady while single steps are not."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from runner import follow, mfu, queries, verbs
from runner.cli_watch import mfu_words
from runner.lab import Lab
from runner.records import Point, Run, Sample, Submission
from runner.roster import Track
from tests.runner.labs import finish, make_lab

H200 = "NVIDIA H200"


@pytest.fixture
def run(tmp_path: Path) -> tuple[Lab, Run]:
    """A finished run of 60 counted seconds on an H200, with what docs/benchmarks.md measured."""
    lab = make_lab(tmp_path)
    run_id = verbs.submit(lab, Submission(budget_s=60), who="cli").run_ids[0]
    numbers = {"flops_per_token": 276.8e6, "training_s": 60.2, "num_steps": 778, "tokens_m": 101.974, "mfu_reported": 46.89}
    finish(lab, run_id, 0.5754, gpu_name=H200, gpu_uuid="GPU-a", host="h", **numbers)
    found = lab.store.run(run_id)
    assert found is not None
    return lab, found


def test_the_tokens_of_the_warm_up_are_left_out(run: tuple[Lab, Run]) -> None:
    lab, done = run
    speed = 101.974e6 * 768 / 778 / 60.2
    assert mfu.counted_speed(done) == pytest.approx(speed)
    assert mfu.mfu_percent(done, lab.policy()) == pytest.approx(100 * 276.8e6 * speed / 989.5e12)
    assert mfu.mfu_percent(done, lab.policy()) == pytest.approx(done.mfu_reported, abs=0.3)  # the script leaves them out as well
    short = replace(done, num_steps=8, tok_s=1000.0)
    assert mfu.counted_speed(short) == 1000.0  # nothing but warm-up: the whole says nothing
    assert mfu.counted_speed(replace(done, num_steps=None)) == pytest.approx(101.974e6 / 60.2)
    assert mfu.mfu_percent(replace(done, gpu_name="Some Card")) is None


def test_what_the_card_really_did_stands_beside_it(run: tuple[Lab, Run]) -> None:
    lab, done = run
    assert mfu.under_load(lab, done) is None
    at = int(done.started_at or 0)
    busy = [Sample("GPU-a", at + n, done.id, util_pct=99.0, power_w=690.0, power_limit_w=700.0, sm_mhz=1665) for n in range(1, 11)]
    idle = [Sample("GPU-a", at + 12, done.id, util_pct=3.0, power_w=120.0, power_limit_w=700.0, sm_mhz=1980)]
    lab.store.add_samples([*busy, *idle, Sample("GPU-a", at + 13, "r9999", util_pct=99.0, sm_mhz=500)])
    load = mfu.under_load(lab, done)
    nominal = mfu.mfu_percent(done, lab.policy())
    assert load is not None and nominal is not None
    assert (load["sm_mhz"], load["power_w"], load["power_limit_w"], load["seconds"]) == (1665, 690, 700, 10)
    assert load["mfu_at_clock_percent"] == pytest.approx(nominal * 989.5e12 / (132 * 4096 * 1665e6))
    assert mfu_words(queries.run_object(lab, done), load) == (
        f"{nominal:.1f}% of the card's peak, reported 46.9%, {load['mfu_at_clock_percent']:.1f}% at the 1,665 MHz it had, 690 of 700 W"
    )
    unknown = mfu.under_load(lab, replace(done, gpu_name="NVIDIA H200 NVL"))
    assert unknown is not None and unknown["mfu_at_clock_percent"] is None and unknown["sm_mhz"] == 1665
    live = replace(done, phase="running", started_at=time.time() - 500)
    assert mfu.under_load(lab, live, now=at + 5.0) is not None and mfu.under_load(lab, live, now=at + 100.0) is None


def test_a_live_speed_is_that_of_some_seconds_not_of_one_step(run: tuple[Lab, Run]) -> None:
    track = Track(run[1])
    for step in range(200):
        dt_ms = 200.0 if step % 10 == 9 else 50.0  # every tenth step hiccups
        follow._pace(track, [Point(step, None, None, 3.0, 131072e3 / dt_ms, dt_ms, None)])
    assert track.facts["tok_s"] == pytest.approx(10 * 131072 / 0.65, rel=0.05)
    assert sum(s for _, s in track.pace) == pytest.approx(5.0, abs=0.3)
    follow._pace(track, [Point(n, None, None, 3.0, 1e6, 20000.0, None) for n in range(2)])
    assert track.facts["tok_s"] == pytest.approx(1e6) and len(track.pace) == 1  # a step longer than the window is the window
    follow._pace(track, [Point(300, None, None, None, None, None, None)])
    assert track.facts["tok_s"] == pytest.approx(1e6)
