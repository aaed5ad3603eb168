"""Each detector on the case it is for, and on a healthy run beside it."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from runner import health
from runner.errors import PolicyError
from runner.health import FLAT_GAINS, RUN_KINDS, LabView, View, detect, detect_lab
from runner.records import Point, Run
from tests.runner.labs import make_lab

NOW = 10_000.0


def a_run(**known: Any) -> Run:
    empty: dict[str, Any] = {f.name: None for f in fields(Run)}
    usual = {
        "id": "r0001",
        "seq": 1,
        "phase": "running",
        "stage": "training",
        "purpose": "experiment",
        "gpu_uuid": "GPU-1",
        "constants": {"DEVICE_BATCH_SIZE": 128},
        "overrides": {},
        "step": 200,
        "share": 0.5,
        "loss": 3.5,
        "tok_s": 1.6e6,
        "dt_ms": 300.0,
        "budget_s": 300.0,
        "epoch": 1.0,
        "started_at": NOW - 200,
        "first_step_at": NOW - 170,
        "last_output_at": NOW - 0.3,
    }
    return Run(**{**empty, **usual, **known})


def curve(*losses: float | None) -> list[Point]:
    return [Point(i, None, (i + 1) / 20, x, 1.6e6, 300.0, 40.0) for i, x in enumerate(losses)]


SAMPLE = {
    "util_pct": 99,
    "power_w": 690.0,
    "power_limit_w": 700.0,
    "power_default_w": 700.0,
    "throttle": 0x4,
    "temp_c": 61,
    "sm_mhz": 1665,
    "sm_max_mhz": 1980,
    "pcie_gen": 5,
    "pcie_gen_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
}
HEALTHY = View(
    run=a_run(),
    now=NOW,
    points=curve(9, 7, 6, 5, 4.5, 4.2, 4.0, 3.8, 3.6, 3.5),
    sample=SAMPLE,
    mfu_percent=40.0,
    class_mfu=[39.0, 41.0, 40.5],
    peer_tok_s=[1.6e6, 1.65e6],
    smaller_batch=("r0000", 64, 1.5e6),
    baseline_epochs=1.0,
    measured_flops=700e12,
    achieved_flops=400e12,
    evaluated_share=1.0,
)


def kinds(view: View) -> set[str]:
    return {f.kind for f in detect(view)}


def with_run(**known: Any) -> View:
    return replace(HEALTHY, run=replace(HEALTHY.run, **known))


def sampled(**known: Any) -> View:
    return replace(HEALTHY, sample={**SAMPLE, **known})


def test_a_healthy_run_raises_nothing() -> None:
    assert detect(HEALTHY) == []


def test_its_own_processes_and_those_a_container_cannot_see_are_no_neighbours() -> None:
    own = {"pid": 7, "name": "python", "user": "me", "run": "r0001", "used_mib": 9000}
    hidden = {"pid": 8, "name": None, "user": None, "run": None, "used_mib": 9000}
    monitor = {"pid": 9, "name": "nvtop", "user": "me", "run": None, "used_mib": 20}
    assert detect(sampled(processes=[own, hidden, monitor], ecc_uncorrected=0)) == []


def test_missing_facts_raise_nothing() -> None:
    kept = ("id", "seq", "phase", "purpose", "constants", "overrides", "budget_s")
    bare = a_run(**{f.name: None for f in fields(Run) if f.name not in kept})
    assert detect(View(run=bare, now=NOW)) == []
    nothing = dict.fromkeys(SAMPLE)
    assert detect(replace(HEALTHY, sample=nothing)) == []


@pytest.mark.parametrize(
    ("view", "kind"),
    [
        (with_run(last_output_at=NOW - 20), "stalled"),
        (with_run(last_output_at=NOW - 40), "no_output"),
        (with_run(tok_s=0.7e6), "slow"),
        (sampled(throttle=0x40), "throttled"),
        (sampled(power_limit_w=400.0), "power_capped"),
        (sampled(pcie_width=4), "pcie_degraded"),
        (sampled(processes=[{"pid": 7, "name": "python", "user": "eve", "run": None, "used_mib": 9000}]), "shared_gpu"),
        (sampled(processes=[{"pid": 7, "name": "python", "user": "eve", "run": "r0099", "used_mib": 9000}]), "shared_gpu"),
        (sampled(ecc_uncorrected=3), "ecc_errors"),
        (replace(HEALTHY, points=curve(9, 5, 4, 4, 4, 4, 4, 4, 4, 4.01)), "flat_loss"),
        (replace(HEALTHY, points=curve(9, 5, None, None, None)), "nan"),
        (replace(with_run(hypothesis="a bold edit"), same_as="r0000"), "unchanged_source"),
        (with_run(wall_s=900.0, training_s=300.0), "wall_over_training"),
        (with_run(epoch=2.0), "more_epochs"),
        (replace(with_run(epoch=5.0), baseline_epochs=None), "more_epochs"),
        (replace(HEALTHY, evaluated_share=0.9), "evaluation_shrunk"),
        (replace(HEALTHY, mfu_percent=130.0), "mfu_impossible"),
        (replace(HEALTHY, mfu_percent=12.0), "mfu_low"),
        (replace(HEALTHY, mfu_percent=20.0, achieved_flops=100e12), "mfu_low"),
        (replace(HEALTHY, mfu_percent=0.4, class_mfu=[], measured_flops=None), "mfu_low"),
        (replace(with_run(tok_s=1.0e6), peer_tok_s=[]), "batch_cliff"),
        (replace(with_run(tok_s=1.0e6), peer_tok_s=[1.05e6]), "batch_cliff"),
        (replace(with_run(gpu_uuid="CPU:box"), cpu_load=(9.0, 2)), "cpu_contention"),
        (with_run(step=None, first_step_at=None, started_at=NOW - 400), "no_first_step"),
    ],
)
def test_each_case_raises_its_flag_with_evidence(view: View, kind: str) -> None:
    found = {f.kind: f for f in detect(view)}
    assert kind in found
    assert len(found[kind].evidence) > 15
    assert found[kind].severity in ("info", "warn", "bad")


@pytest.mark.parametrize(
    "view",
    [
        with_run(tok_s=1.0e6),  # others are fast at this very device batch
        sampled(throttle=0x4),  # at its power cap all the time is normal
        sampled(util_pct=0, pcie_gen=1),  # an idle link lowers its generation
        replace(with_run(stage="compiling", step=None, last_output_at=NOW - 200, share=None), sample={**SAMPLE, "util_pct": 0}),
        with_run(stage="evaluating", last_output_at=NOW - 60),
        replace(
            with_run(dt_ms=20_000.0, last_output_at=NOW - 35),  # a CPU step may take long
            points=[replace(p, dt_ms=20_000.0) for p in HEALTHY.points],
        ),
        replace(HEALTHY, points=curve(9, 5, 4, None, None)),
        replace(with_run(purpose="repeat", hypothesis="again"), same_as="r0000"),
        with_run(wall_s=45.0, training_s=20.0),  # start-up of a short run
        replace(HEALTHY, points=curve(9, 8)),  # too early to call it flat
    ],
)
def test_what_looks_alike_but_is_fine(view: View) -> None:
    assert kinds(view) == set()


LAB = LabView(now=NOW, queued=0, paused=False, idle=[("GPU-1", 10.0)], last_agent_call_s=10.0)


def lab_kinds(view: LabView) -> set[tuple[str, str]]:
    return {(subject, f.kind) for subject, f in detect_lab(view)}


def test_the_lab_itself() -> None:
    assert lab_kinds(LAB) == set()
    idle = replace(LAB, idle=[("GPU-1", 90.0)])
    assert lab_kinds(replace(idle, queued=3)) == {("lab", "idle_with_queue")}
    assert lab_kinds(replace(idle, queued=3, paused=True)) == set()
    assert lab_kinds(replace(idle, queued=3, blocked=True)) == set()
    assert lab_kinds(replace(idle, last_agent_call_s=5000.0)) == {("lab", "agent_quiet")}
    assert lab_kinds(replace(idle, last_agent_call_s=None)) == set()  # no agent ever called: nobody is missing
    foreign = replace(LAB, foreign=[("GPU-1", "foreign", "40 GiB"), ("GPU-2", "quarantined", "2 pids")])
    assert lab_kinds(foreign) == {("GPU-1", "foreign_process"), ("GPU-2", "orphan_process")}


def test_diminishing_returns_need_a_long_row() -> None:
    within = [(0.0001, "within noise")] * FLAT_GAINS
    assert lab_kinds(replace(LAB, gains=within)) == {("lab", "diminishing_returns")}
    assert lab_kinds(replace(LAB, gains=within[1:])) == set()
    assert lab_kinds(replace(LAB, gains=[*within[1:], (0.01, "clear")])) == set()
    assert lab_kinds(replace(LAB, gains=[(-0.2, "clear")] * FLAT_GAINS)) == {("lab", "diminishing_returns")}


def test_the_policy_may_name_every_flag_of_a_live_run_and_no_other(tmp_path: Path) -> None:
    made = {name for name in re.findall(r'Finding\(\s*"([a-z_]+)"', Path(health.__file__).read_text())}
    of_the_lab = {"idle_with_queue", "agent_quiet", "diminishing_returns", "foreign_process", "orphan_process"}
    assert made - of_the_lab - {"wall_over_training"} == set(RUN_KINDS)
    with pytest.raises(PolicyError, match="'stuck'"):
        make_lab(tmp_path, policy='kill_on_flags = ["stuck"]').policy()


@pytest.mark.parametrize(
    ("epoch", "baseline", "said"),
    [
        (4.0, None, None),
        (4.0, 4.0, None),
        (5.0, None, "warn"),
        (20.0, 2.0, "warn"),
        (20.0, 20.0, "info"),
        (2.0, 1.0, "info"),
        (2.0, 2.0, None),
    ],
)
def test_repeated_text_is_a_warning_once_for_a_class(epoch: float, baseline: float | None, said: str | None) -> None:
    found = [str(f.severity) for f in detect(replace(with_run(epoch=epoch), baseline_epochs=baseline)) if f.kind == "more_epochs"]
    assert found == ([said] if said else [])
