"""Commands of the research itself: what a wave says, noise, pruning replay.

Statistics live in runner/research; here they are asked for and printed.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from runner import queries, verbs
from runner.cli_io import WHO, JsonFlag, emit, lab_of, say, table
from runner.cli_runs import Wait, hand_over
from runner.errors import BadValue
from runner.lab import Lab
from runner.records import Run
from runner.research import noise as noise_floor
from runner.research import pruning
from runner.research.effects import told_once
from runner.research.waves import analyse_wave, score
from runner.text import ago, bpb, one_line, percent, signed


def register(app: typer.Typer) -> None:
    """Add the commands of this group."""
    app.command()(analyze)
    app.command()(noise)
    pruning_app = typer.Typer(no_args_is_help=True, help="What pruning would have saved, and lost.")
    pruning_app.callback()(pruning_group)
    pruning_app.command("replay")(replay)
    app.add_typer(pruning_app, name="pruning")


def analyze(
    context: typer.Context,
    wave: Annotated[str, typer.Argument(metavar="WAVE", help="The wave's id, for example w3.")],
    json: JsonFlag = False,
) -> None:
    """What a wave says. Factors, interactions, the best cell seen and the best predicted, each with its error."""
    lab = lab_of(context, readonly=True)
    found = analyse_wave(lab, wave)
    if json:
        emit(lab, {"wave": wave, "analysis": found.as_json()})
        return
    noise_from = {"class": "repeats of the class", "repeats": "its own repeats", "residual": "what the effects leave"}.get(found.sd_from)
    said = f"; noise {six(found.sd)} from {noise_from}" if noise_from else ""
    say(f"{wave}: {found.completed} of {found.runs} runs have a result that counts, mean {bpb(found.mean)}{said}.")
    if found.factors:
        rows = [
            (f.factor, *(("-", "-") if f.gain is None else (level(f.best), level(f.worst))), six(f.gain), six(f.se), f.badge)
            for f in found.factors
        ]
        table(("factor", "best", "worst", "gain", "±", ""), rows, right="gain ±")
    for one in [i for i in told_once(found.interactions) if i.clear][:6]:
        pair = " with ".join(f"{name} {level(value)}" for name, value in zip(one.factors, one.levels, strict=True))
        say(f"Together, {pair} adds {signed(one.effect)} ± {six(one.se)} to val_bpb.")
    for words, best in (("Best seen", found.observed_best), ("Best predicted", found.predicted_best)):
        if best is not None:
            cell = ", ".join(f"{name} {level(value)}" for name, value in best.cell.items()) or "the base"
            error = f" ± {six(best.se)}" if best.se is not None else ""
            say(f"{words}: {cell}: {bpb(best.value)}{error}{'' if best.ran else ' (never ran)'}.")
    for sentence in found.notes:
        say(sentence)


def level(value: Any) -> str:
    """A factor's value, on one line."""
    return one_line(str(value), 40)


def floors(lab: Lab) -> list[dict[str, Any]]:
    """The noise floor of every class and budget with a result, and the least gain that would be clear against its baseline."""
    rows = []
    for scope in queries.leaderboard(lab, limit=1)["classes"]:
        board = queries.leaderboard(lab, class_key=scope["class"], budget_s=scope["budget_s"], limit=10_000)
        base = next((r for r in board["rows"] if r["badge"] == "baseline"), None)
        found = noise_floor.Noise(board["noise_sd"], board["noise_n"] or 0)
        least = noise_floor.smallest_clear_gain(found, 1, base["seed_n"] if base else 1)
        row = {"class": scope["class"], "budget_s": scope["budget_s"], "runs": scope["runs"], "noise_sd": found.sd, "noise_n": found.dof}
        known = {"baseline": base["id"], "baseline_bpb": base["val_bpb"]} if base else {"baseline": None, "baseline_bpb": None}
        rows.append(row | known | {"smallest_clear_gain": least})
    return rows


