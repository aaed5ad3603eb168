"""Balanced waves along a ladder of budgets, by ask and tell: what tests/bench/night.py found best, and what `tune` and program.md use.

The first wave repeats the start and changes one constant at a time, to both sides; where there is a cheap rung (a short budget, a plentiful
GPU type) it runs there. Every later wave changes all constants at once around the point where the runs so far are expected to be lowest:
each up in about a third of the runs, down in a third, left alone in a third, every run with its mirror image, so that effects are told
apart with all runs of the wave. Nothing here runs or stores anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runner.research.knobs import Knob, knobs_of
from runner.research.noise import Noise, pooled
from runner.research.response import Array, Constants, Datum, Prior, Response, spread, usual_noise
from runner.research.strategy import SIZES, Mend, Told, Trial

TYPE_OCTAVES = 0.15  # a confirming type is a little faster than a screening one; enough to let slopes differ
PRUNED_WEIGHT = 0.05  # a pruned run's forecast says "worse", not how much


@dataclass(frozen=True, slots=True)
class Rung:
    """A stage: its budget (None: the default one), whether on the target type, waves (None: to the end), mirror pairs in a later wave."""

    budget_s: float | None = None
    confirm: bool = False
    waves: int | None = None
    pairs: int = 8


def ladder(budget_s: float, *, short: float = 1 / 3, pairs: int = 3) -> tuple[Rung, ...]:
    """One screening wave at a share of the budget on the plentiful type, then small waves at the full budget on the target type."""
    return Rung(budget_s * short, False, 1), Rung(budget_s, True, None, pairs)


@dataclass(frozen=True, slots=True)
class Pace:
    """How far things move: steps of the changes in the first and later waves, reach of the center's moves, repeats of the start."""

    first: float = 1.0
    later: float = 0.5
    reach: tuple[float, ...] = (1.2, 0.8, 0.6, 0.5)
    climb: float = 0.8  # the reach of the move that foresees the next rung
    repeats: int = 4
    alone: float = 1 / 3  # the share of runs in which a constant is left alone


