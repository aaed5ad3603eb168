"""Putting a run's files in place on a far host: small files come with the request, large ones once per host by their SHA-256.

Layout below the workdir: `labs/LAB/runs/ID`, `shared/SHA256` (corpora and other large files, linked from work/), `data/`, `cache/`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from typing import Any, Dict, List, Tuple

from . import files, rundirs

ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
SHA = re.compile(r"^[0-9a-f]{64}$")


def checked(text: str, form: "re.Pattern[str]" = ID) -> str:
    """The text, when it is a plain name; raises PermissionError otherwise."""
    if not isinstance(text, str) or not form.match(text):
        raise PermissionError("%r is no valid name" % (text,))
    return text


def run_dir(workdir: str, lab: str, run_id: str) -> str:
    """Where a run of a lab lives."""
    return os.path.join(workdir, "labs", checked(lab), "runs", checked(run_id))


def shared_path(workdir: str, sha: str) -> str:
    """Where a large file lives."""
    return os.path.join(workdir, "shared", checked(sha, SHA))


def place(workdir: str, lab: str, run_id: str, manifest: List[Dict[str, Any]], body: bytes) -> Dict[str, Any]:
    """Lay out a run directory; {"missing": [sha…]} when large files must be sent first, {"placed": bool} otherwise.

    Nothing happens to a directory whose run was started before. Each entry: {path, size, mode, sha or null}; `body` holds the files
    without sha.
    """
    final = run_dir(workdir, lab, run_id)
    if rundirs.state(final, sweep=False)["phase"] not in ("absent", "refused"):
        return {"placed": False}
    large = {entry["sha"] for entry in manifest if entry.get("sha")}
    missing = sorted(sha for sha in large if not os.path.exists(shared_path(workdir, sha)))
    if missing:
        return {"missing": missing}
    stage = os.path.join(os.path.dirname(final), ".stage-" + run_id)
    shutil.rmtree(stage, ignore_errors=True)
    os.makedirs(os.path.join(stage, "work"), mode=0o700)
    at = 0
    for entry in manifest:
        target = os.path.join(stage, *plain_parts(entry["path"]))
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        if entry.get("sha"):
            os.symlink(shared_path(workdir, entry["sha"]), target)
            continue
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o700 if entry.get("mode", 0) & 0o100 else 0o600)
        try:
            files.write_all(fd, body[at : at + entry["size"]])
        finally:
            os.close(fd)
        at += entry["size"]
    if at != len(body):
        raise ValueError("the files of run %s do not fit their list" % run_id)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(stage, final)
    return {"placed": True}


def plain_parts(path: str) -> List[str]:
    """The parts of a relative path that stays inside."""
    parts = path.split("/")
    if path.startswith("/") or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise PermissionError("%r leads out of the run directory" % path)
    return parts


def blob(workdir: str, sha: str, offset: int, total: int, body: bytes) -> Dict[str, Any]:
    """Take a piece of a large file; {"have": bytes} so far. The last piece is accepted only when the whole has the hash."""
    final = shared_path(workdir, sha)
    if os.path.exists(final):
        return {"have": total}
    os.makedirs(os.path.dirname(final), mode=0o700, exist_ok=True)
    part = final + ".part"
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        have = os.fstat(fd).st_size
        if offset != have:
            return {"have": have}  # resumed: the sender goes on from here
        os.lseek(fd, offset, os.SEEK_SET)
        files.write_all(fd, body)
        have += len(body)
        os.fsync(fd)
    finally:
        os.close(fd)
    if have >= total:
        if file_sha(part) != sha:
            os.unlink(part)
            raise ValueError("a file arrived damaged; it will be sent again")
        os.rename(part, final)
    return {"have": have}


def file_sha(path: str) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def list_runs(workdir: str, lab: str) -> List[Dict[str, Any]]:
    """The run directories of a lab on this host: id, phase, modified (wall), size_mib."""
    base = os.path.join(workdir, "labs", checked(lab), "runs")
    found = []
    for name in sorted(os.listdir(base)) if os.path.isdir(base) else []:
        path = os.path.join(base, name)
        if ID.match(name) and os.path.isdir(path) and not os.path.islink(path):
            found.append(
                {
                    "id": name,
                    "phase": rundirs.state(path, sweep=False)["phase"],
                    "modified": os.stat(path).st_mtime,
                    "size_mib": tree_size(path) >> 20,
                }
            )
    return found


def tree_size(path: str) -> int:
    """Bytes of the regular files below a folder; links are not followed."""
    total = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue  # it went while we looked
    return total


def poll(workdir: str, lab: str, wanted: Dict[str, List[int]], limit: int) -> Tuple[Dict[str, Any], bytes]:
    """States of runs, and for each what is new in out.log and work/events.jsonl from the given offsets on, in one answer."""
    states: Dict[str, Any] = {}
    body = b""
    for run_id, (log_offset, events_offset) in wanted.items():
        path = run_dir(workdir, lab, run_id)
        state = rundirs.state(path)
        pieces = []
        for name, offset, size in (
            ("out.log", log_offset, state.get("log_bytes")),
            ("work/events.jsonl", events_offset, state.get("events_bytes")),
        ):
            room = max(0, min(limit, (8 << 20) - len(body)))
            data = rundirs.read(path, name, offset, min(room, size - offset)) if size is not None and size > offset >= 0 else b""
            pieces.append(len(data))
            body += data
        states[run_id] = dict(state, pieces=pieces)
    return states, body
