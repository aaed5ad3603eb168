"""Everything anyone may ask of a lab. CLI, MCP and TUI call these functions and get the same errors.

A verb touches wanted columns only, in one transaction, and leaves one audit event with who and why. It starts nothing and waits for
nothing: the daemon
sees the change and acts. `who` is "cli", "tui", "daemon" or "mcp:NAME".
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from runner import board, submitting, text
from runner.errors import BadValue, Refused, UnknownName
from runner.lab import Lab
from runner.policy import load_policy
from runner.records import Outcome, Phase, Purpose, Request, Run, Submission, Submitted, Trust, Verdict, WaveRequest

REQUEST_VERBS = ("hosts_check", "host_setup", "gpu_release", "verify", "fetch")
WHO_FORM = re.compile(r"(cli|tui|daemon|mcp:.{1,64})")
REQUEST_ID_FORM = re.compile(r"[\x21-\x7e]{1,128}")
MAX_WORDS = 2000


def submit(lab: Lab, sub: Submission, *, who: str) -> Submitted:
    """Queue one run, or `seeds` repeats of it as a wave. The same request_id never starts a second run.

    Raised: BadValue, UnknownName, Refused (policy), Duplicate (names the earlier run); nothing was changed then.
    """
    if isinstance(sub.seeds, bool) or not isinstance(sub.seeds, int) or not 1 <= sub.seeds <= submitting.MAX_SEEDS:
        raise BadValue(f"seeds is {sub.seeds!r}.", next_step=f"Allowed: 1 to {submitting.MAX_SEEDS}.")
    if sub.seeds > 1:
        return _replayed(lab, sub.request_id, "submit", who, lambda: _submit_seeds(lab, sub, who))
    return _replayed(lab, sub.request_id, "submit", who, lambda: _submit_one(lab, sub, who))


def _submit_one(lab: Lab, sub: Submission, who: str) -> Submitted:
    prepared = submitting.prepare(lab, sub)
    budget_s = submitting.checked_budget(lab.policy().limits, sub.budget_s)
    notes = submitting.check_place(lab, sub.gpu_type, sub.host)
    parent = submitting.known_run(lab, sub.parent).id if sub.parent else prepared.base_run
    submitting.check_limits(lab, who, 1, budget_s)
    purpose = submitting.purpose_of(lab, prepared, budget_s, sub.purpose)
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
        hypothesis=_words(sub.hypothesis),
        gpu_type=sub.gpu_type,
        want_host=sub.host,
        priority=_priority(sub.priority),
        repeat_of=_repeated(lab, prepared) if purpose == Purpose.REPEAT else None,
    )
    _night(lab)
    lab.store.event(
        who,
        "submit",
        run_id,
        text.one_line(sub.hypothesis, MAX_WORDS) if sub.hypothesis else None,
        {"overrides": sub.overrides, "budget_s": budget_s},
    )
    return Submitted([run_id], None, notes + _state_notes(lab, who))


def _submit_seeds(lab: Lab, sub: Submission, who: str) -> Submitted:
    wave = WaveRequest(
        base=sub.base,
        source=sub.source,
        path=sub.path,
        overrides=sub.overrides,
        repeats=sub.seeds,
        budget_s=sub.budget_s,
        hypothesis=sub.hypothesis,
        gpu_type=sub.gpu_type,
        host=sub.host,
        priority=sub.priority,
        purpose=Purpose.REPEAT if sub.purpose == Purpose.EXPERIMENT else sub.purpose,
    )
    if sub.diff is not None:
        prepared = submitting.prepare(lab, sub)
        wave = WaveRequest(
            source=prepared.text,
            repeats=sub.seeds,
            budget_s=sub.budget_s,
            hypothesis=sub.hypothesis,
            gpu_type=sub.gpu_type,
            host=sub.host,
            priority=sub.priority,
            purpose=wave.purpose,
        )
    return _submit_wave(lab, wave, who)


def submit_wave(lab: Lab, request: WaveRequest, *, who: str) -> Submitted:
    """Queue the runs of a grid, a list or repeats, all of them or none.

    Cells that are in effect the same as another cell or as an earlier run are left out and named in the notes.
    """
    return _replayed(lab, request.request_id, "submit_wave", who, lambda: _submit_wave(lab, request, who))


def _submit_wave(lab: Lab, request: WaveRequest, who: str) -> Submitted:
    cells = submitting.wave_cells(request)
    budget_s = submitting.checked_budget(lab.policy().limits, request.budget_s)
    notes = submitting.check_place(lab, request.gpu_type, request.host)
    base = submitting.prepare(lab, Submission(source=request.source, path=request.path, base=request.base, overrides=request.overrides))
    ready = []
    seen: dict[str, dict[str, Any]] = {}
    for cell in cells:
        overrides = {**request.overrides, **cell}
        prepared = submitting.prepare(lab, Submission(source=request.source, path=request.path, base=request.base, overrides=overrides))
        if prepared.effective_sha in seen and request.repeats == 1:
            notes.append(f"Left out {cell}: in effect the same as {seen[prepared.effective_sha]}.")
            continue
        twin = (
            submitting.find_duplicate(lab, prepared, budget_s, request.gpu_type)
            if request.repeats == 1 and request.purpose == Purpose.EXPERIMENT
            else None
        )
        if twin is not None:
            notes.append(f"Left out {cell}: in effect the same as {twin.id}.")
            continue
        seen[prepared.effective_sha] = cell
        ready.append((cell, prepared))
    if not ready:
        raise Refused("Every cell of this wave is known already: " + " ".join(notes), next_step="Change a factor, or ask for repeats.")
    submitting.check_limits(lab, who, len(ready) * request.repeats, budget_s)
    kind = "grid" if request.factors else ("list" if request.cells else "repeats")
    lab.keep_source(base.text)
    wave_id = lab.store.insert_wave(
        created_at=time.time(),
        kind=kind,
        title=_words(request.title),
        hypothesis=_words(request.hypothesis),
        base_sha=base.sha,
        base_run=base.base_run,
        factors=request.factors,
        repeats=request.repeats,
        budget_s=budget_s,
        agent=who,
    )
    approval, run_ids = _approval(lab, who), []
    for nth in range(request.repeats):
        for cell, prepared in ready:
            first = base.constants.get(submitting.SEED_NAME, 0)
            varied = prepared if nth == 0 else submitting.with_seed(prepared, (first if isinstance(first, int) else 0) + nth)
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
                    purpose=submitting.purpose_of(lab, varied, budget_s, request.purpose),
                    hypothesis=_words(request.hypothesis),
                    gpu_type=request.gpu_type,
                    want_host=request.host,
                    priority=_priority(request.priority),
                    repeat_of=_repeated(lab, varied) if request.repeats > 1 else None,
                )
            )
    _night(lab)
    lab.store.event(
        who, "submit_wave", wave_id, _words(request.hypothesis), {"runs": run_ids, "factors": request.factors, "budget_s": budget_s}
    )
    return Submitted(run_ids, wave_id, notes + _state_notes(lab, who))


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

    return _replayed(lab, request_id, "requeue", who, again)


def repeat(lab: Lab, run_id: str, n: int = 1, *, who: str, why: str | None = None, request_id: str | None = None) -> Submitted:
    """Run a source `n` more times, at new seeds where it has a SEED: this is how noise is measured."""

    def again() -> Submitted:
        run = submitting.known_run(lab, run_id)
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= submitting.MAX_SEEDS:
            raise BadValue(f"The number of repeats is {n!r}.", next_step=f"Allowed: 1 to {submitting.MAX_SEEDS}.")
        used = [s for (s,) in lab.store.tally("seed", "effective_sha = ? AND seed IS NOT NULL", (run.effective_sha,))]
        seeds = [max([run.seed or 0, *used]) + 1 + i for i in range(n)]
        submitting.check_limits(lab, who, n, run.budget_s)
        ids = [_copy(lab, run, who, Purpose.REPEAT, repeat_of=run.id, seed=seed, verb="repeat", why=why, checked=True) for seed in seeds]
        return Submitted(ids, None, _state_notes(lab, who))

    return _replayed(lab, request_id, "repeat", who, again)


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
        if gpu_type is None and budget_s is None:
            raise BadValue("A promotion needs a GPU type or a budget.", next_step="Say gpu_type, budget_s, or both.")
        if isinstance(seeds, bool) or not isinstance(seeds, int) or not 1 <= seeds <= submitting.MAX_SEEDS:
            raise BadValue(f"seeds is {seeds!r}.", next_step=f"Allowed: 1 to {submitting.MAX_SEEDS}.")
        budget = submitting.checked_budget(lab.policy().limits, budget_s if budget_s is not None else run.budget_s)
        notes = submitting.check_place(lab, gpu_type, None)
        submitting.check_limits(lab, who, seeds, budget)
        ids = [
            _copy(
                lab,
                run,
                who,
                Purpose.PROMOTION,
                promoted_from=run.id,
                parent=run.parent,
                gpu_type=gpu_type or run.gpu_type,
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

    return _replayed(lab, request_id, "promote", who, again)


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
    prepared = submitting.prepare(lab, Submission(base=run.id))
    if seed is not None:
        prepared = submitting.with_seed(prepared, seed)
    budget_s = columns.pop("budget_s", run.budget_s)
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
    lab.store.event(who, verb, run_id, _words(why), {"of": run.id})
    return run_id


def cancel(lab: Lab, ids: Iterable[str], *, who: str, why: str | None = None, force: bool = False) -> list[str]:
    """Ask for runs to end (a wave id names all of its runs); notes say which had ended before. `force` skips the grace between TERM and
    KILL."""
    with lab.store.transaction():
        runs = [run for name in _listed(ids) for run in _runs_named(lab, name)]
        notes = [f"{run.id} had ended ({run.outcome})." for run in runs if run.ended]
        for run in runs:
            if not run.ended:
                lab.store.update_run(run.id, wanted="cancel", wanted_force=int(force))
                lab.store.event(who, "cancel", run.id, _words(why), {"force": force})
    return notes


def decide(lab: Lab, run_id: str, verdict: str, *, who: str, why: str | None, override: bool = False) -> Run:
    """Write down keep or discard, by whom and why; a verdict may be changed later, each one stays in the audit trail.

    Raised: Refused for a keep that the evidence does not carry, unless `override` with a reason.
    """
    if verdict not in (Verdict.KEEP, Verdict.DISCARD):
        raise BadValue(f"A verdict is keep or discard, not {verdict!r}.")
    with lab.store.transaction():
        run = submitting.known_run(lab, run_id)
        if not run.ended:
            raise Refused(f"{run.id} has not ended ({run.phase}); a verdict needs its outcome.", next_step="Wait for it, or cancel it.")
        if verdict == Verdict.KEEP:
            _check_keep(lab, run, why, override)
        lab.store.update_run(run.id, verdict=str(verdict), verdict_by=who, verdict_why=_words(why), verdict_at=time.time())
        lab.store.event(who, "decide", run.id, _words(why), {"verdict": str(verdict), "override": override})
    return submitting.known_run(lab, run_id)


def _check_keep(lab: Lab, run: Run, why: str | None, override: bool) -> None:
    if run.outcome != Outcome.COMPLETED or run.val_bpb is None:
        raise Refused(
            f"{run.id} has no result to keep ({run.outcome}{': ' + run.cause if run.cause else ''}).",
            next_step="Discard it, or requeue it.",
        )
    doubt = board.standing(lab, run)
    if doubt is None:
        return
    if run.trust == Trust.REFUTED or not override:
        raise Refused(f"{run.id} cannot be kept: {doubt}", next_step="Repeat it to learn more, or keep it with override and a reason.")
    if not (why or "").strip():
        raise Refused(f"{run.id} is kept against the evidence ({doubt}); that needs a reason.", next_step="Say why.")


def set_priority(lab: Lab, ids: Iterable[str], *, who: str, priority: float | None = None, move: str | None = None) -> None:
    """Give queued runs a priority (higher first), or move them up, down or to the top of the queue."""
    if (priority is None) == (move is None) or move not in (None, "up", "down", "top"):
        raise BadValue("Say a priority, or move: up, down or top.")
    with lab.store.transaction():
        wanted = [submitting.known_run(lab, name) for name in _listed(ids)]
        for run in wanted:
            if run.phase not in (Phase.QUEUED, Phase.PROPOSED):
                raise Refused(f"{run.id} is not waiting ({run.phase}); only waiting runs have a place in the queue.")
        if priority is not None:
            for run in wanted:
                lab.store.update_run(run.id, priority=_priority(priority))
        else:
            _reorder(lab, [r.id for r in wanted], str(move))
        for run in wanted:
            lab.store.event(who, "priority", run.id, None, {"priority": priority, "move": move})


def _reorder(lab: Lab, ids: list[str], move: str) -> None:
    """Change the order of the queue with as few new priorities as will do."""
    queue = [r for r in lab.store.active_runs() if r.phase in (Phase.QUEUED, Phase.PROPOSED)]
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


def pause_agent(lab: Lab, name: str, on: bool, *, who: str, why: str | None = None) -> None:
    """Start none of one agent's runs, or go on."""
    paused = set(lab.store.setting("paused_agents", []))
    paused = paused | {name} if on else paused - {name}
    _setting(lab, "paused_agents", sorted(paused), who, "pause_agent" if on else "resume_agent", name, why)


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
        cause_text=_words(why) or "declined by a human",
    )