@dataclass(slots=True)
class Balanced:
    """One wave of single changes, then waves that change everything, each around the lowest point that the runs so far foresee."""

    start: Constants
    rungs: tuple[Rung, ...] = (Rung(),)
    only: list[str] | None = None
    mend: Mend = dict
    seed: int = 0
    pace: Pace = field(default_factory=Pace)
    prior: Prior = field(default_factory=Prior)
    floor: Noise | None = None  # what is known of the noise beside the repeats asked for here
    incumbent: Constants = field(init=False)
    ran: Constants = field(init=False)  # the last center around which runs had results
    knobs: dict[str, Knob] = field(init=False)
    waves: int = field(init=False, default=0)
    stage: int = field(init=False, default=0)
    _since: int = field(init=False, default=0)
    _data: list[tuple[Told, int]] = field(init=False, default_factory=list)
    _groups: list[list[float]] = field(init=False, default_factory=list)
    _fits: set[tuple[Any, ...]] = field(init=False, default_factory=set)
    _failed: dict[tuple[Any, ...], int] = field(init=False, default_factory=dict)
    _barren: list[tuple[Any, ...]] = field(init=False, default_factory=list)
    _edges: dict[tuple[str, int], float] = field(init=False, default_factory=dict)  # values from which on runs diverge
    _blamed: dict[tuple[str, int], list[float]] = field(init=False, default_factory=dict)
    _random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.incumbent, self.ran = dict(self.start), dict(self.start)
        self.knobs = knobs_of(self.start, self.only)
        self._random = np.random.default_rng(self.seed)

    @property
    def rung(self) -> Rung:
        """The present stage."""
        return self.rungs[self.stage]

    # asking

    def ask(self) -> list[Trial]:
        """The first wave: repeats of the start, and single changes. A later one: mirror pairs around the incumbent."""
        if not self.knobs:
            return []
        if self.waves:
            return [self._trial(self._moved(row), "*") for row in self._design(self.rung.pairs)]
        trials = [Trial(dict(self.start), "base", None, self.rung.budget_s, self.rung.confirm) for _ in range(self.pace.repeats)]
        for name, knob in self.knobs.items():
            values = {knob.moved(self.start[name], sign * self.pace.first): None for sign in (1, -1)}
            changed = [self.mend({**self.start, name: value}) for value in values]
            trials += [self._trial(c, name) for c in changed if c[name] != self.start[name]]
        return trials

    def _trial(self, constants: Constants, knob: str) -> Trial:
        return Trial(constants, "step", knob, self.rung.budget_s, self.rung.confirm)

    def _moved(self, row: Array) -> Constants:
        point = dict(self.incumbent)
        for (name, knob), sign in zip(self.knobs.items(), row, strict=True):
            value = knob.moved(point[name], float(sign) * self.pace.later) if sign else point[name]
            if self._edges.get((name, -1), -math.inf) < value < self._edges.get((name, 1), math.inf):
                point[name] = value
        return self.mend(point)

    def _design(self, pairs: int) -> Array:
        """Signs of mirror pairs, [runs, knobs]; of thirty drawn, the set that tells slopes and bends apart best."""
        n, best, found = len(self.knobs), -math.inf, np.zeros((0, 0))
        weak = np.diag([0.01, *[0.3] * n, *[0.6] * n])
        for _ in range(30):
            half = self._random.choice([-1.0, 1.0], (pairs, n)) * (self._random.random((pairs, n)) >= self.pace.alone)
            rows = np.vstack([half, -half])
            design = np.hstack([np.ones((2 * pairs, 1)), rows, rows**2])
            value = float(np.linalg.slogdet(design.T @ design + weak)[1])
            if value > best:
                best, found = value, rows
        return found

    # telling

    def tell(self, results: Sequence[Told]) -> None:
        """Learn from a wave and move to where the runs so far are expected to be lowest."""
        self._note(results)
        self.waves += 1
        self._since += 1
        if len(self._data) >= 4:
            self._move(self.pace.reach[min(self.waves, len(self.pace.reach)) - 1])
        if self.rung.waves is not None and self._since >= self.rung.waves and self.stage < len(self.rungs) - 1:
            self.stage, self._since = self.stage + 1, 0
            if len(self._data) >= 4:
                self._move(self.pace.climb)

    def _note(self, results: Sequence[Told]) -> None:
        """Remember results, what did not run, and values beyond which runs diverged."""
        self._groups.append([t.value for t in results if t.trial.role == "base" and t.value is not None and not t.predicted])
        self._data += [(t, self.stage) for t in results if t.value is not None and math.isfinite(t.value)]
        for told in results:
            size = self._size(told.trial.constants)
            if told.value is not None:
                self._fits.add(size)
            elif told.outcome == "crashed":
                self._failed[size] = self._failed.get(size, 0) + 1
        crashed, lost = sum(t.outcome == "crashed" for t in results), sum(t.value is None for t in results)
        if 2 * lost > len(results) and self.incumbent != self.ran:
            if 2 * crashed > len(results):
                self._barren.append(self._size(self.incumbent))  # the combination does not run, although its parts do
            self.incumbent = dict(self.ran)
        else:
            self.ran = dict(self.incumbent)
        self._barren += [s for s, n in self._failed.items() if n >= 2 and s not in self._fits and s not in self._barren]
        self._barren = [s for s in self._barren if s not in self._fits]
        for told in results:
            if told.outcome == "diverged":
                self._suspect(told)

    def _suspect(self, told: Told) -> None:
        """Where a run diverged: at its one change, else at the values beyond all that ever ran, once two runs agree."""
        for name in self.knobs:
            value = told.trial.constants[name]
            ran = [t.trial.constants[name] for t, _ in self._data]
            for sign in (1, -1):
                if any(sign * value <= sign * v for v in (*ran, self.start[name])):
                    continue
                self._blamed.setdefault((name, sign), []).append(value)
                if told.trial.knob == name or len(self._blamed[name, sign]) > 1:
                    self._edges[name, sign] = (min if sign > 0 else max)(self._blamed[name, sign])

    def _move(self, reach: float) -> None:
        response = Response(self.knobs, self._known(), self.incumbent, self.sd, self.prior)
        allowed = self._allowed()
        found = self.mend(response.lowest(self.incumbent, reach, allowed)[0])
        if not self._runs(found):
            found = self._within_what_ran(response, found, reach, allowed)
        self.incumbent = found

    def _within_what_ran(self, response: Response, wished: Constants, reach: float, allowed: dict[str, list[Any]]) -> Constants:
        """The lowest point among sizes that ran, the nearest to the wished ones first."""
        heavy, wish = [n for n, k in self.knobs.items() if k.weighs], self._size(wished)
        near = sorted(self._fits, key=lambda size: sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(size, wish, strict=True)))
        found: list[tuple[float, Constants]] = []
        for size in near[:8]:
            fixed = dict(zip(heavy, size, strict=True))
            point, value = response.lowest({**self.incumbent, **fixed}, reach, {**allowed, **{n: [v] for n, v in fixed.items()}})
            mended = self.mend(point)
            if self._runs(mended):
                found.append((value, mended))
        return min(found, key=lambda f: f[0])[1] if found else dict(self.ran)

    def _known(self) -> list[Datum]:
        now, known = self.rung, []
        for told, stage in self._data:
            rung = self.rungs[stage]
            octaves = math.log2(rung.budget_s / now.budget_s) if rung.budget_s and now.budget_s else 0.0
            octaves -= TYPE_OCTAVES * (now.confirm - rung.confirm)
            weight = PRUNED_WEIGHT if told.predicted else 1.0
            known.append(Datum(told.trial.constants, float(told.value or 0.0), str(stage), octaves, weight))
        return known

    @property
    def sd(self) -> float:
        """The noise of repeats, drawn towards a guess while they are few."""
        own = pooled(self._groups)
        noise = self.floor if self.floor is not None and self.floor.dof > own.dof else own
        return usual_noise(noise.sd, noise.dof, spread(self._known(), self.prior))

    def _allowed(self) -> dict[str, list[Any]]:
        """Values within what ran, for sizes (beyond may not fit the memory) and for knobs with an edge."""
        limits: dict[str, list[Any]] = {}
        for name, knob in self.knobs.items():
            beyond = self._edges.get((name, -1), -math.inf) >= self.incumbent[name] or self.incumbent[name] >= self._edges.get(
                (name, 1), math.inf
            )
            if knob.kind in SIZES or (name, 1) in self._edges or (name, -1) in self._edges:
                ran = [t.trial.constants[name] for t, _ in self._data]
                limits[name] = [min(ran), max(ran)] if beyond else sorted({min(ran), max(ran), self.incumbent[name]}, key=float)
        return limits

    def _size(self, constants: Constants) -> tuple[Any, ...]:
        return tuple(constants[name] for name, knob in self.knobs.items() if knob.weighs)

    def _runs(self, constants: Constants) -> bool:
        """Whether sizes are not known to fail: they ran, or are not at least as large as some that did not."""
        size = self._size(constants)
        return size in self._fits or not any(all(a >= b for a, b in zip(size, bad, strict=True)) for bad in self._barren if bad)
