"""The noise floor of a class, and what a gain is worth against it.

Noise is the standard deviation between repeats of one source in one class at one budget, pooled over sources. A gain is clear when a
two-sided t test at 95 % says so; with few repeats the bar is high, and without repeats the answer is "unknown", never a guess.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.975  # two-sided 95 %
CLEAR, WITHIN, UNKNOWN = "clear", "within noise", "unknown"


@dataclass(frozen=True, slots=True)
class Noise:
    """Pooled standard deviation of repeats and its degrees of freedom; sd None when nothing was repeated."""

    sd: float | None
    dof: int


@dataclass(frozen=True, slots=True)
class Gain:
    """How much better a mean is (positive is better), its standard error, half the width of its 95 % interval, and the badge."""

    value: float
    se: float | None
    half_width: float | None
    badge: str


def pooled(groups: Iterable[Sequence[float]]) -> Noise:
    """Within-group variance pooled by degrees of freedom; non-finite values are left out."""
    dof, squares = 0, []
    for group in groups:
        values = [x for x in group if math.isfinite(x)]
        if len(values) > 1:
            mean = math.fsum(values) / len(values)
            squares += [(x - mean) ** 2 for x in values]
            dof += len(values) - 1
    return Noise(math.sqrt(math.fsum(squares) / dof), dof) if dof else Noise(None, 0)


def gain(new: Sequence[float], base: Sequence[float], noise: Noise) -> Gain:
    """Gain of `new` over `base`, both lists of repeats of one source. Raised: ValueError when either is empty.

    Repeats that agree to the last digit measure no noise (the same seed on a deterministic script): the gain is unknown then, not clear.
    """
    if not new or not base:
        raise ValueError("a gain needs a result on each side")
    value = math.fsum(base) / len(base) - math.fsum(new) / len(new)
    if not noise.sd:
        return Gain(value, None, None, UNKNOWN)
    se = noise.sd * math.sqrt(1 / len(new) + 1 / len(base))
    half = t_quantile(CONFIDENCE, noise.dof) * se
    return Gain(value, se, half, CLEAR if abs(value) > half else WITHIN)


def smallest_clear_gain(noise: Noise, repeats_new: int = 1, repeats_base: int = 1) -> float | None:
    """The least difference of two means that would count as clear; None without a noise floor."""
    if not noise.sd:
        return None
    return t_quantile(CONFIDENCE, noise.dof) * noise.sd * math.sqrt(1 / repeats_new + 1 / repeats_base)


@functools.lru_cache(maxsize=1024)
def t_quantile(p: float, dof: int) -> float:
    """Quantile of Student's t for 0.5 <= p < 1, by bisection of its distribution function."""
    if dof < 1 or not 0.5 <= p < 1:
        raise ValueError(f"t_quantile({p}, {dof})")
    low, high = 0.0, 1.0
    while t_cdf(high, dof) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, dof) < p else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, dof: int) -> float:
    """Distribution function of Student's t, through the regularised incomplete beta function."""
    tail = 0.5 * _beta(dof / (dof + t * t), dof / 2, 0.5)
    return 1 - tail if t >= 0 else tail


def _beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b), by Lentz's continued fraction (Abramowitz and Stegun 26.5.8)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d, fraction = 1.0, 0.0, 1.0
    for i in range(400):
        m = i // 2
        if i == 0:
            numerator = 1.0
        elif i % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (_away(1 + numerator * d, tiny))
        c = _away(1 + numerator / c, tiny)
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * (fraction - 1)


def _away(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
