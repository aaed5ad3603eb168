"""Host-side supervisor of one run: outlives the connection that started it, holds the GPU locks, ends what must end, and writes down
what happened.

    python -I -c 'import sys; sys.path.insert(0, PARENT); from onhost import supervisor; sys.exit(supervisor.main())' RUN_DIR [--foreground]

RUN_DIR/spec.json is there already; the files are described in FORMAT.md section 3. Returns once the run is on record: 0 started, 3
refused (--foreground), 4 another supervisor owns this directory, 5 it was used before, 2 the spec cannot be used (the reason on
stderr).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import traceback
from typing import Any, Dict, List, Optional, Tuple

from . import files, leader, locks, memory, procs

BEAT_S = 2.0
LOOK_S = 0.2  # how often `stop` is looked for
NOTE_FRESH_S = 3.0
ORPHAN_GRACE_S = 2.0
LAST_WORD_S = 600.0  # how long the last status is tried to be written before it is given up
Refusal = Tuple[str, str]


class BadSpec(Exception):
    """Raised when spec.json cannot be used; the text says why."""


def read_spec(dir_fd: int) -> Dict[str, Any]:
    """The checked spec of a run directory."""
    spec = files.read_object(dir_fd, "spec.json")
    if spec is None:
        raise BadSpec("spec.json is missing or no JSON object")
    argv = spec.get("argv")
    if spec.get("v") != 1 or not spec.get("run_id"):
        raise BadSpec("spec.json is not of version 1, or names no run")
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise BadSpec("spec.json: argv must be a list of texts")
    return spec


def is_gpu(uuid: str) -> bool:
    """Whether a lock stands for a GPU (the CPU slot has no device memory to look at)."""
    return not uuid.startswith("CPU")


class Supervisor:
    """One run from its lock to its last word."""

    def __init__(self, run_dir: str, dir_fd: int, lock_fd: int, spec: Dict[str, Any]) -> None:
        self.run_dir, self.dir_fd, self.lock_fd, self.spec = run_dir, dir_fd, lock_fd, spec
        self.status_file = files.StatusFile(dir_fd)
        self.boot_id = procs.boot_id()
        me = os.getpid()
        self.status: Dict[str, Any] = {
            "v": 1, "run_id": spec["run_id"], "seq": 0, "phase": "starting", "reason": None, "detail": None, "stop_reason": None,
            "boot_id": self.boot_id, "supervisor": {"pid": me, "ticks": procs.start_ticks(me)}, "leader": None, "holder": None,
            "queued_at": time.time(), "started_at": None, "ended_at": None, "elapsed_s": None, "exit_code": None, "exit_signal": None,
            "orphans_killed": 0, "unkillable": [], "gpu_memory": {}, "log_bytes": 0, "log_dropped": 0, "log_error": None,
            "max_rss_kib": None,
        }  # fmt: skip
        self.gpus: List[str] = sorted(set(spec.get("gpus") or []))
        self.baseline: Dict[str, Any] = {g: (spec.get("mem_baseline_mib") or {}).get(g) for g in self.gpus if is_gpu(g)}
        self.grace_s = float(spec.get("grace_s") or 10)
        self.locks: Optional[locks.GpuLocks] = locks.GpuLocks(spec.get("lock_dir") or locks.default_dir(), self.gpus)
        self.tree: Optional[leader.Tree] = None
        self.log: Optional[leader.Log] = None
        self.beat_fd = files.open_control(dir_fd, "heartbeat", os.O_WRONLY | os.O_CREAT)
        self.beats, self.next_beat = 0, 0.0
        self.stop_seen: Optional[Tuple[int, int]] = None
        self.forced = self.stop_too_late = self.incomplete = False
        self.terminated: List[int] = []
        self.wake_out, self.wake_in = os.pipe()
        os.set_blocking(self.wake_out, False)
        os.set_blocking(self.wake_in, False)
        signal.set_wakeup_fd(self.wake_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self.terminated.append(1))

    # -- what others see ------------------------------------------------------------------------------------------------------------------

    def publish(self, **news: Any) -> None:
        """Replace status.json; on a full disk it is tried again at each beat."""
        self.status.update(news)
        self.status["seq"] += 1
        self.status_file.write(self.status)

    def beat(self) -> None:
        """Every two seconds: heartbeat (in place, so a full disk cannot stop it), pending status, lock files kept young."""
        now = time.monotonic()
        if now < self.next_beat:
            return
        self.beats, self.next_beat = self.beats + 1, now + BEAT_S
        try:
            os.pwrite(self.beat_fd, b"%-10d %s %-16.3f %-18.3f\n" % (self.beats, self.boot_id.encode(), now, time.time()), 0)
        except OSError:
            pass  # the very first beat on a full disk; the lock still tells that we live
        self.status_file.retry()
        self.restore_files()
        if self.locks:
            self.locks.touch()

    def restore_files(self) -> None:
        """Make the run's lock and status again when the run took them away: without them it would look as if we had died. At the second
        look, so that nothing gets in the way of somebody who is removing the whole directory.
        """
        try:
            locked = os.path.samestat(os.stat("lock", dir_fd=self.dir_fd, follow_symlinks=False), os.fstat(self.lock_fd))
        except OSError:
            locked = False
        complete = locked and files.size_of(self.dir_fd, "status.json") is not None
        if not complete and self.incomplete and not files.gone(self.dir_fd):
            self.publish()
            try:
                self.lock_fd = self.lock_fd if locked else files.take_run_lock(self.dir_fd) or self.lock_fd
            except OSError:
                pass  # a full disk: the pid in the status tells that we live
        self.incomplete = not complete

    def stop_wanted(self) -> Optional[str]:
        """Why the run should end, as far as others say: a new `stop` file, SIGTERM to us, or the run directory gone."""
        try:
            info = os.stat("stop", dir_fd=self.dir_fd, follow_symlinks=False)
        except OSError:
            if self.terminated:
                return "supervisor-terminated"
            return "stopped" if files.gone(self.dir_fd) else None
        if (info.st_ino, info.st_mtime_ns) != self.stop_seen:
            self.stop_seen = (info.st_ino, info.st_mtime_ns)
            wish = files.read_object(self.dir_fd, "stop") or {}
            reason = str(wish.get("reason") or "cancelled")[:200]
            self.stop_too_late = reason == "withdrawn" and self.status["started_at"] is not None  # only a standby can be taken back
            if not self.stop_too_late:
                self.forced, self.status["stop_reason"] = bool(wish.get("force")), reason
        if self.stop_too_late:
            return "supervisor-terminated" if self.terminated else None
        return "stopped"

    def sleep(self, more_fds: List[int]) -> None:
        """Until something happens, at most LOOK_S."""
        ready, _, _ = select.select([self.wake_out, *more_fds], [], [], LOOK_S)
        if self.wake_out in ready:
            os.read(self.wake_out, 4096)

    # -- before the run -------------------------------------------------------------------------------------------------------------------

    def main(self) -> int:
        """Wait, check, run, and tell; the exit code of --foreground."""
        refusal = self.take_gpus() or self.check_disk() or self.check_memory()
        if refusal:
            return self.refuse(*refusal)
        self.start()
        assert self.tree and self.log
        while not self.tree.reap():
            self.beat()
            self.end_what_must_end()
            if self.status["unkillable"]:
                break
            emptied = self.log.pump()
            if emptied:
                self.sleep([self.log.source_fd])
        self.finish()
        return 0

    def prepare_tree(self) -> leader.Tree:
        """The tree and its log, made before the locks are taken so that the leader inherits their descriptors."""
        assert self.locks
        if self.tree is None:
            self.tree = leader.Tree(self.spec, self.dir_fd, self.run_dir, self.locks.fds)
            self.log = leader.Log(self.dir_fd, self.tree.output, int(self.spec.get("max_log_bytes") or 64 << 20))
        return self.tree

    def take_gpus(self) -> Optional[Refusal]:
        """Take the GPU locks now, or (standby) wait for them with the imports done."""
        assert self.locks
        wait_s = float(self.spec.get("wait_lock_s") or 0)
        if self.locks.try_take():
            return None
        if not wait_s:
            self.status["holder"] = next((note for note in self.locks.notes() if note), {})
            return "gpu-locked", "another run holds the GPU"
        return self.wait_for_gpus(time.monotonic() + wait_s)

    def wait_for_gpus(self, until: float) -> Optional[Refusal]:
        """Standby: the lock is handed over by the kernel; `stop` withdraws."""
        assert self.locks
        self.publish(phase="waiting")
        if leader.warm_possible(self.spec):
            self.prepare_tree().spawn(warm=True)
        self.locks.take_in_background(self.wake_in)
        while not self.locks.taken:
            self.beat()
            if self.locks.error:
                return "gpu-locked", self.locks.error
            why = self.stop_wanted()
            if why:
                return why, "withdrawn before it started"
            if time.monotonic() >= until:
                self.status["holder"] = next((note for note in self.locks.notes() if note), {})
                return "lock-timeout", "the GPU did not become free in time"
            if self.tree and self.log:
                self.tree.reap()
                self.log.pump()
            self.sleep([])
        return None

    def check_disk(self) -> Optional[Refusal]:
        """No run starts below the free-disk floor."""
        floor = int(self.spec.get("min_free_mib") or 0)
        room = os.fstatvfs(self.dir_fd)
        free_mib = room.f_bavail * room.f_frsize >> 20
        return ("disk-full", "%d MiB free, the floor is %d MiB" % (free_mib, floor)) if free_mib < floor else None

    def check_memory(self) -> Optional[Refusal]:
        """The GPU's memory must be at its baseline; a run that just ended may have seen to that already (its note)."""
        assert self.locks
        notes = self.locks.notes()
        self.locks.write_notes(**locks.who(self.spec.get("lab_id"), str(self.spec["run_id"])))
        if not self.baseline:
            return None
        now = time.monotonic()
        if all(n.get("clean") and n.get("boot_id") == self.boot_id and 0 <= now - n.get("released", 0.0) < NOTE_FRESH_S for n in notes):
            return None
        seen = memory.ask(self.limits())
        self.status["gpu_memory"] = self.memory_facts(seen)
        for uuid, state in (seen or {}).items():
            if state["clean"] is False:
                return "gpu-memory", "%s holds %d MiB before the run starts" % (uuid, state["used_mib"])
            if self.baseline[uuid] is None:
                self.baseline[uuid] = state["used_mib"]
        return None

    def limits(self) -> Dict[str, Optional[float]]:
        """How much memory each GPU may hold and still count as free."""
        return {g: memory.limit_mib(b) for g, b in self.baseline.items()}

    def memory_facts(self, seen: Optional[Dict[str, Any]]) -> Dict[str, Any]:
        """gpu_memory of the status: null where nothing could be read."""
        none = {"used_mib": None, "holders": [], "clean": None}
        return {g: dict((seen or {}).get(g, none), baseline_mib=b) for g, b in self.baseline.items()}

    def refuse(self, reason: str, detail: str) -> int:
        """Say why nothing was run; the run may be tried again here."""
        if self.tree:
            self.tree.signal_all(signal.SIGKILL)
            deadline = time.monotonic() + 5
            while not self.tree.reap() and time.monotonic() < deadline:
                self.sleep([])
        if self.locks and self.locks.taken:
            self.locks.write_notes(boot_id=self.boot_id)
        self.publish(phase="refused", reason=reason, detail=detail, ended_at=time.time())
        self.persist()
        return 3

    # -- the run --------------------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the leader, or open the gate of the warm one."""
        tree = self.prepare_tree()
        error = None
        if not tree.open_gate():
            error = tree.spawn()
        self.started = time.monotonic()  # monotonic: a clock jump neither ends nor extends a run
        self.kill_at: Optional[float] = None
        self.killed_at: Optional[float] = None
        self.left_at: Optional[float] = None
        self.reason: Optional[str] = "exec-failed" if error else None
        self.publish(phase="running", started_at=time.time(), leader={"pid": tree.pid, "ticks": tree.ticks}, detail=error)

    def end_what_must_end(self) -> None:
        """TERM, grace, KILL: for a stop, the time limit, and workers that outlive their leader."""
        assert self.tree
        now = time.monotonic()
        wish = self.stop_wanted()
        if self.tree.exit is not None and self.left_at is None:
            self.left_at = now
            if self.reason is None:
                self.status["orphans_killed"] = self.tree.signal_all(signal.SIGTERM)
                self.kill_at = now + min(self.grace_s, ORPHAN_GRACE_S)
        limit_s = self.spec.get("time_limit_s")
        if self.reason is None and self.left_at is None:
            self.reason = wish or ("time-limit" if limit_s and now - self.started >= limit_s else None)
            if self.reason:
                self.kill_at = now if self.forced else now + self.grace_s
                self.publish(phase="stopping", reason=self.reason)
                if not self.forced:
                    self.tree.signal_all(signal.SIGTERM)
        elif self.forced and self.killed_at is None:
            self.kill_at = now
        if self.kill_at is not None and now >= self.kill_at:
            self.killed_at = self.killed_at or now
            hit = self.tree.signal_all(signal.SIGKILL)
            if self.left_at is not None:
                self.status["orphans_killed"] = max(hit, self.status["orphans_killed"])
            self.kill_at = now + 0.2
            if now - self.killed_at > float(self.spec.get("kill_wait_s") or 15):
                self.status["unkillable"] = self.tree.members()

    def finish(self) -> None:
        """Last bytes, memory, locks, and only then the word `ended`: who reads it may take the GPU at once."""
        assert self.tree and self.log and self.locks
        while not self.log.pump():
            pass
        self.log.write_tail()
        facts = self.memory_facts(memory.ask(self.limits()) if self.baseline else {})
        clean = all(state["clean"] for state in facts.values()) and not self.status["unkillable"]
        self.locks.write_notes(boot_id=self.boot_id, released=time.monotonic(), clean=clean, run_id=self.spec["run_id"])
        ended_at = time.time()  # before the lock goes: the next run on this GPU starts after it
        self.locks.release()
        self.locks = None
        exit_facts = self.tree.exit_facts()
        if self.reason is None and self.terminated and exit_facts["exit_signal"] == signal.SIGTERM:
            self.reason = "supervisor-terminated"  # a batch system signalled us and the run at once, and the run was faster
        self.publish(
            phase="ended", reason=self.reason or ("exit" if exit_facts["exit_signal"] is None else "signal"), ended_at=ended_at,
            elapsed_s=round((self.left_at or time.monotonic()) - self.started, 3), gpu_memory=facts, max_rss_kib=self.tree.max_rss_kib,
            **exit_facts, **self.log.facts(),
        )  # fmt: skip
        self.persist()

    def persist(self) -> None:
        """Stay (and keep the run's lock, but no GPU) until the last status is on disk, or cannot get there: its directory is gone, or the
        disk stays full for minutes.
        """
        if self.locks and self.locks.taken:
            self.locks.release()
            self.locks = None
        until = time.monotonic() + LAST_WORD_S
        while not self.status_file.retry() and not files.gone(self.dir_fd) and time.monotonic() < until:
            time.sleep(BEAT_S)
        self.status_file.close()


