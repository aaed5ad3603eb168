"""The lab folder: finding it, making it, refusing it, and the paths inside it.

The database is an execution channel (whoever writes a row makes the daemon run code), so a lab that belongs to somebody else, or that
others may
write, is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from runner.errors import LabError, PolicyError
from runner.loosening import merged, to_toml
from runner.memo import Memo
from runner.policy import Policy, default_policy, load_policy, policy_text
from runner.store import Store

HOSTS_FILE = "hosts.toml"
# What may lie in a folder that is to become a lab again after its database was lost.
LAB_NAMES = {".gitignore", "runs", "sources", "data", "policy.toml", "daemon.log", "runner.lock", "mcp.token", "tui.json"}


def find_hosts_file(start: Path) -> Path | None:
    """The nearest hosts.toml in `start` or above it."""
    for folder in (start, *start.parents):
        candidate = folder / HOSTS_FILE
        if candidate.is_file():
            return candidate
    return None


def find_lab(explicit: str | Path | None = None, *, start: Path | None = None) -> Path:
    """Which lab: the one named, else OVERNIGHT_LAB, else `lab/` beside the nearest hosts.toml going up, else `lab/` here."""
    named = explicit or os.environ.get("OVERNIGHT_LAB")
    if named:
        return plain_path(named)
    here = (start or Path.cwd()).absolute()
    hosts = find_hosts_file(here)
    return (hosts.parent if hosts else here) / "lab"


def plain_path(path: str | Path) -> Path:
    """An absolute path without `~`, `..` and doubled slashes; links stay as they are named, but for those that a `..` climbs out of."""
    whole = Path(path).expanduser().absolute()
    return whole.resolve() if ".." in whole.parts else whole


class Lab:
    """An open lab: its paths, its store and its policy."""

    def __init__(self, path: Path, store: Store) -> None:
        self.path = path
        self.store = store
        self._policy: Policy | None = None
        self._policy_stamp: tuple[int, int] | None = None
        self._unsynced: list[Path] = []
        self.memo = Memo()  # open labs of one process may share one

    @property
    def db_path(self) -> Path:
        """The database file."""
        return self.path / "lab.db"

    @property
    def runs_dir(self) -> Path:
        """Where run directories (or their mirrors) are."""
        return self.path / "runs"

    @property
    def sources_dir(self) -> Path:
        """Where source texts are, one file a SHA-256."""
        return self.path / "sources"

    @property
    def data_dir(self) -> Path:
        """Tokenised data of the local host."""
        return self.path / "data"

    @property
    def hosts_file(self) -> Path:
        """The hosts.toml this lab belongs to; it need not exist."""
        recorded = self.store.meta("hosts_file")
        return Path(recorded) if recorded else self.path.parent / HOSTS_FILE

    @property
    def accepted_file(self) -> Path:
        """The accepted copy of hosts.toml."""
        return self.path / "policy.toml"

    def run_dir(self, run_id: str) -> Path:
        """The directory of a run."""
        return self.runs_dir / run_id

    def source_path(self, sha: str) -> Path:
        """The file of a source."""
        return self.sources_dir / f"{sha}.py"

    def source_text(self, sha: str) -> str:
        """The text of a source. Raised: LabError when the file is missing or is not what its name says."""
        path = self.source_path(sha)
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise LabError(
                f"The source {sha[:12]} cannot be read: {error}.", next_step="Restore it in the lab's sources/ folder."
            ) from error
        if hashlib.sha256(text.encode()).hexdigest() != sha:
            raise LabError(
                f"{path} was changed after it was stored.", next_step="Submit the script again; stored sources are never edited."
            )
        return text

    def keep_source(self, text: str, *, synced: bool = True) -> str:
        """Store a source text once; returns its SHA-256 (hex, of the UTF-8 bytes). Not `synced`: whoever opened `syncing_sources` sees
        to that."""
        sha = hashlib.sha256(text.encode()).hexdigest()
        path, content = self.source_path(sha), text.encode()
        if not path.exists() or path.stat().st_size != len(content):  # a power cut may have left less of one not yet synced
            write_private(path, content, replace=True, synced=synced)
            if not synced:
                self._unsynced.append(path)
        return sha

    @contextmanager
    def syncing_sources(self) -> Iterator[None]:
        """Have sources that were stored inside it on the disk at its end, all at once: one takes 10 ms, a dozen together 20 ms, and while
        a transaction is open nobody else may write."""
        try:
            yield
        finally:
            paths, self._unsynced = self._unsynced, []
            if len(paths) == 1:
                sync(paths[0])
            elif paths:
                with ThreadPoolExecutor(min(len(paths), 16)) as threads:
                    list(threads.map(sync, paths))

    def policy(self) -> Policy:
        """The accepted policy; re-read when the accepted copy changes."""
        try:
            found = self.accepted_file.stat()
        except FileNotFoundError:
            return default_policy(self.path.parent)
        stamp = (found.st_mtime_ns, found.st_ino)
        if self._policy is None or stamp != self._policy_stamp:
            self._policy = load_policy(self.accepted_file, root=self.hosts_file.parent)
            self._policy_stamp = stamp
        return self._policy

    def sync_policy(self) -> str | None:
        """Take over an edited hosts.toml, but for the parts that loosen something: those stay as accepted.

        Returns a sentence when a part waits for `accept_policy`, or the file cannot be used; None when file and accepted copy agree.
        """
        source = self.hosts_file
        try:
            text = policy_text(source)
        except PolicyError as error:
            if not os.path.lexists(source):
                return None
            if not self.accepted_file.exists():
                raise
            return self._stays(error)
        if not self.accepted_file.exists():
            load_policy(source, text=text, files=True)
            self.accept(text)
            return None
        if text == self.accepted_file.read_text(encoding="utf-8"):
            self._pending(None)
            return None
        try:
            now = self.policy()
            found, waiting = merged(now, load_policy(source, text=text, files=True))
            if not waiting:
                self.accept(text)
                return None
            if dataclasses.replace(found, path=now.path) != now:
                in_force = to_toml(found)
                load_policy(self.accepted_file, text=in_force, root=source.parent)
                self._put_in_force(in_force)
        except PolicyError as error:
            return self._stays(error)
        sentence = f"{source} changed, and this waits for a human: {'; '.join(waiting)}. Accept it with `overnight policy accept`."
        self._pending(sentence)
        return sentence

    def hosts_trouble(self) -> str | None:
        """Why hosts.toml as it lies there cannot be used; None where it can, or where there is none. Changes nothing."""
        try:
            load_policy(self.hosts_file)
        except PolicyError as error:
            return str(error) if os.path.lexists(self.hosts_file) else None
        return None

    def _stays(self, error: PolicyError) -> str:
        sentence = f"{error} The policy accepted before stays in force."
        self._pending(sentence)
        return sentence

    def accept(self, text: str) -> None:
        """Make `text` the policy in force (a human did this, or nothing was loosened)."""
        with self.store.transaction():
            self._put_in_force(text)
            self._pending(None)

    def _put_in_force(self, text: str) -> None:
        write_private(self.accepted_file, text.encode(), replace=True)
        self.store.set_meta("policy_sha", hashlib.sha256(text.encode()).hexdigest())

    def _pending(self, sentence: str | None) -> None:
        if self.store.meta("policy_pending") != sentence:
            self.store.set_meta("policy_pending", sentence)

    def close(self) -> None:
        """Close the store."""
        self.store.close()


def open_lab(path: str | Path | None = None, *, create: bool = False, readonly: bool = False) -> Lab:
    """Open a lab (the one `find_lab` names), making it first when `create`.

    Raised: LabError when the folder or database cannot be used; PolicyError when its first hosts.toml cannot be used.
    """
    folder = find_lab(path)
    if create and not readonly:
        make_lab(folder)
    check_folder(folder)
    readonly = readonly or (not create and not os.access(folder, os.W_OK))  # a read-only mount: reading needs no more
    lab = Lab(folder, Store(folder / "lab.db", readonly=readonly, create=create and not readonly))
    if create and not readonly:
        try:
            _first_time(lab)
        except BaseException:
            lab.close()
            raise
    return lab


def make_lab(folder: Path) -> None:
    """Create the folder of a lab, 0700, hidden from git; nothing happens when it is there."""
    if folder.exists():
        check_folder(folder)
        once = all((folder / name).exists() for name in ("runs", "sources", "data", ".gitignore"))  # its database was deleted or moved
        if not once and not (folder / "lab.db").exists() and any(p.name not in LAB_NAMES for p in folder.iterdir()):
            raise LabError(f"{folder} holds other things and is no lab.", next_step="Name an empty or a new folder with --lab.")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("runs", "sources", "data"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        ignore = folder / ".gitignore"
        if not ignore.exists():
            write_private(ignore, b"*\n")
    except OSError as error:
        raise LabError(
            f"The lab {folder} cannot be made: {error.strerror or error}.", next_step="Name a folder you may write with --lab."
        ) from error


def check_folder(folder: Path) -> None:
    """Refuse a lab that somebody else owns or may write."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        raise LabError(
            f"There is no lab at {folder}.",
            next_step="A first run or the control room makes one (`overnight run`, `overnight`); --lab names another.",
        ) from None
    except OSError as error:
        raise LabError(f"The lab {folder} cannot be opened: {error.strerror or error}.", next_step="Name another with --lab.") from error
    if not stat.S_ISDIR(found.st_mode):
        raise LabError(f"{folder} is not a folder.", next_step="Name the lab's folder with --lab.")
    if found.st_uid != os.geteuid():
        raise LabError(
            f"The lab {folder} belongs to user id {found.st_uid}, not to you.",
            next_step="A lab can start programs; use one of your own (--lab).",
        )
    if found.st_mode & 0o022:
        raise LabError(
            f"The lab {folder} may be written by others (mode {stat.S_IMODE(found.st_mode):04o}).", next_step=f"chmod 700 {folder}"
        )


