"""What an engine asks of the run directories on a machine: states, bytes from an offset, stop, start, sweep, remove.

Called in-process for this machine, and through link.py on far ones; nothing is kept in memory, every answer comes from the directories.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple

from . import files, procs

FINAL = ("ended", "refused")
HUNG_S = 10.0  # a heartbeat older than this (five beats) is a hung supervisor
START_LIMIT_S = 20.0
INHERITED = (
    "PATH", "HOME", "LANG", "LC_*", "TMPDIR", "TZ", "USER", "LOGNAME", "LD_LIBRARY_PATH", "CUDA_*", "NVIDIA_*", "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)  # fmt: skip
NAME = re.compile(r"^(?!.*(^|/)\.\.?(/|$))[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*$")


def inherited(environ: Mapping[str, str]) -> Dict[str, str]:
    """The allow-listed part of a machine's environment: no API keys, no agent sockets, no forwarding."""
    return {k: v for k, v in environ.items() if any(fnmatch.fnmatchcase(k, name) for name in INHERITED) and k != "CUDA_VISIBLE_DEVICES"}


class StartError(Exception):
    """Raised when a supervisor could not be started; the text says why."""


def launch_command(python: str, module: str) -> List[str]:
    """How a module of this folder is started: isolated, so that neither the working folder nor PYTHONPATH can put another module in
    our place.
    """
    parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    code = "import sys; sys.path.insert(0, %r); from onhost import %s as m; sys.exit(m.main())" % (parent, module)
    return [python, "-I", "-c", code]


def state(run_dir: str, *, sweep: bool = True) -> Dict[str, Any]:
    """What is known of a run: phase, status, heartbeat_age_s, log_bytes, events_bytes (see engines.base.State).

    A run whose supervisor is gone is swept first, and is `lost` only when none of its processes lives.
    """
    try:
        dir_fd = files.open_dir(run_dir)
    except OSError:
        return {"phase": "absent", "gone": True}
    try:
        status, phase = settled_status(dir_fd)
        answer: Dict[str, Any] = {"phase": phase, "status": status, "heartbeat_age_s": heartbeat_age(dir_fd)}
        if phase == "lost" and sweep:
            left = sweep_lost(run_dir, status or {})
            if left:
                answer.update(phase="stopping", status=dict(status or {}, unkillable=left))
        answer["log_bytes"] = files.size_of(dir_fd, "out.log")
        answer["events_bytes"] = work_size(dir_fd, "events.jsonl")
        answer["unreadable"] = unreadable(dir_fd, phase)
        return answer
    finally:
        os.close(dir_fd)


def unreadable(dir_fd: int, phase: str) -> Dict[str, str]:
    """Files that are followed and cannot be read (name → why); a run may do to them what it likes, and must still come to its end."""
    found = {name: files.trouble_of(dir_fd, name) for name in ("out.log", "work", "status.json")}
    if found.pop("work") in (None, "it is a folder, not a regular file"):
        found["work/events.jsonl"] = files.trouble_of(dir_fd, "work/events.jsonl")
    else:
        found["work/events.jsonl"] = "work is no folder any more"
    if phase in ("running", "stopping", "ended") and not found["out.log"] and files.size_of(dir_fd, "out.log") is None:
        found["out.log"] = "it was deleted"
    return {name: why for name, why in found.items() if why}


def settled_status(dir_fd: int) -> Tuple[Optional[Dict[str, Any]], str]:
    """The status and the phase it means, given who holds the lock and which boot this is."""
    held = files.lock_held(dir_fd)  # before reading: a supervisor writes its last word and then lets go
    status = files.read_object(dir_fd, "status.json")
    if not held and status is not None and status.get("boot_id") == procs.boot_id():
        supervisor = status.get("supervisor") or {}
        held = procs.alive(int(supervisor.get("pid") or 0), supervisor.get("ticks"))  # its lock file was taken from it; it makes another
    if status is None:
        if held:
            return None, "starting"
        return None, "absent" if files.size_of(dir_fd, "status.json") is None else "lost"
    phase = str(status.get("phase"))
    if phase in FINAL or held:
        return status, phase
    return status, "lost"


def heartbeat_age(dir_fd: int) -> Optional[float]:
    """Seconds since the supervisor's last beat on the monotonic clock; None when there was none in this boot."""
    try:
        _, boot, monotonic, _ = files.read_bytes(dir_fd, "heartbeat").decode("ascii", "replace").split()
        return max(0.0, time.monotonic() - float(monotonic)) if boot == procs.boot_id() else None
    except (OSError, ValueError):
        return None


