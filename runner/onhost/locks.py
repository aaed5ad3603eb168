"""One lock per GPU and machine, shared by every lab and user on it: flock on LOCK_DIR/UUID.lock.

The run inherits the open lock, so a GPU stays locked as long as any of its processes lives, even after kill -9 of the supervisor. The
text of a lock says who holds it and, after a release, whether the GPU's memory was seen to be back: a note for people and for the next
run, never the lock itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import threading
import time
from typing import Any, Dict, List, Optional

from . import files, procs

DEFAULT_DIR = "/tmp/overnight-locks"
MAX_NOTE_BYTES = 1000
LOOK_S = 0.1  # whoever only looks whether a lock is held has it for microseconds


def default_dir() -> str:
    """Where this machine's GPU locks lie: OVERNIGHT_LOCK_DIR, else one folder that all its users share."""
    return os.environ.get("OVERNIGHT_LOCK_DIR") or DEFAULT_DIR


def lock_name(uuid: str) -> str:
    """The file name of a GPU's lock."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", uuid) + ".lock"


def open_lock_dir(path: str) -> int:
    """A descriptor of the lock folder, made with the sticky bit when it is absent; OSError when it cannot be shared safely."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    try:
        os.mkdir(path, 0o1777)
        os.chmod(path, 0o1777)  # mkdir's mode is cut by the umask
    except FileExistsError:
        pass  # the usual case: somebody made it before
    fd = files.open_dir(path)
    info = os.fstat(fd)
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        os.close(fd)
        raise OSError("%s is writable by everybody without the sticky bit; chmod 1777 it" % path)
    return fd


def open_lock(dir_fd: int, name: str) -> int:
    """Open a lock file, made when absent.

    An existing one is opened without O_CREAT: with fs.protected_regular the kernel refuses O_CREAT on
    another user's file in a sticky folder.
    """
    for _ in range(10):
        try:
            return files.open_control(dir_fd, name, os.O_RDWR)
        except FileNotFoundError:
            pass
        try:
            fd = files.open_control(dir_fd, name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue  # somebody made it in between
        os.fchmod(fd, 0o666)  # for the machine's other users, whatever our umask
        return fd
    raise OSError("lock %s appears and vanishes" % name)


class GpuLocks:
    """The locks of one run, opened at once, taken in one order (so that two runs never wait for each other) and given back together."""

    def __init__(self, lock_dir: str, uuids: List[str]) -> None:
        try:
            self.dir_fd = open_lock_dir(lock_dir)
        except OSError as problem:
            raise OSError("the lock folder %s cannot be used: %s" % (lock_dir, problem)) from problem
        self.names = [lock_name(u) for u in sorted(set(uuids))]
        self.fds = [open_lock(self.dir_fd, name) for name in self.names]
        self.taken = False
        self.error: Optional[str] = None

    def try_take(self) -> bool:
        """Take all without waiting; False (and none kept busy by us for long) when one is held."""
        for i in range(len(self.fds)):
            if not files.try_lock(self.fds[i], patience_s=LOOK_S):
                return False
            if not self.still_named(i):
                self.reopen(i)
                return self.try_take()
        self.taken = True
        return True

    def take_in_background(self, wake_fd: int) -> None:
        """Queue for all locks in a thread; the kernel serves waiters in order, and we spend no time polling.

        A byte on `wake_fd` says done.
        """

        def wait() -> None:
            try:
                for i in range(len(self.fds)):
                    fcntl.flock(self.fds[i], fcntl.LOCK_EX)
                    while not self.still_named(i):
                        self.reopen(i)
                        fcntl.flock(self.fds[i], fcntl.LOCK_EX)
                self.taken = True
            except OSError as problem:
                self.error = str(problem)
            os.write(wake_fd, b"L")

        threading.Thread(target=wait, daemon=True).start()

    def still_named(self, i: int) -> bool:
        """Whether the file we locked is still the one others will open (temporary folders get cleaned)."""
        try:
            now = os.stat(self.names[i], dir_fd=self.dir_fd, follow_symlinks=False)
        except OSError:
            return False
        mine = os.fstat(self.fds[i])
        return (now.st_dev, now.st_ino) == (mine.st_dev, mine.st_ino)

    def reopen(self, i: int) -> None:
        """Open the file that now bears the name, at the same descriptor number (a started run knows it by that number)."""
        fresh = open_lock(self.dir_fd, self.names[i])
        os.dup2(fresh, self.fds[i], inheritable=os.get_inheritable(self.fds[i]))
        os.close(fresh)

    def notes(self) -> List[Dict[str, Any]]:
        """What the lock files say, one object each (empty when they say nothing readable)."""
        return [read_note(fd) for fd in self.fds]

    def write_notes(self, **words: Any) -> None:
        """Say who holds the locks, or how they were left; never fails."""
        text = json.dumps(words, sort_keys=True).encode()[:MAX_NOTE_BYTES] + b"\n"
        for fd in self.fds:
            try:
                os.pwrite(fd, text, 0)
                os.ftruncate(fd, len(text))
            except OSError:
                pass  # a full disk: the note is a courtesy

    def touch(self) -> None:
        """Keep cleaners of temporary folders away."""
        for fd in self.fds:
            try:
                os.utime(fd)
            except OSError:
                pass  # not ours and not writable: then somebody else keeps it fresh

    def release(self) -> None:
        """Close our descriptors; a lock is free once the run's inherited ones are closed too.

        LOCK_UN is never used: it would unlock under a live run.
        """
        for fd in self.fds:
            os.close(fd)
        os.close(self.dir_fd)
        self.fds = []


def read_note(fd: int) -> Dict[str, Any]:
    """The object in a lock file, {} when there is none."""
    try:
        note = json.loads(os.pread(fd, MAX_NOTE_BYTES + 1, 0).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def who(lab_id: Optional[str], run_id: str) -> Dict[str, Any]:
    """The note of a holder."""
    return {
        "run_id": run_id,
        "lab_id": lab_id,
        "user": procs.user_name(os.getuid()),
        "pid": os.getpid(),
        "since": time.time(),
        "boot_id": procs.boot_id(),
    }


def holder(lock_dir: str, uuid: str) -> Optional[Dict[str, Any]]:
    """Who holds a GPU's lock on this machine: its note, {} when it left none, None when the lock is free."""
    try:
        dir_fd = files.open_dir(lock_dir)
    except OSError:
        return None
    try:
        name = lock_name(uuid)
        if not files.lock_held(dir_fd, name):
            return None
        fd = files.open_control(dir_fd, name, os.O_RDONLY)
        try:
            return read_note(fd)
        finally:
            os.close(fd)
    except OSError:
        return {}
    finally:
        os.close(dir_fd)
