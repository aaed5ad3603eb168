"""SQLite behind typed calls; with schema.py the only files that know SQL.

One connection, short BEGIN IMMEDIATE transactions, a 5 s busy timeout. Verbs write wanted columns, the daemon writes observed ones; this
file does not
decide who may call what. Every sqlite error leaves here as a LabError with a sentence.
"""

from __future__ import annotations

import json
import operator
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from runner import schema
from runner.errors import LabError
from runner.records import DaemonRow, Event, Flag, Gpu, Host, Point, Request, Run, Sample, Wave
from runner.sqlite_errors import mapped

Record = TypeVar("Record")
# The SQL of Run.waiting without the proposed ones, in terms of the index of runs that have not ended.
IN_QUEUE = "(phase = 'queued' OR (phase = 'starting' AND stage = 'standby')) AND phase != 'ended'"
RUN_COLUMNS = frozenset(f.name for f in fields(Run))
POINT_COLUMNS = tuple(f.name for f in fields(Point))
SAMPLE_COLUMNS = tuple(f.name for f in fields(Sample))
# These decode to an empty object when absent; the other JSON columns decode to None.
_NEVER_NULL = {"overrides", "constants", "factors", "args"}


class Store:
    """An open lab database. Thread-safe; a transaction belongs to the thread that opened it."""

    def __init__(self, path: Path, *, readonly: bool = False, create: bool = False) -> None:
        self.path = path
        self.readonly = readonly
        self._lock = threading.RLock()
        self._depth = 0
        self._schema = schema.VERSION
        with mapped(path):
            self._db = self._connect(create)
            self._file = _identity(path)
            try:
                self._check_version(create)
            except BaseException:
                self._db.close()
                raise

    def moved(self) -> bool:
        """Whether another file, or none, is now where the open database was."""
        return _identity(self.path) != self._file

    def _connect(self, create: bool) -> sqlite3.Connection:
        if not self.path.exists() and not create:
            raise LabError(
                f"There is no lab database at {self.path}.",
                next_step="Submit a run or start the daemon to make one, or name the lab with --lab.",
            )
        mode = "ro" if self.readonly else ("rwc" if create else "rw")
        uri = f"{self.path.resolve().as_uri()}?mode={mode}{self._immutable()}"
        db = sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None, check_same_thread=False)
        db.row_factory = sqlite3.Row
        try:
            if not self.readonly:
                found = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                if found != "wal":
                    raise LabError(
                        f"{self.path} is on a file system where SQLite's write-ahead log does not work.",
                        next_step="Put the lab on a disk of this machine: --lab /var/tmp/overnight-lab.",
                    )
                db.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            db.close()
            raise
        return db

    def _immutable(self) -> str:
        """Where not even the shared memory of the write-ahead log can be made (a read-only mount), a database that was closed in order is
        read as a file that never changes. One that was not brings its log and memory along, and is read with them.
        """
        wal = self.path.with_name(self.path.name + "-wal")
        whole = not wal.exists() or wal.stat().st_size == 0
        return "&immutable=1" if self.readonly and whole and not os.access(self.path.parent, os.W_OK) else ""

    def _check_version(self, create: bool) -> None:
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found > schema.VERSION:
            raise LabError(
                f"{self.path} was written by a newer Overnight (schema {found}; this one knows {schema.VERSION}).",
                next_step="Update Overnight, or name another lab with --lab.",
            )
        if found == schema.VERSION or self.readonly:
            self._schema = found
            if found == 0:
                raise LabError(f"{self.path} holds no lab yet.", next_step="Start the daemon or submit a run to make one.")
            return
        with self.transaction():
            found = self._db.execute("PRAGMA user_version").fetchone()[0]  # another process may have been first
            if found == 0:
                if not create and self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    raise LabError(f"{self.path} is an SQLite file, but not a lab's.", next_step="Name another lab with --lab.")
                for statement in schema.TABLES.split(";\n"):
                    if statement.strip():
                        self._db.execute(statement)
            for version in range(max(found, 1), schema.VERSION):
                for statement in schema.MIGRATIONS[version].split(";\n"):
                    if statement.strip():
                        self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {schema.VERSION}")

    def close(self) -> None:
        """Close the connection; the last writer's close folds the write-ahead log into the database."""
        with self._lock:
            self._db.close()

    # -- the two ways in -------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """BEGIN IMMEDIATE … COMMIT; nested use joins the outer transaction; any exception rolls all of it back."""
        with self._lock, mapped(self.path):
            if self._depth:
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
                return
            self._db.execute("BEGIN IMMEDIATE")
            self._depth = 1
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._depth = 0

    def _write(self, sql: str, args: Sequence[Any] | dict[str, Any] = ()) -> sqlite3.Cursor:
        with self.transaction():
            return self._db.execute(sql, args)

    def _read(self, sql: str, args: Sequence[Any] | dict[str, Any] = ()) -> list[sqlite3.Row]:
        with self._lock, mapped(self.path):
            return self._db.execute(sql, args).fetchall()

    def _records(self, kind: type[Record], sql: str, args: Sequence[Any] = ()) -> list[Record]:
        rows = self._read(sql, args)
        if not rows:
            return []
        plan = _plan(kind, tuple(rows[0].keys()))
        return [_record(kind, plan, row) for row in rows]

    def data_version(self) -> int:
        """Changes whenever another connection has committed; the daemon's cheap "did a client write?"."""
        return int(self._read("PRAGMA data_version")[0][0])

    @property
    def writing(self) -> bool:
        """Whether a transaction of this connection is open: what is read then may never have been."""
        return self._depth > 0

    def changes(self, counter: str) -> tuple[int, int]:
        """Differs from before when what a counter of the schema counts has changed. In a lab of an older schema, which is only read, it
        differs when anybody has written anything."""
        if self._schema < schema.COUNTERS[counter]:
            return 0, self.data_version()
        return 1, int(self._read("SELECT n FROM counters WHERE name = ?", (counter,))[0][0])

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One consistent view for several reads (a deferred transaction)."""
        with self._lock, mapped(self.path):
            if self._depth or self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN DEFERRED")
            try:
                yield
            finally:
                self._db.execute("ROLLBACK")

    # -- runs --------------------------------------------------------------------

    def insert_run(self, **columns: Any) -> str:
        """Insert a run; its id and seq are given here and never reused. Returns the id."""
        with self.transaction():
            seq = self._next("run_seq")
            run_id = f"r{seq:04d}"
            self._insert("runs", {"id": run_id, "seq": seq, **columns})
            return run_id

    def run(self, run_id: str) -> Run | None:
        """The run of that id, or None."""
        found = self._records(Run, "SELECT * FROM runs WHERE id = ?", (run_id,))
        return found[0] if found else None

    def runs(self, where: str = "1", args: Sequence[Any] = (), *, order: str = "seq", limit: int = -1, offset: int = 0) -> list[Run]:
        """Runs by a condition written here or in queries (never from outside text)."""
        return self._records(Run, f"SELECT * FROM runs WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?", (*args, limit, offset))

    def count_runs(self, where: str = "1", args: Sequence[Any] = ()) -> int:
        """How many runs meet a condition."""
        return int(self._read(f"SELECT count(*) FROM runs WHERE {where}", args)[0][0])

    def tally(self, columns: str, where: str = "1", args: Sequence[Any] = (), *, table: str = "runs") -> list[tuple[Any, ...]]:
        """Rows of an aggregate over a table, such as `tally("phase, count(*)", "1 GROUP BY phase")`."""
        return [tuple(row) for row in self._read(f"SELECT {columns} FROM {table} WHERE {where}", args)]

    def active_runs(self) -> list[Run]:
        """Every run that has not ended: highest priority first, then first come."""
        return self.runs("phase != 'ended'", order="priority DESC, seq")

    def update_run(self, run_id: str, **columns: Any) -> None:
        """Set columns of one run."""
        if not columns:
            return
        unknown = columns.keys() - RUN_COLUMNS
        if unknown:
            raise KeyError(f"no such column of runs: {sorted(unknown)}")
        sets = ", ".join(f"{name} = :{name}" for name in columns)
        self._write(f"UPDATE runs SET {sets} WHERE id = :id_", {**_encoded(columns), "id_": run_id})

    def add_points(self, run_id: str, points: Iterable[Point]) -> None:
        """Keep progress lines; a step that is there already is left as it is, so reading a stretch twice doubles nothing."""
        rows = [(run_id, *(getattr(p, c) for c in POINT_COLUMNS)) for p in points]
        marks = ", ".join("?" * (len(POINT_COLUMNS) + 1))
        with self.transaction():
            self._db.executemany(f"INSERT OR IGNORE INTO points(run_id, {', '.join(POINT_COLUMNS)}) VALUES ({marks})", rows)

    def points(self, run_id: str) -> list[Point]:
        """The progress of a run, by step."""
        return self._records(Point, f"SELECT {', '.join(POINT_COLUMNS)} FROM points WHERE run_id = ? ORDER BY step", (run_id,))

    # -- waves, sources --------------------------------------------------------------

    def insert_wave(self, **columns: Any) -> str:
        """Insert a wave; returns its id."""
        with self.transaction():
            seq = self._next("wave_seq")
            self._insert("waves", {"id": f"w{seq}", "seq": seq, **columns})
            return f"w{seq}"

    def wave(self, wave_id: str) -> Wave | None:
        """The wave of that id, or None."""
        found = self._records(Wave, "SELECT * FROM waves WHERE id = ?", (wave_id,))
        return found[0] if found else None

    def waves(self, limit: int = -1) -> list[Wave]:
        """Waves, newest first."""
        return self._records(Wave, "SELECT * FROM waves ORDER BY seq DESC LIMIT ?", (limit,))

    def add_source(self, sha: str, size: int, name: str, effective_sha: str) -> None:
        """Record a source text; its file is written by the caller before."""
        self._write("INSERT OR IGNORE INTO sources VALUES (?, ?, ?, ?, ?)", (sha, size, name, effective_sha, time.time()))

    # -- hosts, GPUs, telemetry ------------------------------------------------------

    def hosts(self) -> list[Host]:
        """All hosts ever seen, by name."""
        return self._records(Host, "SELECT * FROM hosts ORDER BY name")

    def upsert_host(self, name: str, **columns: Any) -> None:
        """Insert a host (kind, state and since are needed then) or set some of its columns."""
        self._upsert("hosts", "name", name, columns)

    def gpus(self) -> list[Gpu]:
        """All GPUs ever seen, by host and index."""
        return self._records(Gpu, "SELECT * FROM gpus ORDER BY host, idx, uuid")

    def upsert_gpu(self, uuid: str, **columns: Any) -> None:
        """Insert a GPU (host, name, state and since are needed then) or set some of its columns."""
        self._upsert("gpus", "uuid", uuid, columns)

    def delete_gpu(self, uuid: str) -> None:
        """Forget a GPU that its host no longer has."""
        self._write("DELETE FROM gpus WHERE uuid = ?", (uuid,))

    def add_samples(self, samples: Iterable[Sample]) -> None:
        """Keep telemetry; one row a GPU and second."""
        rows = [tuple(getattr(s, c) for c in SAMPLE_COLUMNS) for s in samples]
        with self.transaction():
            self._db.executemany(
                f"INSERT OR REPLACE INTO samples({', '.join(SAMPLE_COLUMNS)}) VALUES ({', '.join('?' * len(SAMPLE_COLUMNS))})", rows
            )

    def samples(self, where: str, args: Sequence[Any], *, limit: int = -1) -> list[Sample]:
        """Telemetry by a condition on its columns, oldest first."""
        return self._records(Sample, f"SELECT {', '.join(SAMPLE_COLUMNS)} FROM samples WHERE {where} ORDER BY at LIMIT ?", (*args, limit))

    def thin_samples(self, before: float, keep_every_s: int) -> int:
        """Drop all but one row in `keep_every_s` seconds of telemetry older than `before`; how many went."""
        return self._write("DELETE FROM samples WHERE at < ? AND at % ? != 0", (int(before), keep_every_s)).rowcount

    # -- flags, events, requests, settings ------------------------------------------------

    def raise_flag(self, subject: str, kind: str, severity: str, evidence: str) -> bool:
        """Raise a flag; True when it was not up already (edge-triggered), else only its evidence is renewed."""
        with self.transaction():
            up = self._read("SELECT evidence FROM flags WHERE subject = ? AND kind = ? AND cleared_at IS NULL", (subject, kind))
            if up and up[0][0] == evidence:
                return False
            if up:
                self._write(
                    "UPDATE flags SET evidence = ?, severity = ? WHERE subject = ? AND kind = ?", (evidence, severity, subject, kind)
                )
                return False
            self._write("INSERT OR REPLACE INTO flags VALUES (?, ?, ?, ?, ?, NULL)", (subject, kind, severity, evidence, time.time()))
            return True

    def clear_flag(self, subject: str, kind: str) -> bool:
        """Take a flag down; True when it was up."""
        return (
            self._write(
                "UPDATE flags SET cleared_at = ? WHERE subject = ? AND kind = ? AND cleared_at IS NULL", (time.time(), subject, kind)
            ).rowcount
            > 0
        )

    def flags(self, subject: str | None = None, *, cleared: bool = False) -> list[Flag]:
        """Flags that are up (or, with `cleared`, all), of one subject or of all."""
        where = "(? IS NULL OR subject = ?)" + ("" if cleared else " AND cleared_at IS NULL")
        return self._records(Flag, f"SELECT * FROM flags WHERE {where} ORDER BY raised_at", (subject, subject))

    def event(self, who: str, verb: str, subject: str | None = None, why: str | None = None, detail: Any = None) -> int:
        """Append to the audit trail; the event's id."""
        row = (time.time(), who, verb, subject, why, None if detail is None else json.dumps(detail, allow_nan=False, default=str))
        return int(self._write("INSERT INTO events(at, who, verb, subject, why, detail) VALUES (?, ?, ?, ?, ?, ?)", row).lastrowid or 0)

    def events(self, *, after: int = 0, before: int | None = None, subject: str | None = None, limit: int = 100) -> list[Event]:
        """Events newest first, by id range and subject."""
        sql = "SELECT * FROM events WHERE id > ? AND (? IS NULL OR id < ?) AND (? IS NULL OR subject = ?) ORDER BY id DESC LIMIT ?"
        return self._records(Event, sql, (after, before, before, subject, subject, limit))

    def insert_request(self, verb: str, args: dict[str, Any], who: str) -> int:
        """Ask the daemon for something; the request's id."""
        now = time.time()
        row = (verb, json.dumps(args, allow_nan=False), who, now, now)
        return int(
            self._write(
                "INSERT INTO requests(verb, args, who, state, created_at, updated_at) VALUES (?, ?, ?, 'asked', ?, ?)", row
            ).lastrowid
            or 0
        )

    def request(self, request_id: int) -> Request | None:
        """The request of that id, or None."""
        found = self._records(Request, "SELECT * FROM requests WHERE id = ?", (request_id,))
        return found[0] if found else None

    def requests(self, state: str) -> list[Request]:
        """Requests in a state, oldest first."""
        return self._records(Request, "SELECT * FROM requests WHERE state = ? ORDER BY id", (state,))

    def update_request(self, request_id: int, **columns: Any) -> None:
        """Set state, progress, result or error of a request."""
        columns["updated_at"] = time.time()
        sets = ", ".join(f"{name} = :{name}" for name in columns)
        values = {
            k: json.dumps(v, allow_nan=False, default=str) if k in ("result", "error") and v is not None else v for k, v in columns.items()
        }
        self._write(f"UPDATE requests SET {sets} WHERE id = :id_", {**values, "id_": request_id})

    def setting(self, key: str, default: Any = None) -> Any:
        """A setting of the lab, or the default."""
        found = self._read("SELECT value FROM settings WHERE key = ?", (key,))
        return json.loads(found[0][0]) if found else default

    def set_setting(self, key: str, value: Any) -> None:
        """Write a setting of the lab."""
        self._write("INSERT OR REPLACE INTO settings VALUES (?, ?)", (key, json.dumps(value, allow_nan=False)))

    def meta(self, key: str) -> str | None:
        """A fact about the lab itself."""
        found = self._read("SELECT value FROM meta WHERE key = ?", (key,))
        return str(found[0][0]) if found else None

    def set_meta(self, key: str, value: str | None) -> None:
        """Write or remove a fact about the lab itself."""
        if value is None:
            self._write("DELETE FROM meta WHERE key = ?", (key,))
        else:
            self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def replay(self, request_id: str) -> tuple[str, Any] | None:
        """What an earlier write with this request_id was and returned: (verb, result)."""
        found = self._read("SELECT verb, result FROM replays WHERE request_id = ?", (request_id,))
        return (str(found[0][0]), json.loads(found[0][1])) if found else None

    def remember(self, request_id: str, verb: str, result: Any) -> None:
        """Keep the result of a write, so that its repetition returns the same."""
        self._write("INSERT INTO replays VALUES (?, ?, ?, ?)", (request_id, verb, json.dumps(result, allow_nan=False), time.time()))

    def daemon(self) -> DaemonRow | None:
        """The daemon's row: who serves or last served the lab."""
        found = self._records(DaemonRow, "SELECT pid, boot_id, started_at, beat_at, version, note FROM daemon")
        return found[0] if found else None

    def beat(self, *, pid: int, boot_id: str, started_at: float, version: str, note: str | None) -> None:
        """The daemon's sign of life."""
        self._write("INSERT OR REPLACE INTO daemon VALUES (1, ?, ?, ?, ?, ?, ?)", (pid, boot_id, started_at, time.time(), version, note))

    # -- shared by the above ---------------------------------------------------------------

    def _next(self, counter: str) -> int:
        value = int(self.meta(counter) or 0) + 1
        self.set_meta(counter, str(value))
        return value

    def _insert(self, table: str, columns: dict[str, Any]) -> None:
        names = ", ".join(columns)
        marks = ", ".join(f":{name}" for name in columns)
        self._write(f"INSERT INTO {table}({names}) VALUES ({marks})", _encoded(columns))

    def _upsert(self, table: str, key: str, value: str, columns: dict[str, Any]) -> None:
        with self.transaction():
            if columns:
                sets = ", ".join(f"{name} = :{name}" for name in columns)
                done = self._write(f"UPDATE {table} SET {sets} WHERE {key} = :key_", {**_encoded(columns), "key_": value}).rowcount
                if done:
                    return
            self._insert(table, {key: value, **columns})


