"""What hosts and GPUs are now: engine reports become the rows of `hosts`, `gpus` and `samples`, and the states slots are placed by.

Kept at one second while a run is on the GPU, thinned for history. A GPU that disappears is `lost`, one that somebody else uses is
`foreign`; neither takes a run, and both come back by themselves. Only a human ends a quarantine.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from runner.records import GpuState, Sample, Severity
from runner.roster import Device

if TYPE_CHECKING:
    from runner.engines.base import HostReport, Slot
    from runner.records import Host
    from runner.roster import Roster

FOREIGN_MIB = 500  # a compute process of somebody else with more than this keeps our runs away
SETTLE_S = 3.0  # a sample older than the last change plus this says nothing about a strange process
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
                _record_devices(roster, report, now)
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
    store, name = roster.store, report.host
    policy = roster.hosts.get(name)
    info = {k: v for k, v in report.info.items() if k != "environment"}
    if policy is not None:
        info["labels"] = policy.labels
    if report.up:
        roster.seen_up.add(name)
    elif name not in roster.seen_up and time.monotonic() - roster.started < CONNECT_S:
        if before is None:
            store.upsert_host(name, kind=policy.kind if policy else "local", state="new", since=now)
        return  # still connecting: nothing is known yet
    unfit = roster.fitness.why(name) if report.up else None
    state = "down" if not report.up else "unfit" if unfit else "up"
    error = report.error or unfit
    if before is None:
        store.upsert_host(name, kind=policy.kind if policy else "local", state="new", since=now)
    changed = before is None or before.state != state
    if (
        changed
        or before is None
        or (before.error, before.boot_id, before.info) != (error, report.boot_id, info)
        or abs((before.disk_free_mib or 0) - (report.disk_free_mib or 0)) > 64
    ):
        store.upsert_host(
            name,
            state=state,
            error=error,
            boot_id=report.boot_id or (before.boot_id if before else None),
            info=info,
            disk_free_mib=report.disk_free_mib,
            **({"since": now} if changed else {}),
        )
    if changed and before is not None:
        store.event("daemon", f"host_{state}", name, error)
        roster.changed.set()
    if not report.up:
        store.raise_flag(name, "host_down", Severity.BAD, report.error or "it does not answer")
        return
    store.clear_flag(name, "host_down")
    floor = disk_floor(roster, name)
    if report.disk_free_mib is not None and report.disk_free_mib < floor:
        store.raise_flag(name, "disk_low", Severity.BAD, f"{report.disk_free_mib} MiB free, floor {floor} MiB: no new run starts here")
        return
    roster.note(f"disk of {name}", None)
    if store.clear_flag(name, "disk_low"):
        roster.changed.set()


def disk_floor(roster: Roster, host: str) -> int:
    """The free disk below which a host takes no new run, MiB."""
    policy = roster.hosts.get(host)
    if policy is not None and policy.min_free_disk_mib is not None:
        return policy.min_free_disk_mib
    return roster.lab.policy().limits.min_free_disk_mib


def _record_devices(roster: Roster, report: HostReport, now: float) -> None:
    samples = {s.get("uuid"): s for s in report.samples}
    here = {slot.uuid: slot for slot in report.slots}
    for uuid, slot in here.items():
        device = roster.devices.get(uuid) or _new_device(roster, slot, now)
        if _is_of_another(roster, device, report):
            continue
        sample = samples.get(uuid)
        if sample is not None:
            device.sample = sample
        error = (sample or {}).get("error")
        if error:
            _lose(roster, device, f"it cannot be read: {error}")
            continue
        device.slot = slot
        if device.state == GpuState.LOST:
            roster.set_device(uuid, GpuState.FREE)
        _judge_foreign(roster, device, now)
    for uuid, device in roster.devices.items():
        if device.slot.host == report.host and uuid not in here:
            _lose(roster, device, "its host no longer reports it")


def _is_of_another(roster: Roster, device: Device, report: HostReport) -> bool:
    """Two entries of hosts.toml that are one machine: a card stays with the entry that named it first."""
    first = device.slot.host
    if first == report.host:
        return False
    other = roster.reports.get(first)
    same = other is not None and other.up and first in roster.hosts and device.slot.uuid in {s.uuid for s in other.slots}
    roster.note(f"twin {report.host}", f"hosts {first} and {report.host} have the same GPUs: they are used as {first}'s" if same else None)
    return same


def _lose(roster: Roster, device: Device, why: str) -> None:
    """A card that is gone or cannot be read takes no run; what is on it says so and goes on as long as it can."""
    if device.state == GpuState.LOST:
        return
    uuid = device.slot.uuid
    roster.set_device(uuid, GpuState.LOST, why)
    occupant = roster.occupant(uuid)
    if occupant is not None:
        roster.store.raise_flag(occupant.run.id, "gpu_lost", Severity.BAD, f"{device.slot.name} ({uuid}) on {device.slot.host}: {why}")


def _new_device(roster: Roster, slot: Slot, now: float) -> Device:
    """A device seen for the first time by this daemon; a quarantine outlives it in the database."""
    device = Device(slot, since=now)
    kept = next((g for g in roster.store.gpus() if g.uuid == slot.uuid), None)
    if kept is not None and kept.state == GpuState.QUARANTINED:
        device.state, device.reason, device.since, device.holder = GpuState.QUARANTINED, kept.reason, kept.since, kept.holder
    roster.devices[slot.uuid] = device
    roster.changed.set()
    return device


def _judge_foreign(roster: Roster, device: Device, now: float) -> None:
    """Other people's compute processes on a GPU of which we use nothing."""
    uuid = device.slot.uuid
    if device.state not in (GpuState.FREE, GpuState.FOREIGN) or roster.occupant(uuid) is not None:
        return
    if device.state == GpuState.FOREIGN and device.retry_at:
        if now >= device.retry_at:
            roster.set_device(uuid, GpuState.FREE)
        return
    sample = device.sample or {}
    if (sample.get("at") or 0) < device.since + SETTLE_S:
        return
    strangers = [p for p in sample.get("processes") or [] if (p.get("used_mib") or 0) > FOREIGN_MIB]
    if strangers:
        used = sum(p["used_mib"] for p in strangers)
        roster.set_device(uuid, GpuState.FOREIGN, f"{used} MiB in use by {_people(strangers)}", holder={"processes": strangers})
    elif device.state == GpuState.FOREIGN:
        roster.set_device(uuid, GpuState.FREE)


def _people(processes: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"{p.get('name') or 'a process'} (pid {p.get('pid') or '?'}{', ' + p['user'] if p.get('user') else ''})" for p in processes[:3]
    )


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