def _answer_proposals(lab: Lab, ids: Iterable[str], who: str, why: str | None, **columns: Any) -> None:
    if who.startswith("mcp:"):
        raise Refused("Approval is a human's: it is given in the TUI or with `overnight approve`.")
    with lab.store.transaction():
        for name in _listed(ids):
            for run in _runs_named(lab, name):
                if run.phase != Phase.PROPOSED:
                    if run.id == name:
                        raise Refused(f"{run.id} is not waiting for approval ({run.phase}).")
                    continue
                lab.store.update_run(run.id, approval_why=_words(why), **columns)
                lab.store.event(who, str(columns["approval"]).removesuffix("d"), run.id, _words(why))


def ask(lab: Lab, verb: str, args: dict[str, Any], *, who: str) -> int:
    """Ask the daemon for something only it can do; `answer` reads what came of it."""
    if verb not in REQUEST_VERBS:
        raise UnknownName("request", verb, REQUEST_VERBS)
    with lab.store.transaction():
        request_id = lab.store.insert_request(verb, args, who)
        lab.store.event(who, verb, str(next(iter(args.values()), "lab")), None, args)
    return request_id


def answer(lab: Lab, request_id: int) -> Request:
    """A request as it stands; its `state` is done or failed when it has been answered."""
    found = lab.store.request(request_id)
    if found is None:
        raise UnknownName("request", str(request_id), [])
    return found


