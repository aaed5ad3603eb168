"""Everything anyone may read of a lab, with every derived fact in one place (ages, MFU, queue positions, lab state).

CLI, MCP and TUI show what these functions return. Nothing here writes; a lab opened read-only will do.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import board, daemonlock, machines, states, tallies
from runner.errors import BadValue, UnknownName
from runner.lab import Lab
from runner.mfu import mfu_percent
from runner.records import Flag, Gpu, GpuState, Json, Phase, Point, Run, Wave
from runner.scheduler import matches_type
from runner.store import IN_QUEUE
from runner.submitting import known_run
from runner.text import bpb, clean, one_line

DAEMON_STALE_S = 5.0  # the daemon beats every second
# overrides as a table shows them, NAME=value, without what JSON puts around names, texts and lists
BARE = str.maketrans({c: None for c in '"[]{}, '} | {":": "="})
BARE_OVERRIDES = "replace(lower(overrides), ':', '=')"
for _mark in '"[]{}, ':
    BARE_OVERRIDES = f"replace({BARE_OVERRIDES}, '{_mark}', '')"
BY_HAND_S = 900.0  # how long agents are reminded of what a human cancelled
standing = board.standing
leaderboard = board.leaderboard
gpu_objects, gpus_now, host_objects, free_in_s = machines.gpu_objects, machines.gpus_now, machines.host_objects, machines.free_in_s


@dataclass(frozen=True, slots=True)
class Page:
    """Some rows of many; `cursor` continues, None at the end."""

    rows: list[Run]
    total: int
    cursor: str | None


@dataclass(frozen=True, slots=True)
class LogText:
    """A stretch of a run's log: bytes `offset` to `next_offset` of out.log, cleaned."""

    text: str
    offset: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class LabState:
    """How the lab stands right now; counts of runs and GPUs, and what a human changed."""

    path: str
    daemon_alive: bool
    daemon_note: str | None
    total_gpus: int
    idle_gpus: int
    quarantined_gpus: int
    hosts_down: list[str]
    proposed: int
    queued: int
    running: int
    unreachable: int
    ended: int
    completed: int
    paused: bool
    paused_agents: list[str]
    approval: str
    best_id: str | None
    best_bpb: float | None
    best_class: str | None
    best_budget_s: float | None
    runs_left: int | None
    gpu_hours_used: float
    gpu_hours_left: float | None
    wall_hours_left: float | None
    runs_last_hour: int
    last_agent: str | None
    last_agent_call_s: float | None
    policy_pending: str | None
    cancelled_by_hand: list[str]
    paused_why: str | None = None  # what the human said who paused the queue
    no_gain: str | None = None  # the evidence of diminishing returns, while that flag is up
    daemon_silent_s: float | None = None  # a living daemon that writes nothing: a full disk, or a machine that hangs


def run_objects(lab: Lab, runs: Iterable[Run]) -> list[Json]:
    """The run object of FORMAT.md section 5 for each run; flags and queue places are read once for all."""
    runs = list(runs)
    flags: dict[str, list[Flag]] = {}
    for flag in lab.store.flags(runs[0].id if len(runs) == 1 else None):
        flags.setdefault(flag.subject, []).append(flag)
    places = (
        {run_id: n for n, (run_id,) in enumerate(lab.store.tally("id", f"{IN_QUEUE} ORDER BY priority DESC, seq"), 1)}
        if any(r.waiting for r in runs)
        else {}
    )
    now = time.time()
    return [_run_object(lab, run, flags.get(run.id, []), places.get(run.id), now) for run in runs]


def run_object(lab: Lab, run: Run) -> Json:
    """The run object of FORMAT.md section 5."""
    return run_objects(lab, [run])[0]


