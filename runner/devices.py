"""The states slots are placed by: what an engine's report says of each card becomes free, foreign or lost.

A card that disappears is `lost`, one that somebody else uses or has locked is `foreign`; neither takes a run, and both come back by
themselves. Only a human ends a quarantine. A host out of contact says nothing about its cards.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from runner import states
from runner.engines.base import Slot
from runner.records import GpuState, Severity
from runner.roster import Device

if TYPE_CHECKING:
    from runner.engines.base import HostReport
    from runner.records import Gpu
    from runner.roster import Roster

FOREIGN_MIB = 500  # a compute process of somebody else with more than this keeps our runs away
MISSING_S = 5.0  # a sampler that has just been started names its cards one after the other
SETTLE_S = 3.0  # what was seen before the last change plus this says nothing about a strange process


def record(roster: Roster, report: HostReport, now: float) -> None:
    """Take over what a host that answers says of its cards."""
    samples = {s.get("uuid"): s for s in report.samples}
    here = {slot.uuid: slot for slot in report.slots}
    for uuid, slot in here.items():
        device = roster.devices.get(uuid) or _new_device(roster, slot, now)
        if _is_of_another(roster, device, report):
            continue
        device.sample = samples.get(uuid) or device.sample
        error = (samples.get(uuid) or {}).get("error")
        if error:
            _lose(roster, device, f"it cannot be read: {error}")
            continue
        device.slot, device.deselected = slot, False
        if device.state == GpuState.LOST:
            _found_again(roster, device)
        _judge_lock(roster, device, report)
        _judge_foreign(roster, device, now)
    if here:
        _missing(roster, report, set(here))


def _missing(roster: Roster, report: HostReport, here: set[str]) -> None:
    """Cards that were there once: those that hosts.toml no longer gives us are forgotten, the others are lost."""
    known = {uuid: (d.slot, (d.sample or {}).get("mig")) for uuid, d in roster.devices.items() if d.slot.host == report.host}
    kept = {uuid: (_slot_of(g), (g.telemetry or {}).get("mig")) for uuid, g in roster.kept_states.items() if g.host == report.host}
    for uuid in here:
        roster.missing_since.pop(uuid, None)
    for uuid, (slot, mig) in {**kept, **known}.items():
        if uuid in here:
            continue
        if deselected(roster, slot, mig):
            if uuid in roster.devices:
                roster.devices[uuid].deselected = True
            if roster.occupant(uuid) is None and not roster.waiting(uuid):
                forget(roster, uuid)
        elif time.monotonic() - roster.missing_since.setdefault(uuid, time.monotonic()) >= MISSING_S:
            _lose(roster, roster.devices.get(uuid) or _new_device(roster, slot, time.time()), "its host no longer reports it")


def deselected(roster: Roster, slot: Slot, mig: str | None = None) -> bool:
    """Whether hosts.toml no longer gives us a card of a host (or its CPU, which is a slot only where no card is one)."""
    policy = roster.hosts.get(slot.host)
    if policy is None:
        return False
    if slot.uuid.startswith("CPU:"):
        return policy.gpus != []
    return not isinstance(policy.gpus, str) and not any(name in policy.gpus for name in (slot.uuid, slot.index, mig) if name is not None)


def forget(roster: Roster, uuid: str) -> None:
    """A card that is ours no more."""
    roster.devices.pop(uuid, None)
    roster.kept_states.pop(uuid, None)
    roster.store.delete_gpu(uuid)
    roster.changed.set()


def _slot_of(gpu: Gpu) -> Slot:
    """The slot of a card that an earlier daemon knew."""
    return Slot(gpu.host, gpu.uuid, gpu.name, gpu.idx, gpu.mem_total_mib)


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


def _found_again(roster: Roster, device: Device) -> None:
    """A card that is back; the run that went on without being seen to have it is no longer flagged."""
    roster.set_device(device.slot.uuid, GpuState.FREE)
    occupant = roster.occupant(device.slot.uuid)
    if occupant is not None:
        roster.store.clear_flag(occupant.run.id, "gpu_lost")


def _new_device(roster: Roster, slot: Slot, now: float) -> Device:
    """A card seen for the first time by this daemon; what the one before knew of it goes on, a quarantine in any case."""
    device = Device(slot, since=now)
    kept = roster.kept_states.pop(slot.uuid, None)
    if kept is not None and kept.state == GpuState.QUARANTINED:
        device.state, device.reason, device.since, device.holder = GpuState.QUARANTINED, kept.reason, kept.since, kept.holder
    elif kept is not None and kept.state == GpuState.FREE and not roster.unwatched:
        device.since = kept.since
    roster.devices[slot.uuid] = device
    roster.changed.set()
    return device


def _judge_lock(roster: Roster, device: Device, report: HostReport) -> None:
    """Somebody else's lock on a slot of which we use nothing keeps our runs away, and says whose it is before any run is refused."""
    uuid = device.slot.uuid
    if uuid not in report.locks or roster.occupant(uuid) is not None or device.state not in (GpuState.FREE, GpuState.FOREIGN):
        return
    note, at = report.locks[uuid]
    words = None if note is None else _holder_words(roster, uuid, note)
    by_lock = device.state == GpuState.FOREIGN and bool((device.holder or {}).get("lock"))
    if note is not None and words is not None:
        signed = note.get("lab_id") not in (None, str(roster.store.meta("lab_id")))  # else it may be the end of a run of ours
        if signed or by_lock or at > device.since + SETTLE_S:
            roster.set_device(uuid, GpuState.FOREIGN, words, holder={**note, "lock": True})  # no time to retry: it is seen when it goes
    elif note is None and by_lock and at > device.since + 1:
        roster.set_device(uuid, GpuState.FREE)


def _holder_words(roster: Roster, uuid: str, note: dict[str, Any]) -> str | None:
    """Whose lock it is; None when it is a run that this daemon follows on that very slot."""
    if note.get("lab_id") != str(roster.store.meta("lab_id")):
        return states.lock_words(note)
    track = roster.tracks.get(str(note.get("run_id")))
    if track is None:
        return f"still locked by {note.get('run_id')} of this lab (pid {note.get('pid') or '?'})"
    if track.run.gpu_uuid == uuid:
        return None
    return f"{track.run.id} of this lab has it through host {track.run.host}: two entries of hosts.toml are one machine, and share its slot"


def _judge_foreign(roster: Roster, device: Device, now: float) -> None:
    """Other people's compute processes on a GPU of which we use nothing."""
    uuid = device.slot.uuid
    if device.state not in (GpuState.FREE, GpuState.FOREIGN) or roster.occupant(uuid) is not None:
        return
    if device.state == GpuState.FOREIGN and (device.holder or {}).get("lock") and not device.retry_at:
        return  # _judge_lock sees when it goes
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
        words = f"{used} MiB in use by {states.people_words(strangers)}"
        roster.set_device(uuid, GpuState.FOREIGN, words, holder={"processes": strangers})
    elif device.state == GpuState.FOREIGN:
        roster.set_device(uuid, GpuState.FREE)
