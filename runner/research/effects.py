"""What a wave says: main effects, pairwise interactions, error bars and the predicted best cell, by least squares.

Levels are categories coded to sum to zero, so an effect is a deviation from the wave's mean; hardware classes are blocks, so that an
effect is never confounded with the GPU it ran on. Cells that crashed or are missing leave holes: what cannot be estimated is None.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.research.noise import CONFIDENCE, Noise, pooled, t_quantile

Array = npt.NDArray[np.float64]
FAILED = ("crashed", "diverged")
MAX_CELLS = 20_000  # cells for which a prediction is made


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a wave as the analysis sees it: its cell, its block (class), and its value; None when it has none."""

    run_id: str
    cell: dict[str, Any]
    value: float | None
    block: str = ""
    outcome: str = "completed"


@dataclass(frozen=True, slots=True)
class Effect:
    """Deviation of a level from the wave's mean (None where runs are missing for it), its standard error, runs behind it."""

    factor: str
    level: Any
    effect: float | None
    se: float | None
    n: int


@dataclass(frozen=True, slots=True)
class FactorSummary:
    """A factor as a whole: its best level, and how much better that is than the worst, with error and badge."""

    factor: str
    best: Any
    worst: Any
    gain: float | None
    se: float | None
    badge: str


@dataclass(frozen=True, slots=True)
class Interaction:
    """What two levels do together beyond the sum of their main effects."""

    factors: tuple[str, str]
    levels: tuple[Any, Any]
    effect: float | None
    se: float | None
    clear: bool


def told_once(interactions: Sequence[Interaction]) -> list[Interaction]:
    """Interactions without their mirror images, the largest first: of a factor with two levels each effect stands there twice, with
    either sign, and the lower one is kept. What could not be estimated comes last.
    """
    levels: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for one in interactions:
        seen = levels.setdefault(one.factors, (set(), set()))
        for side, level in zip(seen, one.levels, strict=True):
            side.add(key(level))
    kept: dict[tuple[Any, ...], Interaction] = {}
    for one in interactions:
        own = tuple(None if len(side) == 2 else key(level) for side, level in zip(levels[one.factors], one.levels, strict=True))
        other = kept.get((one.factors, own))
        if other is None or _or_inf(one.effect) < _or_inf(other.effect):
            kept[(one.factors, own)] = one
    return sorted(kept.values(), key=lambda i: -abs(i.effect) if i.effect is not None else math.inf)


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else value


@dataclass(frozen=True, slots=True)
class Prediction:
    """A cell with its predicted value and standard error; `ran` says whether it is among the finished runs."""

    cell: dict[str, Any]
    value: float
    se: float | None
    ran: bool


@dataclass(slots=True)
class Analysis:
    """Everything a wave says. `sd` is the noise behind the error bars, `sd_from` says where it comes from (repeats, class, residual, -)."""

    runs: int
    completed: int
    mean: float | None = None
    sd: float | None = None
    dof: int = 0
    sd_from: str = "-"
    effects: list[Effect] = field(default_factory=list)
    factors: list[FactorSummary] = field(default_factory=list)
    interactions: list[Interaction] = field(default_factory=list)
    blocks: dict[str, float | None] = field(default_factory=dict)
    observed_best: Prediction | None = None
    predicted_best: Prediction | None = None
    missing: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """A plain object of the same facts."""
        return asdict(self)


def key(level: Any) -> str:
    """A level as a dictionary key: equal for equal JSON values."""
    return json.dumps(level, sort_keys=True, default=str)