def accept_policy(lab: Lab, *, who: str) -> None:
    """Put the present hosts.toml in force, also where it loosens a limit; only a human may."""
    if who.startswith("mcp:"):
        raise Refused("The policy is accepted by a human, in the TUI or with `overnight policy accept`.")
    load_policy(lab.hosts_file)  # what cannot be used is not accepted
    lab.accept(lab.hosts_file.read_text(encoding="utf-8"))
    lab.store.event(who, "accept_policy", str(lab.hosts_file))


def heard_from(lab: Lab, who: str) -> None:
    """Note that an agent called just now: GPUs that idle while no agent calls are shown with this age. No audit event: nothing is asked
    for."""
    lab.store.set_setting("last_agent_call", {"who": who, "at": time.time()})


def new_night(lab: Lab, *, who: str) -> None:
    """Start counting max_wall_hours anew."""
    _setting(lab, "night_started_at", time.time(), who, "new_night", "lab", None)


# -- shared ---------------------------------------------------------------------------------


def _replayed(lab: Lab, request_id: str | None, verb: str, who: str, act: Callable[[], Submitted]) -> Submitted:
    """Do `act` in one transaction, once for each request_id."""
    if not WHO_FORM.fullmatch(who):
        raise BadValue(f"{who!r} is not a name for who asks.")
    if request_id is not None and not REQUEST_ID_FORM.fullmatch(request_id):
        raise BadValue("A request_id is 1 to 128 printable characters without spaces.", next_step="A UUID will do.")
    with lab.store.transaction():
        earlier = lab.store.replay(request_id) if request_id else None
        if earlier is not None:
            if earlier[0] != verb:
                raise Refused(f"The request_id {request_id} was used for {earlier[0]}.", next_step="Use a new one for each request.")
            return Submitted(**{**earlier[1], "replay": True})
        done = act()
        if request_id:
            lab.store.remember(request_id, verb, {"run_ids": done.run_ids, "wave_id": done.wave_id, "notes": done.notes})
        return done


