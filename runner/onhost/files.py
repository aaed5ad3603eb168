"""Files of a run directory, opened so that nobody can lead us astray: relative to the directory's own descriptor, no links followed,
regular files only.

`StatusFile` replaces status.json whole, and keeps one written-ahead spare so that the last word of a run gets out on a full disk too.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import time
from typing import Any, Dict, Optional

MAX_CONTROL_BYTES = 1 << 20
SPARE_BYTES = 8192  # a status is well under this


class NotRegular(OSError):
    """Raised when a control file is a link, a device or a folder."""


def open_dir(path: str, follow: bool = False) -> int:
    """A descriptor of a folder; OSError when it is a link (unless `follow`) or no folder."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))


def open_control(dir_fd: int, name: str, flags: int, mode: int = 0o600) -> int:
    """Open a file of the folder; raises NotRegular for anything but a regular file, FileNotFoundError when it is absent."""
    try:
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode, dir_fd=dir_fd)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link; a folder, or a pipe or socket without a reader, to write to
            raise NotRegular("%s is not a regular file" % name) from problem
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegular("%s is not a regular file" % name)
    return fd


def read_bytes(dir_fd: int, name: str, offset: int = 0, limit: int = MAX_CONTROL_BYTES) -> bytes:
    """Up to `limit` bytes from `offset`; OSError when the file cannot be had."""
    fd = open_control(dir_fd, name, os.O_RDONLY)
    try:
        return os.pread(fd, limit, offset)
    finally:
        os.close(fd)


def read_object(dir_fd: int, name: str) -> Optional[Dict[str, Any]]:
    """The JSON object in a file; None when the file is absent, no regular file, or (so far) no whole object."""
    try:
        found = json.loads(read_bytes(dir_fd, name).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def size_of(dir_fd: int, name: str) -> Optional[int]:
    """Bytes of a regular file, None when there is none."""
    try:
        info = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except OSError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def trouble_of(dir_fd: int, name: str) -> Optional[str]:
    """Why a file that is there cannot be read, in words; None when it can, or when it is absent. Only looks; nothing is opened."""
    try:
        mode = os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
    except OSError as problem:
        return "it cannot be looked at (%s)" % problem.strerror
    if not stat.S_ISREG(mode):
        kinds = ((stat.S_ISLNK, "a symbolic link"), (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"))
        return "it is %s, not a regular file" % next((word for is_kind, word in kinds if is_kind(mode)), "a device or socket")
    return None if mode & stat.S_IRUSR or os.geteuid() == 0 else "it may not be read (mode %04o)" % stat.S_IMODE(mode)


def clear_way(dir_fd: int, name: str) -> None:
    """Put aside what stands where a file of ours belongs: a link or device is unlinked, a folder keeps its content under another name."""
    try:
        mode = os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            os.rename(name, "%s.was-a-folder.%d" % (name, time.time_ns()), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        elif not stat.S_ISREG(mode):
            os.unlink(name, dir_fd=dir_fd)
    except OSError:
        pass  # absent, or the disk refuses: the write that follows tells


def gone(dir_fd: int) -> bool:
    """Whether an open folder was deleted: nothing can be written into it any more."""
    return os.fstat(dir_fd).st_nlink == 0


def write_whole(dir_fd: int, name: str, data: bytes) -> None:
    """Replace a file in one step (temporary file, fsync, rename); OSError leaves the older one whole."""
    tmp = "%s.%d.tmp" % (name, os.getpid())
    try:
        fd = open_control(dir_fd, tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(tmp, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError:
        remove(dir_fd, tmp)
        raise


def write_all(fd: int, data: bytes) -> None:
    """Write every byte or raise OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def remove(dir_fd: int, name: str) -> None:
    """Unlink a file that may be absent."""
    try:
        os.unlink(name, dir_fd=dir_fd)
    except OSError:
        pass  # absent, or the disk refuses: both leave nothing for us to do


def try_lock(fd: int, patience_s: float = 0.0, how: int = fcntl.LOCK_EX) -> bool:
    """Take the flock of an open file; False when somebody holds it.

    With patience, a lock held only for an instant (`lock_held` looking) is waited out.
    """
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise  # a file system without locks must not look like a lock that is held
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)
        else:
            return True


def lock_held(dir_fd: int, name: str = "lock") -> bool:
    """Whether somebody holds the flock of a file: the one question that needs no pid."""
    try:
        fd = open_control(dir_fd, name, os.O_RDWR)
    except OSError:
        return False
    try:
        return not try_lock(fd, how=fcntl.LOCK_SH)  # shared: two who look at once are not in each other's way
    finally:
        os.close(fd)


def take_run_lock(dir_fd: int) -> Optional[int]:
    """The descriptor of the run directory's lock, held as long as it is open; None when another supervisor has it."""
    clear_way(dir_fd, "lock")
    fd = open_control(dir_fd, "lock", os.O_RDWR | os.O_CREAT)
    if try_lock(fd, patience_s=1.0):
        return fd
    os.close(fd)
    return None


class StatusFile:
    """status.json of a run: each `write` replaces it whole; what could not be written is kept in `pending` and tried again by `retry`."""

    SPARE = "status.spare"

    def __init__(self, dir_fd: int) -> None:
        self.dir_fd = dir_fd
        self.pending: Optional[bytes] = None
        self.make_spare()

    def make_spare(self) -> None:
        """Reserve blocks for the next status while there are any."""
        try:
            fd = open_control(self.dir_fd, self.SPARE, os.O_WRONLY | os.O_CREAT)
            try:
                os.posix_fallocate(fd, 0, SPARE_BYTES)
            finally:
                os.close(fd)
        except OSError:
            pass  # no room now: the next write will go the ordinary way

    def write(self, status: Dict[str, Any]) -> bool:
        """Publish a status; False when the disk refused it for now."""
        self.pending = json.dumps(status, sort_keys=True).encode()
        return self.retry()

    def retry(self) -> bool:
        """Publish what is pending; True when nothing is."""
        if self.pending is None:
            return True
        clear_way(self.dir_fd, self.SPARE)
        clear_way(self.dir_fd, "status.json")
        try:
            fd = open_control(self.dir_fd, self.SPARE, os.O_WRONLY | os.O_CREAT)
            try:
                written = os.pwrite(fd, self.pending, 0)
                if written != len(self.pending):
                    return False
                os.ftruncate(fd, written)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(self.SPARE, "status.json", src_dir_fd=self.dir_fd, dst_dir_fd=self.dir_fd)
        except OSError:
            return False
        self.pending = None
        self.make_spare()
        return True

    def close(self) -> None:
        """Give the spare's blocks back."""
        remove(self.dir_fd, self.SPARE)
