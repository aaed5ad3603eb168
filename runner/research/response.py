"""A smooth guess at how val_bpb depends on constants, from all runs so far: a Gaussian process over coordinates around a center.

Every constant has a slope, a bend and some roughness of its own, pairs have a weak interaction, and each kind of run (budget, GPU type) has
a level of its own. Runs at another budget share the curves; slopes may drift with the logarithm of the budget, and what sets the size of
batch and model is expected to grow with it (McCandlish et al. 2018; Hoffmann et al. 2022). Rasmussen and Williams, chapter 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runner.research.knobs import Knob

Array = npt.NDArray[np.float64]
Constants = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prior:
    """What is expected before any run, in the metric's unit for one step of a knob; `Response` scales it to what the runs show."""

    slope: float = 0.004
    bend: float = 0.0018  # optima are valleys more often than ridges
    bend_sd: float = 0.003
    rough: float = 0.0015  # of one knob's curve beside the parabola, over `length` steps
    length: float = 0.8
    cross: float = 0.0004
    drift: float = 0.0005  # of a slope, for each doubling of the budget
    growth_drift: float = 0.001  # of the slope of a knob that grows with the budget
    growth: float = 0.35  # how far such a knob's best value moves for each doubling
    far: float = 0.00015  # misfit, times the squared distance from the center
    level: float = 0.02
    usual: float = 0.003  # median deviation of results for which these numbers hold


@dataclass(frozen=True, slots=True)
class Datum:
    """A result at some constants; `octaves` are doublings of compute against the runs that count, `weight` divides its variance."""

    constants: Constants
    value: float
    block: str = ""
    octaves: float = 0.0
    weight: float = 1.0


def spread(data: Sequence[Datum], prior: Prior) -> float:
    """By how much the prior is to be scaled up: results further apart than usual belong to steeper surfaces."""
    off = []
    for block in {d.block for d in data}:
        values = np.array([d.value for d in data if d.block == block])
        off += list(np.abs(values - np.median(values)))
    return max(float(np.median(off)) / prior.usual, 1.0) if off else 1.0


class Response:
    """The posterior mean over constants, relative to the level of the runs that count."""

    def __init__(self, knobs: Mapping[str, Knob], data: Sequence[Datum], center: Constants, sd: float, prior: Prior) -> None:
        self.knobs, self.names, self.prior = knobs, list(knobs), prior
        self.scale = spread(data, prior)
        self.center = self.at(center)
        self.grows = np.array([float(knobs[n].grows) for n in self.names])
        self.x: Array = np.array([self.at(d.constants) for d in data]) - self.center
        self.z: Array = np.array([[d.octaves] for d in data])
        y = np.array([d.value for d in data])
        blocks = sorted({d.block for d in data})
        levels = np.array([[float(d.block == b) for b in blocks] for d in data])
        usual = levels @ np.array([np.median(y[levels[:, i] > 0]) for i in range(len(blocks))])
        far = self.scale * prior.far * np.sum(self.x**2, axis=1)
        noise = np.diag(sd**2 / np.array([d.weight for d in data]) + far**2)
        shared = (self.scale * prior.level) ** 2 * levels @ levels.T
        inverse: Array = np.linalg.inv(self._kernel(self.x, self.z) + noise + shared)
        n = len(self.names)
        self.bends: Array = np.full(n, self.scale * prior.bend)
        for _ in range(2):  # the growth of an optimum is a drift in proportion to the bend, which the first pass tells
            self.alpha: Array = inverse @ (y - usual - self._mean(self.x, self.z))
            found = self.scale * prior.bend + (self.scale * prior.bend_sd) ** 2 * (self.x**2).T @ self.alpha
            self.bends = np.clip(found, 0.3 * self.scale * prior.bend, 6 * self.scale * prior.bend)

    def at(self, constants: Constants) -> Array:
        """The coordinates of some constants."""
        return np.array([knob.to(constants[name]) for name, knob in self.knobs.items()])

    def change(self, points: Array) -> Array:
        """What is expected at coordinates relative to the center, [points, knobs], but for a constant."""
        here = np.zeros((len(points), 1))
        return np.asarray(self._mean(points, here) + self._kernel(points, here, self.x, self.z) @ self.alpha)

    def _mean(self, x: Array, z: Array) -> Array:
        bend = np.full(len(self.names), self.scale * self.prior.bend)
        return np.asarray(x**2 @ bend - (x * z) @ (2 * self.bends * self.prior.growth * self.grows))

    def _kernel(self, x: Array, z: Array, x2: Array | None = None, z2: Array | None = None) -> Array:
        p, n = self.prior, len(self.names)
        other, other_z = (x, z) if x2 is None or z2 is None else (x2, z2)
        drift = np.where(self.grows > 0, p.growth_drift, p.drift)
        sds = np.concatenate([np.full(n, p.slope), np.full(n, p.bend_sd), drift]) ** 2
        found: Array = (np.hstack([x, x**2, x * z]) * sds) @ np.hstack([other, other**2, other * other_z]).T
        for i in range(n):
            found += p.rough**2 * np.exp(-((x[:, i, None] - other[None, :, i]) ** 2) / (2 * p.length**2))
        found += p.cross**2 / 2 * ((x @ other.T) ** 2 - x**2 @ (other**2).T)
        return np.asarray(self.scale**2 * found)

    def lowest(self, start: Constants, reach: float, allowed: Mapping[str, Sequence[Any]]) -> tuple[Constants, float]:
        """The lowest point within `reach` steps of the center, by descents along one knob at a time; with its expected change.

        `allowed` gives the values that a knob may take where that is limited; a knob with one value stays.
        """
        now, x = dict(start), self.at(start) - self.center
        for _ in range(8):
            moved = False
            for i, (name, knob) in enumerate(self.knobs.items()):
                values = self._values(name, knob, reach, now[name], allowed.get(name))
                points = np.repeat(x[None], len(values), 0)
                points[:, i] = [knob.to(v) - self.center[i] for v in values]
                best = int(np.argmin(self.change(points)))
                if values[best] != now[name]:
                    now[name], x[i], moved = values[best], points[best, i], True
            if not moved:
                break
        return now, float(self.change(x[None])[0])

    def _values(self, name: str, knob: Knob, reach: float, now: Any, allowed: Sequence[Any] | None) -> list[Any]:
        if allowed is not None and len(allowed) == 1:
            return list(allowed)
        center = self.center[self.names.index(name)]
        tried = {now, *(knob.of(float(center + step)) for step in np.linspace(-reach, reach, 13))}
        if knob.kind in ("pow2", "count"):
            tried |= {knob.of(center + 1), knob.of(center - 1)}
        if allowed is not None:
            low, high = min(allowed), max(allowed)
            tried = {v for v in tried if low <= v <= high} or {now}
        return sorted(tried)


def usual_noise(sd: float | None, dof: int, scale: float, guess: float = 1e-3, guess_dof: int = 4) -> float:
    """Noise from repeats, drawn towards a guess by a few degrees of freedom: two repeats that happen to agree measure nothing."""
    return math.sqrt(((sd or 0.0) ** 2 * dof + (guess * scale) ** 2 * guess_dof) / (dof + guess_dof))
