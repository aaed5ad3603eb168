"""The supervisor against real processes: each fault it is there for, done for real."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from runner.onhost import procs, rundirs, supervisor
from tests.runner.onhost.rig import Rig, until

# a worker that ignores TERM and moves a child into a session of its own
STUBBORN = f"""{sys.executable} -c "
import os, signal, sys, time
signal.signal(15, signal.SIG_IGN)
if not os.fork():
    os.setsid()
    print('worker up', flush=True)
    time.sleep(300)
time.sleep(300)" """


def test_exit_code_and_output_are_kept_byte_for_byte(rig: Rig) -> None:
    run = rig.start("printf 'a\\rb\\n\\000\\377'; echo err >&2; exit 7")
    status = rig.wait(run)
    assert (status["phase"], status["reason"], status["exit_code"], status["exit_signal"]) == ("ended", "exit", 7, None)
    assert (run / "out.log").read_bytes() == b"a\rb\n\x00\xfferr\n"
    assert status["log_bytes"] == 10 and status["log_dropped"] == 0
    assert status["started_at"] <= status["ended_at"] and status["elapsed_s"] >= 0
    until(lambda: not rig.run_lock_held(run), what="the supervisor is gone")
    assert not list(run.glob("*.tmp")) and not (run / "status.spare").exists()


def test_a_program_that_is_not_there_is_told_from_one_that_fails(rig: Rig) -> None:
    status = rig.wait(rig.start(["/no/such/program"]))
    assert status["reason"] == "exec-failed" and "/no/such/program" in status["detail"] and status["exit_code"] == 127


def test_death_by_signal(rig: Rig) -> None:
    status = rig.wait(rig.start("kill -SEGV $$"))
    assert (status["reason"], status["exit_code"], status["exit_signal"]) == ("signal", None, signal.SIGSEGV)


def test_the_environment_is_the_specs_and_nothing_else(rig: Rig) -> None:
    run = rig.start("env", launch_env={**os.environ, "OPENAI_API_KEY": "secret"})
    rig.wait(run)
    names = {line.split("=")[0] for line in (run / "out.log").read_text().splitlines()}
    assert names - {"PWD", "SHLVL", "_", "OLDPWD"} == {"PATH", "HOME", "OVERNIGHT_RUN_ID", "OVERNIGHT_RUN_DIR"}


def test_time_limit_ends_the_whole_tree_even_when_it_ignores_term(rig: Rig) -> None:
    run = rig.start(f"trap '' TERM; {STUBBORN} & sleep 300", time_limit_s=1.0, grace_s=0.5, gpus=["GPU-a"])
    rig.log_has(run, "worker up")
    status = rig.wait(run)
    assert (status["phase"], status["reason"], status["exit_signal"]) == ("ended", "time-limit", signal.SIGKILL)
    assert rig.left(run) == [] and not rig.held("GPU-a")


def test_stop_gives_the_run_time_to_save(rig: Rig) -> None:
    run = rig.start("trap 'echo saved; exit 0' TERM; echo up; sleep 300 & wait", grace_s=20)
    rig.log_has(run, "up")
    rig.stop(run, "pruned")
    status = rig.wait(run)
    assert (status["reason"], status["stop_reason"], status["exit_code"]) == ("stopped", "pruned", 0)
    assert (run / "out.log").read_text().endswith("saved\n") and rig.left(run) == []


def test_force_skips_the_grace_also_when_it_comes_later(rig: Rig) -> None:
    run = rig.start("trap '' TERM; echo up; while :; do sleep 1; done", grace_s=600)
    rig.log_has(run, "up")
    rig.stop(run)
    rig.wait(run, "stopping")
    rig.stop(run, force=True)
    assert rig.wait(run)["exit_signal"] == signal.SIGKILL


def test_a_worker_that_outlives_its_leader_is_ended_before_the_gpu_is_free(rig: Rig) -> None:
    run = rig.start(f"{STUBBORN} & until grep -q up ../out.log; do sleep 0.05; done; echo 'val_bpb: 1.0'; exit 0", gpus=["GPU-a"])
    status = rig.wait(run)
    assert status["exit_code"] == 0 and status["reason"] == "exit" and status["orphans_killed"] >= 1
    assert rig.left(run) == [] and not rig.held("GPU-a")


