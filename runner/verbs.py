"""Everything anyone may ask of a lab. CLI, MCP and TUI call these functions and get the same errors.

A verb touches wanted columns only, in one transaction, and leaves one audit event with who and why. It starts nothing and waits for
nothing: the daemon
sees the change and acts. `who` is "cli", "tui", "daemon" or "mcp:NAME".
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import Any

from runner import asked, board, measuring, replays, submitting
from runner.controls import (
    accept_policy,
    approve,
    decline,
    drain_host,
    new_night,
    pause_agent,
    pause_host,
    pause_queue,
    set_approval,
    set_priority,
)
from runner.errors import BadValue, Refused, UnknownName
from runner.lab import Lab
from runner.records import Json, Outcome, Purpose, Request, Run, Submission, Submitted, Trust, Verdict, WaveRequest
from runner.replays import submitted_once
from runner.research import promotion, surroundings
from runner.scheduler import matches_type

ANSWERED = "This request_id was answered before; nothing new was done."
REQUEST_VERBS = ("hosts_check", "host_setup", "gpu_release", "verify", "fetch")

__all__ = [
    "accept_policy",
    "answer",
    "approve",
    "ask",
    "cancel",
    "decide",
    "decline",
    "drain_host",
    "heard_from",
    "measure",
    "new_night",
    "pause_agent",
    "pause_host",
    "pause_queue",
    "promote",
    "repeat",
    "requeue",
    "set_approval",
    "set_priority",
    "submit",
    "submit_wave",
]


def submit(lab: Lab, sub: Submission, *, who: str) -> Submitted:
    """Queue one run, or `seeds` repeats of it as a wave. The same request_id never starts a second run.

    Raised: BadValue, UnknownName, Refused (policy), Duplicate (names the earlier run); nothing was changed then.
    """
    if isinstance(sub.seeds, bool) or not isinstance(sub.seeds, int) or not 1 <= sub.seeds <= submitting.MAX_SEEDS:
        raise BadValue(f"seeds is {sub.seeds!r}.", next_step=f"Allowed: 1 to {submitting.MAX_SEEDS}.")
    answered = _answered(lab, who, sub.request_id)
    if sub.seeds > 1:
        wave = None if answered else _as_wave(lab, sub)
        plan = None if wave is None else _plan_wave(lab, wave)
        return submitted_once(lab, sub.request_id, "submit", who, sub, lambda: _submit_wave(lab, wave or _as_wave(lab, sub), plan, who))
    prepared = None if answered else submitting.prepare(lab, sub)
    return submitted_once(
        lab, sub.request_id, "submit", who, sub, lambda: _submit_one(lab, sub, prepared or submitting.prepare(lab, sub), who)
    )


def _answered(lab: Lab, who: str, request_id: str | None) -> bool:
    """Whether a request was answered before. Scripts are read before the write lock is taken: that takes 50 ms."""
    submitting.trainer_effective_sha(lab)  # its script is remembered
    return replays.answered(lab, who, request_id)


def _submit_one(lab: Lab, sub: Submission, prepared: submitting.Prepared, who: str) -> Submitted:
    budget_s = submitting.checked_budget(lab.policy().limits, sub.budget_s)
    submitting.check_trainer(lab, prepared, budget_s)
    notes = submitting.check_place(lab, sub.gpu_type, sub.host) + surroundings.check(lab, prepared.script.root, sub.host)
    parent = submitting.known_run(lab, sub.parent).id if sub.parent is not None else prepared.base_run
    submitting.check_limits(lab, who, 1, budget_s)
    purpose = submitting.purpose_of(lab, prepared, budget_s, sub.purpose, submitting.trainer_effective_sha(lab))
    if purpose == Purpose.EXPERIMENT and not sub.allow_duplicate:
        submitting.refuse_duplicate(lab, prepared, budget_s, sub.gpu_type)
    run_id = submitting.insert(
        lab,
        prepared,
        agent=who,
        purpose=purpose,
        budget_s=budget_s,
        approval=_approval(lab, who),
        parent=parent,
        hypothesis=asked.words(sub.hypothesis),
        gpu_type=sub.gpu_type,
        want_host=sub.host,
        priority=asked.priority(sub.priority),
        repeat_of=_repeated(lab, prepared, budget_s) if purpose == Purpose.REPEAT else None,
    )
    _night(lab)
    lab.store.event(
        who,
        "submit",
        run_id,
        asked.words(sub.hypothesis),
        {"overrides": sub.overrides, "budget_s": budget_s},
    )
    return Submitted([run_id], None, notes + _state_notes(lab, who))


def _as_wave(lab: Lab, sub: Submission) -> WaveRequest:
    """A submission with several seeds, as the wave it is."""
    origin: dict[str, Any] = {"base": sub.base, "source": sub.source, "path": sub.path, "overrides": sub.overrides}
    if sub.diff is not None:
        origin = {"source": submitting.prepare(lab, sub).text}
    return WaveRequest(
        **origin,
        repeats=sub.seeds,
        budget_s=sub.budget_s,
        hypothesis=sub.hypothesis,
        gpu_type=sub.gpu_type,
        host=sub.host,
        priority=sub.priority,
        purpose=Purpose.REPEAT if sub.purpose == Purpose.EXPERIMENT else sub.purpose,
    )


def submit_wave(lab: Lab, request: WaveRequest, *, who: str) -> Submitted:
    """Queue the runs of a grid, a list or repeats, all of them or none.

    Cells that are in effect the same as another cell or as an earlier run are left out and named in the notes.
    """
    plan = None if _answered(lab, who, request.request_id) else _plan_wave(lab, request)
    return submitted_once(lab, request.request_id, "submit_wave", who, request, lambda: _submit_wave(lab, request, plan, who))


Plan = tuple[submitting.Prepared, list[tuple[dict[str, Any], submitting.Prepared]]]


def _plan_wave(lab: Lab, request: WaveRequest) -> Plan:
    """The base and each cell with its checked source."""
    cells = submitting.wave_cells(request)
    start = submitting.origin(lab, Submission(source=request.source, path=request.path, base=request.base))
    base = submitting.varied(lab, start, request.overrides)
    return base, [(cell, submitting.varied(lab, start, {**request.overrides, **cell})) for cell in cells]


def _seeded(base: submitting.Prepared, prepared: submitting.Prepared, nth: int) -> submitting.Prepared:
    """The nth repeat of a cell; the first is the cell as it is."""
    return prepared if nth == 0 else submitting.with_seed(prepared, (base.seed or 0) + nth)


def _submit_wave(lab: Lab, request: WaveRequest, plan: Plan | None, who: str) -> Submitted:
    base, cells = plan or _plan_wave(lab, request)
    budget_s = submitting.checked_budget(lab.policy().limits, request.budget_s)
    notes = submitting.check_places(lab, request.gpu_type, request.host) + surroundings.check(lab, base.script.root, request.host)
    submitting.check_trainer(lab, base, budget_s)
    ready, known = [], []
    seen: dict[str, dict[str, Any]] = {}
    for cell, prepared in cells:
        if prepared.effective_sha in seen and request.repeats == 1:
            notes.append(f"Left out {asked.cell(cell)}: in effect the same as {asked.cell(seen[prepared.effective_sha])}.")
            continue
        twin = (
            submitting.find_duplicate(lab, prepared, budget_s, request.gpu_type)
            if request.repeats == 1 and request.purpose == Purpose.EXPERIMENT
            else None
        )
        if twin is not None:
            notes.append(f"Left out {asked.cell(cell)}: in effect the same as {twin.id}.")
            known.append([cell, prepared.effective_sha])
            continue
        seen[prepared.effective_sha] = cell
        ready.append((cell, prepared))
    if not ready:
        raise Refused("Every cell of this wave is known already. " + " ".join(notes), next_step="Change a factor, or ask for repeats.")
    submitting.check_limits(lab, who, len(ready) * request.repeats, budget_s)
    kind = "grid" if request.factors else ("list" if request.cells else "repeats")
    lab.keep_source(base.text, synced=False)
    wave_id = lab.store.insert_wave(
        created_at=time.time(),
        kind=kind,
        title=asked.words(request.title),
        hypothesis=asked.words(request.hypothesis),
        base_sha=base.sha,
        base_run=base.base_run,
        factors=request.factors,
        repeats=request.repeats,
        budget_s=budget_s,
        agent=who,
    )
    approval, run_ids, own_sha = _approval(lab, who), [], submitting.trainer_effective_sha(lab)
    for nth in range(request.repeats):
        for cell, prepared in ready:
            varied = _seeded(base, prepared, nth)
            run_ids.append(
                submitting.insert(
                    lab,
                    varied,
                    agent=who,
                    budget_s=budget_s,
                    approval=approval,
                    wave_id=wave_id,
                    cell=cell,
                    parent=base.base_run,
                    purpose=submitting.purpose_of(lab, varied, budget_s, request.purpose, own_sha),
                    hypothesis=asked.words(request.hypothesis),
                    gpu_type=request.gpu_type,
                    want_host=request.host,
                    priority=asked.priority(request.priority),
                    repeat_of=_repeated(lab, varied, budget_s) if request.repeats > 1 else None,
                )
            )
    _night(lab)
    detail = {"runs": run_ids, "factors": request.factors, "budget_s": budget_s, "known": known}
    lab.store.event(who, "submit_wave", wave_id, asked.words(request.hypothesis), detail)
    return Submitted(run_ids, wave_id, notes + _state_notes(lab, who))


def measure(lab: Lab, *, who: str, gpu_type: str | None = None, host: str | None = None, request_id: str | None = None) -> Submitted:
    """Queue the trainer's whole preflight (attention, compile modes, device batch) on each GPU model that has none; notes say where not
    and why. Raised: UnknownName for a host, Refused by a limit.
    """

    def queue() -> Submitted:
        notes = submitting.check_place(lab, gpu_type, host)
        runs, told = measuring.whole(lab, gpu_type, host, who, _approval(lab, who))
        return Submitted(runs, None, [*notes, *told, *(_state_notes(lab, who) if runs else [])])

    return submitted_once(lab, request_id, "measure", who, (gpu_type, host), queue)


def requeue(lab: Lab, run_id: str, *, who: str, why: str | None = None, request_id: str | None = None) -> Submitted:
    """Run an ended run's source again as a new run with `retry_of`."""

    def again() -> Submitted:
        run = submitting.known_run(lab, run_id)
        if not run.ended:
            raise Refused(f"{run.id} has not ended ({run.phase}).", next_step="Cancel it first, or ask for a repeat.")
        return Submitted(
            [_copy(lab, run, who, run.purpose, retry_of=run.id, repeat_of=run.repeat_of, verb="requeue", why=why)],
            None,
            _state_notes(lab, who),
        )

    return submitted_once(lab, request_id, "requeue", who, run_id, again)


