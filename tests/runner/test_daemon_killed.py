"""The real detached daemon, killed at bad moments: no run is lost, none runs twice, no line of a log is missing or doubled."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runner import daemonctl, verbs
from runner.daemon import main as daemon_main
from runner.errors import DaemonError
from runner.lab import Lab, open_lab
from runner.records import Submission, WaveRequest
from tests.runner.daemons import alive, ended, fake_lab, kill_daemon, local_lab, serving, until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU locks of these tests' own: the CPU slot is shared by everybody on a machine."""
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    made = local_lab(tmp_path)
    yield made
    daemonctl.stop_daemon(made)
    made.close()


def submit(lab: Lab, **overrides: Any) -> str:
    return verbs.submit(lab, Submission(overrides=overrides, budget_s=20, allow_duplicate=True), who="cli").run_ids[0]


async def test_kill_9_in_the_middle_of_a_wave_loses_nothing(lab: Lab) -> None:
    ids = verbs.submit_wave(lab, WaveRequest(factors={"TAG": ["a", "b", "c"]}, overrides={"STEPS": 100}, budget_s=20), who="cli").run_ids
    daemonctl.ensure_daemon(lab)
    await until(lambda: (lab.store.run(ids[0]).step or 0) > 3)  # type: ignore[union-attr]
    kill_daemon(lab)
    await until(lambda: (lab.run_dir(ids[0]) / "status.json").read_text().find('"ended"') > 0)  # it went on without us
    assert lab.store.run(ids[0]).phase == "running"  # type: ignore[union-attr]
    daemonctl.ensure_daemon(lab)
    await until(lambda: lab.store.run(ids[2]).started_at)  # type: ignore[union-attr]
    kill_daemon(lab)
    daemonctl.ensure_daemon(lab)
    runs = await ended(lab, *ids)
    assert [r.outcome for r in runs] == ["completed"] * 3
    assert all([p.step for p in lab.store.points(r.id)] == list(range(100)) for r in runs)
    assert lab.store.count_runs() == 3


async def test_a_run_taken_up_again_can_be_cancelled(lab: Lab) -> None:
    run_id = submit(lab, MODE="long")
    daemonctl.ensure_daemon(lab)
    await until(lambda: lab.store.run(run_id).step)  # type: ignore[union-attr]
    kill_daemon(lab)
    verbs.cancel(lab, [run_id], who="cli")
    daemonctl.ensure_daemon(lab)
    assert (await ended(lab, run_id))[0].outcome == "cancelled"


async def test_stop_leaves_runs_alone_and_a_dead_supervisor_makes_them_lost_and_retried_once(lab: Lab) -> None:
    run_id = submit(lab, STEPS=2000)
    daemonctl.ensure_daemon(lab)
    await until(lambda: lab.store.run(run_id).step)  # type: ignore[union-attr]
    assert daemonctl.stop_daemon(lab) and daemonctl.daemon_status(lab) is None
    status = json.loads((lab.run_dir(run_id) / "status.json").read_text())
    assert alive(status["leader"]["pid"])
    os.kill(status["supervisor"]["pid"], 9)
    daemonctl.ensure_daemon(lab)
    (run,) = await ended(lab, run_id)
    assert run.outcome == "lost" and not alive(status["leader"]["pid"])
    (retry,) = await until(lambda: lab.store.runs("retry_of = ?", (run_id,)))
    await until(lambda: lab.store.run(retry.id).step)  # type: ignore[union-attr]
    status = json.loads((lab.run_dir(retry.id) / "status.json").read_text())
    os.kill(status["supervisor"]["pid"], 9)
    assert (await ended(lab, retry.id))[0].outcome == "lost"
    verbs.submit(lab, Submission(overrides={"TAG": "after"}, budget_s=20), who="cli")
    await until(lambda: lab.store.count_runs("phase != 'ended'") == 0)
    assert lab.store.count_runs() == 3  # the retry was not retried again


