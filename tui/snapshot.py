"""What the screen knows: one frozen Snapshot a second, taken by a daemon thread that may block for ever without anyone noticing.

The reader opens the lab read-only, asks `runner.queries`, and hands each snapshot to the app. It reads again only what moved
(`data_version`), reopens a database that was replaced, and turns every failure into a sentence. Pages add what they need with `watch`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from runner import queries
from runner.errors import OvernightError
from runner.keeper import Keeper
from runner.lab import Lab, open_lab
from runner.records import Event, Flag, Host, Json, Phase, Wave

from .gpuwords import stale

HISTORY = 240
CELL_S = 5  # readings in one cell of a history
PAST_CELLS = 60  # cells read back when the screen opens: five minutes
SHOWN = 200  # rows of the leaderboard
AGES = ("age_s", "since_s", "sample_age_s", "unreachable_s")  # seconds in GPU and run objects that grow while nothing happens
SETTLE_S = 10.0  # the leaderboard is ranked anew at least so often while runs move

Loader = Callable[[Lab], Any]
Deliver = Callable[["Snapshot"], None]


@dataclass(frozen=True, slots=True)
class Failed:
    """A view that could not be read, in a sentence."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of the lab; `problem` says why the newest attempt failed, while the rest stays as last seen."""

    at: float = 0.0
    lab: str = ""
    problem: str | None = None
    state: queries.LabState | None = None
    gpus: tuple[Json, ...] = ()
    live: Mapping[str, Json] = field(default_factory=dict)
    queue: tuple[Json, ...] = ()
    board: Json | None = None
    hosts: tuple[Host, ...] = ()
    told: Mapping[str, Json] = field(default_factory=dict)  # the host object of each host, by name
    flags: tuple[Flag, ...] = ()
    events: tuple[Event, ...] = ()
    waves: tuple[Wave, ...] = ()
    history: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    views: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seen(self) -> bool:
        """Whether the lab was read at least once."""
        return self.state is not None


class Source(Protocol):
    """Where snapshots come from: the lab, or a scene of a test."""

    def start(self, deliver: Deliver) -> None:
        """Begin to hand out snapshots; returns at once."""

    def stop(self) -> None:
        """Hand out no more; returns at once."""

    def poke(self) -> None:
        """Take one now: a verb was just carried out, or a screen opened."""

    def watch(self, name: str, load: Loader) -> None:
        """Put `load(lab)` into `views[name]` of every snapshot from now on."""

    def unwatch(self, name: str) -> None:
        """No longer."""


