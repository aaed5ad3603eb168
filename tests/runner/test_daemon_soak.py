"""Seeded: real supervisors on four stand-in GPUs, runs that go wrong in every way, cancels and kills of the daemon at random moments."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import daemonctl, verbs
from runner.lab import Lab
from runner.records import Run, Submission
from tests.runner.daemons import TINY, kill_daemon
from tests.runner.labs import make_lab
from tests.runner.onhost.rig import FakeNvml, nvml, nvml_library

__all__ = ["nvml", "nvml_library"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# What each way of going wrong must end as; a cancelled run may have been faster than its cancel.
MODES = {
    "ok": {"completed"},
    "nan": {"diverged"},
    "fail": {"diverged"},
    "no_summary": {"no_result"},
    "crash_before_step": {"crashed"},
    "hang": {"completed"},
    "child": {"completed"},
    "ignore_term": {"cancelled"},
    "long": {"cancelled"},
}


@pytest.fixture
def lab(tmp_path: Path, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))
    for key, value in nvml.env.items():
        monkeypatch.setenv(key, value)
    for n in range(4):
        nvml.card(f"GPU-{n}")
    policy = "min_free_disk_mib = 1\ngrace_s = 0.5\nhung_after_summary_s = 1\nwall_extra_s = 60"
    made = make_lab(tmp_path / "work", policy=policy, hosts='[[host]]\nname = "here"\nkind = "local"\n', script=TINY)
    yield made
    daemonctl.stop_daemon(made)
    made.close()


def status_of(lab: Lab, run: Run) -> dict[str, Any]:
    return dict(json.loads((lab.run_dir(run.id) / "status.json").read_text()))


async def test_whatever_happens_every_run_is_accounted_for_once(lab: Lab) -> None:
    rng = random.Random(7)
    wanted: dict[str, set[str]] = {}
    for n in range(36):
        mode = rng.choice(list(MODES))
        overrides = {"MODE": mode, "TAG": f"t{n}", "STEPS": rng.choice([5, 20, 60])}
        run_id = verbs.submit(lab, Submission(overrides=overrides, budget_s=20, allow_duplicate=True), who="cli").run_ids[0]
        wanted[run_id] = MODES[mode]
    kills = 0
    while lab.store.count_runs("phase != 'ended'"):
        daemonctl.ensure_daemon(lab)
        await asyncio.sleep(rng.uniform(0.1, 1.5))
        for run in lab.store.runs("phase = 'running' AND wanted = 'run'"):
            if wanted[run.id] == {"cancelled"} and rng.random() < 0.5:
                verbs.cancel(lab, [run.id], who="cli", force=rng.random() < 0.3)
        if kills < 15 and rng.random() < 0.6:
            kill_daemon(lab)
            kills += 1
    assert kills >= 8
    assert {r.id: r.outcome for r in lab.store.runs() if r.outcome not in wanted[r.id]} == {}
    assert lab.store.count_runs() == len(wanted)
    spans: dict[str, list[tuple[float, float]]] = {}
    for run in lab.store.runs():
        status = status_of(lab, run)
        log = (lab.run_dir(run.id) / "out.log").read_bytes()
        assert status["phase"] == "ended" and run.log_offset == len(log) and log.count(b"Vocab size") == 1
        steps = {int(part.split()[0]) for part in log.decode().split("\rstep ")[1:]}
        assert {p.step for p in lab.store.points(run.id)} == steps
        spans.setdefault(run.gpu_uuid or "", []).append((status["started_at"], status["ended_at"]))
    for used in spans.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(used)))  # no card held two runs at once
    assert sorted(e.subject for e in lab.store.events(limit=1000) if e.verb == "ended") == sorted(wanted)
    assert {g.state for g in lab.store.gpus()} <= {"free", "busy"}
