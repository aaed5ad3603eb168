"""Preflight: one run of the trainer's own preflight.py on a GPU model of a host, before the first experiment there and when a check asks.

It is a run of purpose `preflight` in a slot like any other, so it never stands beside a run. What it finds lies in the host's data folder
under GPU, driver and torch, where train.py and the reports of the host read it. One that fails or hangs is said once and holds nothing up.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runner import scheduler, submitting
from runner.engines import dirs
from runner.errors import OvernightError
from runner.records import GpuState, HostState, Outcome, Phase, Purpose, Severity
from runner.scheduler import matches_type
from runner.text import finite, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runner.lab import Lab
    from runner.policy import TrainerPolicy
    from runner.records import Gpu, Host, Run
    from runner.roster import Roster

PROGRAM = "preflight.py"
FIRST, LAST = 1e6, -1e5  # priorities: before everything, or when nothing else waits
QUICK_LIMIT_S, FULL_LIMIT_S = 300, 1800  # a whole one compiles the model about fifteen times, and keeps nothing when it is cut off
FLAG = "preflight_failed"
TAKEN = "it is about to be measured"
Json = dict[str, Any]


def measurable(trainer: TrainerPolicy) -> bool:
    """Whether the trainer has a preflight of its own; upstream has none."""
    return (trainer.folder / PROGRAM).is_file()


def found_on(info: Mapping[str, Any] | None, gpu_name: str | None, driver: str | None = None) -> Json | None:
    """The newest preflight of that GPU model in a host's report, under that driver where it is given."""
    for one in (info or {}).get("preflights") or []:
        if one.get("gpu_name") == gpu_name and (driver is None or one.get("driver") in (None, driver)):
            return dict(one)
    return None


def matmul_flops(info: Mapping[str, Any] | None, gpu_name: str | None) -> float | None:
    """The matrix rate a preflight measured on that GPU model of a host, FLOP/s."""
    rate = (found_on(info, gpu_name) or {}).get("matmul_flops")
    return finite(float(rate)) if isinstance(rate, (int, float)) and rate > 0 else None


def models(roster: Roster, host: str) -> dict[str, str | None]:
    """GPU model → driver of a host that is up; a CPU slot is nothing to measure."""
    report = roster.reports.get(host)
    if report is None or not report.up:
        return {}
    drivers = {s.get("uuid"): s.get("driver") for s in report.samples}
    return {slot.name: drivers.get(slot.uuid) for slot in report.slots if not dirs.is_cpu(slot.uuid)}


def before_first_runs(roster: Roster) -> dict[tuple[str, str], str]:
    """Queue a quick preflight for each GPU model that has none and was never tried; (host, model) → why other runs wait there."""
    if not measurable(roster.lab.policy().trainer):
        return {}
    for name, engine in roster.engines.items():
        if engine.kind == "fake":
            continue
        for gpu, driver in models(roster, name).items():
            key = (name, gpu, driver)
            if key in roster.measured:
                continue
            roster.measured.add(key)
            if found_on(roster.reports[name].info, gpu, driver) is None and not _tried(roster, name, gpu, driver):
                _queue(roster.lab, name, gpu, "daemon", "nothing was measured on this GPU yet", quick=True, priority=FIRST)
                roster.changed.set()
    waiting = roster.store.runs("phase != 'ended' AND purpose = 'preflight' AND priority > 0")
    paused = set(roster.store.setting("paused_agents", [])) if waiting else set()  # theirs waits, and nobody waits for it
    return {(r.want_host or "", r.gpu_type or ""): f"{r.id} measures this GPU first" for r in waiting if r.live or r.agent not in paused}


def _tried(roster: Roster, host: str, gpu: str, driver: str | None) -> bool:
    """Whether a preflight of that GPU model was queued before, whatever became of it; a new driver is a new matter."""
    rows = roster.store.tally("driver", "purpose = 'preflight' AND want_host = ? AND gpu_type = ?", (host, gpu))
    return any(known in (None, driver) for (known,) in rows)