def supervise(run_dir: str, tell: Optional[int]) -> int:
    """Take the run directory's lock and supervise; `tell` hears the outcome of the start."""

    def answer(code: int, text: str = "") -> int:
        if tell is not None:
            os.write(tell, bytes([code]) + text.encode())
            os.close(tell)
        elif text:
            sys.stderr.write(text)
        return code

    try:
        dir_fd = files.open_dir(run_dir)
        lock_fd = files.take_run_lock(dir_fd)
        if lock_fd is None:
            return answer(4)
        if files.size_of(dir_fd, "status.json") is not None:
            return answer(5)
        spec = read_spec(dir_fd)
        errors = files.open_control(dir_fd, "supervisor.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        supervisor = Supervisor(os.path.realpath(run_dir), dir_fd, lock_fd, spec)
    except (OSError, BadSpec) as problem:
        return answer(2, "%s: %s\n" % (run_dir, problem))
    os.dup2(errors, 2)
    supervisor.publish()
    supervisor.beat()  # a supervisor that freezes early must be seen to be frozen
    answer(0)
    try:
        return supervisor.main()
    except Exception as problem:  # noqa: BLE001 - nobody else will tell: end the run and leave the reason
        traceback.print_exc()
        if supervisor.tree:
            supervisor.tree.signal_all(signal.SIGKILL)
        supervisor.publish(
            phase="ended", reason="supervisor-terminated", detail="the supervisor failed: %r" % problem, ended_at=time.time()
        )
        supervisor.persist()
        return 1


def main(argv: Optional[List[str]] = None) -> int:
    """The command line: RUN_DIR [--foreground]."""
    words = sys.argv[1:] if argv is None else argv
    foreground = "--foreground" in words
    run_dir = os.path.abspath(next(word for word in words if not word.startswith("--")))
    os.umask(0o077)
    tell = None if foreground else procs.detach()
    os.chdir("/")
    code = supervise(run_dir, tell)
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: a thread may still wait for a lock
