"""The line above every page, the alerts under it, and the keys below: pure functions from a snapshot to rows.

The header says how the night goes; the alerts say what costs GPU time right now, worst first, with evidence and the key that helps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from runner.queries import LabState
from runner.records import Flag
from runner.text import plural

from ..gpuwords import label
from ..lines import Line, Span, safe
from ..snapshot import Snapshot
from ..words import age, number

STALE_S = 5.0
LATELY, LATELY_S = 10, 3600.0  # as many ends, and as old, as tell how runs fare now
Alert = tuple[str, str]  # (severity: bad, warn, info; sentence)
_ORDER = {"bad": 0, "warn": 1, "info": 2}


def header(snapshot: Snapshot, width: int, now: float, *, readonly: bool = False, frozen: bool = False) -> Line:
    """The night in a row; what matters least leaves first when the room is short."""
    parts = _parts(snapshot, now, readonly, frozen)
    kept = [p for p in parts if p[1]]
    while len(kept) > 2 and sum(len(_text(p[1])) + 3 for p in kept) > width:
        worst = max(p[0] for p in kept)
        if worst == 0:
            break
        kept.remove(next(p for p in reversed(kept) if p[0] == worst))
    line = Line((" ", ""))
    for i, (_, spans) in enumerate(kept):
        line.add(" │ " if i else "", "track").extend(spans)
    return line


def _text(spans: list[Span]) -> str:
    return "".join(t for t, _ in spans)


def _parts(snapshot: Snapshot, now: float, readonly: bool, frozen: bool) -> list[tuple[int, list[Span]]]:
    """(how soon it may leave, spans) of each fact."""
    name: list[Span] = [("Overnight", "title")]
    where: list[Span] = [(safe("/".join(snapshot.lab.rstrip("/").split("/")[-2:]), 40), "muted")]
    held = " ".join(word for word, on in (("read-only", readonly), ("FROZEN z", frozen)) if on)
    mode: list[Span] = [(held, "warn")] if held else []
    state = snapshot.state
    if state is None:
        return [
            (0, name),
            (4, where),
            (1, mode),
            (1, [("reading the lab …" if snapshot.problem is None else "the lab cannot be read", "muted")]),
        ]
    old_s = now - snapshot.at
    stale: list[Span] = [(f"data {age(old_s)} old", "warn")] if old_s > STALE_S else []
    queue: list[Span] = [(f"queue {state.queued}", "")]
    if state.paused:
        queue.append((" PAUSED p", "warn"))
    if state.approval == "ask":
        queue.append((" APPROVAL m", "warn"))
    if state.proposed:
        queue.append((f" +{state.proposed} to approve", "warn"))
    word = "slot" if any(g.get("index") is None for g in snapshot.gpus) else "GPU"  # a host without a GPU has one CPU slot
    busy = sum(g.get("state") == "busy" for g in snapshot.gpus)
    gpus: list[Span] = [(f"{busy}/{plural(state.total_gpus, word)} busy", "warn" if state.idle_gpus and state.queued else "")]
    best: list[Span] = (
        [("best ", "muted"), (number(state.best_bpb, 6), "good"), (f" {safe(state.best_id, 12)}", "muted")] if state.best_id else []
    )
    calls: list[Span] = [("agent ", "muted"), (f"{age(state.last_agent_call_s)} ago", "")] if state.last_agent_call_s is not None else []
    left = _left(state)
    speed: list[Span] = [(str(state.runs_last_hour), ""), (" run/h" if state.runs_last_hour == 1 else " runs/h", "muted")]
    daemon: list[Span] = [("●", "good")] if state.daemon_alive else [("○ no daemon", "bad")]
    return [
        (0, name),
        (8, where),
        (0, daemon),
        (0, stale),
        (1, mode),
        (1, gpus),
        (2, queue),
        (5, speed),
        (3, best),
        (7, left),
        (6, calls),
        (9, [(time.strftime("%H:%M", time.localtime(now)), "muted")]),
    ]


def _left(state: LabState) -> list[Span]:
    """What the policy's limits leave."""
    parts = [
        f"{state.runs_left} runs" if state.runs_left is not None else "",
        f"{number(state.gpu_hours_left, 1)} GPU-h" if state.gpu_hours_left is not None else "",
        f"{number(state.wall_hours_left, 1)} h" if state.wall_hours_left is not None else "",
    ]
    text = ", ".join(p for p in parts if p)
    return [("left ", "muted"), (text, "")] if text else []


