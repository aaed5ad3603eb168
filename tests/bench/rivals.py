"""Searches to measure ours against, by ask and tell: greedy one at a time, and plain waves.

`Waves`: repeat the base, change one constant at a time around it, lay a parabola per constant through all results so far, step to where
they are lowest, and check that step with repeats against the old base.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.research.knobs import Knob, knobs_of
from runner.research.noise import pooled
from runner.research.strategy import SIZES, Constants, Mend, Told, Trial

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Seen:
    """A result in the model's memory."""

    constants: Constants
    value: float
    weight: float = 1.0


class Greedy:
    """One change at a time, kept when it measured better than anything before: what an agent does with one GPU."""

    def __init__(self, start: Mapping[str, Any], *, seed: int = 0, knobs: list[str] | None = None, mend: Mend = dict) -> None:
        self.incumbent: Constants = dict(start)
        self.mend = mend
        self.knobs = knobs_of(start, knobs)
        self.rng = random.Random(seed)
        self.best: float | None = None
        self.todo: list[tuple[str, int]] = []
        self.step, self.kept = 1.0, True
        self.move: tuple[str, int] | None = None

    def ask(self) -> list[Trial]:
        """One trial: the start, the last winning direction again, or the next of a shuffled round."""
        if self.best is None:
            return [Trial(dict(self.incumbent), "base")]
        for _ in range(4 * len(self.knobs) + 4):
            if self.move is None:
                if not self.todo:
                    self.step = self.step if self.kept else max(self.step / 2, 0.25)
                    self.kept = False
                    self.todo = [(name, sign) for name in self.knobs for sign in (-1, 1)]
                    self.rng.shuffle(self.todo)
                self.move = self.todo.pop()
            name, sign = self.move
            value = self.knobs[name].moved(self.incumbent[name], sign * self.step)
            tried = self.mend({**self.incumbent, name: value})
            if tried[name] != self.incumbent[name]:
                return [Trial(tried, "step", name)]
            self.move = None
        return []

    def tell(self, results: Sequence[Told]) -> None:
        """Keep what measured better; a kept direction is tried again."""
        for told in results:
            if told.value is None or told.predicted or (self.best is not None and told.value >= self.best):
                if self.best is not None:
                    self.move = None
                continue
            self.kept = self.best is not None or self.kept
            self.best, self.incumbent = told.value, dict(told.trial.constants)


@dataclass(frozen=True, slots=True)
class Settings:
    """How `Waves` searches. `caution` weighs the model's uncertainty against a promised gain, `curiosity` for it when picking sides."""

    repeats: int = 4
    old_repeats: int = 2
    caution: float = 0.3
    curiosity: float = 1.0
    reach: float = 1.2
    shrink: float = 0.75
    least_step: float = 0.3
    width: float = 2.0
    slope_prior: float = 0.004
    bend_prior: float = 0.003
    pruned_weight: float = 0.2


