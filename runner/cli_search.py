"""Commands of the search: tune, two GPU types compared, results.tsv in and out.

Each is a thin layer over runner.research; what is printed is also there as JSON.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from runner import submitting
from runner.cli_io import WHO, JsonFlag, emit, lab_of, note, say, table
from runner.daemonctl import ensure_daemon
from runner.errors import BadValue, Refused
from runner.keeper import Keeper
from runner.records import Purpose
from runner.research import promotion
from runner.research.axes import said as changes_said
from runner.research.classes import gpu_of
from runner.research.results import export_results, import_results
from runner.research.tune import Plan, Tune
from runner.text import bpb, percent, signed, significant, thousands
from runner.textfile import read_text

POLL_S = 0.5


def register(app: typer.Typer) -> None:
    """Add the commands of this group."""
    for command in (tune, compare):
        app.command()(command)
    app.command(name="export")(export)
    app.command(name="import")(import_)


def compare(
    context: typer.Context,
    first: Annotated[str, typer.Argument(metavar="TYPE", help="A part of a GPU's name, such as H100.")],
    second: Annotated[str, typer.Argument(metavar="TYPE", help="Another, such as H200.")],
    budget: Annotated[float | None, typer.Option("--budget", metavar="S", help="Budget in seconds (default: the policy's).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Two GPU types side by side. Ranks, relative gains over the same baseline, and where they disagree about the order."""
    lab = lab_of(context, readonly=True)
    a, b = (promotion.class_of_type(lab, t) for t in (first, second))
    for wish, found in ((first, a), (second, b)):
        if found is None:
            raise Refused(f"Nothing with a result ran on a GPU like {wish!r}.", next_step="`overnight leaderboard` names the classes.")
    if a == b:
        raise BadValue(f"{first!r} and {second!r} are one class here ({gpu_of(str(a))}).", next_step="Name two types of GPU.")
    budget_s = budget or lab.policy().limits.budget_s
    rows = promotion.across(lab, str(a), str(b), budget_s)
    flips = promotion.flips(lab, str(a), str(b), budget_s)
    if as_json:
        emit(lab, {"classes": [a, b], "budget_s": budget_s, "rows": [vars_of(r) for r in rows], "flips": [vars_of(f) for f in flips]})
        return
    if rows:
        left, right = gpu_of(str(a)), gpu_of(str(b))
        table(
            ("run", f"gain {left}", "rank", "run", f"gain {right}", "rank"),
            [(r.run_a, percent(r.percent_a, 2), str(r.rank_a), r.run_b, percent(r.percent_b, 2), str(r.rank_b)) for r in rows],
        )
    else:
        say(f"No baseline ran on both types at this budget: `overnight promote ID --gpu {second}` runs one there, to compare gains.")
    for f in flips[:20]:
        kind = "Clear flip" if f.clear else "Flip within noise"
        on = [f"{signed(gain)} on {gpu_of(str(key))}" for gain, key in ((f.gain_a, a), (f.gain_b, b))]
        say(f"{kind}: {f.first} against {f.second}: {', '.join(on)}.")
    if rows and not flips:
        say("No pair of these is in another order there.")


def vars_of(record: Any) -> dict[str, Any]:
    """A slotted record as a plain object."""
    return {name: getattr(record, name) for name in record.__slots__}


