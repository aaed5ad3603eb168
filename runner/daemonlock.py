"""Whether a daemon serves a lab: the one owner of that question is the lock it holds, never the age of what it last wrote.

A full disk keeps a living daemon from writing, and a killed one leaves a young row behind; the kernel frees the lock at its last breath.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

LOCK = "runner.lock"


def daemon_pid(lab_path: Path) -> int | None:
    """The pid of the daemon that holds the lab's lock, None when none does, 0 when it has not said. Microseconds; writes nothing."""
    try:
        fd = os.open(lab_path / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(fd, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else 0
    else:
        return None
    finally:
        os.close(fd)


def write_pid(fd: int, pid: int) -> None:
    """Write a pid (0: not yet said) into the held lock, in place: on a full disk the block that is there still takes it."""
    os.pwrite(fd, f"{pid:<10d}\n".encode(), 0)
    os.ftruncate(fd, 11)
