"""The end of a run: the rest of its output, its outcome and cause, its flags, its GPU's state and whether it is tried again.

All of it in one transaction with the last points, so that a run ends once, whatever happens to the daemon in between.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from runner import follow, measuring, news, reading, upkeep, verbs, verifying
from runner.errors import OvernightError, RequestError
from runner.fitness import host_at_fault
from runner.records import GpuState, Outcome, Phase, Purpose, Severity
from runner.research import classes, trust

if TYPE_CHECKING:
    from runner.engines.base import Engine, State
    from runner.records import Run
    from runner.roster import Roster, Track

TAIL = 16384


async def conclude(roster: Roster, engine: Engine, track: Track, state: State) -> None:
    """Read what is left of a run that is over, and close its row."""
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
        note_start(roster, track)
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
    # a stop that came too late (a standby that had its GPU already, a run that had ended) explains nothing
    stopped = (state.status or {}).get("stop_reason") == track.stop_asked
    words = (track.stop_why if stopped else None) or said.cause_text
    if said.outcome == Outcome.CANCELLED and (asked := news.cancelled_by(roster.lab, track.run.id)) is not None and asked.why:
        words = f"cancelled by {asked.who}: {asked.why}"
    fields = {"outcome": said.outcome, "cause": said.cause, "cause_text": words, "last_lines": said.last_lines}
    if track.run.purpose == Purpose.VERIFY:
        fields |= verifying.conclude(roster, track.run, tail)
    elif track.run.purpose == Purpose.PREFLIGHT:
        fields |= measuring.conclude(roster, track.run, tail, fields)
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
            class_key=None if run.purpose == Purpose.PREFLIGHT else run.class_key or classes.class_key(run),
            **fields,
        )
        roster.store.event("daemon", "ended", run.id, str(outcome) + (f": {track.run.cause_text}" if track.run.cause_text else ""))
        if outcome == Outcome.LOST and roster.lab.policy().limits.retry_lost and _may_retry(track.run):
            try:
                verbs.requeue(roster.lab, run.id, who="daemon", why="lost, and retried once by policy")
            except RequestError as error:
                roster.store.raise_flag(run.id, "not_retried", Severity.WARN, str(error))
    if track.run.gpu_uuid and roster.devices.get(track.run.gpu_uuid) and not track.standby:
        roster.devices[track.run.gpu_uuid].since = time.time()
    roster.drop(track)


def _may_retry(run: Run) -> bool:
    """Only the first loss of a run that a client still wants; what we run for ourselves is simply asked for again.

    A run whose directory was deleted under it most likely did that itself, and would again.
    """
    ours = run.purpose in (Purpose.VERIFY, Purpose.PREFLIGHT)
    return run.retry_of is None and run.wanted == "run" and not ours and run.cause != "run_dir_gone"


def note_failure(roster: Roster, run: Run, why: str) -> bool:
    """A run could not get going for a reason that may be its host's; True while the host is unfit."""
    host = run.host or ""
    if not roster.fitness.failed(host, run.id, why):
        return False
    roster.store.raise_flag(host, "unfit", Severity.BAD, f"{roster.fitness.why(host)}; it takes no run for now")
    return True


def note_start(roster: Roster, track: Track) -> None:
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
        n = status["orphans_killed"]
        left = "1 process outlived the script and was killed" if n == 1 else f"{n} processes outlived the script and were killed"
        store.raise_flag(run.id, "orphans", Severity.WARN, left)
    if status.get("log_dropped"):
        store.raise_flag(
            run.id,
            "log_capped",
            Severity.INFO,
            f"{status['log_dropped']} bytes in the middle of its output were dropped (the log is capped, or the disk was full)",
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
