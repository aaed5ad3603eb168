"""One run per GPU and machine: between labs, between users, and handed from run to run."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from runner.onhost import files, locks, rundirs
from tests.runner.commands import started
from tests.runner.onhost.rig import Rig, until

ONHOST_PARENT = str(Path(rundirs.__file__).parents[1])
PROTECTED = Path("/proc/sys/fs/protected_regular")


def test_two_labs_never_share_a_gpu_and_the_second_is_told_who_has_it(rig: Rig) -> None:
    first = rig.start("sleep 300", gpus=["GPU-a", "GPU-b"], lab_id="lab-one", run_id="r0007")
    rig.wait(first, "running")
    second = rig.start("touch ran", gpus=["GPU-b", "GPU-c"], lab_id="lab-two")
    status = rig.wait(second)
    assert (status["phase"], status["reason"], status["started_at"]) == ("refused", "gpu-locked", None)
    assert (status["holder"]["run_id"], status["holder"]["lab_id"]) == ("r0007", "lab-one") and status["holder"]["user"]
    assert not (second / "work" / "ran").exists() and not rig.held("GPU-c")
    rig.stop(first, force=True)
    rig.wait(first)
    until(lambda: not rig.run_lock_held(second))
    assert rundirs.start(str(second), sys.executable) is True  # a refused run ran nothing: it may be started again
    assert rig.wait(second)["exit_code"] == 0 and (second / "work" / "ran").exists()
    until(lambda: not rig.run_lock_held(second))
    assert rundirs.start(str(second), sys.executable) is False


def test_a_lock_file_left_behind_blocks_nobody(rig: Rig) -> None:
    rig.lock_dir.mkdir()
    (rig.lock_dir / "GPU-a.lock").write_text('{"run_id": "r0001", "pid": 1}')
    assert rig.wait(rig.start("true", gpus=["GPU-a"]))["exit_code"] == 0


def test_standby_starts_when_the_gpu_is_handed_over(rig: Rig) -> None:
    first = rig.start("until [ -e go ]; do sleep 0.05; done", gpus=["GPU-a"])
    rig.wait(first, "running")
    second = rig.start("touch ran", gpus=["GPU-a"], wait_lock_s=60)
    third = rig.start("touch ran", gpus=["GPU-a"], wait_lock_s=60)
    assert rig.wait(second, "waiting")["started_at"] is None
    rig.wait(third, "waiting")
    (first / "work" / "go").touch()
    ends = [rig.wait(run) for run in (first, second, third)]
    assert [status["exit_code"] for status in ends] == [0, 0, 0]
    assert ends[1]["started_at"] >= ends[0]["started_at"] + ends[0]["elapsed_s"]
    assert ends[2]["started_at"] >= ends[1]["started_at"] + ends[1]["elapsed_s"]


def test_standby_is_withdrawn_and_gives_up(rig: Rig) -> None:
    first = rig.start("sleep 300", gpus=["GPU-a"])
    rig.wait(first, "running")
    second = rig.start("touch ran", gpus=["GPU-a"], wait_lock_s=60, run_id="second")
    rig.wait(second, "waiting")
    rig.stop(second, "withdrawn")
    status = rig.wait(second)
    assert (status["phase"], status["reason"], status["stop_reason"]) == ("refused", "stopped", "withdrawn")
    third = rig.start("touch ran", gpus=["GPU-a"], wait_lock_s=0.5)
    status = rig.wait(third)
    assert (status["phase"], status["reason"]) == ("refused", "lock-timeout") and status["holder"]["run_id"] == "r1"
    assert not (second / "work" / "ran").exists() and not (third / "work" / "ran").exists()


def test_kill_9_of_a_standby_leaves_the_gpu_to_the_others(rig: Rig) -> None:
    first = rig.start("sleep 300", gpus=["GPU-a"])
    rig.wait(first, "running")
    second = rig.start("true", gpus=["GPU-a"], wait_lock_s=60)
    os.kill(rig.wait(second, "waiting")["supervisor"]["pid"], 9)
    until(lambda: rundirs.state(str(second))["phase"] == "lost")
    rig.stop(first, force=True)
    rig.wait(first)
    assert rig.wait(rig.start("true", gpus=["GPU-a"]))["exit_code"] == 0


def test_a_warm_standby_has_its_imports_done_and_runs_the_script_as_python_would(rig: Rig) -> None:
    first = rig.start("until [ -e go ]; do sleep 0.05; done", gpus=["GPU-a"])
    rig.wait(first, "running")
    script = "import slow_import, sys, os; print(__name__, __file__, sys.argv, sys.path[0] == os.getcwd(), os.path.exists('../../started'))"
    second = rig.make([sys.executable, "train.py", "--x"], gpus=["GPU-a"], wait_lock_s=60, warm=["slow_import"])
    (second / "work" / "train.py").write_text(script)
    (second / "work" / "slow_import.py").write_text(f"open({str(rig.base / 'imported')!r}, 'w').close()")
    assert rig.launch(second).returncode == 0
    until(lambda: (rig.base / "imported").exists(), what="the standby imports while the GPU is busy")
    assert rig.status(second)["phase"] == "waiting" and rig.held("GPU-a")
    (first / "work" / "go").touch()
    assert rig.wait(second)["exit_code"] == 0
    assert (second / "out.log").read_text() == "__main__ train.py ['train.py', '--x'] True False\n"


def test_a_warm_standby_that_is_withdrawn_leaves_nothing(rig: Rig) -> None:
    first = rig.start("sleep 300", gpus=["GPU-a"])
    rig.wait(first, "running")
    second = rig.make([sys.executable, "train.py"], gpus=["GPU-a"], wait_lock_s=60, warm=["json"])
    (second / "work" / "train.py").write_text("open('ran', 'w')")
    rig.launch(second)
    until(lambda: rig.left(second), what="the warm interpreter")
    rig.stop(second)
    assert rig.wait(second)["phase"] == "refused"
    until(lambda: rig.left(second) == [])
    assert not (second / "work" / "ran").exists()


def test_the_warm_run_keeps_the_gpu_locked_when_its_supervisor_is_killed(rig: Rig) -> None:
    first = rig.start("until [ -e go ]; do sleep 0.05; done", gpus=["GPU-a"])
    rig.wait(first, "running")
    second = rig.make([sys.executable, "train.py"], gpus=["GPU-a"], wait_lock_s=60, warm=["json"])
    (second / "work" / "train.py").write_text("import os, time\nif os.fork() == 0: os.setsid()\nprint('up', flush=True)\ntime.sleep(300)")
    rig.launch(second)
    (first / "work" / "go").touch()
    rig.log_has(second, "up\nup")
    os.kill(rig.status(second)["supervisor"]["pid"], 9)
    until(lambda: not rig.run_lock_held(second))
    assert rig.held("GPU-a")  # the forked worker inherited the lock although it was taken after the interpreter started
    until(lambda: rundirs.state(str(second))["phase"] == "lost")
    assert not rig.held("GPU-a")


def test_a_lock_whose_file_was_cleaned_away_is_not_believed(tmp_path: Path) -> None:
    taken = locks.GpuLocks(str(tmp_path), ["GPU-a"])
    (tmp_path / "GPU-a.lock").unlink()  # between opening and locking, as a cleaner of temporary folders would
    assert taken.try_take()
    assert locks.holder(str(tmp_path), "GPU-a") is not None
    taken.release()
    assert locks.holder(str(tmp_path), "GPU-a") is None


def test_a_lock_folder_open_to_all_without_the_sticky_bit_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(OSError, match="sticky"):
        locks.open_lock_dir(str(folder))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError):
        locks.open_lock_dir(str(tmp_path / "link"))


def test_a_lock_folder_that_cannot_be_used_is_no_busy_gpu(rig: Rig) -> None:
    (rig.base / "file").write_text("")
    run = rig.make("true", gpus=["GPU-a"], lock_dir=str(rig.base / "file"))
    done = rig.launch(run)
    assert done.returncode == 2 and b"lock folder" in done.stderr and not (run / "status.json").exists()


def test_a_file_system_without_locks_does_not_look_like_a_held_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    with (tmp_path / "lock").open("w") as file, pytest.raises(OSError, match="No locks available"):
        files.try_lock(file.fileno(), patience_s=5)


def test_looking_whether_a_lock_is_held_refuses_no_run_and_no_other_look(tmp_path: Path) -> None:
    """Every control room looks at every lock once a second; each look has the lock for some microseconds."""
    folder, stop = str(tmp_path / "locks"), threading.Event()
    locks.GpuLocks(folder, ["GPU-a"]).release()
    seen: list[object] = []

    def look() -> None:
        while not stop.is_set():
            seen.append(locks.holder(folder, "GPU-a"))

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for thread in lookers:
        thread.start()
    try:
        for _ in range(200):
            mine = locks.GpuLocks(folder, ["GPU-a"])
            assert mine.try_take()
            mine.release()
    finally:
        stop.set()
        for thread in lookers:
            thread.join()
    assert len(seen) > 100
    assert locks.holder(folder, "GPU-a") is None


def as_user(uid: int, lock_dir: Path, action: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A process of another account that works with the GPU's lock."""
    code = (
        f"import os, sys; sys.path.insert(0, {ONHOST_PARENT!r}); from onhost import locks; os.setgid({uid}); os.setuid({uid})\n"
        f"l = locks.GpuLocks({str(lock_dir)!r}, ['GPU-a']); print(l.try_take(), flush=True)\n{action}"
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return started([sys.executable, "-I", "-c", code], text=True, **pipes)


@pytest.mark.parametrize("protection", [0, 2])
def test_two_users_share_one_lock_folder_whatever_the_kernel_protects(tmp_path: Path, protection: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("acting as two users needs root")
    for folder in (tmp_path, *tmp_path.parents):
        if folder != Path("/tmp") and folder.is_relative_to("/tmp"):
            folder.chmod(0o755)
    before = PROTECTED.read_text()
    try:
        PROTECTED.write_text(f"{protection}\n")
    except OSError:
        pytest.skip("fs.protected_regular cannot be set here")
    try:
        lock_dir = tmp_path / "locks"
        lock_dir.mkdir()
        lock_dir.chmod(0o1777)
        with as_user(65534, lock_dir, "sys.stdin.readline()") as one:
            assert one.stdout and one.stdout.readline() == "True\n"
            with as_user(1234, lock_dir, "") as two:
                assert two.communicate(timeout=10)[0] == "False\n"
            mine = locks.GpuLocks(str(lock_dir), ["GPU-a"])
            assert mine.try_take() is False
            one.communicate("\n", timeout=10)
        assert mine.try_take() is True
        mine.release()
    finally:
        PROTECTED.write_text(before)