def analyse(
    results: Sequence[Result], *, factors: dict[str, list[Any]] | None = None, noise: Noise | None = None, lower_is_better: bool = True
) -> Analysis:
    """Analyse a wave from its runs; `factors` names all levels of a grid, `noise` is the class's floor where there is one."""
    levels = factors or _levels(results)
    good = [r for r in results if r.value is not None and math.isfinite(r.value)]
    out = Analysis(runs=len(results), completed=len(good), missing=_missing(results, levels))
    _note_failures(out, results)
    declared, levels = levels, _finished_levels(levels, good)
    if not good:
        out.notes.append("No run of this wave has a result.")
        return out
    sign = 1.0 if lower_is_better else -1.0
    best = min(good, key=lambda r: (sign * float(r.value or 0), r.run_id))
    out.observed_best = Prediction(best.cell, float(best.value or 0), None, True)
    if len(good) < 2 or not levels:
        out.mean = math.fsum(float(r.value or 0) for r in good) / len(good)
        out.notes.append("Fewer than two results with differing factors: there is nothing to compare.")
        return out
    fit = _Fit(good, levels, noise)
    have = {name: {key(r.cell.get(name)): r.cell.get(name) for r in good} for name in declared}
    left_alone = {name: next(iter(seen.values())) for name, seen in have.items() if name not in levels}
    _fill(out, fit, levels, sign)
    diverged = {
        _cell_key(r.cell, levels)
        for r in results
        if r.outcome == "diverged" and all(key(r.cell.get(n)) == key(v) for n, v in left_alone.items())
    }
    out.predicted_best = _predict(out, fit, levels, sign, diverged, left_alone)
    out.effects += [
        Effect(name, level, None, None, 0)
        for name, values in declared.items()
        if len(values) > 1
        for level in values
        if key(level) not in have[name]
    ]
    return out


def _levels(results: Sequence[Result]) -> dict[str, list[Any]]:
    found: dict[str, dict[str, Any]] = {}
    for r in results:
        for name, level in r.cell.items():
            found.setdefault(name, {}).setdefault(key(level), level)
    # A listed cell that leaves a factor out ran at the base's value, a level of its own.
    for name, seen in found.items():
        if any(name not in r.cell for r in results):
            seen.setdefault(key(None), None)
    return {name: list(seen.values()) for name, seen in found.items()}


def _finished_levels(levels: dict[str, list[Any]], good: Sequence[Result]) -> dict[str, list[Any]]:
    """Levels with a result, of factors where that leaves two: the others would make every contrast undetermined."""
    seen = {(name, key(r.cell.get(name))) for r in good for name in levels}
    left = {name: [v for v in values if (name, key(v)) in seen] for name, values in levels.items()}
    return {name: values for name, values in left.items() if len(values) > 1}


def _missing(results: Sequence[Result], levels: dict[str, list[Any]]) -> list[dict[str, Any]]:
    count = math.prod(len(v) for v in levels.values())
    if not levels or count > MAX_CELLS or {name for r in results for name in r.cell} != set(levels):
        return []
    have = {_cell_key(r.cell, levels) for r in results if r.value is not None and math.isfinite(r.value)}
    cells = [dict(zip(levels, combo, strict=True)) for combo in itertools.product(*levels.values())]
    return [c for c in cells if _cell_key(c, levels) not in have] if count == len({_cell_key(r.cell, levels) for r in results}) else []


def _cell_key(cell: dict[str, Any], levels: dict[str, list[Any]]) -> tuple[str, ...]:
    return tuple(key(cell.get(name)) for name in levels)


def _note_failures(out: Analysis, results: Sequence[Result]) -> None:
    lost = Counter(r.outcome for r in results if r.value is None)
    if lost:
        out.notes.append("Without a result: " + ", ".join(f"{n} {word}" for word, n in sorted(lost.items())) + ".")
    for name in {n for r in results for n in r.cell}:
        by_level: dict[str, list[str]] = {}
        for r in results:
            if r.outcome in ("completed", "pruned", *FAILED):
                by_level.setdefault(key(r.cell.get(name)), []).append(r.outcome)
        whole = {level for level, ends in by_level.items() if len(ends) > 1 and set(ends) <= {*FAILED, "pruned"}}
        dead = sorted(level for level in whole if set(by_level[level]) <= set(FAILED))
        if dead and len(dead) < len(by_level):
            out.notes.append(f"Every run with {name} = {', '.join(dead)} crashed or diverged.")
        cut = sorted(whole - set(dead))
        if cut:
            out.notes.append(f"No run with {name} = {', '.join(cut)} came to its end (pruned, or crashed): nothing is known of its score.")


