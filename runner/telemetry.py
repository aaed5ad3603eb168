"""What hosts and GPUs are now: engine reports become the rows of `hosts`, `gpus` and `samples`.

Kept at one second while a run is on the GPU, thinned for history. What the cards' states are is devices.py's to say.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from runner import devices, moving, states
from runner.records import GpuState, HostState, Sample, Severity

if TYPE_CHECKING:
    from runner.engines.base import HostReport
    from runner.records import Host
    from runner.roster import Device, Roster

CONNECT_S = 10.0  # a host that has not answered so long after a start is down, not new
HISTORY_FULL_S = 6 * 3600  # one-second samples are kept so long, then one in ten
KEEP_EVERY_S = 10


def record(roster: Roster, reports: list[HostReport]) -> None:
    """Write one round of reports in one transaction."""
    now = time.time()
    known = {h.name: h for h in roster.store.hosts()}
    samples: list[Sample] = []
    with roster.writing():
        for report in reports:
            roster.reports[report.host] = report
            _record_host(roster, report, known.get(report.host), now)
            if report.up:
                devices.record(roster, report, now)
        for device in roster.devices.values():
            sample = _sample_row(roster, device, now)
            if sample:
                samples.append(sample)
            _write_gpu(roster, device)
        if samples:
            roster.store.add_samples(samples)


def thin(roster: Roster) -> None:
    """Drop nine in ten of the samples of long ago."""
    roster.store.thin_samples(time.time() - HISTORY_FULL_S, KEEP_EVERY_S)


def _record_host(roster: Roster, report: HostReport, before: Host | None, now: float) -> None:
    """The row of a host, when anything of it changed, and its flags."""
    store, name = roster.store, report.host
    policy = roster.hosts.get(name)
    info = {k: v for k, v in report.info.items() if k != "environment"}
    if policy is not None:
        info["labels"] = policy.labels
    if moving.moves(roster, name):
        info["moves"] = moving.WORDS
    if before is None:
        store.upsert_host(name, kind=policy.kind if policy else "local", state=HostState.NEW, since=now)
    if report.up:
        roster.seen_up.add(name)
    elif name not in roster.seen_up and time.monotonic() - roster.started < CONNECT_S:
        return  # still connecting: nothing is known yet
    unfit = roster.fitness.why(name) if report.up else None
    state = HostState.DOWN if not report.up else HostState.UNFIT if unfit else HostState.UP
    error = report.error or unfit
    changed = before is None or before.state != state
    fresh = changed or (roster.unwatched and name not in roster.told)  # nobody saw what it was while no daemon ran
    roster.told.add(name)
    low = states.disk_low(roster.lab.policy(), name, report.disk_free_mib)
    if (
        fresh
        or before is None
        or (before.error, before.boot_id, before.info) != (error, report.boot_id or before.boot_id, info)
        or _disk_moved(roster, before, report.disk_free_mib)
    ):
        store.upsert_host(
            name,
            state=state,
            error=error,
            boot_id=report.boot_id or (before.boot_id if before else None),
            info=info,
            disk_free_mib=report.disk_free_mib,
            **({"since": now} if fresh else {}),
        )
    if changed and before is not None:
        store.event("daemon", f"host_{state}", name, error)
        roster.changed.set()
    if not report.up:
        store.raise_flag(name, "host_down", Severity.BAD, report.error or "it does not answer")
        return
    store.clear_flag(name, "host_down")
    if low:
        store.raise_flag(name, "disk_low", Severity.BAD, f"no new run starts here: {low}")
        return
    roster.note(f"disk of {name}", None)
    if store.clear_flag(name, "disk_low"):
        roster.changed.set()


def _disk_moved(roster: Roster, before: Host, free_mib: int | None) -> bool:
    """Whether the free disk is worth writing down: it moved, or passed the floor."""
    policy = roster.lab.policy()
    passed = bool(states.disk_low(policy, before.name, free_mib)) != bool(states.disk_low(policy, before.name, before.disk_free_mib))
    return passed or abs((before.disk_free_mib or 0) - (free_mib or 0)) > 64


def _sample_row(roster: Roster, device: Device, now: float) -> Sample | None:
    """One second of a GPU: always while a run is on it, every tenth second otherwise."""
    sample = device.sample
    at = int((sample or {}).get("at") or 0)
    if sample is None or not at or now - at > 5:
        return None
    track = roster.occupant(device.slot.uuid)
    if track is None and at % KEEP_EVERY_S:
        return None
    names = ("util_pct", "mem_used_mib", "power_w", "power_limit_w", "temp_c", "sm_mhz", "sm_max_mhz", "throttle")
    tok_s = track.facts.get("tok_s", track.run.tok_s) if track else None
    return Sample(device.slot.uuid, at, track.run.id if track else None, **{n: sample.get(n) for n in names}, tok_s=tok_s)


def _write_gpu(roster: Roster, device: Device) -> None:
    """The row of a GPU, when anything of it changed."""
    slot, uuid = device.slot, device.slot.uuid
    track, waiting = roster.occupant(uuid), roster.waiting(uuid)
    state = GpuState.BUSY if track is not None and device.state == GpuState.FREE else device.state
    since = device.since
    if track is not None and state == GpuState.BUSY:
        since = track.run.placed_at or device.since
    row = (
        state,
        device.reason,
        since,
        track.run.id if track else None,
        waiting[0].run.id if waiting else None,
        (device.sample or {}).get("at"),
    )
    if row == device.written:
        return
    roster.store.upsert_gpu(
        uuid,
        host=slot.host,
        idx=slot.index,
        name=slot.name,
        mem_total_mib=slot.mem_total_mib,
        state=state,
        reason=row[1],
        since=since,
        run_id=row[3],
        standby_run_id=row[4],
        holder=device.holder,
        telemetry=device.sample,
    )
    device.written = row


def write_gpus(roster: Roster) -> None:
    """Bring the rows of all GPUs up to date (after placements and ends, between two rounds of telemetry)."""
    with roster.writing():
        for device in roster.devices.values():
            _write_gpu(roster, device)
