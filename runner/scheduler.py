"""Who runs where: a pure function from the queue and the slots to placements.

Priority first, then first come. A run may ask for a GPU type or a host; what cannot be placed carries its reason in words. Nothing here
does I/O or knows the time; the daemon calls it on every change and writes down what it answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

EAGER_LEFT_S = 30.0  # a local GPU gets its next run handed when the present one has at most this long to go


@dataclass(frozen=True, slots=True)
class Wish:
    """A queued run as the scheduler sees it: `order` is (−priority, queue rank), smaller goes first."""

    run_id: str
    order: tuple[float, float]
    gpu_type: str | None = None
    host: str | None = None
    hold: str | None = None  # why it may not start now (its agent is paused, …)


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot now: `usable` means free, `run_id` who is on it, `waiting` the standbys handed to it, oldest first."""

    host: str
    uuid: str
    name: str
    usable: bool
    run_id: str | None = None
    waiting: tuple[Wish, ...] = ()
    left_s: float | None = None  # how long the present run still needs, when it can be told
    hold: str | None = None  # why its host takes no new run (paused, disk below its floor, …)
    far: bool = False  # a link may break: hand ahead early
    why_not: str | None = None  # why it is not usable (quarantined: …, another program's)


@dataclass(frozen=True, slots=True)
class Placement:
    """Start this run on this slot; `standby` means it waits there for the present run to end."""

    run_id: str
    host: str
    uuid: str
    standby: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now: placements, standbys to take back (run id → why), and why each run that stays queued does."""

    placements: list[Placement] = field(default_factory=list)
    withdraw: dict[str, str] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)
    impossible: dict[str, str] = field(default_factory=dict)


def place(queue: Iterable[Wish], slots: Sequence[SlotView], *, handed_ahead: int = 1, paused: bool = False) -> Plan:
    """Match queued runs to slots; free slots first, then one standby (up to `handed_ahead`) behind each run that is about to end."""
    plan = Plan()
    wishes = sorted(queue, key=lambda w: w.order)
    if paused:
        plan.blocked.update({w.run_id: "the queue is paused" for w in wishes})
        plan.withdraw.update({w.run_id: "the queue is paused" for s in slots for w in s.waiting})
        return plan
    open_slots = [s for s in slots if s.usable and not s.hold and not s.waiting]
    busy = [s for s in slots if not s.usable and s.run_id and not s.hold]
    for slot in slots:
        plan.withdraw.update({w.run_id: str(slot.hold or w.hold) for w in slot.waiting if slot.hold or w.hold})
    said: dict[tuple[str | None, str | None], tuple[str, bool]] = {}
    room = {s.uuid: handed_ahead - len(s.waiting) for s in busy}
    for wish in wishes:
        if wish.hold:
            plan.blocked[wish.run_id] = wish.hold
            continue
        if (wish.gpu_type, wish.host) in said:  # an equal wish found nothing, and slots only get fewer
            _explain(wish, slots, plan, said)
            continue
        free = _pick_open(wish, open_slots)
        if free is not None:
            open_slots.remove(free)
            plan.placements.append(Placement(wish.run_id, free.host, free.uuid, standby=False))
            continue
        behind = _pick_behind(wish, busy, room)
        if behind is not None:
            room[behind.uuid] -= 1
            plan.placements.append(Placement(wish.run_id, behind.host, behind.uuid, standby=True))
            continue
        _explain(wish, slots, plan, said)
    _take_back(wishes, slots, open_slots, plan)
    return plan


def fits(wish: Wish, slot: SlotView) -> bool:
    """Whether the run's own constraints allow the slot, be it free or not."""
    if wish.host and wish.host != slot.host:
        return False
    return wish.gpu_type is None or matches_type(wish.gpu_type, slot.name)


def matches_type(gpu_type: str, name: str) -> bool:
    """Whether a GPU's name has every word of the type asked for: `rtx 5090` fits "NVIDIA GeForce RTX 5090"."""
    lowered = name.lower().replace("-", " ")
    return all(word in lowered for word in gpu_type.lower().replace("-", " ").split())


def _pick_open(wish: Wish, open_slots: Sequence[SlotView]) -> SlotView | None:
    """A free slot that fits; a run without wishes leaves the scarcest GPU type to those who ask for it."""
    fitting = [s for s in open_slots if fits(wish, s)]
    if not fitting:
        return None
    counts: dict[str, int] = {}
    for s in open_slots:
        counts[s.name] = counts.get(s.name, 0) + 1
    return max(fitting, key=lambda s: (counts[s.name], -open_slots.index(s)))


def _pick_behind(wish: Wish, busy: Sequence[SlotView], room: Mapping[str, int]) -> SlotView | None:
    """The busy slot with the fewest standbys that comes free first, has room for one, and is near its end (or far away).

    One behind each before a second behind any: out of contact, what waits on one machine cannot move to another that idles.
    """
    fitting = [s for s in busy if room[s.uuid] > 0 and fits(wish, s) and (s.far or (s.left_s is not None and s.left_s <= EAGER_LEFT_S))]
    return min(fitting, key=lambda s: (-room[s.uuid], s.left_s if s.left_s is not None else float("inf"))) if fitting else None


def _take_back(wishes: Collection[Wish], slots: Sequence[SlotView], open_slots: Sequence[SlotView], plan: Plan) -> None:
    """Withdraw a standby that would run sooner elsewhere, or that stands before a run of higher priority."""
    standbys = sorted(((w, s) for s in slots for w in s.waiting if w.run_id not in plan.withdraw), key=lambda ws: ws[0].order)
    spare = list(open_slots)
    for wish, _ in standbys:
        slot = _pick_open(wish, spare)
        if slot is not None:
            spare.remove(slot)
            plan.withdraw[wish.run_id] = f"a slot on {slot.host} is free"
    for wish in wishes:
        if wish.run_id not in plan.blocked or wish.hold:
            continue
        behind = [(w, s) for w, s in standbys if w.run_id not in plan.withdraw and w.order[0] > wish.order[0] and fits(wish, s)]
        if behind:
            plan.withdraw[max(behind, key=lambda ws: ws[0].order)[0].run_id] = f"{wish.run_id} has a higher priority"


def _explain(wish: Wish, slots: Sequence[SlotView], plan: Plan, said: dict[tuple[str | None, str | None], tuple[str, bool]]) -> None:
    """Say why a run waits, and whether it waits for something that does not exist; equal wishes get equal words (`said`)."""
    key = (wish.gpu_type, wish.host)
    if key not in said:
        said[key] = _reason(wish, slots)
    reason, impossible = said[key]
    plan.blocked[wish.run_id] = reason
    if impossible:
        plan.impossible[wish.run_id] = reason


def _reason(wish: Wish, slots: Sequence[SlotView]) -> tuple[str, bool]:
    """Why no slot can take it now, and whether none ever could."""
    if not slots:
        return "no host has a slot yet", False
    on_host = [s for s in slots if wish.host is None or s.host == wish.host]
    if not on_host:
        return f"no host {wish.host!r} has a slot", True
    fitting = [s for s in on_host if fits(wish, s)]
    if not fitting:
        where = f"host {wish.host!r} has no" if wish.host else "no host has a"
        return f"{where} GPU like {wish.gpu_type!r} (there is: {', '.join(sorted({s.name for s in on_host}))})", True
    if all(s.hold for s in fitting):
        return f"{fitting[0].host}: {fitting[0].hold}", False
    if all(s.why_not for s in fitting):
        return f"{fitting[0].name} on {fitting[0].host}: {fitting[0].why_not}", False
    return "waits for a free slot", False