def sync(path: Path) -> None:
    """Have a file's content on the disk. Raised: LabError."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise LabError(f"{path} cannot be written: {error.strerror or error}.", next_step="Free some disk space.") from error


def write_private(path: Path, content: bytes, *, replace: bool = False, synced: bool = True) -> None:
    """Write a 0600 file whole or not at all (tmp + fsync + rename); an existing file is kept unless `replace`."""
    if path.exists() and not replace:
        return
    tmp = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        descriptor = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        os.replace(tmp, path)
    except OSError as error:
        tmp.unlink(missing_ok=True)
        raise LabError(
            f"{path} cannot be written: {error.strerror or error}.", next_step="Free some disk space or check the folder's permissions."
        ) from error


def _highest_run(runs_dir: Path) -> int:
    """The highest run number a directory is left of: ids are never used again, also when the database was lost."""
    return max((int(p.name[1:]) for p in runs_dir.iterdir() if re.fullmatch(r"r\d{4,}", p.name)), default=0)


def _first_time(lab: Lab) -> None:
    """Facts a new lab is born with, and its first policy."""
    store = lab.store
    if store.meta("lab_id") is None:
        hosts = find_hosts_file(lab.path.parent)
        with store.transaction():
            if store.meta("lab_id") is None:
                store.set_meta("lab_id", uuid.uuid4().hex[:12])
                store.set_meta("run_seq", str(_highest_run(lab.runs_dir)))
                store.set_meta("created_at", str(time.time()))
                store.set_meta("hosts_file", str(hosts or lab.path.parent / HOSTS_FILE))
    db = lab.db_path
    for name in (db, db.with_name("lab.db-wal"), db.with_name("lab.db-shm")):
        if name.exists():
            name.chmod(0o600)
    lab.sync_policy()