def test_kill_9_of_the_leader(rig: Rig) -> None:
    run = rig.start(f"{STUBBORN} & sleep 300", gpus=["GPU-a"])
    rig.log_has(run, "worker up")
    os.kill(rig.status(run)["leader"]["pid"], 9)
    status = rig.wait(run)
    assert (status["reason"], status["exit_signal"]) == ("signal", 9) and rig.left(run) == [] and not rig.held("GPU-a")


def test_kill_9_of_the_supervisor_keeps_the_gpu_locked_until_its_workers_are_swept(rig: Rig) -> None:
    # the worker is forked, as loaders are: it has inherited the GPU's lock
    run = rig.start(f"{STUBBORN} & sleep 300", gpus=["GPU-a"])
    rig.log_has(run, "worker up")
    status = rig.status(run)
    os.kill(status["supervisor"]["pid"], 9)
    until(lambda: not procs.alive(status["leader"]["pid"], status["leader"]["ticks"]), what="the leader dies with its supervisor")
    until(lambda: not rig.run_lock_held(run))
    assert rig.left(run) and rig.held("GPU-a")
    assert rundirs.state(str(run), sweep=False)["phase"] == "lost"
    assert rundirs.state(str(run))["phase"] == "lost"
    assert rig.left(run) == [] and not rig.held("GPU-a")


def test_a_sweep_never_touches_the_run_of_another_lab_with_the_same_id(rig: Rig) -> None:
    mine = rig.start("sleep 300", run_id="r0001", base=rig.base / "one")
    other = rig.start("sleep 300", run_id="r0001", base=rig.base / "two")
    rig.wait(other, "running")
    os.kill(rig.wait(mine, "running")["supervisor"]["pid"], 9)
    until(lambda: rundirs.state(str(mine))["phase"] == "lost")
    assert rundirs.state(str(other))["phase"] == "running" and rig.left(other)


def test_cancelling_one_of_two_runs_leaves_the_other_alone(rig: Rig) -> None:
    one, two = rig.start("sleep 300", gpus=["GPU-a"]), rig.start("sleep 300", gpus=["GPU-b"])
    rig.wait(one, "running"), rig.wait(two, "running")
    rig.stop(one, force=True)
    rig.wait(one)
    assert rundirs.state(str(two))["phase"] == "running" and rig.held("GPU-b") and not rig.held("GPU-a")


def test_a_frozen_supervisor_is_hung_not_dead(rig: Rig, monkeypatch) -> None:
    run = rig.start("sleep 300", gpus=["GPU-a"])
    supervisor = rig.wait(run, "running")["supervisor"]
    os.kill(supervisor["pid"], signal.SIGSTOP)
    state = until(lambda: ((s := rundirs.state(str(run)))["heartbeat_age_s"] or 0) > 3.5 and s)
    assert state["phase"] == "running" and rig.run_lock_held(run)
    monkeypatch.setattr(rundirs, "HUNG_S", 3.0)
    rig.stop(run, force=False)
    assert procs.alive(supervisor["pid"], supervisor["ticks"])
    rig.stop(run, force=True)
    until(lambda: rundirs.state(str(run))["phase"] == "lost")
    assert rig.left(run) == [] and not rig.held("GPU-a")


def test_term_to_the_supervisor_ends_the_run_in_order(rig: Rig) -> None:
    run = rig.start("trap 'exit 3' TERM; echo up; sleep 300 & wait")
    rig.log_has(run, "up")
    os.kill(rig.status(run)["supervisor"]["pid"], signal.SIGTERM)
    status = rig.wait(run)
    assert (status["reason"], status["exit_code"]) == ("supervisor-terminated", 3)


def test_two_supervisors_on_one_run(rig: Rig) -> None:
    run = rig.start("sleep 300")
    rig.wait(run, "running")
    before = rig.status(run)
    assert rig.launch(run).returncode == 4
    assert rig.launch(run, "--foreground").returncode == 4
    assert rig.status(run) == before
    rig.stop(run, force=True)
    rig.wait(run)
    until(lambda: not rig.run_lock_held(run))
    assert rig.launch(run).returncode == 5  # a run id is never used twice


def test_foreground_is_the_same_run_as_a_batch_process(rig: Rig) -> None:
    run = rig.make("echo hello; exit 4")
    assert rig.launch(run, "--foreground").returncode == 0
    assert rig.status(run)["exit_code"] == 4 and (run / "out.log").read_text() == "hello\n"


