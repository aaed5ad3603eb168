"""kill -9 of agent, server and daemon at once, in the middle of a wave: started runs go on, the next start takes all of them up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.daemonctl import daemon_pid, ensure_daemon, stop_daemon
from runner.lab import Lab
from runner.records import Run
from tests.runner.daemons import alive
from tests.runner.labs import make_lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SCRIPT = (Path(__file__).parent / "upstream_bytes.py").read_text()


@pytest.fixture
def lab(tmp_path: Path):
    opened = make_lab(tmp_path, hosts='[[host]]\nname = "here"\nkind = "local"\ngpus = []\n', script=SCRIPT)
    yield opened
    stop_daemon(opened)
    opened.close()


def until(what: str, true: Callable[[], object], deadline_s: float = 120) -> None:
    """Wait for a state."""
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.05)


def start_agent(lab: Lab, folder: Path) -> subprocess.Popen[bytes]:
    """The scripted agent playing plan.json; what it says goes to agent.log."""
    command = [sys.executable, "-I", "-m", "mcp_server.client", "--lab", str(lab.path), "--plan", str(folder / "plan.json")]
    with open(folder / "agent.log", "wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def children_of(pid: int) -> list[int]:
    """Direct children of a process."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def run_of(lab: Lab, position: int) -> Run | None:
    """The run submitted at that place, once it is there."""
    runs = lab.store.runs()
    return runs[position] if len(runs) > position else None


def test_nothing_is_lost_when_all_of_us_die_at_once(lab: Lab, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    overrides = {"STEPS": 80, "STEP_SECONDS": 0.01, "GATE": str(gate)}
    plan = {
        "baseline": {"overrides": {"STEPS": 3, "STEP_SECONDS": 0.0}, "request_id": "all-baseline"},
        "waves": [{"factors": {"VAL_BPB": [0.97, 0.98, 0.99]}, "overrides": overrides, "request_id": "all-wave"}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    agent = start_agent(lab, tmp_path)

    def first_of_the_wave_is_training() -> bool:
        run = run_of(lab, 1)
        return run is not None and run.phase == "running" and (run.step or 0) > 5

    try:
        until("a run of the wave trains", first_of_the_wave_is_training, 90)
    except AssertionError as late:
        agent.kill()
        agent.wait()
        states = [(r.id, r.phase, r.step, r.outcome, r.cause_text) for r in lab.store.runs()]
        raise AssertionError(f"{late}; {states}; the agent: {(tmp_path / 'agent.log').read_text()[-2000:]}") from late
    running = run_of(lab, 1)
    assert running is not None
    (host,) = lab.store.hosts()
    assert host.info["lock_dir"] == os.environ["OVERNIGHT_LOCK_DIR"], "what is ours to say must reach the daemon"
    leader = json.loads((lab.run_dir(running.id) / "status.json").read_text())["leader"]["pid"]
    daemon = daemon_pid(lab)
    assert daemon
    us = (daemon, *children_of(agent.pid), agent.pid)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none has time to start another again
        for pid in us:
            os.kill(pid, number)
    agent.wait()
    until("the daemon is gone", lambda: daemon_pid(lab) is None)
    assert alive(leader), "the run died with us"
    gate.touch()
    status = lab.run_dir(running.id) / "status.json"
    until("the run ends by itself", lambda: json.loads(status.read_text())["phase"] == "ended")
    recorded = lab.store.run(running.id)
    assert recorded is not None and not recorded.ended, "nobody can have written this down yet"

    ensure_daemon(lab)
    until("every run has ended", lambda: all(r.ended for r in lab.store.runs()), 120)
    runs = lab.store.runs()
    assert [(r.outcome, r.val_bpb) for r in runs] == [("completed", v) for v in (0.9979, 0.97, 0.98, 0.99)]
    for run in runs[1:]:
        steps = [p.step for p in lab.store.points(run.id)]
        log = (lab.run_dir(run.id) / "out.log").read_bytes()
        assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 79 and log.count(b"\rstep") == 80
        assert [e.verb for e in lab.store.events(subject=run.id)].count("ended") == 1