def sweep_lost(run_dir: str, status: Dict[str, Any]) -> List[int]:
    """Kill what a dead supervisor left; the pids that are still there a moment later."""
    run_id = str(status.get("run_id") or os.path.basename(run_dir))
    real = os.path.realpath(run_dir)
    if status.get("boot_id") not in (None, procs.boot_id()) or not procs.sweep(run_id, real):
        return []
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if not procs.survivors(run_id, real):
            return []
        time.sleep(0.02)
    return procs.survivors(run_id, real)


def open_parent(run_dir: str, name: str) -> Tuple[int, str]:
    """A descriptor of the folder that holds `name` (a path inside the run directory, no links on the way) and the last part of the name."""
    if not NAME.match(name):
        raise PermissionError("%r is no name inside a run directory" % name)
    parts = name.split("/")
    fd = files.open_dir(run_dir)
    for part in parts[:-1]:
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd, parts[-1]


def work_size(dir_fd: int, name: str) -> Optional[int]:
    """Bytes of a file in work/."""
    try:
        work = os.open("work", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError:
        return None
    try:
        return files.size_of(work, name)
    finally:
        os.close(work)


def read(run_dir: str, name: str, offset: int, limit: int) -> bytes:
    """Bytes of a file of the run directory; empty at its end, and when it is absent or cannot be read (`unreadable` says why).

    Raises PermissionError for a name that leads out of the directory, and for nothing that a run can do to its files.
    """
    if not NAME.match(name):
        raise PermissionError("%r is no name inside a run directory" % name)
    try:
        fd, last = open_parent(run_dir, name)
    except OSError:
        return b""
    try:
        return files.read_bytes(fd, last, offset, limit)
    except OSError:
        return b""
    finally:
        os.close(fd)


def start(run_dir: str, python: str, env: Optional[Dict[str, str]] = None) -> bool:
    """Start the supervisor of a run directory; False when it was started before. A refused run (nothing ever ran) may be started again."""
    dir_fd = files.open_dir(run_dir)
    try:
        _, phase = settled_status(dir_fd)
        if phase == "refused":
            for name in ("status.json", "stop", "heartbeat", "out.log"):
                files.remove(dir_fd, name)
        elif phase != "absent":
            return False
        if files.size_of(dir_fd, "stop") is not None:
            files.remove(dir_fd, "stop")
    finally:
        os.close(dir_fd)
    command = [*launch_command(python, "supervisor"), run_dir]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=START_LIMIT_S,
            env=env,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise StartError("%s: %s" % (python, problem)) from problem
    if done.returncode in (0, 4, 5):
        return done.returncode == 0
    said = done.stderr.decode("utf-8", "replace").strip().split("\n")[-1]
    raise StartError(said or "the supervisor ended with %d" % done.returncode)


def stop(run_dir: str, reason: str, force: bool = False) -> None:
    """Ask the supervisor to end the run.

    When the disk refuses the request it is signalled instead; a hung one is killed when `force` says so.
    """
    try:
        dir_fd = files.open_dir(run_dir)
    except OSError:
        return  # nothing to stop
    try:
        supervisor = (files.read_object(dir_fd, "status.json") or {}).get("supervisor") or {}
        pid, ticks = int(supervisor.get("pid") or 0), supervisor.get("ticks")
        try:
            files.write_whole(dir_fd, "stop", json.dumps({"reason": reason, "force": force}).encode())
        except OSError:
            procs.send(pid, ticks, signal.SIGTERM)
        if force and (heartbeat_age(dir_fd) or 0) > HUNG_S and files.lock_held(dir_fd):
            procs.send(pid, ticks, signal.SIGKILL)  # its leader dies with it, the rest is swept when the loss is seen
    finally:
        os.close(dir_fd)


def refuse_live(run_dir: str) -> bool:
    """False when there is no run directory; raises PermissionError while its supervisor lives."""
    try:
        dir_fd = files.open_dir(run_dir)
    except OSError:
        return False
    try:
        if files.lock_held(dir_fd):
            raise PermissionError("%s still has a supervisor" % run_dir)
    finally:
        os.close(dir_fd)
    return True


def forget(run_dir: str) -> None:
    """Remove a run directory; refuses while its supervisor lives."""
    if refuse_live(run_dir):
        shutil.rmtree(run_dir)


def forget_work(run_dir: str, keep: Tuple[str, ...] = ("events.jsonl",)) -> None:
    """Remove what lies in work/ but for `keep`; refuses while the supervisor lives."""
    work = os.path.join(run_dir, "work")
    if not refuse_live(run_dir) or os.path.islink(work) or not os.path.isdir(work):
        return
    for entry in list(os.scandir(work)):
        if entry.name in keep:
            continue
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def disk_free_mib(path: str) -> Optional[int]:
    """Room for an ordinary user on the file system of a path."""
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize >> 20


def python_version() -> str:
    """This interpreter's version."""
    return "%d.%d.%d" % sys.version_info[:3]