def _approval(lab: Lab, who: str) -> str:
    """`asked` when a human wants to see agents' submissions first; a human's own need nobody."""
    mode = lab.store.setting("approval", lab.policy().limits.approval)
    return "asked" if mode == "ask" and who.startswith("mcp:") else "none"


def _state_notes(lab: Lab, who: str) -> list[str]:
    notes = []
    if _approval(lab, who) == "asked":
        notes.append("A human approves submissions first; this one waits as proposed.")
    if lab.store.setting("queue_paused", False):
        notes.append("A human has paused the queue; it starts when they resume it.")
    if who in lab.store.setting("paused_agents", []):
        notes.append("A human has paused your runs; they start when resumed.")
    return notes


def _repeated(lab: Lab, prepared: submitting.Prepared) -> str | None:
    """The first run of this effective source, which a repeat repeats."""
    found = lab.store.runs("effective_sha = ? AND purpose != 'verify'", (prepared.effective_sha,), limit=1)
    return found[0].id if found else None


def _runs_named(lab: Lab, name: str) -> list[Run]:
    if name[:1] == "w" and name[1:].isdigit():
        if lab.store.wave(name) is None:
            raise UnknownName("wave", name, [w.id for w in lab.store.waves(50)])
        return lab.store.runs("wave_id = ?", (name,))
    return [submitting.known_run(lab, name)]