def whole(lab: Lab, gpu_type: str | None, host: str | None, who: str, approval: str) -> tuple[list[str], list[str]]:
    """Queue the whole preflight of each GPU model (of that type, on that host) that has none: the runs that measure, and in words where
    nothing is queued and why. One that waits already is taken, and waits no longer behind everything else. Raised: Refused by a limit.
    """
    if not measurable(lab.policy().trainer):
        return [], [f"The trainer has no {PROGRAM}, so nothing is measured: runs use what the script says."]
    runs: list[str] = []
    notes: list[str] = []
    rows = {h.name: h for h in lab.store.hosts()}
    for policy in lab.policy().hosts:
        row = rows.get(policy.name)
        if host not in (None, policy.name):
            continue
        if policy.kind == "fake":
            notes.append(f"{policy.name}: its GPUs are simulated, so nothing is measured there.")
        elif row is None or row.state in (HostState.NEW, HostState.DOWN):
            notes.append(f"{policy.name} does not answer, so nothing is measured there: the first run on it waits for a quick preflight.")
        else:
            cards = {g.name: g for g in lab.store.gpus() if g.host == policy.name and g.state != GpuState.LOST}
            fitting = [g for g in cards.values() if not dirs.is_cpu(g.uuid) and (gpu_type is None or matches_type(gpu_type, g.name))]
            if not fitting and any(dirs.is_cpu(g.uuid) for g in cards.values()):
                notes.append(f"{policy.name} has no GPU, so nothing is measured there: train.py uses its CPU preset.")
            for gpu in fitting:
                _take_or_queue(lab, row, gpu, (who, approval), runs, notes)
    return runs, notes


def _take_or_queue(lab: Lab, host: Host, gpu: Gpu, asker: tuple[str, str], runs: list[str], notes: list[str]) -> None:
    known = found_on(host.info, gpu.name, (gpu.telemetry or {}).get("driver"))
    last = lab.store.runs("host = ? AND gpu_name = ? AND torch IS NOT NULL", (host.name, gpu.name), order="seq DESC", limit=1)
    stale = known is not None and bool(last) and known.get("torch") not in (None, last[0].torch)
    if known is not None and not stale and not known.get("quick"):
        notes.append(f"{host.name} was measured before: {said(known)}.")
        return
    going = [r for r in _going(lab, host.name, gpu.name) if r.budget_s > QUICK_LIMIT_S]
    if going:
        lab.store.update_run(going[-1].id, priority=max(going[-1].priority, 0.0))
        runs.append(going[-1].id)
        return
    who, approval = asker
    submitting.check_limits(lab, who, 1, FULL_LIMIT_S)
    first = known is None or stale
    why = "nothing was measured on this GPU yet" if first else "only a quick measurement of this GPU is known"
    priority = FIRST if first and approval == "none" else 0.0
    if run_id := _queue(lab, host.name, gpu.name, who, why, quick=False, priority=priority, approval=approval):
        runs.append(run_id)


def _going(lab: Lab, host: str, gpu: str) -> list[Run]:
    """Preflights of a GPU model that have not ended."""
    return lab.store.runs("phase != 'ended' AND purpose = 'preflight' AND want_host = ? AND gpu_type = ?", (host, gpu))


def _queue(lab: Lab, host: str, gpu: str, who: str, why: str, *, quick: bool, priority: float, approval: str = "none") -> str | None:
    """Queue a preflight; its id, None when the trainer's script cannot be read (every run would say so, too)."""
    store, trainer = lab.store, lab.policy().trainer
    try:
        text = submitting.trainer_text(trainer)
    except OvernightError:
        return None
    sha = lab.keep_source(text)
    with store.transaction():
        store.add_source(sha, len(text.encode()), trainer.source, PROGRAM)
        run_id = store.insert_run(
            created_at=time.time(),
            purpose=Purpose.PREFLIGHT,
            source_sha=sha,
            effective_sha=PROGRAM,  # nobody's experiment is a duplicate of it
            hypothesis=f"measure {gpu} of {host}{' quickly' if quick else ''}",
            budget_s=float(QUICK_LIMIT_S if quick else FULL_LIMIT_S),
            priority=priority,
            want_host=host,
            gpu_type=gpu,
            agent=who,
            approval=approval,
            phase=Phase.PROPOSED if approval == "asked" else Phase.QUEUED,
        )
        store.event(who, "preflight", run_id, why)
    return run_id


