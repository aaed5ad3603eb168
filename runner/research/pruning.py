"""Stopping hopeless runs early, and what it would have cost.

Finished runs of the same class and budget say how a smoothed loss at some share of the budget goes with the final val_bpb (a straight line
with its prediction interval). A run is hopeless when it is predicted to end in the worse half and even the good end of its interval is
worse than the good results so far. Baselines, repeats, promotions and verifications are never judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.records import Point, Purpose
from runner.research.noise import t_quantile

PRUNABLE = frozenset({Purpose.EXPERIMENT, Purpose.TUNE})
GRID = tuple(round(0.05 * i, 2) for i in range(1, 20))  # shares of the budget at which curves are compared


@dataclass(frozen=True, slots=True)
class Mode:
    """When a run may be stopped: from which share on, how sure (one-sided), after how many finished runs, and below which of them."""

    from_share: float
    confidence: float
    finished: int
    certain: float  # one-sided, that a lower loss goes with a better end at all; else a loss says nothing yet
    quantile: float  # of finished results, which even the good end of the interval must be worse than


MODES = {"cautious": Mode(0.40, 0.99, 10, 0.999, 0.25), "eager": Mode(0.20, 0.90, 6, 0.99, 0.10)}


@dataclass(frozen=True, slots=True)
class Curve:
    """A finished run: loss at each share of GRID (None where it has no point yet), and its final val_bpb."""

    run_id: str
    losses: tuple[float | None, ...]
    final: float | None
    budget_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hopeless:
    """Why a run may be stopped: its predicted val_bpb and the good end of the interval, against the bar and the best."""

    share: float
    loss: float
    predicted: float
    at_best: float
    bar: float
    best: float
    finished: int

    @property
    def evidence(self) -> str:
        """One sentence for the row and the audit trail."""
        return (
            f"at {100 * self.share:.0f} % of its budget a loss of {self.loss:.4f} predicts a val_bpb of {self.predicted:.6f}, "
            f"{self.at_best:.6f} at best; so say {self.finished} finished runs of its class, of which the good ones have "
            f"{self.bar:.6f} and the best {self.best:.6f}"
        )


def sampled(points: Iterable[Point]) -> tuple[float | None, ...]:
    """The loss at each share of GRID: the last finite one at or before it, at most 5 % of the budget old."""
    known = sorted((p.share, p.loss) for p in points if p.share is not None and p.loss is not None and math.isfinite(p.loss))
    out: list[float | None] = []
    at = 0
    last: tuple[float, float] | None = None
    for share in GRID:
        while at < len(known) and known[at][0] <= share + 1e-9:
            last = known[at]
            at += 1
        out.append(last[1] if last is not None and share - last[0] <= 0.05 + 1e-9 else None)
    return tuple(out)


def judge(mode: str, share: float | None, losses: Sequence[float | None], finished: Sequence[Curve], pruned: int = 0) -> Hopeless | None:
    """Whether a run at `share` with these losses is hopeless against finished runs of its class and budget; None while it is not.

    `pruned` counts the runs stopped before: they are the worse ones, and without them the bar would rise by its own doing.
    """
    rule = MODES.get(mode)
    if rule is None or share is None:
        return None
    at = max((i for i, s in enumerate(GRID) if s <= share + 1e-9), default=-1)
    if at < 1 or GRID[at] < rule.from_share:
        return None
    # Two looks must agree: among nineteen, one may be certain by chance.
    before = _hopeless(rule, at - 1, losses, finished, pruned)
    return _hopeless(rule, at, losses, finished, pruned) if before is not None else None


def _hopeless(rule: Mode, at: int, losses: Sequence[float | None], finished: Sequence[Curve], pruned: int) -> Hopeless | None:
    if losses[at] is None:
        return None
    pairs = [(c.losses[at], c.final) for c in finished]
    known = [(x, y) for x, y in pairs if x is not None and y is not None and math.isfinite(y)]
    if len(known) < rule.finished:
        return None
    loss = float(losses[at] or 0.0)
    predicted, half = _predict(known, loss, rule)
    finals = sorted(y for _, y in known)
    bar = finals[min(int(rule.quantile * (len(finals) + pruned)), len(finals) - 1)]
    if half is None or predicted <= finals[len(finals) // 2] or predicted - half <= bar:
        return None
    return Hopeless(GRID[at], loss, predicted, predicted - half, bar, finals[0], len(known))


def _predict(known: Sequence[tuple[float, float]], x: float, rule: Mode) -> tuple[float, float | None]:
    """Value at x of the least-squares line, and half of its one-sided prediction interval (Draper and Smith 1.4).

    None for the interval where the line's slope is not certain enough.
    """
    n = len(known)
    mean_x, mean_y = math.fsum(a for a, _ in known) / n, math.fsum(b for _, b in known) / n
    sxx = math.fsum((a - mean_x) ** 2 for a, _ in known)
    if sxx <= 0 or n < 3:
        return mean_y, None
    slope = math.fsum((a - mean_x) * (b - mean_y) for a, b in known) / sxx
    left = math.fsum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in known)
    sd = math.sqrt(left / (n - 2))
    if slope <= 0 or slope * math.sqrt(sxx) <= t_quantile(rule.certain, n - 2) * sd:
        return mean_y, None
    away = (x - mean_x) / math.sqrt(sxx)
    half = t_quantile(rule.confidence, n - 2) * sd * math.hypot(1, 1 / math.sqrt(n), away)
    return mean_y + slope * (x - mean_x), half if math.isfinite(half) else None


@dataclass(frozen=True, slots=True)
class Replay:
    """What pruning would have done to runs that finished: seconds saved and what was lost by it."""

    mode: str
    runs: int
    pruned: int
    saved_s: float
    total_s: float
    wrong: int  # would have beaten the best at that time
    lost_good: int  # would have ended among the best tenth of all
    stops: tuple[tuple[str, float], ...]


def replay(mode: str, curves: Sequence[Curve]) -> Replay:
    """Judge finished runs again in their order of arrival, each against those that had finished before it."""
    finals = sorted(c.final for c in curves if c.final is not None)
    good = finals[max(len(finals) // 10 - 1, 0)] if finals else math.inf
    before: list[Curve] = []
    stops: list[tuple[str, float]] = []
    saved = total = 0.0
    wrong = lost_good = 0
    for curve in curves:
        total += curve.budget_s
        stop = next((h for s in GRID if (h := judge(mode, s, curve.losses, before, len(stops))) is not None), None)
        if stop is not None:
            stops.append((curve.run_id, stop.share))
            saved += (1 - stop.share) * curve.budget_s
            wrong += curve.final is not None and curve.final < stop.best
            lost_good += curve.final is not None and curve.final <= good
        else:
            before.append(curve)  # a pruned run teaches nothing about the end
    return Replay(mode, len(curves), len(stops), saved, total, wrong, lost_good, tuple(stops))
