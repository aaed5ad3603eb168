"""A staged run directory as what travels: a list of files, small ones with their bytes, large ones by hash (a corpus goes to a host
once).
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGE_BYTES = 1 << 20
SKIPPED = ("lock", "heartbeat", "status.json", "status.spare", "out.log", "stop", "supervisor.err")


@dataclass(frozen=True, slots=True)
class Parcel:
    """Manifest entries {path, size, mode, sha or null}, the small files' bytes in that order, and where each large file lies."""

    entries: list[dict[str, Any]]
    body: bytes
    large: dict[str, Path]


class Hashes:
    """SHA-256 of files, remembered by identity and modification time."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, int], str] = {}

    def of(self, path: Path) -> str:
        """The hash of a file (links followed)."""
        info = path.stat()
        key = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
        if key not in self._known:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
            self._known[key] = digest.hexdigest()
        return self._known[key]


def pack(stage: Path, hashes: Hashes) -> Parcel:
    """The parcel of a staged run.

    Links to files (materialising links what is large) are followed; anything but regular files stays behind.
    """
    entries: list[dict[str, Any]] = []
    pieces: list[bytes] = []
    large: dict[str, Path] = {}
    for root, folders, names in os.walk(stage):
        folders.sort()
        for name in sorted(names):
            path = Path(root, name)
            relative = path.relative_to(stage).as_posix()
            if relative in SKIPPED or not path.exists():
                continue
            info = path.stat()
            if not stat.S_ISREG(info.st_mode):
                continue
            entry: dict[str, Any] = {"path": relative, "size": info.st_size, "mode": info.st_mode & 0o777, "sha": None}
            if info.st_size > LARGE_BYTES:
                entry["sha"] = hashes.of(path)
                large[entry["sha"]] = path
            else:
                data = path.read_bytes()
                entry["size"] = len(data)
                pieces.append(data)
            entries.append(entry)
    return Parcel(entries, b"".join(pieces), large)
