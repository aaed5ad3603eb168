"""Commands that ask for something to be run or decided: run, wave, cancel, requeue, repeat, promote, decide, priority, verify.

Each is one call of a verb; nothing is judged here but the spelling of the command line.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from runner import queries, verbs
from runner.cli_io import (
    WHO,
    JsonFlag,
    assignment,
    emit,
    lab_of,
    note,
    parsed,
    read_script,
    say,
    split_values,
    wait_for_answer,
)
from runner.cli_watch import print_runs, run_line
from runner.daemonctl import ensure_daemon
from runner.errors import BadValue
from runner.keeper import Keeper
from runner.lab import Lab
from runner.records import Outcome, Phase, Purpose, Run, Submission, Submitted, Trust, WaveRequest
from runner.research.lineage import left
from runner.submitting import known_run

Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Run ids, e.g. r0042.")]
IdsOrWaves = Annotated[list[str], typer.Argument(metavar="ID...", help="Run ids, e.g. r0042, or waves, e.g. w3: all runs of it.")]
Why = Annotated[str | None, typer.Option("--why", "-m", help="The reason; it stands in the audit trail.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="NAME=VALUE", help="Override a module-level constant of the script; repeat for more."),
]
Budget = Annotated[float | None, typer.Option("--budget", "-b", metavar="SECONDS", help="Counted training time (default: the policy's).")]
Base = Annotated[str | None, typer.Option("--base", metavar="ID", help="Start from the source of this run instead of a file.")]
GpuType = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Only on a GPU whose name holds this text.")]
OnHost = Annotated[str | None, typer.Option("--host", metavar="NAME", help="Only on this host.")]
Priority = Annotated[float, typer.Option("--priority", "-p", help="Higher runs first.")]
Key = Annotated[
    str | None,
    typer.Option("--request-id", metavar="KEY", help="The same key never starts a second run; it answers with the first one's id."),
]
Wait = Annotated[bool, typer.Option("--wait", "-w", help="Stay until it has ended; exit code 1 unless all completed.")]
Script = Annotated[Path | None, typer.Argument(metavar="SCRIPT", help="The training script (default: the trainer's own).")]
SETTLED_S = 2.0  # hosts and daemons come up within this: what lasts longer is a reason


def register(app: typer.Typer) -> None:
    """Add the commands of this group."""
    for command in (run, wave, cancel, requeue, repeat, promote, decide, priority, verify):
        app.command()(command)


def text_of(script: Path | None, base: str | None) -> str | None:
    """The text of the script that was named. Raised: BadValue when it cannot be read, or --base names another."""
    if script is not None and base is not None:
        raise BadValue("A script and --base both say what to run.", next_step="Give one of them.")
    return None if script is None else read_script(script)


def script_of(lab: Lab, script: Path | None, text: str | None) -> dict[str, Any]:
    """How a submission names what to run: a file of the trainer folder by its path, any other file by its text."""
    if script is None:
        return {}
    folder = lab.policy().trainer.folder.resolve()
    found = script.resolve()
    return {"path": str(found.relative_to(folder))} if found.is_relative_to(folder) else {"source": text}


def overrides_of(words: list[str] | None, option: str = "--set") -> dict[str, Any]:
    """`NAME=VALUE` words as overrides; a name given twice is refused."""
    found: dict[str, Any] = {}
    for word in words or []:
        name, value = assignment(word, option)
        if name in found:
            raise BadValue(f"{option} names {name} twice.", next_step="Give each constant one value.")
        found[name] = parsed(value)
    return found


def run(
    context: typer.Context,
    script: Script = None,
    constants: Set = None,
    budget: Budget = None,
    base: Base = None,
    diff: Annotated[Path | None, typer.Option("--diff", metavar="FILE", help="A unified diff against the base.")] = None,
    hypothesis: Annotated[str | None, typer.Option("--hypothesis", "-m", metavar="TEXT", help="What the edit should do, and why.")] = None,
    parent: Annotated[str | None, typer.Option("--parent", metavar="ID", help="The run it is compared with.")] = None,
    baseline: Annotated[bool, typer.Option("--baseline", help="Mark it as a baseline: never pruned.")] = False,
    gpu: GpuType = None,
    host: OnHost = None,
    priority: Priority = 0.0,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Run it with N seeds.")] = 1,
    allow_duplicate: Annotated[bool, typer.Option("--allow-duplicate", help="Run it although an equal experiment exists.")] = False,
    request_id: Key = None,
    wait: Wait = False,
    json: JsonFlag = False,
) -> None:
    """Submit one run."""
    text = text_of(script, base)
    lab = lab_of(context, create=True)
    request = Submission(
        **script_of(lab, script, text),
        base=base,
        diff=None if diff is None else read_script(diff),
        overrides=overrides_of(constants),
        budget_s=budget,
        hypothesis=hypothesis,
        parent=parent,
        purpose=Purpose.BASELINE if baseline else Purpose.EXPERIMENT,
        gpu_type=gpu,
        host=host,
        priority=priority,
        seeds=seeds,
        allow_duplicate=allow_duplicate,
        request_id=request_id,
    )
    hand_over(lab, verbs.submit(lab, request, who=WHO), wait=wait, json=json)


def wave(
    context: typer.Context,
    script: Script = None,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", "-g", metavar="NAME=V1,V2,...", help="A factor and its values; repeat for a full grid.")
    ] = None,
    cell: Annotated[
        list[str] | None, typer.Option("--cell", "-c", metavar="NAME=V,NAME2=V", help="One run by its overrides; repeat for a list.")
    ] = None,
    constants: Set = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Each cell so many times, with other seeds.")] = 1,
    budget: Budget = None,
    base: Base = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="A short name.")] = None,
    hypothesis: Annotated[str | None, typer.Option("--hypothesis", "-m", metavar="TEXT", help="What the wave should tell.")] = None,
    gpu: GpuType = None,
    host: OnHost = None,
    priority: Priority = 0.0,
    request_id: Key = None,
    wait: Wait = False,
    json: JsonFlag = False,
) -> None:
    """Submit many runs: a grid, or a list of cells."""
    if not grid and not cell:
        raise BadValue(
            "A wave needs --grid or --cell.", next_step="For example: overnight wave --grid MATRIX_LR=0.02,0.04 --grid DEPTH=4,6"
        )
    text = text_of(script, base)
    factors: dict[str, list[Any]] = {}
    for word in grid or []:
        name, values = assignment(word, "--grid")
        if name in factors:
            raise BadValue(f"--grid names {name} twice.", next_step="Give each factor all its values at once.")
        factors[name] = [parsed(v) for v in split_values(values)]
    lab = lab_of(context, create=True)
    request = WaveRequest(
        **script_of(lab, script, text),
        factors=factors,
        cells=[overrides_of(split_values(word), "--cell") for word in cell or []],
        base=base,
        overrides=overrides_of(constants),
        repeats=repeats,
        budget_s=budget,
        title=title,
        hypothesis=hypothesis,
        gpu_type=gpu,
        host=host,
        priority=priority,
        request_id=request_id,
    )
    hand_over(lab, verbs.submit_wave(lab, request, who=WHO), wait=wait, json=json)


def hand_over(lab: Lab, made: Submitted, *, wait: bool, json: bool) -> None:
    """Start the daemon for what was submitted, wait for it if asked, and print it."""
    for sentence in made.notes:
        note(sentence)
    if not json:
        name = f"wave {made.wave_id}: " if made.wave_id else ""
        say(f"{name}{' '.join(made.run_ids)} {'is known already' if made.replay else 'submitted'} (lab {lab.path})")
    ensure_daemon(lab)
    runs = waited_for(lab, made.run_ids) if wait else [known_run(lab, i) for i in made.run_ids]
    objects = queries.run_objects(lab, runs)
    if json and made.wave_id is None and len(objects) == 1:
        emit(lab, objects[0])
    elif json:
        known = lab.store.wave(made.wave_id) if made.wave_id else None
        emit(lab, {"wave": queries.wave_object(lab, known) if known else None, "runs": objects})
    elif wait:
        print_runs(objects)
    if wait and any(r.outcome != Outcome.COMPLETED for r in runs):
        raise typer.Exit(1)


def waited_for(lab: Lab, run_ids: list[str]) -> list[Run]:
    """Wait for the end; an interrupt ends the waiting and not the runs."""
    try:
        return wait_for_end(lab, run_ids)
    except KeyboardInterrupt:
        note(f"{' '.join(run_ids[:8])} {'go' if len(run_ids) > 1 else 'goes'} on without you; `overnight cancel ID` stops a run.")
        raise


def wait_for_end(lab: Lab, run_ids: list[str]) -> list[Run]:
    """Wait until all the runs have ended, however long that takes, and keep a daemon at work for them.

    Why nothing goes on is said on stderr; on a terminal the progress too.
    """
    keeper, shown, told, seen, seen_at = Keeper(lab.path), "", "", "", 0.0
    while True:
        runs = [known_run(lab, i) for i in run_ids]
        if all(r.ended for r in runs):
            return runs
        waiting = next((r for r in runs if r.phase == Phase.QUEUED), None) if not any(r.live for r in runs) else None
        why = keeper.look(lab) or (queries.why_waiting(lab, waiting) if waiting else None) or ""
        if why != seen:
            seen, seen_at = why, time.monotonic()
        elif why and why != told and time.monotonic() - seen_at > SETTLED_S:
            told = why
            note(f"waiting: {why}")
        line = (
            "; ".join(run_line(r) for r in runs if not r.ended and r.phase != "queued")[:200] or f"{sum(not r.ended for r in runs)} waiting"
        )
        if sys.stderr.isatty() and line != shown:
            shown = line
            note(line)
        time.sleep(0.2)


def cancel(
    context: typer.Context,
    ids: IdsOrWaves,
    why: Why = None,
    force: Annotated[bool, typer.Option("--force", help="Kill at once, without the grace period.")] = False,
    json: JsonFlag = False,
) -> None:
    """Stop runs, or take them out of the queue. A running one counts as cancelled once its processes are gone."""
    lab = lab_of(context)
    notes = verbs.cancel(lab, ids, who=WHO, why=why, force=force)
    show_done(lab, ids, notes, json=json)


def show_done(lab: Lab, ids: list[str], notes: list[str], *, json: bool) -> None:
    """Print what a verb did to runs."""
    named = [run for i in dict.fromkeys(ids) for run in (lab.store.runs("wave_id = ?", (i,)) or [known_run(lab, i)])]
    objects = queries.run_objects(lab, named)
    if json:
        emit(lab, {"runs": objects, "notes": notes})
        return
    for sentence in notes:
        note(sentence)
    print_runs(objects)


def requeue(
    context: typer.Context,
    run_id: Annotated[str, typer.Argument(metavar="ID")],
    why: Why = None,
    wait: Wait = False,
    json: JsonFlag = False,
) -> None:
    """Run an ended run again. It becomes a new run that names the old one."""
    lab = lab_of(context)
    hand_over(lab, verbs.requeue(lab, run_id, who=WHO, why=why), wait=wait, json=json)


def repeat(
    context: typer.Context,
    run_id: Annotated[str, typer.Argument(metavar="ID")],
    n: Annotated[int, typer.Option("--repeats", "-n", metavar="N", help="How many more.")] = 1,
    wait: Wait = False,
    json: JsonFlag = False,
) -> None:
    """Run the same source with other seeds. The noise of its class is measured so."""
    lab = lab_of(context)
    hand_over(lab, verbs.repeat(lab, run_id, n, who=WHO), wait=wait, json=json)


def promote(
    context: typer.Context,
    run_id: Annotated[str, typer.Argument(metavar="ID")],
    gpu: GpuType = None,
    budget: Budget = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="With so many seeds.")] = 1,
    wait: Wait = False,
    json: JsonFlag = False,
) -> None:
    """Try a result on another GPU or budget. A gain that holds there is worth keeping."""
    lab = lab_of(context)
    hand_over(lab, verbs.promote(lab, run_id, who=WHO, gpu_type=gpu, budget_s=budget, seeds=seeds), wait=wait, json=json)


def decide(
    context: typer.Context,
    run_id: Annotated[str, typer.Argument(metavar="ID")],
    verdict: Annotated[str, typer.Argument(metavar="keep|discard")],
    why: Annotated[str, typer.Option("--why", "-m", help="The reason; it stands in the audit trail.")] = "",
    override: Annotated[bool, typer.Option("--override", help="Keep although the gain is within noise (needs --why).")] = False,
    json: JsonFlag = False,
) -> None:
    """Keep or discard a result."""
    lab = lab_of(context)
    decided = verbs.decide(lab, run_id, verdict, who=WHO, why=why, override=override)
    show_done(lab, [decided.id], left(lab, decided), json=json)


def priority(
    context: typer.Context,
    ids: Ids,
    value: Annotated[float | None, typer.Option("--to", metavar="N", help="The new priority; higher runs first.")] = None,
    move: Annotated[str | None, typer.Option("--move", metavar="up|down|top", help="Move within the queue instead.")] = None,
    json: JsonFlag = False,
) -> None:
    """Change the order of the queue."""
    lab = lab_of(context)
    verbs.set_priority(lab, ids, who=WHO, priority=value, move=move)
    show_done(lab, ids, [], json=json)


def verify(context: typer.Context, run_id: Annotated[str, typer.Argument(metavar="ID")], json: JsonFlag = False) -> None:
    """Recompute a result from its checkpoint. Says whether the printed val_bpb is true."""
    lab = lab_of(context)
    known_run(lab, run_id)
    result = wait_for_answer(lab, verbs.ask(lab, "verify", {"run": run_id}, who=WHO), deadline_s=math.inf)
    found = known_run(lab, run_id)
    if json:
        emit(lab, {**queries.run_object(lab, found), "verification": result})
    else:
        say(f"{run_id} {found.trust or 'not verified'}: {found.trust_why or 'no reason given'}")
    if found.trust != Trust.VERIFIED:
        raise typer.Exit(1)
