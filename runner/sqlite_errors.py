"""The seam where sqlite's errors become sentences: what is wrong with a lab's database, and what helps."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.errors import LabError


@contextmanager
def mapped(path: Path) -> Iterator[None]:
    """The seam where sqlite's errors become sentences."""
    try:
        yield
    except sqlite3.Error as error:
        raise LabError(_sentence(path, error)) from error


def disk_full(path: Path) -> bool:
    """Whether nothing more fits beside the file: SQLite then calls its own shared memory an I/O error."""
    try:
        return os.statvfs(path.parent).f_bavail == 0
    except OSError:
        return False


def mounted_readonly(path: Path) -> bool:
    """Whether the file system of the file takes no writes: WAL needs them even to read, and SQLite only says it cannot open."""
    try:
        return bool(os.statvfs(path.parent).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _sentence(path: Path, error: sqlite3.Error) -> str:
    text = str(error).lower()
    if "locked" in text or "busy" in text:
        why = "another program has held it for more than 5 s. Try again; if it stays so, see who has it open with `fuser`."
    elif "full" in text or "no space" in text or ("disk i/o" in text and disk_full(path)):
        why = "the disk is full. Free some space; nothing that was recorded is lost."
    elif "readonly" in text or "read-only" in text or ("unable to open" in text and mounted_readonly(path)):
        why = "it may not be written. Check the permissions of the folder, or whether the disk is mounted read-only."
    elif "malformed" in text or "not a database" in text or "disk image" in text:
        why = "it is damaged or not a database. Move it away and restore a copy; runs/ and sources/ beside it are untouched."
    elif "unable to open" in text:
        why = "it cannot be opened. Check that the folder exists and is yours."
    elif "locking protocol" in text or "disk i/o" in text:
        why = "the disk under it fails or is a network file system. Put the lab on a disk of this machine with --lab."
    else:
        why = f"SQLite says: {error}."
    return f"The lab database {path} cannot be used: {why}"
