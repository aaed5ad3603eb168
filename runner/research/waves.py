"""The analysis of a wave of a lab: its runs gathered, held or refuted claims left out, the class's noise put beside them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from runner import board
from runner.errors import UnknownName
from runner.lab import Lab
from runner.records import Outcome, Run, Trust, Wave
from runner.research.effects import Analysis, Result, analyse, key
from runner.research.noise import Noise, pooled

UNRUN = "waiting"


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Mean values over two factors in one class; None where nothing finished. `values[i][j]` belongs to `rows[i]` and `columns[j]`.

    `class_key` is the class with most results; `left_out` counts results of other classes, which cannot be compared with these.
    """

    row_factor: str
    column_factor: str
    rows: list[Any]
    columns: list[Any]
    values: list[list[float | None]]
    counts: list[list[int]]
    class_key: str = ""
    left_out: int = 0


def results_of(lab: Lab, wave: Wave) -> list[Result]:
    """The wave's runs for the analysis; a run that has not ended, or whose claim is held or refuted, has no value.

    A listed cell names only what it changes: what other cells of its list name stands in it as the run had it.
    """
    runs = lab.store.runs("wave_id = ?", (wave.id,))
    return [_result(run, run.cell or {}, _listed(wave, runs)) for run in runs]


def _listed(wave: Wave, runs: Sequence[Run]) -> list[str]:
    """Every constant that some cell of a list names; none for a grid, whose cells are whole."""
    return [] if wave.factors else list(dict.fromkeys(name for run in runs for name in run.cell or {}))


def last_of_level(lab: Lab, run: Run, stopping: Container[str]) -> str | None:
    """The level of its wave that would be left without any result if `run` were stopped too, as `NAME = value`; None when none would.

    A level that is a single cell (one factor, one run each) is not held: stopping it is the answer.
    """
    wave = lab.store.wave(run.wave_id) if run.wave_id else None
    if wave is None or len(wave.factors) < 2:
        return None
    results = results_of(lab, wave)
    cells = [r.cell for r in results]
    results += known_of(lab, wave, results)
    open_ = [r.cell for r in results if r.value is not None or (r.outcome == UNRUN and r.run_id != run.id and r.run_id not in stopping)]
    for name in wave.factors:
        level = key((run.cell or {}).get(name))
        if sum(key(c.get(name)) == level for c in cells) > 1 and all(key(c.get(name)) != level for c in open_):
            return f"{name} = {level}"
    return None


def known_of(lab: Lab, wave: Wave, results: Sequence[Result]) -> list[Result]:
    """Results of other runs for the cells that were left out because they are in effect sources of theirs, in the classes of the wave.

    A list is read against the script it started from, where that ran.
    """
    told = lab.store.tally("detail", "subject = ? AND verb = 'submit_wave' LIMIT 1", (wave.id,), table="events")
    cells = json.loads(told[0][0]).get("known", []) if told and told[0][0] else []
    names = _listed(wave, lab.store.runs("wave_id = ?", (wave.id,))) if not wave.factors else []
    if names:
        cells += [[{}, sha] for (sha,) in lab.store.tally("DISTINCT effective_sha", "source_sha = ?", (wave.base_sha,))]
    classes = {r.block for r in results if r.value is not None}
    found: dict[tuple[str, str], Result] = {}
    for cell, effective_sha in cells:
        others = "effective_sha = ? AND budget_s = ? AND outcome = 'completed' AND wave_id IS NOT ? AND purpose != 'verify'"
        for run in lab.store.runs(others, (effective_sha, wave.budget_s, wave.id)):
            if run.class_key in classes and score(run) is not None:
                one = _result(run, cell, names)
                found.setdefault((run.id, key(one.cell)), one)
    return list(found.values())


def score(run: Run) -> float | None:
    """What a run counts for: the recomputed value where there is one, None while its claim is held or when it was refuted."""
    if run.outcome != Outcome.COMPLETED or run.val_bpb is None:
        return None
    if board.unranked_reason(run.val_bpb, run.trust, run.trust_why) is not None:
        return None
    return run.verified_bpb if run.trust == Trust.VERIFIED and run.verified_bpb is not None else run.val_bpb


def _result(run: Run, cell: dict[str, Any], names: Sequence[str]) -> Result:
    whole = {name: cell.get(name, run.constants.get(name)) for name in names if name in cell or name in run.constants}
    value = score(run)
    outcome = UNRUN if run.outcome is None else str(run.outcome)
    if value is None and outcome == Outcome.COMPLETED:
        outcome = "not ranked"
    return Result(run.id, whole or cell, value, run.class_key or "", outcome)