def repeat(lab: Lab, run_id: str, n: int = 1, *, who: str, why: str | None = None, request_id: str | None = None) -> Submitted:
    """Run a source `n` more times, at new seeds where it has a SEED: this is how noise is measured."""

    def again() -> Submitted:
        run = submitting.known_run(lab, run_id)
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= submitting.MAX_SEEDS:
            raise BadValue(f"The number of repeats is {n!r}.", next_step=f"Allowed: 1 to {submitting.MAX_SEEDS}.")
        place = _same_type(lab, run)
        used = [s for (s,) in lab.store.tally("seed", "effective_sha = ? AND seed IS NOT NULL", (run.effective_sha,))]
        seeds = [max([run.seed or 0, *used]) + 1 + i for i in range(n)]
        submitting.check_limits(lab, who, n, run.budget_s)
        as_before: dict[str, Any] = {"repeat_of": run.id, "gpu_type": place, "verb": "repeat", "why": why, "checked": True}
        ids = [_copy(lab, run, who, Purpose.REPEAT, seed=seed, **as_before) for seed in seeds]
        return Submitted(ids, None, _state_notes(lab, who))

    return submitted_once(lab, request_id, "repeat", who, (run_id, n), again)


def _same_type(lab: Lab, run: Run) -> str | None:
    """Where a repeat, or a promotion to a longer budget, belongs: on the type of GPU its run had, for another is another class."""
    names = {g.name for g in lab.store.gpus()}
    return run.gpu_name if run.gpu_name in names and len(names) > 1 else run.gpu_type