def _run_object(lab: Lab, run: Run, flags: list[Flag], place: int | None, now: float) -> Json:
    return {
        "id": run.id,
        "state": states.run_state(run),
        "phase": run.phase,
        "stage": run.stage if run.phase in (Phase.STARTING, Phase.RUNNING) else None,  # what it did last, it may do no more
        "outcome": run.outcome,
        "cause": run.cause,
        "cause_text": run.cause_text,
        "val_bpb": run.val_bpb,
        "trust": run.trust,
        "verified_bpb": run.verified_bpb,
        "class": run.class_key,
        "budget_s": run.budget_s,
        "verdict": run.verdict,
        "verdict_why": run.verdict_why,
        "flags": [flag_object(f) for f in flags],
        "purpose": run.purpose,
        "parent": run.parent,
        "base_run": run.base_run,
        "retry_of": run.retry_of,
        "repeat_of": run.repeat_of,
        "promoted_from": run.promoted_from,
        "wave": run.wave_id,
        "cell": run.cell,
        "hypothesis": run.hypothesis,
        "agent": run.agent,
        "priority": run.priority,
        "gpu_type": run.gpu_type,
        "host": run.host,
        "gpu": run.gpu_name,
        "gpu_uuid": run.gpu_uuid,
        "source": run.source_sha,
        "overrides": run.overrides,
        "constants": run.constants,
        "seed": run.seed,
        "step": run.step,
        "share": run.share,
        "loss": run.loss,
        "tok_s": run.tok_s,
        "remaining_s": run.remaining_s,
        "mfu_percent": mfu_percent(run, lab.policy()),
        "mfu_reported": run.mfu_reported,
        "peak_vram_mb": run.peak_vram_mb,
        "training_s": run.training_s,
        "total_s": run.total_s,
        "wall_s": run.wall_s,
        "tokens_m": run.tokens_m,
        "num_steps": run.num_steps,
        "params_m": run.params_m,
        "depth": run.depth,
        "attributes": run.attributes,
        "created_at": run.created_at,
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "age_s": now - run.created_at,
        "unreachable_s": now - run.unreachable_since if run.unreachable_since else None,
        "exit_code": run.exit_code,
        "approval": run.approval,
        "queue_position": place,
    }


def flag_object(flag: Flag) -> Json:
    """A flag as answers show it."""
    return {"kind": flag.kind, "severity": flag.severity, "evidence": flag.evidence}