def test_flood_is_capped_and_counted(rig: Rig) -> None:
    run = rig.start("yes 0123456789abcde | head -c 50000000; printf 'the last word\\n'", max_log_bytes=1 << 20)
    status = rig.wait(run, limit_s=18)
    log = (run / "out.log").read_bytes()
    assert status["log_bytes"] == len(log) < (1 << 20) + (66 << 10)
    head, marker, tail = log[: 1 << 20], *log[1 << 20 :].lstrip(b"\n").split(b"\n", 1)
    assert head == b"0123456789abcde\n" * (1 << 16) and tail.endswith(b"abcde\nthe last word\n") and tail.startswith(b"0123")
    assert b"%d bytes of output were left out" % status["log_dropped"] in marker
    assert len(head) + status["log_dropped"] + len(tail) == 50_000_014


def test_a_little_over_the_cap_loses_nothing(rig: Rig) -> None:
    status = rig.wait(run := rig.start("head -c 5000 /dev/zero; echo end", max_log_bytes=1000))
    assert (status["log_bytes"], status["log_dropped"]) == (5004, 0) and (run / "out.log").read_bytes() == bytes(5000) + b"end\n"


def test_a_run_directory_that_vanishes_ends_its_run(rig: Rig, tmp_path: Path) -> None:
    run = rig.start("sleep 300", gpus=["GPU-a"])
    leader = rig.wait(run, "running")["leader"]
    warden = rig.status(run)["supervisor"]
    # the supervisor may be writing a file into the folder at this very moment
    until(lambda: shutil.rmtree(run, ignore_errors=True) or not run.exists(), what="folder removed")
    rig.dirs.remove(run)
    until(lambda: not procs.alive(leader["pid"], leader["ticks"]) and not rig.held("GPU-a"), what="run ended")
    until(lambda: not procs.alive(warden["pid"], warden["ticks"]), what="its supervisor ended too: it has nowhere to write")


def test_a_run_that_takes_its_control_files_away_still_ends_in_order(rig: Rig) -> None:
    spoil = "cd ..; for f in *; do [ $f = work ] || rm -rf $f; done; mkdir status.json status.spare; ln -s /etc/passwd out.log; "
    run = rig.start(spoil + "mkfifo work/events.jsonl; echo spoiled > work/done; sleep 300", gpus=["GPU-a"])
    until(lambda: (run / "work" / "done").exists())
    until(lambda: rundirs.state(str(run))["phase"] == "running" and rig.run_lock_held(run), what="lock and status are there again")
    state = rundirs.state(str(run))
    assert "symbolic link" in state["unreadable"]["out.log"] and "a pipe" in state["unreadable"]["work/events.jsonl"]
    assert rundirs.read(str(run), "out.log", 0, 100) == rundirs.read(str(run), "work/events.jsonl", 0, 100) == b""
    rig.stop(run)
    until(lambda: rundirs.state(str(run))["phase"] == "ended")
    status = rig.status(run)
    assert (status["reason"], status["stop_reason"]) == ("stopped", "cancelled") and not rig.held("GPU-a")


def test_a_status_that_cannot_be_written_is_given_up_with_the_gpus_free(tmp_path: Path, monkeypatch) -> None:
    order: list[str] = []

    class Refusing:
        """A disk that stays full; only what `persist` uses."""

        taken, dir_fd = True, os.open(tmp_path, os.O_RDONLY)

        def release(self) -> None:
            order.append("released")

        def retry(self) -> bool:
            order.append("tried")
            return False

        def close(self) -> None:
            order.append("closed")

        @property
        def locks(self) -> Refusing:
            return self

        @locks.setter
        def locks(self, value: None) -> None:
            pass

        status_file = locks

    monkeypatch.setattr(supervisor, "LAST_WORD_S", 0.0)
    supervisor.Supervisor.persist(Refusing())  # type: ignore[arg-type]
    os.close(Refusing.dir_fd)
    assert order == ["released", "tried", "closed"]


def test_unusable_specs_are_refused_with_a_reason(rig: Rig) -> None:
    run = rig.make("true")
    for text in (
        "",
        "[]",
        "{",
        json.dumps({"v": 2, "run_id": "r1", "argv": ["true"]}),
        json.dumps({"v": 1, "run_id": "r1", "argv": "true"}),
    ):
        (run / "spec.json").write_text(text)
        done = rig.launch(run)
        assert done.returncode == 2 and b"spec.json" in done.stderr and b"Traceback" not in done.stderr
    assert not (run / "status.json").exists()


