"""Hosts and GPUs as every face shows them: rows of the database with their ages, what their hosts' states make of them, and their runs.

Read through `runner.queries`. Nothing here writes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from runner import states
from runner.lab import Lab
from runner.mfu import mfu_percent, under_load
from runner.policy import Policy
from runner.records import Gpu, GpuState, Host, HostState, Json, Run


def gpu_objects(lab: Lab, runs: Iterable[Run] = ()) -> list[Json]:
    """The GPU object of FORMAT.md section 5 for each GPU of a host that is in use; `runs` are read already."""
    now, gpus, known = time.time(), gpus_now(lab), {run.id: run for run in runs}
    unread = [gpu.run_id for gpu in gpus if gpu.run_id is not None and gpu.run_id not in known]
    if unread:  # one statement for all: a lab has hundreds of GPUs
        known |= {run.id: run for run in lab.store.runs(f"id IN ({', '.join('?' * len(unread))})", unread, order="+seq")}
    return [gpu_object(lab, gpu, known.get(gpu.run_id or ""), now) for gpu in gpus]


def gpus_now(lab: Lab, hosts: Iterable[Host] | None = None) -> list[Gpu]:
    """Every GPU in the state it is shown in: what its host's state makes of its own."""
    known = {h.name: h for h in (lab.store.hosts() if hosts is None else hosts)}
    policy = lab.policy()
    return [states.gpu_now(gpu, known.get(gpu.host), policy) for gpu in lab.store.gpus()]


def gpu_object(lab: Lab, gpu: Gpu, run: Run | None, now: float) -> Json:
    """The GPU object of one row, with the run on it."""
    sample = gpu.telemetry
    at = sample.get("at") if sample else None
    load = under_load(lab, run, now=now) if run is not None and not run.ended else None
    row = {
        "uuid": gpu.uuid,
        "host": gpu.host,
        "index": gpu.idx,
        "name": gpu.name,
        "state": gpu.state,
        "reason": gpu.reason,
        "run": gpu.run_id,
        "standby": gpu.standby_run_id,
        "since_s": now - gpu.since,
        "free_in_s": free_in_s(run, now) if gpu.state == GpuState.BUSY else None,
        "holder": gpu.holder,
        "sample": sample,
        "sample_age_s": max(now - at, 0.0) if at else None,
        "mfu_percent": mfu_percent(run, lab.policy()) if run else None,
        "mfu_at_clock_percent": load["mfu_at_clock_percent"] if load else None,
        "tok_s": run.tok_s if run else None,
        "mem_total_mib": gpu.mem_total_mib,
    }
    row["note"] = states.gpu_note(row)
    return row


def host_objects(lab: Lab, reports: Mapping[str, Json] | None = None) -> list[Json]:
    """The host object of FORMAT.md section 5 for each host of hosts.toml, and each that left it and still runs something; `reports` are
    what a check just found.
    """
    now, policy = time.time(), lab.policy()
    stored = {h.name: h for h in lab.store.hosts()}
    gpus: dict[str, list[str]] = {}
    for gpu in lab.store.gpus():
        gpus.setdefault(gpu.host, []).append(gpu.uuid)
    kinds = {h.name: h.kind for h in policy.hosts}
    kinds |= {h.name: h.kind for h in stored.values() if h.name not in kinds and h.state != HostState.REMOVED}
    return [_host_object(stored.get(n), n, kind, policy, gpus.get(n, []), (reports or {}).get(n, {}), now) for n, kind in kinds.items()]


def _host_object(host: Host | None, name: str, kind: str, policy: Policy, gpus: list[str], report: Json, now: float) -> Json:
    word = states.host_state(host, policy) if host else str(HostState.NEW)
    return {
        "name": name,
        "kind": kind,
        "state": report.get("state") if report and word not in ("paused", "draining") else word,
        "since_s": now - host.since if host else None,
        "paused": bool(host and host.paused),
        "drain": bool(host and host.drain),
        "error": report.get("error", states.host_note(host, policy) if host else None),
        "next": report.get("next") or None,
        "checks": report.get("checks", []),
        "gpus": gpus,
        "disk_free_mib": host.disk_free_mib if host else None,
    }


def free_in_s(run: Run | None, now: float) -> float | None:
    """About when a run will be done: what its budget leaves, None before it says."""
    if run is None:
        return None
    if run.remaining_s is not None:
        return max(run.remaining_s, 0.0)
    if run.first_step_at is None:  # compiling: the budget has not begun
        return run.budget_s
    return max(run.budget_s - (now - run.first_step_at), 0.0)
