"""One run, one observed state: what the row becomes, and what is asked of the supervisor.

Called for every live run at every look at its host, and in the same way after a restart; every step may be repeated. A state of
`unknown` only ever makes a run unreachable, never failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from runner import follow, launch, reading, upkeep, verbs, verifying
from runner.errors import HostError, OvernightError, RequestError
from runner.fitness import host_at_fault
from runner.records import GpuState, Outcome, Phase, Purpose, Severity, Stage
from runner.research import classes, trust

if TYPE_CHECKING:
    from runner.engines.base import Engine, State
    from runner.records import Run
    from runner.roster import Roster, Track

NAN_STEPS = 3  # so many progress lines in a row without a finite loss end a run
GONE_S = 5.0  # a started run whose directory stays away so long is lost
VANISHED_S = 10.0  # a supervisor says its first word within milliseconds
UNKILLABLE_S = 15.0
FROZEN_S = 15.0  # seven missed beats
TAIL = 16384
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
        await _absent(roster, track)
        return
    track.absent_since = None
    if state.phase in ("ended", "refused", "lost"):
        await finish(roster, engine, track, state)
        return
    _alive(roster, track, state)
    _heartbeat(roster, track, state)
    if await _cannot_be_killed(roster, engine, track, state):
        return
    if state.phase in ("running", "stopping"):
        await follow.read_new(roster, engine, track, state)
        _note_start(roster, track)
    await _ask_stop(roster, engine, track)


def _out_of_reach(roster: Roster, track: Track) -> None:
    if track.run.phase != Phase.UNREACHABLE:
        roster.update(track, phase=Phase.UNREACHABLE, unreachable_since=time.time())


async def _absent(roster: Roster, track: Track) -> None:
    """A run with a row but no directory: not started yet (a crash came between), or its directory was deleted."""
    if track.run.started_at is None:
        if track.run.wanted == "cancel":
            end(roster, track, Outcome.CANCELLED, cause_text="cancelled before it started")
            return
        _vanished(roster, track)
        return
    now = time.monotonic()
    track.absent_since = track.absent_since or now
    if now - track.absent_since > GONE_S:
        end(roster, track, Outcome.LOST, cause="run_dir_gone", cause_text="its run directory was deleted while it ran")


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
        end(
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
    run, limits = track.run, roster.lab.policy().limits
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
    track.ending = True
    try:
        await follow.read_new(roster, engine, track, state, final=True)
        tail = await _tail(engine, track)
        if state.phase == "lost":
            for report in await engine.capacity():  # the newest boot id, to tell a restart from a killed supervisor
                roster.reports[report.host] = report
        if roster.far(track.run.host or ""):
            await engine.fetch(track.run.id, track.run.host or "", ["status.json", "supervisor.err"], roster.lab.run_dir(track.run.id))
        _finish(roster, track, state, tail)
    except BaseException:
        track.ending = False
        raise


def _finish(roster: Roster, track: Track, state: State, tail: str) -> None:
    """Outcome, wall time, flags and the GPU's new state, in the same transaction as the last points."""
    status = state.status or {}
    run, now = track.run, time.time()
    summary_seen = track.summary_at is not None
    with roster.writing():
        follow.write_track(roster, track)
        fields = _outcome(roster, track, state, tail, summary_seen)
        started = status.get("started_at")
        ended = status.get("ended_at") or now
        fields |= {
            "started_at": run.started_at or started,
            "wall_s": status.get("elapsed_s") or (ended - started if started else None),
            "exit_code": status.get("exit_code"),
            "exit_signal": status.get("exit_signal"),
            "log_bytes": status.get("log_bytes"),
            "log_dropped": status.get("log_dropped"),
        }
        if track.run.first_step_at is not None:
            fields["first_step_at"] = min(track.run.first_step_at, ended)  # it was read only after the end
        device = roster.devices.get(run.gpu_uuid or "")
        if run.driver is None and device is not None:
            fields["driver"] = (device.sample or {}).get("driver")  # the first sample may be later than the placement
        roster.update(track, **fields)
        _flag_end(roster, track, status)
        _settle_gpu(roster, track, status)
        if host_at_fault(track.run):
            note_failure(roster, track.run, track.run.cause_text or "")
        _note_start(roster, track)
        upkeep.remember(roster, run.id)
        end(roster, track, fields["outcome"], ended_at=ended)
        roster.update(track, **trust.settled(roster.lab, track.run))
    track.points, track.facts = [], {}


def _outcome(roster: Roster, track: Track, state: State, tail: str, summary_seen: bool) -> dict[str, Any]:
    """outcome, cause, cause_text and last_lines of a run that is over."""
    if state.phase == "lost":
        why = "its host was restarted" if _rebooted(roster, track, state.status or {}) else "its supervisor was killed"
        if track.run.val_bpb is not None:
            text = f"{why} after its summary; the result stands"
            return {"outcome": Outcome.COMPLETED, "cause": "lost_after_summary", "cause_text": text, "last_lines": _last_lines(tail)}
        if track.run.wanted == "cancel":
            text = f"it was cancelled, and {why}"
            return {"outcome": Outcome.CANCELLED, "cause": None, "cause_text": text, "last_lines": _last_lines(tail)}
        return {"outcome": Outcome.LOST, "cause": "lost", "cause_text": f"{why} while it ran", "last_lines": _last_lines(tail)}
    said = reading.classify_end(state.status, track.run, tail, summary_seen=summary_seen, error=track.error)
    fields = {"outcome": said.outcome, "cause": said.cause, "cause_text": track.stop_why or said.cause_text, "last_lines": said.last_lines}
    if track.run.purpose == Purpose.VERIFY:
        fields |= verifying.conclude(roster, track.run, tail)
    return fields