def test_control_files_are_never_followed_through_links(rig: Rig, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("out.log", "lock", "heartbeat", "supervisor.err"):
        run = rig.make("echo overwritten")
        (run / name).symlink_to(victim)
        rig.launch(run)
        until(lambda run=run: not (run / "lock").exists() or not rig.run_lock_held(run))
        assert victim.read_text() == "precious", name
    outside = tmp_path / "outside"
    outside.mkdir()
    run = rig.make("touch here")
    (run / "work").rmdir()
    (run / "work").symlink_to(outside)
    rig.launch(run)
    assert rig.wait(run)["reason"] == "exec-failed" and list(outside.iterdir()) == []


def test_a_full_disk_neither_stops_the_run_nor_loses_its_end(rig: Rig, small_disk: Path) -> None:
    done = rig.base / "went_on"
    run = rig.start(f"yes 0123456789abcdef | head -c 3000000; touch {done}; exit 4", base=small_disk, run_id="full")
    status = rig.wait(run)  # published on the full disk: its blocks were reserved
    assert done.exists() and (status["exit_code"], status["log_error"]) == (4, "ENOSPC")
    assert status["log_dropped"] > 0 and status["log_bytes"] == (run / "out.log").stat().st_size
    assert status["log_bytes"] + status["log_dropped"] == 3_000_000


def test_stop_reaches_the_run_on_a_full_disk(rig: Rig, small_disk: Path) -> None:
    run = rig.start("trap 'exit 9' TERM; cat /dev/zero > big; echo up; sleep 300 & wait", base=small_disk, run_id="full")
    until(lambda: (run / "work" / "big").exists() and os.statvfs(small_disk).f_bavail == 0)
    for n in range(100):  # take the last inodes' room too
        try:
            (small_disk / f"fill{n}").write_bytes(b"x" * 4096)
        except OSError:
            break
    time.sleep(0)
    rig.stop(run)
    assert rig.wait(run)["reason"] in ("stopped", "supervisor-terminated")
    assert rig.left(run) == []


def test_the_disk_floor_is_checked_before_the_start(rig: Rig) -> None:
    status = rig.wait(rig.start("true", min_free_mib=1 << 40))
    assert (status["phase"], status["reason"], status["started_at"]) == ("refused", "disk-full", None)
    assert str(1 << 40) in status["detail"]


def test_what_kill_cannot_end_is_said_and_keeps_the_gpu(rig: Rig) -> None:
    # no process in the kernel's deep sleep can be had to order: the supervisor's KILL is made ineffective instead
    run = rig.make("trap '' TERM; sleep 300 & wait; sleep 300", gpus=["GPU-a"], time_limit_s=0.3, grace_s=0.2, kill_wait_s=0.5)
    code = rundirs.launch_command(sys.executable, "supervisor")[-1].replace(
        "sys.exit(", "from onhost import procs; real = procs.send; procs.send = lambda p, t, s: s == 9 or real(p, t, s); sys.exit("
    )
    import subprocess

    assert subprocess.run([sys.executable, "-I", "-c", code, str(run)], timeout=10, check=False).returncode == 0
    status = rig.wait(run)
    assert status["phase"] == "ended" and status["unkillable"] and rig.held("GPU-a")
    assert set(status["unkillable"]) & set(rig.left(run))


def test_a_run_of_another_boot_is_lost_and_its_pids_are_left_alone(rig: Rig) -> None:
    run = rig.start("true")
    status = rig.wait(run)
    until(lambda: not rig.run_lock_held(run))
    status.update(phase="running", boot_id="00000000-0000-0000-0000-000000000000", leader={"pid": os.getpid(), "ticks": None})
    (run / "status.json").write_text(json.dumps(status))
    assert rundirs.state(str(run))["phase"] == "lost"


def test_a_pid_used_again_is_not_signalled() -> None:
    me = os.getpid()
    ticks = procs.start_ticks(me)
    assert ticks is not None and procs.alive(me, ticks)
    assert not procs.alive(me, ticks - 1) and procs.send(me, ticks - 1, signal.SIGKILL) is False
    assert procs.send(1, None, 0) is False
