"""The daemon dies between any two of its steps: the next one finds every run where it is, and each runs exactly once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import daemonctl, verbs
from runner.lab import Lab
from runner.records import Submission
from tests.runner.daemons import ended, local_lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# A daemon that dies (as by kill -9) the first time it comes to a step: before it, or right after it.
DYING = """
import importlib, inspect, os, sys
sys.path.insert(0, {root!r})
module, _, name = {step!r}.partition(":")
owner = importlib.import_module(module)
*path, name = name.split(".")
for part in path:
    owner = getattr(owner, part)
step = getattr(owner, name)
if inspect.iscoroutinefunction(step):
    async def dying(*args, **kwargs):
        {before}
        await step(*args, **kwargs)
        os._exit(9)
else:
    def dying(*args, **kwargs):
        {before}
        step(*args, **kwargs)
        os._exit(9)
setattr(owner, name, dying)
from runner.daemon import main
main(["--lab", {lab!r}])
"""
STEPS = [
    "runner.dispatch:Dispatcher.write_placements",
    "runner.launch:stage_run",
    "runner.engines.local:LocalEngine.submit",
    "runner.reconcile:_alive",
    "runner.follow:read_new",
    "runner.follow:flush",
    "runner.finishing:_finish",
    "runner.finishing:end",
    "runner.telemetry:write_gpus",
]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))
    made = local_lab(tmp_path)
    yield made
    daemonctl.stop_daemon(made)
    made.close()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
async def test_death_at_a_step(lab: Lab, step: str, moment: str) -> None:
    ids = [verbs.submit(lab, Submission(overrides={"TAG": tag, "STEPS": 20}, budget_s=20), who="cli").run_ids[0] for tag in ("one", "two")]
    root = str(Path(daemonctl.__file__).parent.parent)
    code = DYING.format(root=root, step=step, lab=str(lab.path), before="os._exit(9)" if moment == "before" else "pass")
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=dict(os.environ), check=False)
    assert died.returncode == 9, died.stderr.decode()
    daemonctl.ensure_daemon(lab)
    runs = await ended(lab, *ids)
    assert [(r.outcome, r.val_bpb) for r in runs] == [("completed", 0.9979)] * 2
    assert lab.store.count_runs() == 2
    for run in runs:
        log = (lab.run_dir(run.id) / "out.log").read_bytes()
        assert run.log_offset == len(log) and log.count(b"Vocab size") == 1  # it was started once
        assert [p.step for p in lab.store.points(run.id)] == list(range(20))
    assert sorted(e.subject for e in lab.store.events() if e.verb == "ended") == sorted(ids)