def tune(
    context: typer.Context,
    budget: Annotated[float | None, typer.Option("--budget", metavar="S", help="Short budget of each run (default: the policy's).")] = None,
    longer: Annotated[
        list[float] | None, typer.Option("--longer", metavar="S", help="A longer budget for the winner; may be given again.")
    ] = None,
    waves: Annotated[int, typer.Option("--waves", min=1, max=20, help="Waves at the short budget.")] = 3,
    size: Annotated[int, typer.Option("--size", min=4, max=64, help="Runs in a wave.")] = 8,
    knob: Annotated[
        list[str] | None, typer.Option("--knob", metavar="NAME", help="A constant to tune, or LR_MULTIPLIER; may be given again.")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="TYPE", help="A part of the GPU's name.")] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="waves, or optuna (the `tune` extra).")] = "waves",
    restart: Annotated[bool, typer.Option("--restart", help="Forget an unfinished tune and begin anew.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Tune batch, learning rate and model size, by runs. The winner is tried at a longer budget; the command goes on where it stopped."""
    lab = lab_of(context, create=True)
    short = submitting.checked_budget(lab.policy().limits, budget)
    plan = Plan(
        short,
        tuple(submitting.checked_budget(lab.policy().limits, s) for s in longer or [4 * short]),
        waves,
        size,
        gpu_type=gpu,
        optimizer=optimizer,
        knobs=tuple(knob or ()),
    )
    tuning = Tune(lab, plan, restart=restart)
    notes = [*submitting.check_place(lab, tuning.plan.gpu_type, None), *tuning.clear_away()]
    if others := tuning.unlike(plan):
        what = "This is the tune that has ended" if tuning.over() else "The tune that was begun goes on"
        notes.append(f"{what}, with {', '.join(others)}; --restart begins another.")
    if not as_json:
        for line in notes:
            say(line)
        say(f"Tuning {', '.join(tuning.axes.names)}.")
    told = [f"Preflight: {line}" for line in notes]  # a wish that no GPU meets is said once
    try:
        while tuning.advance():
            ensure_daemon(lab)
            _wait_for(tuning, told, quiet=as_json)
    except Refused:
        if not as_json:
            _show_tune(tuning)
        raise
    if as_json:
        emit(
            lab, {"rows": tuning.table(), "preflight": tuning.ground.rows(), "notes": list(dict.fromkeys([*notes, *tuning.ground.lines()]))}
        )
    else:
        _show_tune(tuning)


def _wait_for(tuning: Tune, told: list[str], *, quiet: bool) -> None:
    """Until the runs of a step have ended, with a daemon at work for them; `told` is what was said before."""
    keeper, why = Keeper(tuning.lab.path), None
    while True:
        pending = tuning.pending()
        lines = [f"Preflight: {line}" for line in tuning.ground.lines()]
        if trained := [r for r in pending if r.purpose != Purpose.PREFLIGHT]:
            lines.append(f"{len(tuning.runs()) - len(trained)} runs done, {len(trained)} to go in this step.")
        for line in lines:
            if line not in told:
                told.append(line)
                if not quiet:
                    say(line)
        if not pending and tuning.ground.kept is not None:
            return
        time.sleep(POLL_S)
        said, why = why, keeper.look(tuning.lab)
        if why and why != said:
            note(f"waiting: {why}")
        if not pending:
            return


def _show_tune(tuning: Tune) -> None:
    """What preflight chose, and report 1's table."""
    if chosen := tuning.ground.rows():
        table(
            ("host", "GPU", "matrix TFLOP/s", "attention", "compile", "device tokens", "measured"),
            [
                (
                    r["host"],
                    r["gpu_name"],
                    "-" if r["matmul_flops"] is None else f"{r['matmul_flops'] / 1e12:.0f}",
                    r["attention"],
                    r["compile"],
                    thousands(r["device_tokens"]),
                    "quickly" if r["quick"] else "whole",
                )
                for r in chosen
            ],
        )
    table(
        ("budget", "changed", "val_bpb", "gain", "±", "", "MFU", "tokens M", "steps", "runs", "run"),
        [
            (
                f"{r['budget_s']:g} s",
                changes_said(r["changes"]),
                bpb(r["val_bpb"]),
                signed(r["gain"]),
                "-" if r["gain_se"] is None else bpb(r["gain_se"]),
                r["badge"],
                percent(r["mfu_percent"], 2),
                significant(r["tokens_m"]),
                thousands(r["num_steps"]),
                str(r["runs"]),
                r["id"],
            )
            for r in tuning.table()
        ],
    )


def export(
    context: typer.Context,
    to: Annotated[Path | None, typer.Argument(metavar="FILE", help="Where to write it (default: print it).")] = None,
    style: Annotated[str, typer.Option("--style", help="upstream or skypilot column order.")] = "upstream",
) -> None:
    """Write ended experiments as a results.tsv."""
    text = export_results(lab_of(context, readonly=True), style)
    if to is None:
        print(text, end="")
        return
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadValue(f"{to} cannot be written: {error.strerror or error}.", next_step="Name another file.") from None
    say(f"Wrote {text.count(chr(10)) - 1} rows to {to}.")


def import_(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A results.tsv, in upstream's or SkyPilot's columns.")],
    budget: Annotated[float | None, typer.Option("--budget", metavar="S", help="The budget these runs had.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Take the rows of a results.tsv in as history."""
    lab = lab_of(context, create=True)
    try:
        text = read_text(file, "The results file")
    except FileNotFoundError:
        raise BadValue(f"There is no file {file}.", next_step="Name a results.tsv.") from None
    sent = import_results(lab, text, who=WHO, budget_s=budget)
    if as_json:
        emit(lab, {"runs": sent.run_ids, "notes": sent.notes})
        return
    for line in sent.notes:
        say(line)