def command_of(run: Run) -> list[str]:
    """What a preflight run executes, in its own copy of the trainer folder."""
    return ["{python}", PROGRAM, *(["--quick"] if run.budget_s <= QUICK_LIMIT_S else [])]


def place(
    wishes: Sequence[scheduler.Wish], views: Sequence[scheduler.SlotView], first: Mapping[tuple[str, str], str], **how: Any
) -> scheduler.Plan:
    """scheduler.place, with the preflights that `first` speaks of placed before all others, and their GPU models closed to those."""
    if not first:
        return scheduler.place(wishes, views, **how)
    mine = {why.split()[0] for why in first.values()}
    plan = scheduler.place([w for w in wishes if w.run_id in mine], views, **how)
    taken = {p.uuid for p in plan.placements}
    closed = [replace(v, hold=v.hold or first.get((v.host, v.name)) or (TAKEN if v.uuid in taken else None)) for v in views]
    other = scheduler.place([w for w in wishes if w.run_id not in mine], closed, **how)
    return scheduler.Plan(
        plan.placements + other.placements, plan.withdraw | other.withdraw, plan.blocked | other.blocked, plan.impossible | other.impossible
    )


def checked(roster: Roster, report: Json, who: str) -> None:
    """Add to a `hosts check` answer what is to be measured there, and queue it."""
    name, lab = report["name"], roster.lab
    engine = roster.engines.get(name)
    if engine is None or engine.kind == "fake" or report["state"] == "down" or not measurable(lab.policy().trainer):
        return
    torch = next((c["value"] for c in report["checks"] if c["name"] == "torch" and c["ok"]), None)
    for gpu, driver in models(roster, name).items():
        known = found_on(roster.reports[name].info, gpu, driver)
        stale = known is not None and torch is not None and known.get("torch") not in (None, torch)
        if known is not None and not stale and not known.get("quick"):
            continue
        going = _going(lab, name, gpu)
        first = known is None or stale
        why = "a check found nothing measured on this GPU" if first else "a check found a quick measurement only"
        run_id = going[0].id if going else _queue(lab, name, gpu, who, why, quick=False, priority=FIRST if first else LAST)
        roster.changed.set()
        if run_id is not None:
            when = "in the next free slot" if first else "when nothing else waits"
            text = f"{run_id} measures {gpu} {when}; `overnight show {run_id}` says how far it is"
            report["checks"].append({"name": "preflight", "ok": None, "value": run_id, "text": text})


def conclude(roster: Roster, run: Run, tail: str, fields: Json) -> Json:
    """Observed columns of an ended preflight: what it found, or why there is nothing. Never a fault of its host."""
    found, host = result_in(tail), run.host or ""
    if found is not None:
        roster.store.clear_flag(host, FLAG)
        return {"outcome": Outcome.COMPLETED, "cause": None, "cause_text": said(found)}
    if fields["outcome"] == Outcome.CANCELLED:
        return {}
    outcome = Outcome.CRASHED if fields["outcome"] == Outcome.NO_RESULT else fields["outcome"]
    why = one_line(fields["cause_text"] or "it printed no result", 240).rstrip(".")
    text = f"{run.gpu_name or run.gpu_type} could not be measured: {why}; runs there use the trainer's presets"
    roster.store.raise_flag(host, FLAG, Severity.INFO, f"{text} ({run.id})")
    return {"outcome": outcome, "cause": "preflight", "cause_text": text}


def said(found: Json) -> str:
    """What a preflight found, in a line."""
    rate, peak = finite(found.get("matmul_flops")), finite(found.get("peak_flops"))
    if rate is None:
        return one_line(str(found.get("note") or "it measured nothing"), 200)
    share = f", {100 * rate / peak:.0f} % of its peak" if peak else ""
    choices = ", ".join(f"{name.lower().replace('_', ' ')} {value}" for name, value in found["choices"].items() if value is not None)
    quick = " (quickly)" if found.get("quick") else ""
    return one_line(f"{found.get('gpu_name')}: {rate / 1e12:.0f} TFLOP/s{share}{'; ' + choices if choices else ''}{quick}", 240)


def result_in(tail: str) -> Json | None:
    """The object that preflight.py printed last, or None."""
    for line in reversed(tail.splitlines()):
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict) and isinstance(value.get("choices"), dict):
                return value
    return None
