"""One run, one observed state: what the row becomes, and what is asked of the supervisor.

Called for every live run at every look at its host, and in the same way after a restart; every step may be repeated. A state of
`unknown` only ever makes a run unreachable, never failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from runner import finishing, follow, launch, states
from runner.errors import HostError
from runner.records import GpuState, Outcome, Phase, Severity, Stage

if TYPE_CHECKING:
    from runner.engines.base import Engine, State
    from runner.roster import Roster, Track

NAN_STEPS = 3  # so many progress lines in a row without a finite loss end a run
GONE_S = 8.0  # a started run whose directory stays away so long is lost
VANISHED_S = 10.0  # a supervisor says its first word within milliseconds
UNKILLABLE_S = 15.0
FROZEN_S = 15.0  # seven missed beats
log = logging.getLogger("overnight.reconcile")

UNPLACED = {
    "host": None,
    "engine": None,
    "gpu_uuid": None,
    "gpu_name": None,
    "stage": None,
    "placed_at": None,
    "driver": None,
    "unreachable_since": None,
    "log_offset": 0,
    "events_offset": 0,
}


async def observe(roster: Roster, engine: Engine, track: Track, state: State) -> None:
    """Bring the row of one run up to what its engine says of it."""
    if track.launching or track.ending:
        return
    if state.phase == "unknown":
        _out_of_reach(roster, track)
        return
    if track.run.phase == Phase.UNREACHABLE:
        roster.update(track, phase=Phase.STARTING if track.run.started_at is None else Phase.RUNNING, unreachable_since=None)
    if state.phase == "absent":
        await _absent(roster, engine, track, state)
        return
    track.absent_since = None
    _unreadable(roster, track, state)
    if state.phase in ("ended", "refused", "lost"):
        await finish(roster, engine, track, state)
        return
    _alive(roster, track, state)
    _heartbeat(roster, track, state)
    await _ask_stop(roster, engine, track)  # before anything is read: whatever a run did to its files, it can be ended
    if await _cannot_be_killed(roster, engine, track, state):
        return
    if state.phase in ("running", "stopping"):
        await follow.read_new(roster, engine, track, state)
        finishing.note_start(roster, track)
        await _ask_stop(roster, engine, track)


def _out_of_reach(roster: Roster, track: Track) -> None:
    if track.run.phase != Phase.UNREACHABLE:
        roster.update(track, phase=Phase.UNREACHABLE, unreachable_since=time.time())


async def _absent(roster: Roster, engine: Engine, track: Track, state: State) -> None:
    """A run with a row but no directory: not started yet (a crash came between), or its directory was deleted."""
    handed_over = state.gone and track.launches > 0  # its supervisor was on record: the directory was deleted before we looked
    if track.run.started_at is None and not handed_over:
        if track.run.wanted == "cancel":
            finishing.end(roster, track, Outcome.CANCELLED, cause_text="cancelled before it started")
            return
        if not track.launches and roster.lab.policy().host(track.run.host or "") is None:
            await _requeue(roster, engine, track, f"its host {track.run.host} went out of hosts.toml before it started")
            return
        _vanished(roster, track)
        return
    now = time.monotonic()
    track.absent_since = track.absent_since or now
    if now - track.absent_since > GONE_S:
        outcome = Outcome.CANCELLED if track.run.wanted == "cancel" else Outcome.LOST
        finishing.end(roster, track, outcome, cause="run_dir_gone", cause_text="its run directory was deleted while it ran")


def _unreadable(roster: Roster, track: Track, state: State) -> None:
    """Files of the run that are there and cannot be read: they count as having no more bytes, and the run says so."""
    for name in sorted(state.unreadable):
        if name not in track.unreadable:
            track.unreadable.add(name)
            evidence = "; ".join(f"{file}: {why}" for file, why in sorted(state.unreadable.items()))
            roster.store.raise_flag(track.run.id, "unreadable", Severity.WARN, f"nothing more is read of {evidence}")


def _heartbeat(roster: Roster, track: Track, state: State) -> None:
    """A supervisor that holds its lock and does not beat is frozen, not dead: said so, and left alone."""
    age_s = state.heartbeat_age_s
    frozen = age_s is not None and age_s > FROZEN_S
    if frozen and not track.frozen:
        evidence = f"its supervisor has not beaten for {age_s:.0f} s but lives: the host hangs, or the process was stopped"
        roster.store.raise_flag(track.run.id, "supervisor_frozen", Severity.BAD, evidence)
    elif track.frozen and not frozen:
        roster.store.clear_flag(track.run.id, "supervisor_frozen")
    track.frozen = frozen


async def _cannot_be_killed(roster: Roster, engine: Engine, track: Track, state: State) -> bool:
    """A lost run whose processes survive SIGKILL keeps its GPU; after a while the row says so and the GPU is quarantined."""
    if not (state.phase == "stopping" and (state.status or {}).get("unkillable")):
        track.unkillable_since = None
        return False
    now = time.monotonic()
    track.unkillable_since = track.unkillable_since or now
    if now - track.unkillable_since > UNKILLABLE_S:
        await finish(roster, engine, track, state)
        return True
    return False


def _vanished(roster: Roster, track: Track) -> None:
    """Handed over, but nothing of it can be seen: its supervisor died before its first word. The launcher starts it again, a few times."""
    now = time.monotonic()
    if not track.launches:
        return
    track.absent_since = track.absent_since or now
    if now - track.absent_since < VANISHED_S:
        return
    track.absent_since, track.launches = None, 0
    track.vanished += 1
    if track.vanished >= 3:
        finishing.end(
            roster,
            track,
            Outcome.CRASHED,
            cause="not_started",
            cause_text="its supervisor did not come up in three tries; see supervisor.err in its directory",
        )


def _alive(roster: Roster, track: Track, state: State) -> None:
    """Phases on the way, from the supervisor's status."""
    status = state.status or {}
    if state.phase == "waiting":
        roster.update(track, phase=Phase.STARTING, stage=Stage.STANDBY)
        return
    if track.standby and status.get("started_at"):
        track.standby = False
        if track.stop_asked == "withdrawn":
            track.stop_asked = None  # too late: it has its GPU already
        roster.changed.set()
    new: dict[str, Any] = {"phase": {"starting": Phase.STARTING, "stopping": Phase.FINISHING}.get(state.phase, Phase.RUNNING)}
    if status.get("started_at") and track.run.started_at is None:
        new["started_at"] = status["started_at"]
        new["stage"] = Stage.COMPILING
        roster.changed.set()
    roster.update(track, **new)