@dataclass(slots=True)
class Waves:
    """One-factor waves around a base, a quadratic model of all results, and a checked step to its lowest point."""

    start: Constants
    size: int = 16
    only: list[str] | None = None
    settings: Settings = field(default_factory=Settings)
    budget_s: float | None = None
    confirm: bool = False
    first_step: float = 1.0
    mend: Mend = dict
    incumbent: Constants = field(init=False)
    base: Constants = field(init=False)
    knobs: dict[str, Knob] = field(init=False)
    steps: dict[str, float] = field(init=False)
    data: list[Seen] = field(init=False, default_factory=list)
    groups: list[list[float]] = field(init=False, default_factory=list)
    failed: dict[tuple[str, Any], int] = field(init=False, default_factory=dict)
    barren: list[Constants] = field(init=False, default_factory=list)
    waves: int = field(init=False, default=0)
    still: int = field(init=False, default=0)  # waves in a row whose step was not worth taking

    def __post_init__(self) -> None:
        self.incumbent, self.base = dict(self.start), dict(self.start)
        self.knobs = knobs_of(self.start, self.only)
        self.steps = dict.fromkeys(self.knobs, self.first_step)

    # asking

    def ask(self) -> list[Trial]:
        """Repeats of the base, of the old base while the step is unproven, and one-factor changes until the wave is full."""
        s = self.settings
        trials = [self._trial(self.base, "base") for _ in range(s.repeats)]
        if self.base != self.incumbent:
            trials += [self._trial(self.incumbent, "old") for _ in range(s.old_repeats)]
        model = self._model(self.base) if self.data else None
        sides: list[tuple[float, str, Any]] = []
        for name, knob in self.knobs.items():
            for sign in (1, -1):
                value = self.mend({**self.base, name: knob.moved(self.base[name], sign * self.steps[name])})[name]
                if value != self.base[name] and self.failed.get((name, value), 0) < 2:
                    sides.append((self._appeal(model, name, value), name, value))
        sides.sort(key=lambda side: side[0])
        better: list[tuple[float, str, Any]] = []
        other: list[tuple[float, str, Any]] = []
        seen: set[str] = set()
        for side in sides:
            (other if side[1] in seen else better).append(side)
            seen.add(side[1])
        room = max(self.size - len(trials), 1)
        if model is None:  # the first wave looks both ways
            room = max(room, len(sides))
        trials += [self._trial(self.mend({**self.base, name: value}), "step", name) for _, name, value in (*better, *other)[:room]]
        return trials

    def _trial(self, constants: Constants, role: str, knob: str | None = None) -> Trial:
        return Trial(dict(constants), role, knob, self.budget_s, self.confirm)

    def _appeal(self, model: _Model | None, name: str, value: Any) -> float:
        """What the model promises of a change, its ignorance counted as hope; lower is better."""
        if model is None:
            return 0.0
        change, se = model.change(name, self.knobs[name].to(value))
        return change - self.settings.curiosity * se

    # telling

    def tell(self, results: Sequence[Told]) -> None:
        """Learn, accept or refuse the last step, and take the next."""
        self.waves += 1
        base, old = _values(results, "base"), _values(results, "old")
        self.groups += [base, old]
        self.data += [seen for t in results if (seen := self._seen(t, base)) is not None]
        unproven = self.base != self.incumbent
        if base:
            self._note_failures(results)
        if unproven and not base:
            self.barren.append(self._sizes(self.base))  # the combination does not run, although its parts do
        elif unproven and self._worse(base, old):
            self._shorten(k for k in self.knobs if self.base[k] != self.incumbent[k])
        elif base:
            self.incumbent = dict(self.base)
        self.base = self._step()
        self.still = self.still + 1 if self.base == self.incumbent else 0

    def _seen(self, told: Told, base: Sequence[float]) -> Seen | None:
        """A result for the model. A pruned run's forecast says little more than "worse": it counts as that, and lightly."""
        if told.value is None or (told.predicted and not base):
            return None
        if not told.predicted:
            return Seen(told.trial.constants, told.value)
        level = statistics.mean(base)
        value = max(min(told.value, level + 6 * self.sd), level + 2 * self.sd)
        return Seen(told.trial.constants, value, self.settings.pruned_weight)

    def _worse(self, new: Sequence[float], old: Sequence[float]) -> bool:
        """Whether a step measured worse than where it came from, by more than half a standard error."""
        if not new or not old:
            return False
        return statistics.mean(new) > statistics.mean(old) + 0.5 * self.sd * math.sqrt(1 / len(new) + 1 / len(old))

    @property
    def sd(self) -> float:
        """The noise of repeats; a small guess until there are some."""
        return pooled(self.groups).sd or 1e-3

    def _note_failures(self, results: Sequence[Told]) -> None:
        for told in results:
            if told.trial.knob is not None and told.value is None and told.outcome in ("crashed", "diverged"):
                key = (told.trial.knob, told.trial.constants[told.trial.knob])
                self.failed[key] = self.failed.get(key, 0) + (2 if told.outcome == "diverged" else 1)

    def _shorten(self, names: Any) -> None:
        for name in names:
            self.steps[name] = max(self.steps[name] * self.settings.shrink, self.settings.least_step)

    def _step(self) -> Constants:
        """The model's lowest point within reach of the incumbent, knob by knob; what never ran is not combined."""
        if not self.data:
            return dict(self.incumbent)
        model, new = self._model(self.incumbent), dict(self.incumbent)
        gains: list[tuple[float, str]] = []
        for name, knob in self.knobs.items():
            ran = [seen.constants[name] for seen in self.data]
            here, reach = knob.to(self.incumbent[name]), self.settings.reach * self.steps[name]
            best, choice = 0.0, self.incumbent[name]
            for at in np.linspace(here - reach, here + reach, 25):
                value = knob.of(float(at))
                if knob.kind in SIZES and not min(ran) <= value <= max(ran):
                    continue  # beyond what ran may not fit the memory
                change, se = model.change(name, knob.to(value))
                if change + self.settings.caution * se < best:
                    best, choice = change + self.settings.caution * se, value
            if choice == self.incumbent[name]:
                self._shorten([name])
            else:
                new[name] = choice
                gains.append((best, name))
        gains.sort()
        new = self.mend(new)
        sizes = [name for _, name in gains if self.knobs[name].kind in SIZES]
        while sizes and self._sizes(new) in self.barren:  # give up the least promising size of a combination that does not run
            name = sizes.pop()
            new = self.mend({**new, name: self.incumbent[name]})
        return new

    def _sizes(self, constants: Constants) -> Constants:
        return {name: constants[name] for name, knob in self.knobs.items() if knob.kind in SIZES}

    def _model(self, center: Constants) -> _Model:
        return _Model(self.knobs, self.data, center, self.sd, self.settings)


