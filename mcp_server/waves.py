"""analyze_wave: what a wave says, in tables an agent can act on. The statistics are runner.research's; here they are put into words."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import Field

from mcp_server.answers import Answer, Table, cell, rounded
from mcp_server.calls import Call
from mcp_server.reads import cause_words
from runner import news, queries
from runner.lab import Lab
from runner.records import Outcome, Run, Wave
from runner.research.classes import gpu_of
from runner.research.effects import Analysis, told_once
from runner.research.noise import smallest_clear_gain
from runner.research.waves import analyse_wave, heat_map, noise_floor, score

INTERACTIONS = 8  # at most, and three when none is clear: a full table of a large grid would bury them


def analyze_wave(
    call: Call,
    wave: Annotated[str, Field(description="Wave id, e.g. 'w3'.", min_length=1, max_length=20)],
) -> Answer:
    """What a wave tells: for each factor its best value and whether that is clear of the noise, the effect of each value with its standard
    error, the largest interactions, the best cell seen and the best cell predicted, a heat map of the two strongest factors, and failed
    runs. Use it when a wave has ended, before planning the next one; on an unfinished wave it says how much is missing."""
    lab = call.lab
    found = queries.known_wave(lab, wave)
    analysis = analyse_wave(lab, wave)
    runs = news.wave_runs(lab, wave)
    obj = queries.wave_object(lab, found)
    keys = ("id", "kind", "title", "hypothesis", "budget_s", "total", "completed", "running", "queued")
    facts: dict[str, Any] = {k: obj[k] for k in keys if obj.get(k) not in (None, 0)}
    facts |= {
        "mean": rounded(analysis.mean, 6),
        "noise_sd": rounded(analysis.sd, 6),
        "noise_from": None if analysis.sd_from == "-" else analysis.sd_from,
    }
    answer = Answer(facts=facts, notes=list(analysis.notes))
    if found.kind == "repeats":
        return repeats(lab, answer, runs, found.budget_s)
    if analysis.factors:
        rows = [[f.factor, f.best, f.worst, rounded(f.gain, 6), rounded(f.se, 6), f.badge] for f in analysis.factors]
        answer.tables["factors"] = Table(["factor", "best", "worst", "gain", "se", "badge"], rows)
    answer.tables["best_cells"] = best_cells(analysis, runs)
    if analysis.effects:
        effects = [[e.factor, e.level, rounded(e.effect, 6), rounded(e.se, 6), e.n] for e in analysis.effects]
        answer.tables["effects"] = Table(["factor", "value", "effect", "se", "runs"], effects)
    if analysis.interactions:
        once = told_once(analysis.interactions)
        strongest = [i for i in once if i.clear][:INTERACTIONS] or once[:3]
        together = [
            [f"{i.factors[0]}={cell(i.levels[0])}", f"{i.factors[1]}={cell(i.levels[1])}", rounded(i.effect, 6), rounded(i.se, 6), i.clear]
            for i in strongest
        ]
        answer.tables["interactions"] = Table(["this", "with", "effect", "se", "clear"], together, total=len(once))
    if heat := heat_table(lab, found, analysis):
        answer.tables[heat[0]] = heat[1]
    if failed := [[r.id, r.cell, r.outcome, cause_words(r) or r.cause] for r in runs if r.ended and r.outcome != Outcome.COMPLETED]:
        answer.tables["failed"] = Table(["id", "cell", "outcome", "why"], failed)
    answer.next_step = next_step(analysis)
    return answer


def repeats(lab: Lab, answer: Answer, runs: list[Run], budget_s: float) -> Answer:
    """What repeats of one source are for: the noise of their class, and the gain that is clear of it."""
    rows, n = [], 0
    for class_key in dict.fromkeys(run.class_key for run in runs if score(run) is not None):
        values = [value for run in runs if run.class_key == class_key and (value := score(run)) is not None]
        noise, n = noise_floor(lab, class_key, budget_s), len(values)
        least = smallest_clear_gain(noise, 1, n)
        figures = [math.fsum(values) / n, min(values), max(values), noise.sd, least]
        rows.append([gpu_of(class_key or ""), n, *(rounded(x, 6) for x in figures)])
    answer.facts = {k: v for k, v in answer.facts.items() if k not in ("mean", "noise_sd", "noise_from")}
    answer.tables["repeats"] = Table(["gpu", "runs", "mean", "lowest", "highest", "noise_sd", "smallest_clear_gain"], rows)
    answer.notes = [note for note in answer.notes if "differing factors" not in note]
    if failed := [[r.id, r.outcome, cause_words(r) or r.cause] for r in runs if r.ended and r.outcome != Outcome.COMPLETED]:
        answer.tables["failed"] = Table(["id", "outcome", "why"], failed)
    if any(row[-1] is not None for row in rows):
        answer.notes.append("smallest_clear_gain is what one run must be better by than the mean of these.")
    answer.next_step = "Go on with a wave of factors." if n > 1 else "One result tells no noise: repeat it."
    return answer


def best_cells(analysis: Analysis, runs: list[Run]) -> Table:
    """The best cell that ran, with its run, and the cell predicted to be best, which may never have run."""
    rows = []
    if analysis.observed_best is not None:
        best = analysis.observed_best
        ids = [run.id for run in runs if score(run) == best.value]
        rows.append(["seen", best.cell, best.value, None, ids[0] if ids else "known before"])
    if analysis.predicted_best is not None:
        best = analysis.predicted_best
        ids = [run.id for run in runs if (run.cell or {}) == best.cell and run.outcome == Outcome.COMPLETED]
        ran = ids[0] if ids else "known before" if best.ran else "never ran"
        rows.append(["predicted", best.cell, rounded(best.value, 6), rounded(best.se, 6), ran])
    return Table(["which", "cell", "val_bpb", "se", "run"], rows)


def heat_table(lab: Lab, wave: Wave, analysis: Analysis) -> tuple[str, Table] | None:
    """Mean val_bpb over the two factors with the largest gains, as (name, table); None for a wave without two factors."""
    if len(wave.factors) < 2:
        return None
    gains = {f.factor: f.gain or 0.0 for f in analysis.factors}
    down, across = sorted(wave.factors, key=lambda name: -gains.get(name, 0.0))[:2]
    heat = heat_map(lab, wave.id, down, across)
    columns = [down, *(f"{across}={cell(level)}" for level in heat.columns)]
    others = f" (on {gpu_of(heat.class_key)}; {heat.left_out} results of other classes are not in it)" if heat.left_out else ""
    return f"mean_val_bpb{others}", Table(columns, [[level, *values] for level, values in zip(heat.rows, heat.values, strict=True)])


def next_step(analysis: Analysis) -> str:
    """What usually follows from such a result."""
    if analysis.predicted_best is not None and not analysis.predicted_best.ran:
        return "The best predicted cell has not run: run it, or make it the centre of the next wave."
    edges = [f.factor for f in analysis.factors if f.badge == "clear"]
    if edges:
        return f"Clear: {', '.join(edges)}. Move the next wave's centre there; decide about the best run, or promote it."
    return "Nothing is clear of the noise: repeat the best cells, or choose wider values or other factors." if analysis.completed else ""