def promote(
    lab: Lab,
    run_id: str,
    *,
    who: str,
    gpu_type: str | None = None,
    budget_s: float | None = None,
    seeds: int = 1,
    why: str | None = None,
    request_id: str | None = None,
) -> Submitted:
    """Run a source again on another GPU type, or with another budget, to see whether its gain holds there."""

    def again() -> Submitted:
        run = submitting.known_run(lab, run_id)
        _check_promotion(run, gpu_type, budget_s)
        if isinstance(seeds, bool) or not isinstance(seeds, int) or not 1 <= seeds <= submitting.MAX_SEEDS:
            raise BadValue(f"seeds is {seeds!r}.", next_step=f"Allowed: 1 to {submitting.MAX_SEEDS}.")
        budget = submitting.checked_budget(lab.policy().limits, budget_s if budget_s is not None else run.budget_s)
        place = gpu_type or _same_type(lab, run)
        notes = submitting.check_place(lab, gpu_type, None) + promotion.unmeasured(lab, run, place, budget)
        submitting.refuse_promoted(lab, run, budget, place)
        submitting.check_limits(lab, who, seeds, budget)
        ids = [
            _copy(
                lab,
                run,
                who,
                Purpose.PROMOTION,
                promoted_from=run.id,
                parent=run.parent,
                gpu_type=place,
                want_host=None,
                budget_s=budget,
                seed=None if nth == 0 else (run.seed or 0) + nth,
                verb="promote",
                why=why,
                checked=True,
            )
            for nth in range(seeds)
        ]
        return Submitted(ids, None, notes + _state_notes(lab, who))

    return submitted_once(lab, request_id, "promote", who, (run_id, gpu_type, budget_s, seeds), again)