def _values(results: Sequence[Told], role: str) -> list[float]:
    return [t.value for t in results if t.trial.role == role and t.value is not None and not t.predicted]


class _Model:
    """A Bayesian least-squares fit of slopes and bends, one pair for each knob, around a center; near results count more."""

    def __init__(self, knobs: dict[str, Knob], data: Sequence[Seen], center: Constants, sd: float, s: Settings) -> None:
        self.names = list(knobs)
        self.center = {name: knob.to(center[name]) for name, knob in knobs.items()}
        x = np.array([[knobs[n].to(seen.constants[n]) - self.center[n] for n in self.names] for seen in data], dtype=float)
        y = np.array([seen.value for seen in data], dtype=float)
        near = np.exp(-np.sum(x**2, axis=1) / (4 * s.width**2)) * np.array([seen.weight for seen in data])
        n = len(self.names)
        design = np.hstack([np.ones((len(y), 1)), x, x**2])
        prior = np.array([1.0] + [s.slope_prior] * n + [s.bend_prior] * n)
        expected = np.concatenate([np.zeros(1 + n), np.full(n, 0.6 * s.bend_prior)])  # optima are valleys more often than ridges
        expected[0] = float(np.mean(y))
        weights = near / max(sd, 2e-4) ** 2
        precision = design.T @ (design * weights[:, None]) + np.diag(1 / prior**2)
        covariance: Array = np.linalg.inv(precision)
        beta: Array = expected + covariance @ (design.T @ (weights * (y - design @ expected)))
        self.covariance, self.beta = covariance[1:, 1:], beta[1:]

    def change(self, name: str, at: float) -> tuple[float, float]:
        """What moving one knob to a coordinate changes, with its standard error."""
        i, n = self.names.index(name), len(self.names)
        t = at - self.center[name]
        row = np.zeros(2 * n)
        row[i], row[n + i] = t, t * t
        return float(row @ self.beta), math.sqrt(max(float(row @ self.covariance @ row), 0.0))