def noise(
    context: typer.Context,
    repeats: Annotated[
        int | None, typer.Option("--repeats", "-n", min=1, max=64, metavar="N", help="Run the baseline N more times with other seeds.")
    ] = None,
    run_id: Annotated[str | None, typer.Option("--run", metavar="ID", help="Repeat this run instead of the baseline.")] = None,
    wait: Wait = False,
    json: JsonFlag = False,
) -> None:
    """The noise floor. How far repeats of one source lie apart, in each class."""
    lab = lab_of(context)
    found = floors(lab)
    if repeats is not None or run_id is not None:
        chosen = run_id or next((r["baseline"] for r in found if r["baseline"]), None)
        if chosen is None:
            raise _no_baseline(lab)
        hand_over(lab, verbs.repeat(lab, chosen, repeats or 1, who=WHO), wait=wait, json=json)
        return
    if json:
        emit(lab, {"classes": found})
        return
    if not found:
        say("No results yet.")
        return
    table(
        ("class", "budget", "runs", "noise", "repeats", "clear from", "baseline", "val_bpb"),
        [
            (
                r["class"],
                ago(r["budget_s"]),
                r["runs"],
                six(r["noise_sd"]),
                r["noise_n"] or "-",
                six(r["smallest_clear_gain"]),
                r["baseline"],
                bpb(r["baseline_bpb"]),
            )
            for r in found
        ],
        right="runs noise repeats",
    )
    if any(r["noise_sd"] is None for r in found):
        say("No noise floor where nothing was repeated: `overnight noise --repeats 3 --run ID` repeats a run in its class.")
    if any(r["noise_sd"] == 0 for r in found):
        say("Repeats that agree to the last digit measure no noise: no gain is clear there.")


def _no_baseline(lab: Lab) -> BadValue:
    """Why there is nothing to repeat, and what to do."""
    waiting = lab.store.runs("purpose = 'baseline' AND (outcome IS NULL OR outcome = 'completed')", order="seq", limit=1)
    if waiting:
        state = "is not ranked: see `overnight show`" if waiting[0].ended else "has not ended yet"
        told = f"`overnight noise --repeats N --run {waiting[0].id}` repeats it all the same."
        return BadValue(f"The baseline {waiting[0].id} {state}.", next_step=told)
    return BadValue("There is no baseline to repeat yet.", next_step="`overnight run --baseline --seeds 3` makes one and its noise floor.")


def six(value: float | None) -> str:
    """A difference of val_bpb."""
    return "-" if value is None else f"{value:.6f}"


def pruning_group() -> None:
    """What pruning would have saved, and lost."""


def curves_of(lab: Lab, scope: dict[str, Any]) -> list[pruning.Curve]:
    """The finished curves of one class and budget, in order of their ends."""
    where = "outcome = 'completed' AND class_key IS ? AND budget_s = ? AND val_bpb IS NOT NULL"
    runs: list[Run] = lab.store.runs(where, (scope["class"], scope["budget_s"]), order="ended_at")
    judged = [r for r in runs if r.purpose in pruning.PRUNABLE and r.repeat_of is None and score(r) is not None]
    return [pruning.Curve(r.id, pruning.sampled(lab.store.points(r.id)), r.val_bpb, r.budget_s) for r in judged]


def replay(context: typer.Context, json: JsonFlag = False) -> None:
    """Judge finished runs again. How much each pruning mode would have saved, and which good runs it would have lost."""
    lab = lab_of(context)
    rows = []
    for scope in queries.leaderboard(lab, limit=1)["classes"]:
        curves = curves_of(lab, scope)
        for mode in pruning.MODES:
            told = pruning.replay(mode, curves)
            row = {"class": scope["class"], "budget_s": scope["budget_s"], "mode": mode, "runs": len(curves), "pruned": told.pruned}
            row |= {"saved_s": told.saved_s, "total_s": told.total_s, "wrong": told.wrong, "lost_good": told.lost_good}
            rows.append(row | {"stops": [{"id": i, "share": s} for i, s in told.stops]})
    if json:
        emit(lab, {"replays": rows})
        return
    if not rows:
        say("No finished curves yet.")
        return
    table(
        ("class", "budget", "mode", "runs", "pruned", "saved", "of it all", "best lost", "good lost"),
        [
            (
                r["class"],
                ago(r["budget_s"]),
                r["mode"],
                r["runs"],
                r["pruned"],
                ago(r["saved_s"]),
                percent(100 * r["saved_s"] / r["total_s"] if r["total_s"] else None),
                r["wrong"],
                r["lost_good"],
            )
            for r in rows
        ],
        right="runs pruned",
    )