class Reader:
    """Reads the lab once a second in a thread of its own."""

    def __init__(
        self,
        path: Path,
        *,
        interval_s: float = 1.0,
        before: Callable[[], None] | None = None,
        keeper: Keeper | None = None,
        class_key: str | None = None,
    ) -> None:
        self.path = path
        self.interval_s = interval_s
        self.class_key = class_key
        self.budget_s: float | None = None
        self._before, self._keeper = before, keeper
        self._deliver: Deliver | None = None
        self._wake = threading.Event()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._views: dict[str, Loader] = {}
        self._history: dict[str, deque[float | None]] = {}
        self._filling: dict[str, list[float | None]] = {}
        self._lab: Lab | None = None
        self._identity: tuple[int, int] | None = None
        self._version: int | None = None
        self._settled: tuple[Any, float] = (None, 0.0)
        self._last = Snapshot(lab=str(path))

    def start(self, deliver: Deliver) -> None:
        """Start the thread; a daemon thread, so that nothing it hangs in delays quitting."""
        self._deliver = deliver
        threading.Thread(target=self._run, name="overnight-reader", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end when it can."""
        self._over.set()
        self._wake.set()

    def poke(self) -> None:
        """Read again now, whatever the version says."""
        self._version = None
        self._wake.set()

    def choose(self, class_key: str | None, budget_s: float | None) -> None:
        """Rank this class and budget from now on."""
        self.class_key, self.budget_s = class_key, budget_s
        self.poke()

    def watch(self, name: str, load: Loader) -> None:
        """Read `load(lab)` with every snapshot."""
        with self._lock:
            self._views[name] = load
        self.poke()

    def unwatch(self, name: str) -> None:
        """Stop reading it."""
        with self._lock:
            self._views.pop(name, None)

    # the thread

    def _run(self) -> None:
        problem = None
        if self._before is not None:
            try:
                self._before()
            except OvernightError as error:
                problem = str(error)
        while not self._over.is_set():
            self._wake.clear()
            started = time.monotonic()
            snapshot = self.take()
            if self._keeper is not None and self._lab is not None:
                problem = self._look_after_daemon(self._keeper, self._lab)
            if problem and snapshot.problem is None and not getattr(snapshot.state, "daemon_alive", False):
                snapshot = replace(snapshot, problem=problem)
            if self._deliver is not None and not self._over.is_set():
                self._deliver(snapshot)
            self._wake.wait(max(0.05, self.interval_s - (time.monotonic() - started)))
        if self._lab is not None:
            self._lab.close()

    def _look_after_daemon(self, keeper: Keeper, lab: Lab) -> str | None:
        """Have a daemon that died started again; why it did not come up, if so."""
        try:
            keeper.look(lab)
        except OvernightError as error:  # the lab became unreadable: the next reading says so
            return str(error)
        return keeper.trouble

    def take(self) -> Snapshot:
        """One snapshot; a failure leaves the facts as last seen and says what is wrong."""
        try:
            lab = self._open()
            version = lab.store.data_version()
            moved = version != self._version
            self._version = version
            self._last = self._read(lab, moved)
        except OvernightError as error:
            self._last = replace(self._last, problem=str(error))
        except Exception as error:  # noqa: BLE001 - the top of the thread: a fault of one reading is shown, and the next second is tried again
            self._last = replace(self._last, problem=f"The lab could not be read: {type(error).__name__}: {error}.")
            self._close()
        return self._last

    def _open(self) -> Lab:
        try:
            found = os.stat(self.path / "lab.db")
            identity = (found.st_dev, found.st_ino)
        except OSError:
            identity = None
        if self._lab is not None and identity != self._identity:
            self._close()
        if self._lab is None:
            self._lab = open_lab(self.path, readonly=True)
            self._identity, self._version = identity, None
        return self._lab

    def _close(self) -> None:
        if self._lab is not None:
            self._lab.close()
        self._lab = self._version = None

    def _read(self, lab: Lab, moved: bool) -> Snapshot:
        now = time.time()
        if not moved and self._last.seen and self._last.problem is None:
            last, passed_s = self._last, now - self._last.at
            return replace(
                aged(last, passed_s),
                at=now,
                state=queries.lab_state(lab),
                views=self._load(lab, moved),
                history=self._remember(last.gpus),
            )
        store, state = lab.store, queries.lab_state(lab)
        active = store.active_runs()
        objects = list(zip(active, queries.run_objects(lab, active), strict=True))
        hosts = tuple(h for h in store.hosts() if h.state != "removed")
        names = {h.name for h in hosts}
        gpus = tuple(g for g in queries.gpu_objects(lab, active) if g["host"] in names)
        return Snapshot(
            at=now,
            lab=str(lab.path),
            state=state,
            gpus=gpus,
            live={run.id: o for run, o in objects if run.live},
            queue=tuple(sorted((o for run, o in objects if not run.live), key=lambda o: o["phase"] == Phase.PROPOSED)),
            board=self._board(lab, state, now),
            hosts=hosts,
            told={str(h["name"]): h for h in queries.host_objects(lab)},
            flags=tuple(store.flags()),
            events=tuple(store.events(limit=50)),
            waves=tuple(store.waves(limit=50)),
            history=self._remember(gpus, lab),
            views=self._load(lab, moved),
        )

    def _board(self, lab: Lab, state: queries.LabState, now: float) -> Json | None:
        """The leaderboard; ranked again when a run ended or somebody did something, and now and then for what the daemon verified."""
        stamp = (state.ended, state.completed, lab.store.tally("max(id)", table="events"), self.class_key, self.budget_s)
        if self._settled[0] != stamp or now - self._settled[1] > SETTLE_S:
            self._settled = (stamp, now)
            return queries.leaderboard(lab, class_key=self.class_key, budget_s=self.budget_s, limit=SHOWN)
        return self._last.board

    def _remember(self, gpus: tuple[Json, ...], lab: Lab | None = None) -> dict[str, tuple[float | None, ...]]:
        """Means over CELL_S readings each, the newest one still filling: a history that moves every second costs a repaint every second."""
        for gpu in gpus:
            uuid = str(gpu["uuid"])
            if uuid not in self._history:
                self._history[uuid] = deque(past_of(lab, gpu, time.time()) if lab else (), maxlen=HISTORY)
            past, filling = self._history[uuid], self._filling.setdefault(uuid, [])
            value = pulse(gpu)
            if not filling:
                past.append(None)
            filling.append(value)
            past[-1] = mean(filling)
            if len(filling) >= CELL_S:
                filling.clear()
        return {uuid: tuple(past) for uuid, past in self._history.items()}

    def _load(self, lab: Lab, moved: bool) -> dict[str, Any]:
        with self._lock:
            wanted = dict(self._views)
        out: dict[str, Any] = {}
        for name, load in wanted.items():
            if not moved and name in self._last.views and not isinstance(self._last.views[name], Failed):
                out[name] = self._last.views[name]
                continue
            try:
                out[name] = load(lab)
            except OvernightError as error:
                out[name] = Failed(str(error))
            except Exception as error:  # noqa: BLE001 - one page that cannot be read must not blind the others
                out[name] = Failed(f"This could not be read: {type(error).__name__}: {error}.")
        return out


def aged(snapshot: Snapshot, passed_s: float) -> Snapshot:
    """The same rows some seconds later, when nothing was read anew: what does not move must look old."""
    return replace(
        snapshot,
        gpus=tuple(_aged(g, passed_s) for g in snapshot.gpus),
        live={run: _aged(o, passed_s) for run, o in snapshot.live.items()},
        queue=tuple(_aged(o, passed_s) for o in snapshot.queue),
    )


def _aged(row: Json, passed_s: float) -> Json:
    return {**row, **{key: row[key] + passed_s for key in AGES if row.get(key) is not None}}


def pulse(gpu: Json) -> float | None:
    """What a history shows: MFU; utilisation where the card's peak is not known; tokens a second on a CPU; None while it idles."""
    if stale(gpu):
        return None
    speed = gpu.get("tok_s")
    if gpu.get("index") is None:
        return speed
    if gpu.get("mfu_percent") is None and speed is not None:
        return (gpu.get("sample") or {}).get("util_pct")
    return gpu.get("mfu_percent")


def mean(values: Sequence[float | None]) -> float | None:
    """Mean of what is known."""
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def past_of(lab: Lab, gpu: Json, now: float) -> list[float | None]:
    """The history of a GPU before the screen was opened, from the samples the daemon kept, by its run's speed."""
    pulsing, speed = pulse(gpu), gpu.get("tok_s")
    if pulsing is None or not speed:
        return []
    factor = float(pulsing) / float(speed)
    start = int(now) - PAST_CELLS * CELL_S
    cells: list[list[float | None]] = [[] for _ in range(PAST_CELLS)]
    for sample in lab.store.samples("gpu_uuid = ? AND at >= ? AND at < ?", (gpu["uuid"], start, int(now))):
        known = sample.tok_s is not None and sample.run_id == gpu.get("run")
        cells[(sample.at - start) // CELL_S].append(factor * sample.tok_s if known and sample.tok_s else None)
    first = next((i for i, c in enumerate(cells) if mean(c) is not None), PAST_CELLS)
    past = [mean(c) for c in cells[first:]]
    for at in range(1, len(past)):
        if past[at] is None and any(v is not None for v in past[at + 1 : at + 4]):
            past[at] = past[at - 1]  # samples are thinned with age
    return past
