"""What state a run, a GPU and a host are in, in the words that every face shows: the one place that says so.

Pure functions of rows and policy. The daemon places runs by `host_hold` too, so that what is shown and what is done never differ.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from runner.policy import Policy
from runner.records import Event, Gpu, GpuState, Host, HostState, Phase, Run, Stage
from runner.text import ago

DOWN_WORD = "host down since"
SETUP_LAB = "setup"  # what `hosts setup` signs a GPU's lock with while it measures the card


def run_state(run: Run) -> str:
    """One word for where a run is, or how it ended. A stage is only told of a run that is seen to run."""
    if run.outcome:
        return str(run.outcome)
    if run.phase == Phase.STARTING and run.stage == Stage.STANDBY:
        return str(Stage.STANDBY)
    return str(run.stage or run.phase) if run.phase == Phase.RUNNING else str(run.phase)


def run_words(row: Mapping[str, Any]) -> str:
    """`state` of a run object, with the age of what may be no longer true: `unreachable 12 s`."""
    return _aged(str(row["state"]), row["unreachable_s"])


def phase_words(run: Run) -> str:
    """The phase of a run, with its age when nobody knows whether it still is what it was."""
    return _aged(str(run.phase), None if run.unreachable_since is None else time.time() - run.unreachable_since)


def _aged(word: str, unreachable_s: float | None) -> str:
    return f"{word} {ago(unreachable_s)}" if word == Phase.UNREACHABLE and unreachable_s is not None else word


def clock(at: float) -> str:
    """A moment as people near it say it: the time, with the day when it was not today."""
    then = time.localtime(at)
    today = time.localtime(time.time())[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M", then)


def floor_mib(policy: Policy, host: str) -> int:
    """The free disk below which a host takes no new run."""
    found = policy.host(host)
    own = found.min_free_disk_mib if found is not None else None
    return policy.limits.min_free_disk_mib if own is None else own


def disk_low(policy: Policy, host: str, free_mib: int | None) -> str | None:
    """Why a host's disk keeps new runs away; None when it does not."""
    floor = floor_mib(policy, host)
    if free_mib is None or free_mib >= floor:
        return None
    return f"its disk is below the floor ({free_mib} MiB free, floor {floor} MiB)"


def host_hold(host: Host, policy: Policy) -> str | None:
    """Why a host that answers takes no new run; None when it does. (Whether it is unfit just now is the daemon's to know.)"""
    if policy.host(host.name) is None:
        return "it is no longer in hosts.toml"
    if host.info and host.info.get("moves"):
        return str(host.info["moves"])
    if host.paused:
        return "it is paused"
    if host.drain:
        return "it is draining"
    return disk_low(policy, host.name, host.disk_free_mib)


def host_state(host: Host, policy: Policy) -> str:
    """One word for a host: down before what a human told it, that before `up`."""
    if host.state in (HostState.DOWN, HostState.REMOVED):
        return str(host.state)
    if host.drain or policy.host(host.name) is None or (host.info and host.info.get("moves")):
        return "draining"
    return "paused" if host.paused else str(host.state)


def host_note(host: Host, policy: Policy) -> str | None:
    """What is wrong with a host, or keeps new runs away from it, in a sentence."""
    hold = host_hold(host, policy)
    waits = f"takes no new run: {hold}" if hold and not (host.paused or host.drain) else None
    return "; ".join(part for part in (host.error, waits) if part) or None