async def _ask_stop(roster: Roster, engine: Engine, track: Track) -> None:
    """Pass on a human's cancel, and end runs that print no numbers or hang after their summary."""
    run, limits = track.run, roster.limits
    reason = None
    if track.stop_due:
        reason = "cancelled"
    elif track.stop_asked is None and track.nonfinite >= NAN_STEPS:
        reason = "nan"
    elif track.stop_asked is None and track.summary_at is not None and time.monotonic() - track.summary_at > limits.hung_after_summary_s:
        reason = "hung_after_summary"
    if reason:
        await ask_stop(roster, engine, track, reason, force=bool(run.wanted_force) and reason == "cancelled")


async def ask_stop(roster: Roster, engine: Engine, track: Track, reason: str, why: str | None = None, *, force: bool = False) -> bool:
    """Ask the supervisor to end a run; False when the host could not be asked (the next look asks again)."""
    try:
        await engine.stop(track.run.id, track.run.host or "", reason, force)
    except HostError as error:
        log.info("%s: stop not delivered: %s", track.run.id, error)
        return False
    track.stop_asked, track.stop_forced, track.stop_why = reason, force, why
    if reason != "withdrawn":
        roster.store.event("daemon", "stop", track.run.id, why or reason)
    return True


async def finish(roster: Roster, engine: Engine, track: Track, state: State) -> None:
    """A run whose supervisor said its last word (or is gone): read the rest, then decide between the queue and the end."""
    status = state.status or {}
    started = status.get("started_at") is not None
    if state.phase == "lost" and not started and track.run.wanted != "cancel":
        await _requeue(roster, engine, track, "its supervisor was gone before it started")
        return
    if state.phase != "lost" and not started and await _not_started(roster, engine, track, status):
        return
    await finishing.conclude(roster, engine, track, state)


async def _not_started(roster: Roster, engine: Engine, track: Track, status: dict[str, Any]) -> bool:
    """A run that was refused or taken back before it started: to the queue, or cancelled. False: it ended by itself."""
    reason, run = status.get("reason") or "", track.run
    if run.wanted == "cancel" or status.get("stop_reason") == "cancelled":
        finishing.end(roster, track, Outcome.CANCELLED, cause_text="cancelled before it started")
        return True
    detail = status.get("detail") or reason
    if reason.startswith("gpu-locked"):
        holder = {**(status.get("holder") or {}), "lock": True}
        roster.set_device(run.gpu_uuid, GpuState.FOREIGN, states.lock_words(holder), holder=holder, retry_s=15.0)
    elif reason == "gpu-memory":
        memory = (status.get("gpu_memory") or {}).get(run.gpu_uuid) or {}
        roster.set_device(run.gpu_uuid, GpuState.FOREIGN, f"{memory.get('used_mib')} MiB in use by others", holder=memory, retry_s=15.0)
    elif reason == "disk-full":
        roster.note(f"disk of {run.host}", f"host {run.host}: the disk is below its floor; runs wait")
        roster.set_device(run.gpu_uuid, GpuState.FREE, None, retry_s=15.0)
    elif reason not in ("lock-timeout", "stopped", "supervisor-terminated"):
        return False
    await _requeue(roster, engine, track, str(detail))
    return True


async def _requeue(roster: Roster, engine: Engine, track: Track, why: str) -> None:
    """Back into the queue with a clean directory; only ever for a run that did not start."""
    await engine.forget(track.run.id, track.run.host or "")
    await asyncio.to_thread(launch.unstage, roster.lab, track.run.id)
    log.info("%s goes back into the queue: %s", track.run.id, why)
    back_to_queue(roster, track)


def back_to_queue(roster: Roster, track: Track) -> None:
    """The row of a run that has no slot any more."""
    roster.update(track, phase=Phase.QUEUED, **UNPLACED)
    roster.drop(track)
