"""What the daemon's loops share in memory: live runs, slots, hosts and engines.

Nothing here is the truth: the database, the run directories and the engines are, and all of this is rebuilt from them at every start.
Writes go through `update`, so that a track and its row never differ.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.fitness import Fitness
from runner.records import LIVE_PHASES, GpuState, Phase, Point, Run

if TYPE_CHECKING:
    from runner.engines.base import Engine, HostReport, Slot
    from runner.lab import Lab
    from runner.policy import HostPolicy, Limits
    from runner.records import Gpu

UNWATCHED_S = 60.0  # between two daemons' beats


@dataclass(slots=True)
class Track:
    """One live run as the daemon follows it; `points` and `facts` wait for the next flush."""

    run: Run
    standby: bool = False
    log_offset: int = 0
    events_offset: int = 0
    read_at: float = 0.0
    points: list[Point] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    kept_share: float = -1.0
    pace: deque[tuple[float, float]] = field(default_factory=deque)  # (tokens, seconds) of the newest steps
    summary_at: float | None = None  # monotonic: when the summary block was read
    nonfinite: int = 0
    error: Any = None
    stop_asked: str | None = None
    stop_forced: bool = False
    stop_why: str | None = None
    launching: bool = False
    launches: int = 0
    launch_again_at: float = 0.0
    vanished: int = 0
    unkillable_since: float | None = None
    frozen: bool = False
    absent_since: float | None = None
    unreadable: set[str] = field(default_factory=set)  # files that were said to give no bytes
    ending: bool = False

    @property
    def stop_due(self) -> bool:
        """Whether a human asked for an end that was not passed on yet."""
        return self.run.wanted == "cancel" and (self.stop_asked is None or (bool(self.run.wanted_force) and not self.stop_forced))


@dataclass(slots=True)
class Device:
    """A slot as the daemon keeps it: what the engine said of it, and whether it may be used."""

    slot: Slot
    state: str = GpuState.FREE
    reason: str | None = None
    since: float = 0.0
    holder: dict[str, Any] | None = None
    sample: dict[str, Any] | None = None
    retry_at: float = 0.0
    deselected: bool = False  # hosts.toml no longer gives it to us: it goes when its run has ended
    written: tuple[Any, ...] = ()


class Roster:
    """Live runs (`tracks`), devices by UUID, engines and newest reports by host name."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.store = lab.store
        self.tracks: dict[str, Track] = {}
        self.devices: dict[str, Device] = {}
        self.engines: dict[str, Engine] = {}
        self.hosts: dict[str, HostPolicy] = {}
        self.reports: dict[str, HostReport] = {}
        self.changed = asyncio.Event()  # something the scheduler should look at
        self.fitness = Fitness()
        self.measured: set[tuple[str, str, str | None]] = set()  # (host, GPU model, driver) that was asked for a preflight
        self._limits, self._limits_at = lab.policy().limits, time.monotonic()
        self.seen_up: set[str] = set()  # hosts that answered since this daemon started
        self.told: set[str] = set()  # hosts whose state it wrote down since
        self.kept_states: dict[str, Gpu] = {}  # what the daemon before knew of the GPUs
        self.missing_since: dict[str, float] = {}  # monotonic: cards that their host does not report
        self.unwatched = False  # no daemon ran for a while: how long something has been so is not known
        self.started = time.monotonic()
        self.moved_at = float("-inf")  # monotonic: when a run was last placed or ended
        self.notes: dict[str, str] = {}  # what goes wrong now, by place; shown in daemon.note

    @property
    def limits(self) -> Limits:
        """The policy's limits, at most half a second old: they are asked for at every look at every run."""
        now = time.monotonic()
        if now - self._limits_at > 0.5:
            self._limits, self._limits_at = self.lab.policy().limits, now
        return self._limits

    def load(self) -> None:
        """Take up live rows and quarantined GPUs as the database has them."""
        phases = ", ".join(f"'{p}'" for p in LIVE_PHASES)
        for run in self.store.runs(f"phase != 'ended' AND phase IN ({phases})"):
            self.track(run)
        self.kept_states = {g.uuid: g for g in self.store.gpus()}
        last = self.store.daemon()
        self.unwatched = last is None or time.time() - last.beat_at > UNWATCHED_S

    def track(self, run: Run, *, standby: bool | None = None) -> Track:
        """Follow a run from where the database says it was read to."""
        if standby is None:
            standby = run.stage == "standby"
        kept = [p.share for p in self.store.points(run.id) if p.share is not None] if run.log_offset else []
        track = Track(run, standby, run.log_offset, run.events_offset, kept_share=max(kept, default=-1.0))
        track.summary_at = time.monotonic() if run.total_s is not None else None
        self.tracks[run.id] = track
        self.moved_at = time.monotonic()
        return track

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction; when it fails, the tracks are what the rows still are, and those that were dropped are followed again."""
        before = [(t, t.run) for t in self.tracks.values()]
        try:
            with self.store.transaction():
                yield
        except BaseException:
            for track, run in before:
                track.run = run
                self.tracks.setdefault(run.id, track)
            raise

    def update(self, track: Track, **columns: Any) -> None:
        """Write observed columns of a run, if they differ, and keep the track equal to the row."""
        new = {k: v for k, v in columns.items() if getattr(track.run, k) != v}
        if new:
            self.store.update_run(track.run.id, **new)
            track.run = dataclasses.replace(track.run, **new)

    def drop(self, track: Track) -> None:
        """Stop following a run, and let the scheduler look at its slot."""
        self.tracks.pop(track.run.id, None)
        self.moved_at = time.monotonic()
        self.changed.set()

    def on_host(self, host: str) -> list[Track]:
        """The live runs of a host."""
        return [t for t in self.tracks.values() if t.run.host == host]

    def occupant(self, uuid: str) -> Track | None:
        """The run that has the slot (not those that wait for it)."""
        return next((t for t in self.tracks.values() if t.run.gpu_uuid == uuid and not t.standby), None)

    def waiting(self, uuid: str) -> list[Track]:
        """Standbys handed to a slot, oldest first."""
        found = [t for t in self.tracks.values() if t.run.gpu_uuid == uuid and t.standby]
        return sorted(found, key=lambda t: t.run.placed_at or 0.0)

    def set_device(
        self, uuid: str | None, state: str, reason: str | None = None, *, holder: dict[str, Any] | None = None, retry_s: float = 0.0
    ) -> None:
        """Change a GPU's state; quarantine stays until somebody releases it."""
        device = self.devices.get(uuid or "")
        if device is None or (device.state == GpuState.QUARANTINED and state != GpuState.QUARANTINED):
            return
        device.retry_at = time.time() + retry_s if retry_s else 0.0
        if (device.state, device.reason) == (state, reason):
            return
        if state == GpuState.QUARANTINED:
            self.store.event("daemon", "quarantine", uuid, reason, holder)
        device.state, device.reason, device.holder, device.since = state, reason, holder, time.time()
        self.changed.set()

    def release(self, uuid: str) -> None:
        """End a quarantine because a human said so."""
        device = self.devices[uuid]
        device.state, device.reason, device.holder, device.since = GpuState.FREE, None, None, time.time()
        self.changed.set()

    def note(self, place: str, text: str | None) -> None:
        """Keep, or take back, what goes wrong at a place."""
        if text is None:
            self.notes.pop(place, None)
        else:
            self.notes[place] = text

    def far(self, host: str) -> bool:
        """Whether a link lies between us and the host."""
        engine = self.engines.get(host)
        return engine is not None and engine.kind not in ("local", "fake")


def left_s(track: Track, now: float) -> float | None:
    """How long a run probably still needs, or None before its first step."""
    run = track.run
    if run.phase == Phase.FINISHING or track.summary_at is not None:
        return 0.0
    remaining = track.facts.get("remaining_s", run.remaining_s)
    if remaining is not None:
        return max(float(remaining), 0.0)
    if run.started_at is not None and run.budget_s <= 60:
        return max(run.budget_s - (now - run.started_at), 0.0)
    return None
