"""Processes told apart for certain: a pid alone is never trusted, since pids are used again.

A process is known by boot id, pid and start ticks. What a killed supervisor leaves behind is found by the run's id and directory in its
environment.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Dict, List, Optional, Tuple

RUN_MARK = b"OVERNIGHT_RUN_ID="


def boot_id() -> str:
    """The kernel's id of this boot; another one means every process of before is gone."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def stat_fields(pid: int) -> Optional[List[str]]:
    """Fields of /proc/PID/stat from the state letter on, None when there is no such process."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            text = file.read()
    except OSError:
        return None
    return text[text.rindex(b")") + 2 :].decode("ascii", "replace").split()


def start_ticks(pid: int) -> Optional[int]:
    """Clock ticks from boot to the start of the process, None when it is gone."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def alive(pid: int, ticks: Optional[int]) -> bool:
    """Whether this very process still runs; a zombie does not."""
    fields = stat_fields(pid)
    return bool(fields) and fields is not None and fields[0] not in "ZX" and (ticks is None or int(fields[19]) == ticks)


def send(pid: int, ticks: Optional[int], signum: int) -> bool:
    """Signal this very process; False when it is gone or not ours to signal."""
    if pid <= 1 or not alive(pid, ticks):
        return False
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def all_pids() -> List[int]:
    """Every pid of this machine (or container)."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def descendants(root: int) -> List[int]:
    """Living processes below `root`, whatever session or group they moved to."""
    table: Dict[int, Tuple[int, str]] = {}
    for pid in all_pids():
        fields = stat_fields(pid)
        if fields:
            table[pid] = (int(fields[1]), fields[0])
    found = []
    for pid, (_, state) in table.items():
        above, hops = pid, 0
        while above in table and above not in (0, 1, root) and hops < 4096:
            above, hops = table[above][0], hops + 1
        if above == root and pid != root and state not in "ZX":
            found.append(pid)
    return found


def survivors(run_id: str, run_dir: str) -> List[int]:
    """Living processes that carry the run's id and directory in their environment (two labs may both have an r0001)."""
    marks = {("OVERNIGHT_RUN_ID=%s" % run_id).encode(), ("OVERNIGHT_RUN_DIR=%s" % run_dir).encode()}
    found = []
    for pid in all_pids():
        try:
            with open("/proc/%d/environ" % pid, "rb") as file:
                words = set(file.read().split(b"\0"))
        except OSError:
            continue  # gone, or somebody else's
        if marks <= words and pid != os.getpid() and alive(pid, None):
            found.append(pid)
    return found


def sweep(run_id: str, run_dir: str) -> List[int]:
    """Kill what a dead supervisor left behind; the pids that were still there."""
    left = survivors(run_id, run_dir)
    for pid in left:
        send(pid, None, signal.SIGKILL)
    return left


def describe(pid: int) -> Dict[str, object]:
    """Name, user and run (if it is one of Overnight) of a process; None where /proc does not show it (containers)."""
    found: Dict[str, Optional[str]] = {"name": None, "user": None, "run": None}
    try:
        with open("/proc/%d/comm" % pid, encoding="utf-8", errors="replace") as file:
            found["name"] = file.read().strip()
        found["user"] = user_name(os.stat("/proc/%d" % pid).st_uid)
        with open("/proc/%d/environ" % pid, "rb") as environ:
            words = environ.read().split(b"\0")
        marks = [word[len(RUN_MARK) :] for word in words if word.startswith(RUN_MARK)]
        found["run"] = marks[0].decode("utf-8", "replace") if marks else None
    except OSError:
        pass  # not visible from here, or somebody else's
    return {"pid": pid, **found}


def user_name(uid: int) -> str:
    """The account's name, or its number where the machine knows none."""
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)


def detach() -> int:
    """Double fork into an own session; returns, in the supervisor, the descriptor on which it says that it is on record."""
    told, tell = os.pipe()
    if os.fork():
        os.close(tell)
        word = os.read(told, 1000)
        code = word[0] if word else 1
        sys.stderr.write(word[1:].decode("utf-8", "replace"))
        sys.stderr.flush()
        os._exit(code)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.close(told)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return tell