def _listed(ids: Iterable[str]) -> list[str]:
    names = [ids] if isinstance(ids, str) else list(ids)
    if not names:
        raise BadValue("No run was named.", next_step="Give an id such as r0001, or a wave such as w1.")
    return list(dict.fromkeys(names))


def _setting(lab: Lab, key: str, value: Any, who: str, verb: str, subject: str, why: str | None) -> None:
    with lab.store.transaction():
        lab.store.set_setting(key, value)
        lab.store.event(who, verb, subject, _words(why), {key: value})


def _host(lab: Lab, name: str, who: str, verb: str, why: str | None, **columns: int) -> None:
    with lab.store.transaction():
        known = lab.policy().host(name)
        if known is None and name not in [h.name for h in lab.store.hosts()]:
            raise UnknownName("host", name, [h.name for h in lab.policy().hosts], where="hosts.toml")
        if name in [h.name for h in lab.store.hosts()]:
            lab.store.upsert_host(name, **columns)
        elif known is not None:
            lab.store.upsert_host(name, kind=known.kind, state="new", since=time.time(), **columns)
        lab.store.event(who, verb, name, _words(why))


def _night(lab: Lab) -> None:
    if lab.store.setting("night_started_at") is None:
        lab.store.set_setting("night_started_at", time.time())


def _priority(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or abs(value) > 1e6:
        raise BadValue(f"The priority is {value!r}.", next_step="Allowed: a number from -1e6 to 1e6; higher goes first.")
    return float(value)


def _words(value: str | None) -> str | None:
    """Prose from outside: cleaned and cut, None when empty."""
    if value is None or not value.strip():
        return None
    return text.clean(value)[:MAX_WORDS]