def alerts(snapshot: Snapshot, now: float) -> list[Alert]:
    """What is wrong or costs GPU time, worst first."""
    found: list[Alert] = []
    if snapshot.problem:
        found.append(("bad", safe(snapshot.problem, 300)))
    state = snapshot.state
    if state is None:
        return found
    if not state.daemon_alive:
        found.append(
            ("bad", "No daemon serves this lab: queued runs do not start. `overnight daemon start`, or the palette's Start the daemon.")
        )
    elif state.daemon_silent_s is not None:
        found.append(("bad", f"The daemon has written nothing for {age(state.daemon_silent_s)}: a full disk, or a machine that hangs."))
    elif note := (state.daemon_note or "").replace(state.policy_pending or "\0", "").strip("; "):  # it tells what is pending, too
        found.append(("bad", safe(note, 300)))
    if state.policy_pending:
        found.append(("warn", safe(state.policy_pending, 300)))
    if state.proposed:
        verb = "waits" if state.proposed == 1 else "wait"
        found.append(("warn", f"{plural(state.proposed, 'run')} {verb} for approval, last in the queue: a approves, A declines."))
    found += _idle(snapshot, state)
    found += _failing(snapshot, now)
    found += [
        ("bad", f"Host {safe(h.name, 30)} is {safe(h.state, 12)} for {age(now - h.since)}: {safe(h.error, 160)}")
        for h in snapshot.hosts
        if h.state in ("down", "unfit")
    ]
    found += [
        (
            "bad",
            f"{safe(g.get('host'), 30)}:{g.get('index')} is quarantined for {age(g.get('since_s'))}: {safe(g.get('reason'), 160)}"
            " (r releases it)",
        )
        for g in snapshot.gpus
        if g.get("state") == "quarantined"
    ]
    told = {({"down": "host_down"}.get(str(h.state), str(h.state)), h.name) for h in snapshot.hosts if h.state in ("down", "unfit")}
    told |= {("orphan_process", str(g.get("uuid"))) for g in snapshot.gpus if g.get("state") == "quarantined"}
    places = {str(g.get("uuid")): label(g) for g in snapshot.gpus}
    found += [_flag(f, now, places) for f in snapshot.flags if (f.kind, f.subject) not in told]  # one fact is one alert
    return sorted(dict.fromkeys(found), key=lambda a: _ORDER.get(a[0], 3))


def _idle(snapshot: Snapshot, state: LabState) -> list[Alert]:
    """Idle GPUs, with the reason that can be seen from here."""
    idle = [g for g in snapshot.gpus if g.get("state") == "free" and not g.get("run")]
    if not idle or not state.daemon_alive:
        return []
    longest = max((g.get("since_s") or 0.0) for g in idle)
    word = "slot" if any(g.get("index") is None for g in idle) else "GPU"
    what = f"{plural(len(idle), word)} idle, the longest for {age(longest)}"
    if state.paused and state.queued:
        return [("warn", f"{what}: the queue is paused (p resumes) with {plural(state.queued, 'run')} waiting.")]
    if longest < 20:
        return []
    if state.queued:
        wait = "waits: its" if state.queued == 1 else "wait: their"
        return [("warn", f"{what}, while {plural(state.queued, 'run')} {wait} GPU type or host does not fit, or a host is paused.")]
    if state.last_agent_call_s is not None:
        return [
            (
                "warn" if state.last_agent_call_s > 300 else "info",
                f"{what}: the queue is empty; the agent's last call was {age(state.last_agent_call_s)} ago.",
            )
        ]
    return [("info", f"{what}: the queue is empty and no agent has called yet (`overnight connect` says how).")]


def _failing(snapshot: Snapshot, now: float) -> list[Alert]:
    """Most of what ended lately crashed: a night of crashes looks busy otherwise."""
    ends = [e for e in snapshot.events if e.verb == "ended" and now - e.at < LATELY_S][:LATELY]
    crashes = [e for e in ends if str(e.why).startswith("crashed")]
    if not crashes or 2 * len(crashes) <= len(ends):
        return []
    newest = crashes[0]
    what = "The last run" if len(ends) == 1 else f"{len(crashes)} of the last {len(ends)} runs"
    cause = safe(str(newest.why).partition(": ")[2] or "no cause is known", 200)
    return [("warn", f"{what} crashed, {safe(newest.subject, 12)} {age(now - newest.at)} ago: {cause}")]


def _flag(flag: Flag, now: float, places: Mapping[str, str]) -> Alert:
    subject = places.get(flag.subject) or safe(flag.subject, 20)
    return (str(flag.severity), f"{subject} {safe(flag.kind, 30)}, {age(now - flag.raised_at)}: {safe(flag.evidence, 200)}")


def alert_lines(found: list[Alert], width: int, most: int) -> list[Line]:
    """The alerts as at most `most` rows; the last row counts what is left out."""
    glyphs = {"bad": "✕", "warn": "!", "info": "·"}
    shown = found if len(found) <= most else found[: max(1, most - 1)]
    out = [
        Line((f" {glyphs.get(s, '·')} ", s if s != "info" else "muted"), (text, s if s != "info" else "muted")).fitted(width)
        for s, text in shown
    ]
    if len(shown) < len(found):
        out.append(Line((f"   and {len(found) - len(shown)} more: 5 shows the events and flags", "muted")).fitted(width))
    return out[:most] if most else []
