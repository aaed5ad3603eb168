"""The run itself: its first process, everything below it, and what it prints.

The supervisor is a sub-reaper, so a worker that double-forks or opens its own session comes back to it. The kernel answers "is the tree
gone?": `wait4` says ECHILD exactly when no descendant is left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
from typing import Any, Dict, List, Optional

from . import files, procs

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
OOM_SCORE_ADJ = b"300"  # when memory runs out, the kernel takes the run before its supervisor or the host's sshd
TAIL_BYTES = 64 << 10
WARM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "warm.py")


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Tree:
    """The leader and its descendants."""

    def __init__(self, spec: Dict[str, Any], dir_fd: int, run_dir: str, lock_fds: List[int]) -> None:
        self.spec, self.dir_fd, self.run_dir, self.lock_fds = spec, dir_fd, run_dir, lock_fds
        self.pid = 0
        self.ticks: Optional[int] = None
        self.gate: Optional[int] = None
        self.exit: Optional[int] = None  # wait status of the leader
        self.max_rss_kib: Optional[int] = None
        self.gone = False
        self.output, self.their_output = os.pipe()
        os.set_blocking(self.output, False)
        prctl(PR_SET_CHILD_SUBREAPER, 1)

    def spawn(self, warm: bool = False) -> Optional[str]:
        """Start the leader; the reason in words when it could not be.

        A warm one imports what `spec.warm` names and waits for `open_gate`.
        """
        gate_out, gate_in = os.pipe() if warm else (-1, -1)
        error_out, error_in = os.pipe()
        argv = list(self.spec["argv"])
        if warm:
            argv = [argv[0], WARM, str(gate_out), ",".join(self.spec["warm"]), *argv[1:]]
        me = os.getpid()
        self.gone, self.exit = False, None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if warm:
                    os.set_inheritable(gate_out, True)
                    os.close(gate_in)
                self.become(argv, me)
            except OSError as problem:
                os.write(error_in, ("%s: %s" % (problem.filename or argv[0], problem.strerror)).encode())
            finally:
                os._exit(127)
        os.close(error_in)
        if warm:
            os.close(gate_out)
            self.gate = gate_in
        said = os.read(error_out, 500).decode("utf-8", "replace")  # closed by a successful exec
        os.close(error_out)
        self.ticks = procs.start_ticks(self.pid)
        return said or None

    def become(self, argv: List[str], supervisor: int) -> None:
        """In the new process: own session, dies with the supervisor, prints into our pipe, keeps the GPU locks, runs in its folder."""
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(127)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(self.their_output, 1)
        os.dup2(self.their_output, 2)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        for fd in self.lock_fds:
            os.set_inheritable(fd, True)
        try:
            with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
                file.write(OOM_SCORE_ADJ)
        except OSError:
            pass  # a courtesy some containers forbid
        os.umask(0o077)
        cwd = self.spec.get("cwd") or "work"
        os.fchdir(os.open(cwd, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self.dir_fd))
        env = dict(self.spec.get("env") or {}, OVERNIGHT_RUN_ID=str(self.spec["run_id"]), OVERNIGHT_RUN_DIR=self.run_dir)
        os.execvpe(argv[0], argv, env)

    def open_gate(self) -> bool:
        """Let a warm leader run; False when it is not there (any more)."""
        if self.gate is None or self.exit is not None:
            return False
        try:
            os.write(self.gate, b"go\n")
        except OSError:
            return False
        os.close(self.gate)
        self.gate = None
        return True

    def reap(self) -> bool:
        """Collect what has ended; True when nothing of the run is left."""
        while not self.gone:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.gone = True
                break
            if pid == 0:
                break
            if pid == self.pid:
                self.exit, self.max_rss_kib = status, usage.ru_maxrss
        return self.gone

    def members(self) -> List[int]:
        """Living processes of the run."""
        return procs.descendants(os.getpid())

    def signal_all(self, signum: int) -> int:
        """Signal every process of the run; how many there were."""
        found = self.members()
        for pid in found:
            procs.send(pid, None, signum)
        return len(found)

    def exit_facts(self) -> Dict[str, Any]:
        """exit_code and exit_signal of the leader."""
        status = self.exit
        if status is None:
            return {"exit_code": None, "exit_signal": None}
        return {
            "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
            "exit_signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        }


class Log:
    """out.log: what the run prints, byte for byte up to a cap, and behind a line that says so the newest bytes of the rest (a summary comes
    last). These are written once, at the end, so that offsets stay true for whoever follows. A full disk does not stop the run; lost
    bytes are counted.
    """

    def __init__(self, dir_fd: int, source_fd: int, cap: int) -> None:
        self.fd = files.open_control(dir_fd, "out.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.source_fd, self.cap = source_fd, cap
        self.written = self.dropped = 0
        self.tail = bytearray()  # the newest of what was dropped
        self.error: Optional[str] = None

    def pump(self, most: int = 1 << 20) -> bool:
        """Move what is there, at most about `most` bytes; True when the pipe was emptied."""
        moved = 0
        while moved < most:
            try:
                data = os.read(self.source_fd, 65536)
            except BlockingIOError:
                return True
            except OSError as problem:
                self.error = self.error or errno.errorcode.get(problem.errno or 0, str(problem))
                return True
            if not data:
                return True
            moved += len(data)
            self.keep(data)
        return False

    def keep(self, data: bytes) -> None:
        """Append what the cap and the disk allow."""
        room = data[: max(0, self.cap - self.written)]
        done = 0
        try:
            while done < len(room):
                done += os.write(self.fd, room[done:])
        except OSError as problem:
            self.error = errno.errorcode.get(problem.errno or 0, str(problem))
        self.written += done
        if done < len(data):
            self.dropped += len(data) - done
            self.tail += data[done:]
            del self.tail[:-TAIL_BYTES]

    def write_tail(self) -> None:
        """Append the newest of what was left out; nothing when nothing was, or when the disk has no room for it."""
        tail = bytes(self.tail)
        if len(tail) < self.dropped:
            tail = tail[tail.find(b"\n") + 1 :]  # the first line is cut; without any line end, all of it is one
        if not tail:
            return
        left_out = self.dropped - len(tail)
        words = "\n[overnight: the log is full; %d bytes of output were left out here, and the last %d follow]\n"
        whole = ((words % (left_out, len(tail))).encode() if left_out else b"") + tail
        before = os.fstat(self.fd).st_size
        try:
            files.write_all(self.fd, whole)
        except OSError as problem:
            self.error = errno.errorcode.get(problem.errno or 0, str(problem))
            os.ftruncate(self.fd, before)
            return
        self.written += len(whole)
        self.dropped = left_out
        self.tail.clear()

    def facts(self) -> Dict[str, Any]:
        """The log's part of the status."""
        return {"log_bytes": self.written, "log_dropped": self.dropped, "log_error": self.error}


def warm_possible(spec: Dict[str, Any]) -> bool:
    """Whether the run is a plain `python script.py …`, which an interpreter with its imports done can take over."""
    argv = spec["argv"]
    return bool(spec.get("warm")) and len(argv) > 1 and str(argv[1]).endswith(".py") and sys.platform == "linux"