def _check_promotion(run: Run, gpu_type: str | None, budget_s: float | None) -> None:
    """Raised: BadValue, Refused. What is promoted has a result, and goes to another GPU type or to a longer budget."""
    if gpu_type is None and budget_s is None:
        raise BadValue("A promotion needs a GPU type or a budget.", next_step="Say gpu_type, budget_s, or both.")
    if run.outcome != Outcome.COMPLETED or run.val_bpb is None:
        raise Refused(
            f"{run.id} has no result to promote ({run.outcome or run.phase}).",
            next_step="Promote a run that has completed; requeue or repeat another.",
        )
    if budget_s is not None and budget_s < run.budget_s:
        raise BadValue(
            f"{run.id} ran for {run.budget_s:g} s; a promotion to {budget_s:g} s would be shorter.",
            next_step="Give a longer budget, or leave it out to keep its own on another GPU type.",
        )
    if gpu_type is None and budget_s == run.budget_s:
        raise BadValue(f"{run.id} ran for {budget_s:g} s already; the same again is a repeat.", next_step="Ask for a repeat.")
    if gpu_type is not None and budget_s in (None, run.budget_s) and run.gpu_name and matches_type(gpu_type, run.gpu_name):
        raise BadValue(
            f"{run.id} ran on {run.gpu_name} for {run.budget_s:g} s already; the same again is a repeat.",
            next_step="Ask for a repeat, or name another GPU type or a longer budget.",
        )


def _copy(
    lab: Lab,
    run: Run,
    who: str,
    purpose: str,
    *,
    verb: str,
    why: str | None,
    seed: int | None = None,
    checked: bool = False,
    **columns: Any,
) -> str:
    """A new row for an old source; columns not named are taken over."""
    prepared = dataclasses.replace(submitting.prepare(lab, Submission(base=run.id)), overrides=run.overrides)  # in its text already
    if seed is not None:
        prepared = submitting.with_seed(prepared, seed)
    budget_s = columns.pop("budget_s", run.budget_s)
    submitting.check_trainer(lab, prepared, budget_s)
    if not checked:
        submitting.check_limits(lab, who, 1, budget_s)
    taken = {
        "parent": run.parent or run.base_run,
        "wave_id": run.wave_id if verb == "requeue" else None,
        "cell": run.cell if verb == "requeue" else None,
    }
    kept = {"hypothesis": run.hypothesis, "gpu_type": run.gpu_type, "want_host": run.want_host, "priority": run.priority}
    run_id = submitting.insert(
        lab, prepared, agent=who, purpose=purpose, budget_s=budget_s, approval=_approval(lab, who), **{**taken, **kept, **columns}
    )
    lab.store.event(who, verb, run_id, asked.words(why), {"of": run.id})
    return run_id


def cancel(
    lab: Lab, ids: Iterable[str], *, who: str, why: str | None = None, force: bool = False, request_id: str | None = None
) -> list[str]:
    """Ask for runs to end (a wave id names all of its runs); notes say which had ended before. `force` skips the grace between TERM and
    KILL."""
    ids = list(ids) if not isinstance(ids, str) else ids

    def stop() -> Json:
        runs = [run for name in asked.listed(ids) for run in asked.runs_named(lab, name)]
        notes = [f"{run.id} had ended ({run.outcome})." for run in runs if run.ended]
        for run in runs:
            if not run.ended:
                lab.store.update_run(run.id, wanted="cancel", wanted_force=int(force))
                lab.store.event(who, "cancel", run.id, asked.words(why), {"force": force})
        return {"run_ids": [run.id for run in runs], "notes": notes}

    done, replay = replays.once(lab, request_id, "cancel", who, (ids, force), stop)
    return [*done["notes"], *([ANSWERED] if replay else [])]


