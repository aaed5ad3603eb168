"""Pictures of a night as SVG text: the progress of val_bpb, and what each GPU did when. Standard library only, no fonts, no scripts.

Every text from outside is cleaned and escaped; non-finite numbers never reach a coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from runner.text import one_line

At = Callable[[float], float]
INK, QUIET, GRID = "#22262c", "#7a828e", "#e4e7eb"
BEST, KEPT, DOT = "#2f7a3b", "#c2571a", "#9db4d0"
OUTCOMES = {"completed": "#7fae87", "crashed": "#c9595f", "diverged": "#c9595f", "pruned": "#b9b4c9", "cancelled": "#c9c4b4"}
OTHER = "#d9a441"
FONT = 'font-family="ui-monospace, Menlo, Consolas, monospace"'


@dataclass(frozen=True, slots=True)
class Dot:
    """One result: hours since the start, val_bpb, and whether it was kept; the label is shown for kept ones."""

    hours: float
    value: float
    kept: bool
    label: str


@dataclass(frozen=True, slots=True)
class Bar:
    """One run on one GPU: from and to in hours, its outcome, and the hours of counted training in it."""

    lane: str
    start: float
    end: float
    outcome: str
    label: str


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values between two bounds."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / most
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough)
    first = math.ceil(low / step) * step
    return [first + i * step for i in range(int((high - first) / step + 1e-9) + 1)]


def time_marks(hours: float) -> tuple[str, list[tuple[float, str]]]:
    """The unit of a time axis, and its marks: (hours, text)."""
    if hours >= 2:
        return "hours", [(h, f"{h:g}") for h in ticks(0.0, hours, 8)]
    return "minutes", [(m / 60, f"{m:g}") for m in ticks(0.0, hours * 60, 8)]


def best_so_far(dots: Sequence[Dot]) -> list[Dot]:
    """The results that were better than all before them."""
    out: list[Dot] = []
    for dot in sorted(dots, key=lambda d: d.hours):
        if not out or dot.value < out[-1].value:
            out.append(dot)
    return out


def progress_svg(dots: Sequence[Dot], title: str, *, width: int = 960, height: int = 480) -> str:
    """val_bpb of every run over time, the best so far as steps, kept runs labelled; the worst tenth is left out of the range."""
    good = [d for d in dots if math.isfinite(d.value) and math.isfinite(d.hours)]
    if not good:
        return _frame(width, 80, title, [_text(width / 2, 56, "no run has a result yet", QUIET, "middle")])
    values = sorted(d.value for d in good)
    best = best_so_far(good)
    low, high = values[0], max(values[int(0.9 * (len(values) - 1))], best[0].value)
    pad = (high - low) * 0.06 or abs(low) * 0.01 or 1.0
    low, high, last = low - pad, high + pad, max(d.hours for d in good) or 1.0
    left, right, top, bottom = 78, width - 24, 44, height - 46

    def x(hours: float) -> float:
        return left + (right - left) * hours / last

    def y(value: float) -> float:
        return bottom - (bottom - top) * (value - low) / (high - low)

    body = [_axes(x, y, ticks(low, high), last, (left, right, top, bottom))]
    body += [f'<circle cx="{x(d.hours):.1f}" cy="{y(d.value):.1f}" r="3" fill="{DOT}"/>' for d in good if not d.kept and d.value <= high]
    path = f"M {x(best[0].hours):.1f} {y(best[0].value):.1f}"
    path += "".join(f" H {x(d.hours):.1f} V {y(d.value):.1f}" for d in best[1:]) + f" H {right}"
    body.append(f'<path d="{path}" fill="none" stroke="{BEST}" stroke-width="2"/>')
    for dot in (d for d in good if d.kept and d.value <= high):
        body.append(f'<circle cx="{x(dot.hours):.1f}" cy="{y(dot.value):.1f}" r="4.5" fill="{KEPT}"/>')
        anchor = "end" if x(dot.hours) > (left + right) / 2 else "start"
        shift = -8 if anchor == "end" else 8
        body.append(_text(x(dot.hours) + shift, y(dot.value) - 6, one_line(dot.label, 44), KEPT, anchor, 11))
    legend = f"{len(good)} results · {sum(d.kept for d in good)} kept · best {values[0]:.6f}"
    return _frame(width, height, title, [*body, _text(left, bottom + 36, legend, QUIET, "start", 11)])


def slots_svg(bars: Sequence[Bar], title: str, *, lanes: Iterable[str] = (), width: int = 960) -> str:
    """A lane for each GPU (those of `lanes` also without a run), a bar for each run in the colour of its outcome: gaps were idle."""
    lanes = sorted({*lanes, *(b.lane for b in bars)})
    good = [b for b in bars if math.isfinite(b.start) and math.isfinite(b.end) and b.end > b.start]
    if not good:
        return _frame(width, 80, title, [_text(width / 2, 56, "no run has started yet", QUIET, "middle")])
    left, right, top, high = 150, width - 24, 44, 16
    last = max(b.end for b in good)
    bottom = top + high * len(lanes)

    def x(hours: float) -> float:
        return left + (right - left) * max(0.0, hours) / last

    body = [_text(left - 8, top + high * (i + 0.72), one_line(lane, 20), INK, "end", 11) for i, lane in enumerate(lanes)]
    for bar in good:
        at = top + high * lanes.index(bar.lane)
        colour = OUTCOMES.get(bar.outcome, OTHER)
        tip = escape(one_line(f"{bar.label} {bar.outcome}", 80))
        body.append(
            f'<rect x="{x(bar.start):.2f}" y="{at + 2}" width="{max(0.6, x(bar.end) - x(bar.start) - 0.4):.2f}" height="{high - 4}" '
            f'fill="{colour}"><title>{tip}</title></rect>'
        )
    unit, marks = time_marks(last)
    for hour, name in marks:
        body.append(f'<line x1="{x(hour):.1f}" y1="{bottom}" x2="{x(hour):.1f}" y2="{bottom + 5}" stroke="{QUIET}"/>')
        body.append(_text(x(hour), bottom + 20, name, QUIET, "middle", 11))
    seen = sorted({b.outcome for b in good}, key=lambda o: (o != "completed", o))
    place = left
    for outcome in seen:
        body.append(f'<rect x="{place}" y="{bottom + 30}" width="10" height="10" fill="{OUTCOMES.get(outcome, OTHER)}"/>')
        body.append(_text(place + 15, bottom + 39, one_line(outcome, 16), QUIET, "start", 11))
        place += 30 + 7 * len(outcome)
    body.append(_text(right, bottom + 39, unit, QUIET, "end", 11))
    return _frame(width, bottom + 52, title, body)


def _axes(x: At, y: At, rows: list[float], last: float, box: tuple[float, float, float, float]) -> str:
    left, right, top, bottom = box
    digits = max(0, min(6, 1 - math.floor(math.log10(rows[1] - rows[0])))) if len(rows) > 1 else 4
    out = []
    for value in rows:
        out.append(f'<line x1="{left}" y1="{y(value):.1f}" x2="{right}" y2="{y(value):.1f}" stroke="{GRID}"/>')
        out.append(_text(left - 8, y(value) + 4, f"{value:.{digits}f}", QUIET, "end", 11))
    unit, marks = time_marks(last)
    out += [_text(x(hour), bottom + 18, name, QUIET, "middle", 11) for hour, name in marks]
    out.append(f'<line x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}" stroke="{QUIET}"/>')
    out.append(_text(right, bottom + 36, unit, QUIET, "end", 11))
    return "".join([*out, _text(left - 8, top - 8, "val_bpb", QUIET, "end", 11)])


def _text(x: float, y: float, text: str, colour: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" text-anchor="{anchor}" {FONT}>{escape(text)}</text>'


def _frame(width: int, height: int, title: str, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    name = f'<text x="20" y="24" fill="{INK}" font-size="14" font-weight="bold" {FONT}>{escape(one_line(title, 90))}</text>'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', name, *body, "</svg>"]) + "\n"