def end(roster: Roster, track: Track, outcome: str, *, ended_at: float | None = None, **fields: Any) -> None:
    """Close a row; a lost run is started again once, as a new run, when the policy says so."""
    run = track.run
    with roster.writing():
        roster.update(
            track,
            phase=Phase.ENDED,
            stage=None,
            outcome=outcome,
            ended_at=ended_at or time.time(),
            unreachable_since=None,
            remaining_s=None,
            class_key=run.class_key or classes.class_key(run),
            **fields,
        )
        roster.store.event("daemon", "ended", run.id, str(outcome) + (f": {track.run.cause_text}" if track.run.cause_text else ""))
        if outcome == Outcome.LOST and roster.lab.policy().limits.retry_lost and _may_retry(run):
            try:
                verbs.requeue(roster.lab, run.id, who="daemon", why="lost, and retried once by policy")
            except RequestError as error:
                roster.store.raise_flag(run.id, "not_retried", Severity.WARN, str(error))
    if track.run.gpu_uuid and roster.devices.get(track.run.gpu_uuid) and not track.standby:
        roster.devices[track.run.gpu_uuid].since = time.time()
    roster.drop(track)


def _may_retry(run: Run) -> bool:
    """Only the first loss of a run that a client still wants; a verification is simply asked for again."""
    return run.retry_of is None and run.wanted == "run" and run.purpose != Purpose.VERIFY


def note_failure(roster: Roster, run: Run, why: str) -> bool:
    """A run could not get going for a reason that may be its host's; True while the host is unfit."""
    host = run.host or ""
    if not roster.fitness.failed(host, run.id, why):
        return False
    roster.store.raise_flag(host, "unfit", Severity.BAD, f"{roster.fitness.why(host)}; it takes no run for now")
    return True


def _note_start(roster: Roster, track: Track) -> None:
    """A run that takes its first step shows that its host is fit."""
    if "first_step_at" in track.facts and roster.fitness.went_well(track.run.host or ""):
        roster.store.clear_flag(track.run.host or "", "unfit")


def _flag_end(roster: Roster, track: Track, status: dict[str, Any]) -> None:
    """Warnings that only the end can give."""
    run, store = track.run, roster.store
    if status.get("stop_reason") == "hung_after_summary":
        store.raise_flag(
            run.id, "hung_after_summary", Severity.WARN, "it printed its summary and did not end by itself; its result is kept"
        )
    if status.get("unkillable"):
        store.raise_flag(run.id, "kill_failed", Severity.BAD, f"processes {status['unkillable']} did not end after SIGKILL")
    if status.get("orphans_killed"):
        store.raise_flag(run.id, "orphans", Severity.WARN, f"{status['orphans_killed']} processes outlived the script and were killed")
    if status.get("log_dropped"):
        store.raise_flag(
            run.id,
            "log_capped",
            Severity.INFO,
            f"{status['log_dropped']} bytes of output were dropped (the log is capped, or the disk was full)",
        )


def _settle_gpu(roster: Roster, track: Track, status: dict[str, Any]) -> None:
    """A slot is free only when nothing of the run is left on it."""
    uuid = track.run.gpu_uuid
    if status.get("unkillable"):
        roster.set_device(
            uuid,
            GpuState.QUARANTINED,
            f"{track.run.id} left processes that cannot be killed: {status['unkillable']}",
            holder={"pids": status["unkillable"], "run_id": track.run.id},
        )
        return
    memory = (status.get("gpu_memory") or {}).get(uuid) or {}
    if memory.get("clean") is False:
        used, before = memory.get("used_mib"), memory.get("baseline_mib")
        roster.set_device(
            uuid,
            GpuState.QUARANTINED,
            f"{used} MiB still in use after {track.run.id} ended ({before} MiB before it)",
            holder={"holders": memory.get("holders"), "run_id": track.run.id},
        )


async def _not_started(roster: Roster, engine: Engine, track: Track, status: dict[str, Any]) -> bool:
    """A run that was refused or taken back before it started: to the queue, or cancelled. False: it ended by itself."""
    reason, run = status.get("reason") or "", track.run
    if run.wanted == "cancel" or status.get("stop_reason") == "cancelled":
        end(roster, track, Outcome.CANCELLED, cause_text="cancelled before it started")
        return True
    detail = status.get("detail") or reason
    if reason.startswith("gpu-locked"):
        roster.set_device(run.gpu_uuid, GpuState.FOREIGN, "another control room has it locked", holder=status.get("holder"), retry_s=15.0)
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


def _rebooted(roster: Roster, track: Track, status: dict[str, Any]) -> bool:
    report = roster.reports.get(track.run.host or "")
    return bool(report and report.boot_id and status.get("boot_id") and report.boot_id != status["boot_id"])


async def _tail(engine: Engine, track: Track) -> str:
    """The end of the log, for the lines that show why."""
    try:
        start = max(track.log_offset - TAIL, 0)
        data = await engine.read(track.run.id, track.run.host or "", follow.LOG, start, 2 * TAIL)
    except OvernightError as error:
        return f"(the log could not be read: {error})"
    return data[-TAIL:].decode(errors="replace")


def _last_lines(tail: str, count: int = 12) -> str | None:
    lines = [line for line in tail.replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or None