def gpu_now(gpu: Gpu, host: Host | None, policy: Policy) -> Gpu:
    """The GPU as it is shown: what its host's state makes of its own.

    A card out of contact is `down` (not free, busy or lost); a free one on a host that takes no new run is `held`. A quarantine stays one.
    """
    if gpu.state == GpuState.QUARANTINED:
        return dataclasses.replace(gpu, reason=quarantine_words(gpu))
    if host is None:
        return gpu
    if host.state == HostState.DOWN:
        reason = f"{DOWN_WORD} {clock(host.since)}" + (f": {host.error}" if host.error else "")
        return dataclasses.replace(gpu, state=str(GpuState.DOWN), reason=reason, since=host.since)
    unfit = f"it is unfit: {host.error}" if host.state == HostState.UNFIT else None
    hold = host_hold(host, policy) or unfit
    if hold and gpu.state == GpuState.FREE:
        return dataclasses.replace(gpu, state=str(GpuState.HELD), reason=f"{host.name} takes no new run: {hold}")
    return gpu


def gpu_note(row: Mapping[str, Any]) -> str | None:
    """The reason of a GPU object, with the age of a trouble that somebody must look at."""
    if not row["reason"]:
        return None
    aged = row["state"] in (GpuState.QUARANTINED, GpuState.FOREIGN, GpuState.LOST)
    return f"for {ago(row['since_s'])}: {row['reason']}" if aged else str(row["reason"])


def quarantine_words(gpu: Gpu) -> str:
    """Why a GPU is quarantined, who holds it (pid and memory) as last seen, and how much is in use now."""
    telemetry, holder = gpu.telemetry or {}, gpu.holder or {}
    now = telemetry.get("processes")
    people = now if now else holder.get("holders") or []
    pids = ", ".join(f"pid {pid}" for pid in holder.get("pids") or [])
    used = telemetry.get("mem_used_mib")
    parts = [f"held by {people_words(people) or pids}" if people or pids else "no process is seen to hold it"]
    if used is not None:
        parts.append(f"{used} MiB in use now")
    return "; ".join([*parts, str(gpu.reason or "no reason known")])


def people_words(processes: list[dict[str, Any]]) -> str:
    """Processes on a GPU, in words: `python (pid 77, bob, 39000 MiB)`."""
    words = []
    for p in processes[:3]:
        facts = [f"pid {p.get('pid') or '?'}", p.get("user"), f"{p['used_mib']} MiB" if p.get("used_mib") is not None else None]
        words.append(f"{p.get('name') or 'a process'} ({', '.join(str(f) for f in facts if f)})")
    return ", ".join(words) + (f" and {len(processes) - 3} more" if len(processes) > 3 else "")


def lock_words(note: Mapping[str, Any]) -> str:
    """Who holds a GPU's lock, from the note it left there."""
    if note.get("lab_id") == SETUP_LAB:
        who = "`overnight hosts setup` measures it"
    elif note.get("lab_id"):
        who = f"held by another control room: lab {note['lab_id']}"
    else:
        who = "locked by a process that does not say whose it is"
    facts = [
        f"run {note['run_id']}" if note.get("run_id") and note.get("lab_id") not in (None, SETUP_LAB) else None,
        f"user {note['user']}" if note.get("user") else None,
        f"pid {note['pid']}" if note.get("pid") else None,
        f"since {clock(float(note['since']))}" if isinstance(note.get("since"), (int, float)) else None,
    ]
    return ", ".join([who, *(fact for fact in facts if fact)])


def event_words(event: Event) -> str | None:
    """What an event of the audit trail did and why: `verdict keep: below the noise before`; None where nothing more is known."""
    if not event.why:
        return ", ".join(f"{k} {_listed(v)}" for k, v in (event.detail or {}).items() if v not in (None, False, [], {})) or None
    told = [f"{k} {v}" if v is not True else k for k, v in (event.detail or {}).items() if v is True or (isinstance(v, str) and v)]
    return f"{', '.join(told)}: {event.why}" if told else event.why


def _listed(value: Any) -> str:
    """A list as a person writes it, its middle left out where it is long."""
    if isinstance(value, Mapping):
        return " ".join(f"{k}={v}" for k, v in value.items())
    if not isinstance(value, (list, tuple)):
        return str(value)
    words = [str(v) for v in value]
    return ", ".join(words) if len(words) <= 3 else f"{words[0]} … {words[-1]} ({len(words)})"