class _Fit:
    """Least squares of the finished runs on blocks, main effects and, where the runs carry them, pairwise interactions."""

    def __init__(self, good: Sequence[Result], levels: dict[str, list[Any]], noise: Noise | None) -> None:
        self.good, self.levels = good, levels
        self.blocks = sorted({r.block for r in good})
        self.y: Array = np.array([r.value for r in good], dtype=float)
        self.pairs = list(itertools.combinations(levels, 2))
        self.main = self._matrix(good, interactions=False)
        self.full = self._matrix(good, interactions=True) if self._carries_interactions() else None
        self.x = self.main if self.full is None else self.full
        self.beta, self.pinv = _solve(self.x, self.y)
        self.sd, self.dof, self.sd_from = self._noise(noise)
        if self.sd is not None and self.sd <= 1e-9 * float(np.abs(self.y).max()):  # repeats to the digit: no noise that was seen
            self.sd, self.dof, self.sd_from = None, 0, "-"

    def _carries_interactions(self) -> bool:
        """Whether every pair of levels ran at least once; then the full model tells more than the means."""
        if not self.pairs:
            return False
        return all(
            len({(key(r.cell.get(a)), key(r.cell.get(b))) for r in self.good}) == len(self.levels[a]) * len(self.levels[b])
            for a, b in self.pairs
        )

    def _noise(self, noise: Noise | None) -> tuple[float | None, int, str]:
        groups: dict[tuple[str, ...], list[float]] = {}
        for r, y in zip(self.good, self.y, strict=True):
            groups.setdefault((r.block, *_cell_key(r.cell, self.levels)), []).append(float(y))
        within = pooled(groups.values())
        if noise is not None and noise.sd is not None and noise.dof >= within.dof:
            return noise.sd, noise.dof, "class"  # the class's floor pools these repeats too
        if within.sd is not None and within.sd > 0:
            return within.sd, within.dof, "repeats"
        dof = len(self.y) - int(np.linalg.matrix_rank(self.x))
        if dof > 0:
            residual = self.y - self.x @ self.beta
            return math.sqrt(float(residual @ residual) / dof), dof, "residual"
        if self.full is not None:  # saturated: what the interactions hold is taken for noise
            beta, _ = _solve(self.main, self.y)
            residual = self.y - self.main @ beta
            dof = len(self.y) - int(np.linalg.matrix_rank(self.main))
            if dof > 0:
                return math.sqrt(float(residual @ residual) / dof), dof, "residual"
        return None, 0, "-"

    def code(self, name: str, level: Any) -> Array:
        """Sum-to-zero coding: the last level is minus all others."""
        keys = [key(v) for v in self.levels[name]]
        row = np.zeros(len(keys) - 1)
        at = keys.index(key(level))
        if at < len(row):
            row[at] = 1.0
        else:
            row[:] = -1.0
        return row

    def _block_row(self, block: str) -> Array:
        row = np.zeros(max(len(self.blocks) - 1, 0))
        at = self.blocks.index(block)
        if at < len(row):
            row[at] = 1.0
        else:
            row[:] = -1.0
        return row

    def row(self, cell: dict[str, Any], block: str | None, *, interactions: bool) -> Array:
        """The design row of a cell; without a block, the mean over blocks."""
        codes = {name: self.code(name, cell.get(name)) for name in self.levels}
        parts = [np.ones(1), self._block_row(block) if block is not None else np.zeros(max(len(self.blocks) - 1, 0)), *codes.values()]
        if interactions:
            parts += [np.outer(codes[a], codes[b]).ravel() for a, b in self.pairs]
        return np.concatenate(parts)

    def _matrix(self, rows: Sequence[Result], *, interactions: bool) -> Array:
        return np.array([self.row(r.cell, r.block, interactions=interactions) for r in rows])

    def contrast(self, c: Array) -> tuple[float | None, float | None]:
        """Estimate and standard error of a combination of coefficients; None when the runs do not determine it."""
        projected = c @ self.pinv @ self.x
        if not np.allclose(projected, c, atol=1e-7):
            return None, None
        variance = float(c @ self.pinv @ self.pinv.T @ c)
        return float(c @ self.beta), None if self.sd is None else self.sd * math.sqrt(max(variance, 0.0))

    def slot(self, *names: str) -> tuple[int, int]:
        """Where the coefficients of a factor or a pair stand."""
        at = 1 + max(len(self.blocks) - 1, 0)
        for name in self.levels:
            size = len(self.levels[name]) - 1
            if names == (name,):
                return at, at + size
            at += size
        for a, b in self.pairs:
            size = (len(self.levels[a]) - 1) * (len(self.levels[b]) - 1)
            if names == (a, b):
                return at, at + size
            at += size
        raise KeyError(names)


def _solve(x: Array, y: Array) -> tuple[Array, Array]:
    inverse = np.asarray(np.linalg.pinv(x), dtype=float)
    return inverse @ y, inverse