async def test_a_supervisor_killed_after_the_summary_loses_no_result_and_a_cancelled_one_stays_cancelled(lab: Lab) -> None:
    daemonctl.ensure_daemon(lab)
    hung = submit(lab, MODE="hang")
    await until(lambda: lab.store.run(hung).total_s)  # type: ignore[union-attr]
    os.kill(json.loads((lab.run_dir(hung) / "status.json").read_text())["supervisor"]["pid"], 9)
    (run,) = await ended(lab, hung)
    assert (run.outcome, run.cause, run.val_bpb) == ("completed", "lost_after_summary", 0.9979)
    long = submit(lab, MODE="ignore_term")
    await until(lambda: lab.store.run(long).step)  # type: ignore[union-attr]
    pid = json.loads((lab.run_dir(long) / "status.json").read_text())["supervisor"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    verbs.cancel(lab, [long], who="cli")
    await until(lambda: (lab.run_dir(long) / "stop").exists())
    os.kill(pid, 9)
    (run,) = await ended(lab, long)
    assert run.outcome == "cancelled" and not lab.store.runs("retry_of IS NOT NULL")


async def test_another_boot_id_means_lost(lab: Lab) -> None:
    run_id = submit(lab, STEPS=2000)
    daemonctl.ensure_daemon(lab)
    await until(lambda: lab.store.run(run_id).step)  # type: ignore[union-attr]
    daemonctl.stop_daemon(lab)
    path = lab.run_dir(run_id) / "status.json"
    status = json.loads(path.read_text())
    os.kill(status["supervisor"]["pid"], 9)
    path.write_text(json.dumps({**status, "boot_id": "another"}))
    daemonctl.ensure_daemon(lab)
    (run,) = await ended(lab, run_id)
    assert run.outcome == "lost" and "restarted" in (run.cause_text or "")


async def test_a_host_taken_out_of_hosts_toml_while_nobody_looked(lab: Lab) -> None:
    run_id, other = submit(lab, STEPS=150), submit(lab, MODE="long")
    daemonctl.ensure_daemon(lab)
    await until(lambda: lab.store.run(run_id).step)  # type: ignore[union-attr]
    daemonctl.stop_daemon(lab)
    text = lab.hosts_file.read_text()
    lab.accept(text.replace('name = "here"', 'name = "there"'))
    lab.hosts_file.write_text(text.replace('name = "here"', 'name = "there"'))
    daemonctl.ensure_daemon(lab)
    await until(lambda: lab.store.run(run_id).phase == "unreachable")  # type: ignore[union-attr]
    assert "no longer in hosts.toml" in lab.store.flags(run_id)[0].evidence
    lab.accept(text)
    lab.hosts_file.write_text(text)
    (run,) = await ended(lab, run_id)
    assert run.outcome == "completed" and not [f for f in lab.store.flags(run_id) if f.kind == "host_removed"]
    assert [p.step for p in lab.store.points(run_id)] == list(range(150))
    verbs.cancel(lab, [other], who="cli", force=True)
    await ended(lab, other)


def test_a_second_daemon_says_who_is_there(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    pid = daemonctl.ensure_daemon(lab).pid
    assert daemonctl.ensure_daemon(lab).pid == pid
    assert daemon_main(["--lab", str(lab.path)]) == 2
    said = capsys.readouterr().err
    assert f"pid {pid}" in said and said.count("\n") == 1


def test_a_lock_that_is_a_folder_or_a_left_over_file(lab: Lab) -> None:
    (lab.path / "runner.lock").write_text("99999\n")  # left by a daemon that died: its text means nothing
    assert daemonctl.daemon_pid(lab) is None and daemonctl.ensure_daemon(lab).pid != 99999
    daemonctl.stop_daemon(lab)
    (lab.path / "runner.lock").unlink()
    (lab.path / "runner.lock").mkdir()
    with pytest.raises(DaemonError, match="did not come up"):
        daemonctl.ensure_daemon(lab)
    (lab.path / "runner.lock").rmdir()


async def test_a_hostile_working_folder_is_never_imported(lab: Lab, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    (trap / "runner").mkdir(parents=True)
    for name in ("torch.py", "asyncio.py", "sqlite3.py", "sitecustomize.py", "runner/__init__.py", "onhost.py"):
        (trap / name).write_text(f"open({str(tmp_path / 'sprung')!r}, 'a').write({name!r})\nraise SystemExit(9)\n")
    code = f"import sys; sys.path.insert(0, {str(Path(daemonctl.__file__).parent.parent)!r}); " + (
        f"from runner import daemonctl, lab; daemonctl.ensure_daemon(lab.open_lab({str(lab.path)!r}))"
    )
    env = {**os.environ, "PYTHONPATH": str(trap)}
    daemonctl_row = await asyncio.to_thread(subprocess.run, [sys.executable, "-I", "-c", code], cwd=trap, env=env, check=True)
    assert daemonctl_row.returncode == 0
    (run,) = await ended(lab, submit(lab))
    assert run.outcome == "completed" and not (tmp_path / "sprung").exists()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="a small disk of its own needs root and mount")
async def test_a_full_disk_holds_runs_back_and_everything_goes_on_afterwards(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=0700", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    request.addfinalizer(lambda: subprocess.run(["umount", "-l", small], check=True))
    lab = local_lab(small)
    ids = [submit(lab, STEPS=60), submit(lab, TAG="second")]
    async with serving(lab) as daemon:
        await until(lambda: lab.store.run(ids[0]).step)  # type: ignore[union-attr]
        filler = small / "filler"
        with open(filler, "wb", buffering=0) as f, pytest.raises(OSError, match="No space left"):
            while True:
                f.write(b"x" * 4096)
        await until(lambda: daemon.roster.notes or lab.store.flags("here"))
        await asyncio.sleep(0.5)  # it goes on trying
        filler.unlink()
        runs = await ended(lab, *ids)
        assert runs[1].outcome == "completed"
        assert runs[0].outcome in ("completed", "no_result") and runs[0].log_offset == (lab.run_dir(ids[0]) / "out.log").stat().st_size
        assert bool(runs[0].log_dropped) == ("log_capped" in [f.kind for f in lab.store.flags(ids[0])])
        await until(lambda: not daemon.roster.notes)
    lab.close()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_random_kills_over_a_simulated_night(tmp_path: Path) -> None:
    """Seeded: kill -9 at random moments while three simulated GPUs work; every run is accounted for exactly once, with all its points."""
    rng = random.Random(20261130)
    lab = fake_lab(tmp_path, host="types = {H100 = 2, H200 = 1}\nspeed = 250\ncrash_share = 0.15\n")
    factors = {"MATRIX_LR": [0.02, 0.03, 0.04, 0.05], "WEIGHT_DECAY": [0.05, 0.1, 0.2], "SOFTCAP": [10, 15]}
    ids = verbs.submit_wave(lab, WaveRequest(factors=factors, budget_s=300), who="cli").run_ids
    kills = 0
    while lab.store.count_runs("phase != 'ended'"):
        daemonctl.ensure_daemon(lab)
        await asyncio.sleep(rng.uniform(0.05, 1.2))
        if kills < 12:
            kill_daemon(lab)
            kills += 1
    daemonctl.stop_daemon(lab)
    assert kills >= 8 and lab.store.count_runs() == len(ids) == 24
    for run in lab.store.runs():
        status = (lab.run_dir(run.id) / "status.json").read_text()
        assert run.outcome in ("completed", "crashed") and f'"exit_code": {run.exit_code}' in status
        log = (lab.run_dir(run.id) / "out.log").read_bytes()
        assert run.log_offset == len(log) == run.log_bytes
        assert len(lab.store.points(run.id)) == log.count(b"\rstep ")
    spans: dict[str, list[tuple[float, float]]] = {}
    for run in lab.store.runs("started_at IS NOT NULL"):
        spans.setdefault(run.gpu_uuid or "", []).append((run.started_at or 0, run.ended_at or 0))
    for used in spans.values():
        used.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(used))  # no GPU was double-booked
    lab.close()
    open_lab(lab.path, readonly=True).close()