def _encoded(columns: dict[str, Any]) -> dict[str, Any]:
    """Column values as SQLite takes them: JSON columns as text, enums as their words."""
    return {
        name: json.dumps(value, allow_nan=False, default=str)
        if name in schema.JSON_COLUMNS and value is not None
        else (str(value) if isinstance(value, str) else value)
        for name, value in columns.items()
    }


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a row of given columns becomes a record: its values in field order, and which of them are JSON (place, value when null)."""

    values: Callable[[sqlite3.Row], tuple[Any, ...]]
    decoded: tuple[tuple[int, bool], ...]


_plans: dict[tuple[type[Any], tuple[str, ...]], _Plan] = {}


def _plan(kind: type[Any], columns: tuple[str, ...]) -> _Plan:
    """Worked out once per record and column list: a run has eighty columns, and lists of runs are read with every answer."""
    found = _plans.get((kind, columns))
    if found is None:
        names = [f.name for f in fields(kind)]
        decoded = [n for n, name in enumerate(names) if name in schema.JSON_COLUMNS or (kind is Request and name == "error")]
        never_null = tuple((n, names[n] in _NEVER_NULL) for n in decoded)
        found = _plans[(kind, columns)] = _Plan(operator.itemgetter(*(columns.index(name) for name in names)), never_null)
    return found


def _record(kind: type[Record], plan: _Plan, row: sqlite3.Row) -> Record:
    """A row as its frozen record; JSON columns decoded."""
    values = list(plan.values(row))
    for place, never_null in plan.decoded:
        text = values[place]
        values[place] = json.loads(text) if text is not None else ({} if never_null else None)
    return kind(*values)


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file this is; None when there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return (found.st_dev, found.st_ino)