def list_runs(
    lab: Lab,
    *,
    phase: str | None = None,
    outcome: str | None = None,
    wave: str | None = None,
    agent: str | None = None,
    text: str | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> Page:
    """Runs newest first, by any of the given facts; `text` looks into id, hypothesis and overrides (a name, or NAME=value)."""
    where, args = ["1"], list[Any]()
    for column, value, known in (("phase", phase, PHASE_WORDS), ("outcome", outcome, OUTCOME_WORDS)):
        if value is not None:
            if value not in known:
                raise UnknownName(column, value, known)
            where.append(f"{column} = ?")
            args.append(value)
    for column, value in (("wave_id", wave), ("agent", agent)):
        if value is not None:
            where.append(f"{column} = ?")
            args.append(value)
    if text:
        low = text.lower()
        name, given, _ = low.replace(":", "=").partition("=")
        tried = f"(instr(lower(overrides), ?) AND instr({BARE_OVERRIDES}, ?))" if given else "instr(lower(overrides), ?)"
        where.append(f"(id = ? OR instr(lower(coalesce(hypothesis, '')), ?) OR {tried})")
        args += [text, low, *((name.translate(BARE), low.translate(BARE)) if given else (low,))]
    if cursor is not None and (not cursor.isdigit() or len(cursor) > 15):
        raise BadValue(f"The cursor {cursor!r} is not one of ours.", next_step="Take it from the answer before, or leave it out.")
    below = None if cursor is None else int(cursor)
    if text:  # every run has to be looked at, so it is done once
        numbers = [n for (n,) in lab.store.tally("seq", f"{' AND '.join(where)} ORDER BY seq DESC", args)]
        total, wanted = len(numbers), [n for n in numbers if below is None or n < below][: limit + 1]
        rows = lab.store.runs(f"seq IN ({', '.join('?' * len(wanted))})", wanted, order="seq DESC")
    else:
        total = lab.store.count_runs(" AND ".join(where), args)
        if below is not None:
            where.append("seq < ?")
            args.append(below)
        rows = lab.store.runs(" AND ".join(where), args, order="seq DESC", limit=limit + 1)
    return Page(rows[:limit], total, str(rows[limit - 1].seq) if len(rows) > limit else None)


def queue(lab: Lab) -> list[Run]:
    """Runs that wait, in the order in which they start: standbys among them, proposed ones last."""
    return sorted((r for r in lab.store.active_runs() if r.waiting), key=lambda r: r.phase == Phase.PROPOSED)


def why_waiting(lab: Lab, run: Run) -> str | None:
    """Why a queued run cannot start for now, in words; None when a slot it may use is free or will become free by itself."""
    if lab.store.setting("queue_paused", False):
        return "the queue is paused (`overnight queue resume`)"
    if run.agent in lab.store.setting("paused_agents", []):
        return f"{run.agent} is paused (`overnight agents resume {run.agent}`)"
    wanted = run.gpu_type
    slots = [g for g in gpus_now(lab) if run.want_host in (None, g.host) and (wanted is None or matches_type(wanted, g.name))]
    policy = lab.policy()
    holds = {h.name: states.host_hold(h, policy) for h in lab.store.hosts()}  # a busy card there is of no use to it either
    if any(g.state == GpuState.FREE or (g.state == GpuState.BUSY and not holds.get(g.host)) for g in slots):
        return None
    if slots:
        return _why_none(slots, holds)
    down = [f"host {h.name} is {h.state}: {h.error or 'no reason known'}" for h in lab.store.hosts() if h.state in ("down", "unfit")]
    return "; ".join(down[:3]) or "no GPU that it may use is known yet"


def _why_none(slots: list[Gpu], holds: dict[str, str | None]) -> str:
    """Why none of these GPUs takes a run; what several have in common is said once."""
    alike: dict[str, list[Gpu]] = {}
    for gpu in slots:
        reason = f"{gpu.host} takes no new run: {holds[gpu.host]}" if gpu.state == GpuState.BUSY else gpu.reason
        alike.setdefault(reason or "no reason known", []).append(gpu)
    words = [
        f"{gpus[0].host}:{'cpu' if gpus[0].idx is None else gpus[0].idx} is {gpus[0].state}: {reason}" if len(gpus) == 1 else reason
        for reason, gpus in list(alike.items())[:3]
    ]
    return "; ".join(words) + (f" (and {len(alike) - 3} reasons more)" if len(alike) > 3 else "")


def live_runs(lab: Lab) -> list[Run]:
    """Runs on a slot (or on a host out of reach)."""
    return [r for r in lab.store.active_runs() if r.live]


def curve(lab: Lab, run_id: str, limit: int = 200) -> list[Point]:
    """The loss curve thinned to `limit` points; the first and last are always there."""
    points = lab.store.points(known_run(lab, run_id).id)
    if len(points) <= limit:
        return points
    return [points[round(n * (len(points) - 1) / (limit - 1))] for n in range(limit)]


def wave_object(lab: Lab, wave: Wave) -> Json:
    """The wave object of FORMAT.md section 5."""
    rows = lab.store.tally(
        f"count(*), sum(phase = 'proposed' OR {IN_QUEUE}), sum(phase NOT IN ('proposed', 'ended') AND NOT ({IN_QUEUE})), "
        "sum(phase = 'ended'), sum(outcome = 'completed'), "
        f"min(CASE WHEN outcome = 'completed' AND {board.CREDIBLE} THEN val_bpb END)",
        "wave_id = ?",
        (wave.id,),
    )
    total, queued, running, ended, completed, best = (v or 0 if n < 5 else v for n, v in enumerate(rows[0]))
    return {
        "id": wave.id,
        "kind": wave.kind,
        "title": wave.title,
        "hypothesis": wave.hypothesis,
        "base_run": wave.base_run,
        "factors": wave.factors,
        "repeats": wave.repeats,
        "budget_s": wave.budget_s,
        "agent": wave.agent,
        "created_at": wave.created_at,
        "total": total,
        "queued": queued,
        "running": running,
        "ended": ended,
        "completed": completed,
        "best": best,
    }


def known_wave(lab: Lab, wave_id: str) -> Wave:
    """The wave of that id. Raised: UnknownName."""
    wave = lab.store.wave(wave_id)
    if wave is None:
        raise UnknownName("wave", wave_id, [w.id for w in lab.store.waves(100)])
    return wave


def read_log(lab: Lab, run_id: str, *, offset: int | None = None, limit: int = 65536, tail_lines: int | None = None) -> LogText:
    """A stretch of a run's log as mirrored here; the last `limit` bytes when no offset is given."""
    path = lab.run_dir(known_run(lab, run_id).id) / "out.log"
    data, size = _slice(path, offset, limit)
    start = offset if offset is not None else max(size - limit, 0)
    shown = clean(data.decode("utf-8", "replace"))
    if tail_lines is not None:
        shown = "\n".join(shown.rstrip("\n").split("\n")[-tail_lines:])
    return LogText(shown, start, start + len(data))


def _slice(path: Path, offset: int | None, limit: int) -> tuple[bytes, int]:
    """Bytes of a regular file, links not followed; empty when it is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe in its place would have us wait for ever
    except OSError:
        return b"", 0
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        return b"", 0
    with os.fdopen(descriptor, "rb") as file:
        size = found.st_size
        file.seek(min(offset, size) if offset is not None else max(size - limit, 0))
        return file.read(limit), size


def lab_state(lab: Lab) -> LabState:
    """How the lab stands, from one consistent view of the database."""
    store, limits, now = lab.store, lab.policy().limits, time.time()
    with store.reading():
        phases, over = tallies.phases(lab), tallies.ended(lab)
        live_s = store.tally("total(wall_s)", "phase != 'ended'")[0][0]
        standing_by = store.count_runs("phase = 'starting' AND stage = 'standby' AND phase != 'ended'")
        hosts, daemon = store.hosts(), store.daemon()
        gpus = gpus_now(lab, hosts)
        recent = store.count_runs("ended_at > ? AND started_at IS NOT NULL", (now - 3600,))  # what was cancelled in the queue ran never
        agent = store.tally("who, at", "who LIKE 'mcp:%' ORDER BY id DESC LIMIT 1", table="events")
        by_hand = store.tally(
            "DISTINCT subject",
            "id > (SELECT coalesce(max(id), 0) - 500 FROM events) AND verb = 'cancel' AND who IN ('cli', 'tui') AND at > ? "
            "ORDER BY id DESC",
            (now - BY_HAND_S,),
            table="events",
        )
        best = board.leader(lab)
        started = store.setting("night_started_at")
        paused_agents = store.setting("paused_agents", [])
        touched = store.setting("last_agent_call")
        pending = store.meta("policy_pending")
        no_gain = next((flag.evidence for flag in store.flags("lab") if flag.kind == "diminishing_returns"), None)
        state = (store.setting("queue_paused", False), store.setting("approval", limits.approval))
        said = store.tally("why", "verb = 'pause_queue' ORDER BY id DESC LIMIT 1", table="events") if state[0] else []
    gone = {h.name for h in hosts if h.state == "removed"}
    gpus = [g for g in gpus if g.host not in gone]
    used_h = (over.wall_s + live_s) / 3600
    total = sum(phases.values())
    pid = daemonlock.daemon_pid(lab.path)
    silent_s = now - daemon.beat_at if pid and daemon and daemon.pid == pid else None
    last = (touched["who"], touched["at"]) if touched else (agent[0] if agent else None)
    return LabState(
        path=str(lab.path),
        daemon_alive=pid is not None,
        daemon_note=daemon.note if daemon else None,
        total_gpus=len(gpus),
        idle_gpus=sum(g.state == GpuState.FREE for g in gpus),
        quarantined_gpus=sum(g.state == GpuState.QUARANTINED for g in gpus),
        hosts_down=[h.name for h in hosts if h.state in ("down", "unfit")],
        proposed=phases.get("proposed", 0),
        queued=phases.get("queued", 0) + standing_by,
        running=sum(phases.get(p, 0) for p in ("starting", "running", "finishing")) - standing_by,
        unreachable=phases.get("unreachable", 0),
        ended=phases.get("ended", 0),
        completed=over.by_outcome.get("completed", 0),
        paused=bool(state[0]),
        paused_why=said[0][0] if said else None,
        no_gain=no_gain,
        paused_agents=paused_agents,
        approval=state[1],
        best_id=best["id"],
        best_bpb=best["val_bpb"],
        best_class=best["class"],
        best_budget_s=best["budget_s"],
        runs_left=None if limits.max_runs is None else max(limits.max_runs - total, 0),
        gpu_hours_used=used_h,
        gpu_hours_left=None if limits.max_gpu_hours is None else max(limits.max_gpu_hours - used_h, 0.0),
        wall_hours_left=None
        if limits.max_wall_hours is None or started is None
        else max(limits.max_wall_hours - (now - started) / 3600, 0.0),
        runs_last_hour=recent,
        last_agent=last[0] if last else None,
        last_agent_call_s=now - last[1] if last else None,
        policy_pending=pending,
        cancelled_by_hand=[str(subject) for (subject,) in by_hand],
        daemon_silent_s=silent_s if silent_s is not None and silent_s > DAEMON_STALE_S else None,
    )


def agent_parts(lab: Lab, who: str) -> list[str]:
    """What one agent is told of its own, for the end of the line on the lab: what is left to it."""
    most = lab.policy().limits.max_runs_per_agent
    if most is None:
        return []
    return [f"{max(most - lab.store.count_runs('agent = ?', (who,)), 0)} of your {most} runs left"]


def lab_line(lab: Lab) -> str:
    """One line on how the lab stands, for the end of every answer to an agent."""
    return state_line(lab_state(lab))


def hours(left: float) -> str:
    """Hours to a tenth, and two digits of what is less than one: 0.02 h are not none."""
    return f"{left:.1f}" if left >= 1 else f"{left:.2g}"


def state_line(s: LabState) -> str:
    """`lab_line` of a state at hand."""
    parts = [f"{s.idle_gpus} of {s.total_gpus} GPUs idle", f"{s.queued} queued" if s.queued else "queue empty", f"{s.running} running"]
    none = "no result stands" if s.best_class is not None else "no result yet"
    parts.append(f"best {bpb(s.best_bpb)} ({s.best_id})" if s.best_id else none)
    left = [
        f"{s.runs_left} run{'' if s.runs_left == 1 else 's'} left" if s.runs_left is not None else "",
        f"{hours(s.gpu_hours_left)} GPU-hours left" if s.gpu_hours_left is not None else "",
        f"{hours(s.wall_hours_left)} h left" if s.wall_hours_left is not None else "",
    ]
    parts += [p for p in left if p]
    if s.proposed:
        parts.append(f"{s.proposed} waiting for a human's approval")
    if s.unreachable:
        parts.append(f"{s.unreachable} run{'' if s.unreachable == 1 else 's'} out of reach")
    if s.quarantined_gpus:
        parts.append(f"{s.quarantined_gpus} GPUs quarantined")
    if s.paused:
        parts.append("a human paused the queue" + (f": {one_line(s.paused_why, 120)}" if s.paused_why else ""))
    if s.paused_agents:
        parts.append(f"a human paused {', '.join(s.paused_agents)}")
    if s.approval == "ask":
        parts.append("approval mode: a human approves submissions")
    if s.cancelled_by_hand:
        more = f" and {len(s.cancelled_by_hand) - 3} more" if len(s.cancelled_by_hand) > 3 else ""
        parts.append(f"a human cancelled {', '.join(s.cancelled_by_hand[:3])}{more}")
    if s.no_gain:
        parts.append(one_line(s.no_gain, 160))
    if s.hosts_down:
        parts.append(f"down: {', '.join(s.hosts_down[:3])}")
    if not s.daemon_alive:
        parts.append("the daemon is not running")
    elif s.daemon_silent_s is not None:
        parts.append(f"the daemon has written nothing for {s.daemon_silent_s:.0f} s (a full disk?)")
    return "lab: " + " · ".join(parts)


PHASE_WORDS = [str(p) for p in Phase]
OUTCOME_WORDS = ["completed", "no_result", "crashed", "diverged", "timed_out", "cancelled", "declined", "pruned", "lost", "kill_failed"]