def decide(lab: Lab, run_id: str, verdict: str, *, who: str, why: str | None, override: bool = False, request_id: str | None = None) -> Run:
    """Write down keep or discard, by whom and why; a verdict may be changed later, each one stays in the audit trail.

    Raised: Refused for a keep that the evidence does not carry, unless `override` with a reason.
    """
    if verdict not in (Verdict.KEEP, Verdict.DISCARD):
        raise BadValue(f"A verdict is keep or discard, not {verdict!r}.")

    def write() -> Json:
        run = submitting.known_run(lab, run_id)
        if not run.ended:
            raise Refused(f"{run.id} has not ended ({run.phase}); a verdict needs its outcome.", next_step="Wait for it, or cancel it.")
        if verdict == Verdict.KEEP:
            _check_keep(lab, run, why, override, human=not who.startswith("mcp:"))
        lab.store.update_run(run.id, verdict=str(verdict), verdict_by=who, verdict_why=asked.words(why), verdict_at=time.time())
        if verdict == Verdict.KEEP and board.is_held(run.trust_why):  # a human has settled it
            lab.store.update_run(run.id, trust_why=f"accepted by hand: {str(run.trust_why).removeprefix(board.HELD)}")
        lab.store.event(who, "decide", run.id, asked.words(why), {"verdict": str(verdict), "override": override})
        return {"run_ids": [run.id]}

    replays.once(lab, request_id, "decide", who, (run_id, str(verdict), why, override), write)
    return submitting.known_run(lab, run_id)


def _check_keep(lab: Lab, run: Run, why: str | None, override: bool, human: bool) -> None:
    if run.outcome != Outcome.COMPLETED or run.val_bpb is None:
        raise Refused(
            f"{run.id} has no result to keep ({run.outcome}{': ' + run.cause if run.cause else ''}).",
            next_step="Discard it, or requeue it.",
        )
    doubt = board.standing(lab, run)
    if doubt is None:
        return
    if board.is_held(run.trust_why) and not human:
        raise Refused(f"{run.id} cannot be kept: {doubt}", next_step="Ask for a repeat or a verification; only a human may overrule this.")
    if run.trust == Trust.REFUTED or not override:
        raise Refused(f"{run.id} cannot be kept: {doubt}", next_step="Repeat it to learn more, or keep it with override and a reason.")
    if not (why or "").strip():
        raise Refused(f"{run.id} is kept against the evidence ({doubt.rstrip('.')}); that needs a reason.", next_step="Say why.")


def ask(lab: Lab, verb: str, args: dict[str, Any], *, who: str) -> int:
    """Ask the daemon for something only it can do; `answer` reads what came of it."""
    if verb not in REQUEST_VERBS:
        raise UnknownName("request", verb, REQUEST_VERBS)
    with lab.store.transaction():
        request_id = lab.store.insert_request(verb, args, who)
        about = next(iter(args.values()), None)
        subject = ", ".join(map(str, about)) if isinstance(about, list) else about
        lab.store.event(who, verb, str(subject or "lab"), None, args)
    return request_id


def answer(lab: Lab, request_id: int) -> Request:
    """A request as it stands; its `state` is done or failed when it has been answered."""
    found = lab.store.request(request_id)
    if found is None:
        raise UnknownName("request", str(request_id), [])
    return found


def heard_from(lab: Lab, who: str, *, at: float | None = None) -> None:
    """Note that an agent called (just now, or `at`): GPUs that idle while no agent calls are shown with this age. No audit event: nothing
    is asked for."""
    lab.store.set_setting("last_agent_call", {"who": who, "at": time.time() if at is None else at})


def _approval(lab: Lab, who: str) -> str:
    """`asked` when a human wants to see agents' submissions first; a human's own need nobody."""
    mode = lab.store.setting("approval", lab.policy().limits.approval)
    return "asked" if mode == "ask" and who.startswith("mcp:") else "none"


def _state_notes(lab: Lab, who: str) -> list[str]:
    notes = []
    pending = lab.store.meta("policy_pending")
    if pending and not who.startswith("mcp:"):
        notes.append(pending)
    if _approval(lab, who) == "asked":
        notes.append("A human approves submissions first; this one waits as proposed.")
    if lab.store.setting("queue_paused", False):
        notes.append("A human has paused the queue; it starts when they resume it.")
    if who in lab.store.setting("paused_agents", []):
        notes.append("A human has paused your runs; they start when resumed.")
    return notes


def _repeated(lab: Lab, prepared: submitting.Prepared, budget_s: float) -> str | None:
    """The first run of this effective source at this budget, which a repeat repeats."""
    found = lab.store.runs("effective_sha = ? AND budget_s = ? AND purpose != 'verify'", (prepared.effective_sha, budget_s), limit=1)
    return found[0].id if found else None


def _night(lab: Lab) -> None:
    if lab.store.setting("night_started_at") is None:
        lab.store.set_setting("night_started_at", time.time())