def _fill(out: Analysis, fit: _Fit, levels: dict[str, list[Any]], sign: float) -> None:
    width = fit.x.shape[1]
    out.sd, out.dof, out.sd_from = fit.sd, fit.dof, fit.sd_from
    out.mean, _ = fit.contrast(np.eye(width)[0])
    bar = t_quantile(CONFIDENCE, fit.dof) if fit.dof else None
    for name, values in levels.items():
        rows = []
        for level in values:
            c = np.zeros(width)
            start, end = fit.slot(name)
            c[start:end] = fit.code(name, level)
            effect, se = fit.contrast(c)
            n = sum(key(r.cell.get(name)) == key(level) for r in fit.good)
            rows.append((Effect(name, level, effect if n else None, se if n else None, n), c))
        out.effects += [e for e, _ in rows]
        out.factors.append(_summary(name, rows, fit, bar, sign))
        if any(effect.effect is None and effect.n for effect, _ in rows) and len(fit.blocks) > 1:
            out.notes.append(
                f"Not every level of {name} met every other in one class: best and worst are of those that did. "
                "Runs of one wave on one GPU type can all be compared."
            )
    if fit.full is not None:
        for a, b in fit.pairs:
            out.interactions += _pair(a, b, levels, fit, bar)
    if len(fit.blocks) > 1:
        for block in fit.blocks:
            c = np.zeros(width)
            c[1 : len(fit.blocks)] = fit._block_row(block)
            out.blocks[block] = fit.contrast(c)[0]
        out.notes.append("Runs of several classes: each class is a block, and effects are within classes.")
    if fit.full is None and fit.pairs:
        out.notes.append("Some pairs of levels never finished together: interactions are not estimated.")


def _summary(name: str, rows: list[tuple[Effect, Array]], fit: _Fit, bar: float | None, sign: float) -> FactorSummary:
    ran = [(e, c) for e, c in rows if e.n]
    pairs = [(a, b, *fit.contrast(c_b - c_a)) for (a, c_a), (b, c_b) in itertools.combinations(ran, 2)]  # some levels may never have met
    known = [(abs(difference), a, b, difference, se) for a, b, difference, se in pairs if difference is not None]
    if not known:
        return FactorSummary(name, None, None, None, None, "unknown")
    gain, a, b, difference, se = max(known, key=lambda k: k[0])
    best, worst = (a, b) if sign * difference >= 0 else (b, a)
    badge = "unknown" if se is None or bar is None else "clear" if gain > bar * se else "within noise"
    return FactorSummary(name, best.level, worst.level, gain, se, badge)


def _pair(a: str, b: str, levels: dict[str, list[Any]], fit: _Fit, bar: float | None) -> list[Interaction]:
    start, end = fit.slot(a, b)
    found = []
    for la, lb in itertools.product(levels[a], levels[b]):
        c = np.zeros(fit.x.shape[1])
        c[start:end] = np.outer(fit.code(a, la), fit.code(b, lb)).ravel()
        effect, se = fit.contrast(c)
        clear = effect is not None and se is not None and bar is not None and fit.sd_from != "residual" and abs(effect) > bar * se
        found.append(Interaction((a, b), (la, lb), effect, se, clear))
    return found


def _predict(
    out: Analysis, fit: _Fit, levels: dict[str, list[Any]], sign: float, diverged: set[tuple[str, ...]], left_alone: dict[str, Any]
) -> Prediction | None:
    """The best cell by main effects and by those interactions that are clear.

    Cells that diverged are left out, and so are levels that never finished; a cell whose run merely crashed may be predicted.
    """
    if math.prod(len(v) for v in levels.values()) > MAX_CELLS:
        return None
    together = {i.factors for i in out.interactions if i.clear}
    ran = {_cell_key(r.cell, levels) for r in fit.good}
    best: Prediction | None = None
    for combo in itertools.product(*levels.values()):
        cell = dict(zip(levels, combo, strict=True))
        if _cell_key(cell, levels) in diverged:
            continue
        c = fit.row(cell, None, interactions=fit.full is not None)
        if fit.full is not None:
            for pair in fit.pairs:
                if pair not in together:
                    start, end = fit.slot(*pair)
                    c[start:end] = 0.0
        value, se = fit.contrast(c)
        if value is not None and (best is None or sign * value < sign * best.value):
            best = Prediction({**left_alone, **cell}, value, se, _cell_key(cell, levels) in ran)
    return best
