"""The GPU under a run's curve: use, power and heat, each sample below the point of the curve that was trained at that moment.

A curve counts training (steps, or a share of the budget), a sample has a wall clock. What ties them is when each point was reached:
the time of the steps up to it, from the first step on. Warm-up steps, which no budget counts, and a simulated clock fall out of that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from runner.records import Json, Point, Sample

from .lines import Line, fit, spark
from .words import number

ROWS = (("use", "util_pct", "%", 100.0), ("draw", "power_w", "W", None), ("heat", "temp_c", "°C", None))
Anchor = tuple[float, float, float]  # wall time, share of the budget, step


def reached(run: Json, points: Sequence[Point], first_step_at: float, last_output_at: float | None) -> list[Anchor]:
    """When each point of the curve was reached, oldest first."""
    budget_s = run.get("budget_s") or 1.0
    known = [p for p in points if p.share is not None]
    spent, out, before = 0.0, list[Anchor](), None
    for point in known:
        share = point.share or 0.0
        if before is None:
            spent = point.step * (point.dt_ms or 0.0) / 1000 or share * budget_s
        elif point.dt_ms is not None:
            spent += max(0, point.step - before.step) * point.dt_ms / 1000
        else:
            spent += max(0.0, share - (before.share or 0.0)) * budget_s
        out.append((spent, share, float(point.step)))
        before = point
    pace = _pace(run, spent, first_step_at, last_output_at)
    return [(first_step_at + pace * s, share, step) for s, share, step in out]


def _pace(run: Json, spent_s: float, first_step_at: float, last_output_at: float | None) -> float:
    """Seconds of our clock in a second of training: about 1, less on a simulated clock."""
    ended, started, wall_s = run.get("ended_at"), run.get("started_at"), run.get("wall_s")
    if ended is None:
        return (last_output_at - first_step_at) / spent_s if last_output_at and spent_s > 0 and last_output_at > first_step_at else 1.0
    pace = (ended - started) / wall_s if started and wall_s and ended > started else 1.0
    return min(pace, (ended - first_step_at) / spent_s) if spent_s > 0 and ended > first_step_at else pace


def trained_at(anchors: Sequence[Anchor], at: float) -> tuple[float, float] | None:
    """(share, step) at a wall time, between the points around it; None before the first step and after the last point."""
    i = bisect_right(anchors, (at, float("inf"), float("inf")))
    if i == len(anchors):
        return None if not anchors or at > anchors[-1][0] + 1.0 else anchors[-1][1:]
    then, share, step = anchors[i]
    if i == 0:
        return None if at < then - 5.0 else (share, step)
    t0, share0, step0 = anchors[i - 1]
    part = (at - t0) / (then - t0) if then > t0 else 1.0
    return (share0 + part * (share - share0), step0 + part * (step - step0))


def telemetry_lines(
    run: Json, samples: Sequence[Sample], anchors: Sequence[Anchor], width: int, margin: int, axis: str, span: tuple[float, float]
) -> list[Line]:
    """One row each, under the columns of the chart above."""
    budget_s, wide = run.get("budget_s") or 1.0, width - margin - 2
    if not samples or not anchors or wide < 10:
        return []
    places: list[int | None] = []
    for sample in samples:
        found = trained_at(anchors, sample.at)
        x = None if found is None else found[1] if axis == "step" else found[0] * (budget_s if axis == "t" else 1.0)
        places.append(None if x is None else max(0, min(wide - 1, int((x - span[0]) / (span[1] - span[0]) * wide))))
    used = sorted({p for p in places if p is not None})
    gap = 2 + (2 * (used[-1] - used[0]) // max(1, len(used) - 1) if len(used) > 1 else 2)
    out = []
    for name, key, unit, high in ROWS:
        drawn: list[float | None] = [None] * wide
        for sample, place in zip(samples, places, strict=True):
            value: Any = getattr(sample, key)
            if place is not None and value is not None:
                drawn[place] = value if drawn[place] is None else max(value, drawn[place] or 0.0)
        held(drawn, gap)
        last = next((getattr(s, key) for s in reversed(samples) if getattr(s, key) is not None), None)
        label = f"{name} {number(last, 0, unit)}"
        out.append(Line((fit(label, margin, "right") + " ", "muted"), (spark(drawn, wide, 0 if high else None, high), "bar")))
    return out


def held(cells: list[float | None], most: int) -> None:
    """Fill gaps of at most so many columns with the value before them: a sample stands for the time until the next one."""
    gap = most
    for at, value in enumerate(cells):
        if value is not None:
            gap = 0
        elif gap < most and at and any(v is not None for v in cells[at : at + most]):
            cells[at] = cells[at - 1]
            gap += 1