def analyse_wave(lab: Lab, wave_id: str) -> Analysis:
    """Main effects, interactions and the predicted best cell of a wave. Raised: UnknownName."""
    wave = lab.store.wave(wave_id)
    if wave is None:
        raise UnknownName("wave", wave_id, [w.id for w in lab.store.waves(50)])
    results = results_of(lab, wave)
    known = known_of(lab, wave, results)
    classes = {r.block for r in results if r.value is not None}
    floor = pooled_of([noise_floor(lab, c, wave.budget_s) for c in classes])
    found = analyse([*results, *known], factors=wave.factors or None, noise=floor)
    found.runs, found.completed = found.runs - len(known), found.completed - len(known)
    waiting = sum(r.outcome == UNRUN for r in results)
    if waiting:
        found.notes.insert(0, f"{waiting} of {len(results)} runs have not ended; this will change.")
    if known:
        found.notes.append(f"Cells known before count with the results of {', '.join(sorted({r.run_id for r in known})[:8])}.")
    found.notes += same_models(wave, lab.store.runs("wave_id = ?", (wave.id,)))
    if floor.sd is None and found.sd_from in ("-", "residual"):
        found.notes.append("No source was repeated in this class yet: ask for repeats of one run to know the noise.")
    elif found.sd is None and found.factors:
        found.notes.append("Repeats agree to the last digit, which is no noise to judge by: nothing is called clear.")
    return found


def same_models(wave: Wave, runs: Sequence[Run]) -> list[str]:
    """Sentences for levels of a factor that came out as one model, because sizes are rounded (ASPECT_RATIO 90 and 96 at head size 128).

    A factor that never changes the model, such as a learning rate, says nothing here. Models are told apart by the config a run reports,
    else by its parameter count.
    """
    notes = []
    for name, levels in wave.factors.items():
        models: dict[str, dict[str, str]] = {}  # the rest of the cell -> level -> model
        for run in runs:
            model = run.model_config if run.model_config is not None else run.params_m
            if model is not None and run.cell and name in run.cell:
                rest = key({k: v for k, v in run.cell.items() if k != name})
                models.setdefault(rest, {})[key(run.cell[name])] = key(model)
        if not any(len(set(by_level.values())) > 1 for by_level in models.values()):
            continue
        first_like: dict[str, list[Any]] = {}
        for level in levels:
            made = [[rest, by_level.get(key(level))] for rest, by_level in sorted(models.items())]
            if any(model is not None for _, model in made):
                first_like.setdefault(key(made), []).append(level)
        for alike in first_like.values():
            if len(alike) > 1:
                values = ", ".join(str(level) for level in alike)
                notes.append(f"{name} = {values} gave one and the same model, because sizes are rounded: their difference is noise.")
    return notes


def noise_floor(lab: Lab, class_key: str | None, budget_s: float | None) -> Noise:
    """The noise of a class at a budget, from every source that ran more than once there."""
    groups, _ = board.collect(lab, class_key, budget_s)
    return pooled(g.values for g in groups)


def pooled_of(floors: list[Noise]) -> Noise:
    """Several classes' floors as one, by degrees of freedom."""
    known = [(n.sd, n.dof) for n in floors if n.sd is not None]
    dof = sum(d for _, d in known)
    return Noise((sum(sd * sd * d for sd, d in known) / dof) ** 0.5, dof) if dof else Noise(None, 0)


def heat_map(lab: Lab, wave_id: str, row_factor: str, column_factor: str) -> HeatMap:
    """Mean values of a wave over two of its factors, in the class with most results. Raised: UnknownName for a wave or factor."""
    wave = lab.store.wave(wave_id)
    if wave is None:
        raise UnknownName("wave", wave_id, [w.id for w in lab.store.waves(50)])
    for name in (row_factor, column_factor):
        if name not in wave.factors:
            raise UnknownName("factor", name, wave.factors, where=f"wave {wave_id}")
    rows, columns = wave.factors[row_factor], wave.factors[column_factor]
    found: dict[tuple[str, str], list[float]] = {}
    results = results_of(lab, wave)
    valued = [r for r in [*results, *known_of(lab, wave, results)] if r.value is not None]
    classes = Counter(r.block for r in valued).most_common(1)
    own = classes[0][0] if classes else ""
    for r in valued:
        if r.block == own and r.value is not None:
            found.setdefault((key(r.cell.get(row_factor)), key(r.cell.get(column_factor))), []).append(r.value)
    cells = [[found.get((key(a), key(b)), []) for b in columns] for a in rows]
    return HeatMap(
        row_factor,
        column_factor,
        list(rows),
        list(columns),
        [[sum(c) / len(c) if c else None for c in line] for line in cells],
        [[len(c) for c in line] for line in cells],
        own,
        sum(r.block != own for r in valued),
    )
