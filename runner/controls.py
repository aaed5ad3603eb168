"""The verbs that steer: order of the queue, pauses, approval, policy. Call them as `runner.verbs.NAME`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Any

from runner import asked, submitting
from runner.errors import BadValue, Refused, UnknownName
from runner.lab import Lab
from runner.policy import load_policy
from runner.records import Outcome, Phase
from runner.text import one_line


def set_priority(lab: Lab, ids: Iterable[str], *, who: str, priority: float | None = None, move: str | None = None) -> None:
    """Give queued runs a priority (higher first), or move them up, down or to the top of the queue."""
    if (priority is None) == (move is None) or move not in (None, "up", "down", "top"):
        raise BadValue("Say a priority, or move: up, down or top.")
    with lab.store.transaction():
        wanted = [submitting.known_run(lab, name) for name in asked.listed(ids)]
        for run in wanted:
            if not run.waiting:
                raise Refused(f"{run.id} is not waiting ({run.phase}); only waiting runs have a place in the queue.")
        if priority is not None:
            for run in wanted:
                lab.store.update_run(run.id, priority=asked.priority(priority))
        else:
            _reorder(lab, [r.id for r in wanted], str(move))
        for run in wanted:
            lab.store.event(who, "priority", run.id, None, {"priority": priority, "move": move})


def _reorder(lab: Lab, ids: list[str], move: str) -> None:
    """Change the order of the queue with as few new priorities as will do."""
    queue = [r for r in lab.store.active_runs() if r.waiting]
    order = [r.id for r in queue]
    if move == "top":
        order = [i for i in order if i in ids] + [i for i in order if i not in ids]
    else:
        walk = range(1, len(order)) if move == "up" else range(len(order) - 2, -1, -1)
        step = -1 if move == "up" else 1
        for at in walk:
            if order[at] in ids and order[at + step] not in ids:
                order[at], order[at + step] = order[at + step], order[at]
    by_id = {r.id: r for r in queue}
    below: tuple[float, int] | None = None
    for run_id in reversed(order):
        run = by_id[run_id]
        priority = run.priority
        if below is not None and (priority, -run.seq) <= below:
            priority = below[0] if -run.seq > below[1] else below[0] + 0.001
            lab.store.update_run(run_id, priority=priority)
        below = (priority, -run.seq)


def pause_queue(lab: Lab, on: bool, *, who: str, why: str | None = None) -> None:
    """Start nothing new (live runs go on), or go on starting."""
    _setting(lab, "queue_paused", on, who, "pause_queue" if on else "resume_queue", "queue", why)


def pause_agent(lab: Lab, name: str, on: bool, *, who: str, why: str | None = None) -> str:
    """Start none of one agent's runs, or go on; agents are called mcp:NAME, and NAME alone means that, too. Raised: BadValue."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,79}", name):
        raise BadValue(f"{one_line(repr(name), 60)} is no agent's name.", next_step="`overnight runs --json` shows them: mcp:claude.")
    asked_for = name
    if not (name.startswith("mcp:") or name in ("cli", "tui") or lab.store.count_runs("agent = ?", (name,))):
        name = f"mcp:{name}"
    paused = set(lab.store.setting("paused_agents", []))
    paused = paused | {name} if on else paused - {name, asked_for}
    _setting(lab, "paused_agents", sorted(paused), who, "pause_agent" if on else "resume_agent", name, why)
    return name


def pause_host(lab: Lab, name: str, on: bool, *, who: str, why: str | None = None) -> None:
    """Start nothing new on a host, or go on."""
    _host(lab, name, who, "pause_host" if on else "resume_host", why, paused=int(on))


def drain_host(lab: Lab, name: str, on: bool, *, who: str, why: str | None = None) -> None:
    """Let a host finish what it runs and take nothing more, or take it back."""
    _host(lab, name, who, "drain_host" if on else "undrain_host", why, drain=int(on))


def set_approval(lab: Lab, mode: str, *, who: str, why: str | None = None) -> None:
    """`ask`: submissions of agents wait for a human; `auto`: they are queued at once."""
    if mode not in ("auto", "ask"):
        raise BadValue(f"The approval mode is {mode!r}.", next_step="Allowed: auto, ask.")
    _setting(lab, "approval", mode, who, "approval", "lab", why)


def approve(lab: Lab, ids: Iterable[str], *, who: str, why: str | None = None) -> None:
    """Let proposed runs into the queue."""
    _answer_proposals(lab, ids, who, why, approval="approved", phase=Phase.QUEUED)


def decline(lab: Lab, ids: Iterable[str], *, who: str, why: str | None) -> None:
    """Turn proposed runs down; the agent sees the reason."""
    _answer_proposals(
        lab,
        ids,
        who,
        why,
        approval="declined",
        phase=Phase.ENDED,
        outcome=Outcome.DECLINED,
        ended_at=time.time(),
        cause_text=asked.words(why) or "declined by a human",
    )


def _answer_proposals(lab: Lab, ids: Iterable[str], who: str, why: str | None, **columns: Any) -> None:
    if who.startswith("mcp:"):
        raise Refused("Approval is a human's: it is given in the TUI or with `overnight approve`.")
    with lab.store.transaction():
        for name in asked.listed(ids):
            for run in asked.runs_named(lab, name):
                if run.phase != Phase.PROPOSED:
                    if run.id == name:
                        raise Refused(f"{run.id} is not waiting for approval ({run.phase}).")
                    continue
                lab.store.update_run(run.id, approval_why=asked.words(why), **columns)
                lab.store.event(who, str(columns["approval"]).removesuffix("d"), run.id, asked.words(why))


def accept_policy(lab: Lab, *, who: str) -> None:
    """Put the present hosts.toml in force, also where it loosens a limit; only a human may."""
    if who.startswith("mcp:"):
        raise Refused("The policy is accepted by a human, in the TUI or with `overnight policy accept`.")
    load_policy(lab.hosts_file, files=True)  # what cannot be used is not accepted
    lab.accept(lab.hosts_file.read_text(encoding="utf-8"))
    lab.store.event(who, "accept_policy", str(lab.hosts_file))


def new_night(lab: Lab, *, who: str) -> None:
    """Start counting max_wall_hours anew."""
    _setting(lab, "night_started_at", time.time(), who, "new_night", "lab", None)


def _setting(lab: Lab, key: str, value: Any, who: str, verb: str, subject: str, why: str | None) -> None:
    with lab.store.transaction():
        lab.store.set_setting(key, value)
        lab.store.event(who, verb, subject, asked.words(why), {key: value})


def _host(lab: Lab, name: str, who: str, verb: str, why: str | None, **columns: int) -> None:
    with lab.store.transaction():
        known = lab.policy().host(name)
        if known is None and name not in [h.name for h in lab.store.hosts()]:
            raise UnknownName("host", name, [h.name for h in lab.policy().hosts], where="hosts.toml")
        if name in [h.name for h in lab.store.hosts()]:
            lab.store.upsert_host(name, **columns)
        elif known is not None:
            lab.store.upsert_host(name, kind=known.kind, state="new", since=time.time(), **columns)
        lab.store.event(who, verb, name, asked.words(why))
