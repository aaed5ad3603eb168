"""Whether a daemon lives is asked of its lock alone, and clients that stay have a dead one started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner import daemonctl, queries, verbs
from runner.daemon import hold_lock, sign_lock
from runner.keeper import STOPPED, Keeper
from runner.lab import Lab
from runner.onhost import locks
from runner.records import Submission
from tests.runner.commands import overnight, started
from tests.runner.daemons import fake_lab, kill_daemon, local_lab, until
from tests.runner.labs import make_lab
from tui.snapshot import Reader


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    opened = fake_lab(tmp_path)
    yield opened
    daemonctl.stop_daemon(opened)
    opened.close()


def test_a_young_row_is_no_daemon_and_an_old_one_no_death(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = make_lab(tmp_path)
    lab.store.beat(pid=os.getpid(), boot_id="b", started_at=time.time(), version="0", note=None)
    assert not queries.lab_state(lab).daemon_alive and "not running" in queries.lab_line(lab)
    down = overnight(capsys, "--lab", lab.path, "daemon", "status", "--json")
    assert (down.code, down.object["running"], down.object["pid"]) == (1, False, None)
    fd = hold_lock(lab.path)
    assert daemonctl.daemon_pid(lab) == 0 and daemonctl.daemon_status(lab) is None, "whoever holds it now has not said who it is"
    sign_lock(fd)
    lab.store._db.execute("UPDATE daemon SET beat_at = beat_at - 60")  # a full disk: it lives and cannot write
    state = queries.lab_state(lab)
    assert state.daemon_alive and 59 < (state.daemon_silent_s or 0) < 90
    said = overnight(capsys, "--lab", lab.path, "daemon", "status")
    assert said.code == 0 and f"pid {os.getpid()}" in said.out and "not running" not in said.out and "written nothing for 6" in said.out
    os.close(fd)


def test_a_stopped_daemon_leaves_runs_unwatched_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = make_lab(tmp_path)
    (run_id,) = verbs.submit(lab, Submission(budget_s=20), who="cli").run_ids
    lab.store.update_run(run_id, phase="running")
    said = overnight(capsys, "--lab", lab.path, "daemon", "status")
    assert "0 runs wait and 1 run on unwatched" in said.out


def test_a_restarted_daemon_is_not_taken_for_the_one_before(lab: Lab) -> None:
    first = daemonctl.ensure_daemon(lab).pid
    daemonctl.stop_daemon(lab)
    second = daemonctl.ensure_daemon(lab)
    assert second.pid != first and second.pid == daemonctl.daemon_pid(lab) and os.path.exists(f"/proc/{second.pid}")


async def test_a_killed_daemon_comes_back_for_a_screen_that_is_open(lab: Lab) -> None:
    before = daemonctl.ensure_daemon(lab).pid
    reader = Reader(lab.path, interval_s=0.1, keeper=Keeper(lab.path))
    reader.start(lambda _: None)
    try:
        kill_daemon(lab)
        await until(lambda: daemonctl.daemon_pid(lab) not in (None, 0, before))
    finally:
        reader.stop()


async def test_a_daemon_stopped_by_hand_is_left_alone_until_asked(lab: Lab) -> None:
    daemonctl.ensure_daemon(lab)
    daemonctl.stop_daemon(lab)
    keeper = Keeper(lab.path)
    assert keeper.look(lab) == STOPPED and daemonctl.daemon_pid(lab) is None
    assert keeper.look(lab, asked=True) != STOPPED
    await until(lambda: daemonctl.daemon_status(lab))
    await until(lambda: lab.store.setting("daemon_stopped") is False)


def test_waiting_for_a_slot_that_another_lab_has_says_so(tmp_path: Path) -> None:
    lab = local_lab(tmp_path)
    held = locks.GpuLocks(str(tmp_path / "locks"), ["CPU"])
    assert held.try_take()
    held.write_notes(**locks.who("another lab", "r0009"))
    words = [sys.executable, "-I", "-m", "runner.cli", "--lab", str(lab.path), "run", "--wait"]
    env = {**os.environ, "OVERNIGHT_LOCK_DIR": str(tmp_path / "locks")}
    with started(words, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as waiting:
        try:
            assert waiting.stderr is not None
            said = next((line for line in waiting.stderr if line.startswith("waiting:")), "")
            assert "here:cpu is foreign: held by another control room: lab another lab, run r0009" in said
        finally:
            held.release()
            daemonctl.stop_daemon(lab)
    lab.close()


def test_waiting_for_a_run_survives_the_death_of_the_daemon(lab: Lab, tmp_path: Path) -> None:
    lab.hosts_file.write_text(lab.hosts_file.read_text().replace("speed = 300", "speed = 10"))
    words = [sys.executable, "-I", "-m", "runner.cli", "--lab", str(lab.path), "run", "--wait", "--json"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(words, cwd=tmp_path, text=True, **pipes) as waiting:
        deadline = time.monotonic() + 60
        while not lab.store.count_runs("phase = 'running'"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(daemonctl.daemon_pid(lab) or 0, signal.SIGKILL)
        out, err = waiting.communicate(timeout=100)
    assert waiting.returncode == 0 and '"completed"' in out, err
