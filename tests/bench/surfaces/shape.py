"""What the surfaces here have in common: a table of terms, each with an optimum that may move with the budget and with the GPU type.

A surface is a table of `Term`s, pairs that interact, and its noise; `run` gives what one run of it would come to. Distances are steps as
people take them (a doubling, half of 1 - beta, a fifth of the schedule).
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

SPEED = {"H100": 1.0, "H200": 1.09}
MEMORY_GIB = {"H100": 80, "H200": 141}
SEQ_LEN, HEAD_DIM = 2048, 128
LOSS_PER_OCTAVE = 0.036  # a doubling of the compute


@dataclass(frozen=True, slots=True)
class Term:
    """`weight` × distance ** `power` from `best`; each doubling of the budget moves the optimum by `drift`, an H200 by `flip`."""

    best: float
    weight: float
    scale: str = "log2"  # log2, beta (1 - value), or a number: the length of one step
    power: float = 2.0
    drift: float = 0.0
    flip: float = 0.0

    def distance(self, value: float, octaves: float, gpu: str) -> float:
        """Signed steps from the optimum."""
        return self.to(value) - self.to(self.best) - self.drift * octaves - (self.flip if gpu == "H200" else 0.0)

    def to(self, value: float) -> float:
        """The coordinate of a value."""
        if self.scale == "log2":
            return math.log2(max(value, 1e-6))
        if self.scale == "beta":
            return -math.log2(max(1 - value, 1e-6))
        return value / float(self.scale)


@dataclass(frozen=True, slots=True)
class Result:
    """One run; `curve` maps the share of the budget to the smoothed training loss in nats."""

    outcome: str
    val_bpb: float | None
    training_s: float
    curve: Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Shape:
    """A whole surface: its floor at 300 s on an H100, its terms, and pairs of constants that depend on each other."""

    floor: float
    terms: Mapping[str, Term]
    pairs: Mapping[tuple[str, str], float]

    def value(self, c: Mapping[str, float], gpu: str, budget_s: float) -> float:
        """bits per byte without noise."""
        octaves = math.log2(budget_s / 300 * SPEED[gpu])
        steps = {name: term.distance(c[name], octaves, gpu) for name, term in self.terms.items()}
        found = self.floor - LOSS_PER_OCTAVE * octaves
        found += sum(self.terms[name].weight * abs(x) ** self.terms[name].power for name, x in steps.items())
        return found + sum(w * max(-2.0, min(2.0, steps[a])) * max(-2.0, min(2.0, steps[b])) for (a, b), w in self.pairs.items())


def run(
    shape: Shape, c: Mapping[str, float], gpu: str, budget_s: float, seed: int, noise_sd: float, flaky: float, short_noise: float = 0.0
) -> Result:
    """What one run gives; `short_noise` is the power with which the noise grows as the budget shrinks."""
    width = math.ceil(c["DEPTH"] * c["ASPECT_RATIO"] / HEAD_DIM) * HEAD_DIM
    rounded = {**c, "ASPECT_RATIO": width / c["DEPTH"]}
    rng = _rng(sorted(rounded.items()), gpu, budget_s, seed)
    need_gib = 45 * (c["DEVICE_BATCH_SIZE"] / 128) * (width / 512) ** 0.8 * (c["DEPTH"] / 8)
    if c["TOTAL_BATCH_SIZE"] % (c["DEVICE_BATCH_SIZE"] * SEQ_LEN) or need_gib > MEMORY_GIB[gpu]:
        return Result("crashed", None, 0.0, lambda share: math.nan)
    if rng.random() < flaky:
        return Result("crashed", None, budget_s * rng.uniform(0.02, 0.9), lambda share: 9.0 - 5.0 * share)
    if c["MATRIX_LR"] > 0.13 or c["ADAM_BETA1"] >= 0.987:
        return Result("diverged", None, budget_s * rng.uniform(0.02, 0.2), lambda share: math.nan)
    slow = 0.03 if c["DEVICE_BATCH_SIZE"] > 128 else 0.0  # beyond the cliff a run makes a third of the steps
    final = shape.value(rounded, gpu, budget_s) + slow + rng.gauss(0, noise_sd * (300 / budget_s) ** short_noise)

    def curve(share: float) -> float:
        x = min(max(share, 1e-3), 1.0)
        steps = 900 * SPEED[gpu] * budget_s / 300 * 2**19 / c["TOTAL_BATCH_SIZE"]
        return 2.9 * final + 5.5 * math.exp(-x * steps / 60) + 0.4 * (1 - x) + _rng(seed, gpu, round(x, 3)).gauss(0, 0.004)

    return Result("completed", round(final, 6), budget_s, curve)


def _rng(*key: object) -> random.Random:
    return random.Random(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big"))
