"""Curves in braille: several series with axes, linear or logarithmic, from points to rows of text.

Each column keeps the lowest and the highest value that falls into it, so a spike one step long survives any width; non-finite
values are left out. Pure functions: no Textual, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .lines import Line, fit

Points = Sequence[tuple[float, float | None]]
LARGEST = 1e150
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # braille bits, by column and row of a cell


@dataclass(frozen=True, slots=True)
class Series:
    """A named curve; later series are drawn over earlier ones."""

    name: str
    points: Points
    style: str = ""
    marks: bool = False  # single dots, not joined


@dataclass(frozen=True, slots=True)
class Frame:
    """The ranges of a chart; `log` means the y axis is logarithmic."""

    x0: float
    x1: float
    y0: float
    y1: float
    log: bool = False

    def y_share(self, y: float) -> float | None:
        """Where `y` lies between the bottom (0) and the top (1)."""
        if self.log:
            if y <= 0:
                return None
            return (math.log(y) - math.log(self.y0)) / (math.log(self.y1) - math.log(self.y0))
        return (y - self.y0) / (self.y1 - self.y0)

    def y_at(self, share: float) -> float:
        """The value at a share of the height."""
        if self.log:
            return math.exp(math.log(self.y0) + share * (math.log(self.y1) - math.log(self.y0)))
        return self.y0 + share * (self.y1 - self.y0)


def finite_points(points: Points) -> list[tuple[float, float]]:
    """The points that can be drawn: finite, and small enough for differences to stay finite."""
    return [(float(x), float(y)) for x, y in points if x is not None and y is not None and abs(x) < LARGEST and abs(y) < LARGEST]


def frame_of(series: Sequence[Series], *, log: bool = False, clip: bool = True) -> Frame | None:
    """Ranges that hold every series; None when there is nothing to draw.

    With `clip`, the top leaves out the first twelfth of the x range: there the loss falls so fast that the rest would be a flat line.
    """
    curves = [[p for p in finite_points(s.points) if not log or p[1] > 0] for s in series]
    every = [p for c in curves for p in c]
    if not every:
        return None
    xs, low = [p[0] for p in every], min(p[1] for p in every)
    x0, x1 = min(xs), max(xs)
    high = max(p[1] for p in every)
    if clip:
        later = [[y for x, y in c if x >= x0 + (x1 - x0) / 12] or [y for _, y in c] for c in curves if c]
        knee = max(max(c) for c in later)
        high = min(high, knee + 0.15 * (knee - low))
    if high <= low:
        pad = abs(low) * 0.05 or 1.0
        low, high = (low / 1.05, high * 1.05) if log else (low - pad, high + pad)
    return Frame(x0, x1 if x1 > x0 else x0 + 1.0, low, high, log)


def ticks(values: Sequence[float]) -> list[str]:
    """Axis labels in one form for all of them, with as many digits as it takes for neighbours to differ."""
    size, reach = max(abs(v) for v in values), max(values) - min(values)
    if size == 0:
        return ["0" for _ in values]
    scale, unit = next(((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if size >= (s if s > 1e3 else 2e4)), (1.0, ""))
    plain = 1e-3 <= size < 1e13
    wanted = max(0, min(6, 2 - math.floor(math.log10(reach / scale)))) if reach > 0 else 2
    texts: list[str] = []
    for digits in range(wanted if plain else 1, 13):
        texts = ["0" if v == 0 else f"{v / scale:.{digits}f}{unit}" if plain else f"{v:.{digits}e}" for v in values]
        if len(set(texts)) == len(set(values)):
            break
    return texts


def _columns(points: list[tuple[float, float]], frame: Frame, width: int) -> list[tuple[int, list[float]]]:
    """Pixel columns from the left, each with its first, lowest, highest and last value."""
    out: dict[int, list[float]] = {}
    for x, y in sorted(points, key=lambda p: p[0]):
        column = min(width - 1, max(0, round((x - frame.x0) / (frame.x1 - frame.x0) * (width - 1))))
        kept = out.setdefault(column, [y, y, y, y])
        kept[1], kept[2], kept[3] = min(kept[1], y), max(kept[2], y), y
    return sorted(out.items())


def _plot(series: Series, frame: Frame, wide: int, high: int, cells: dict[tuple[int, int], tuple[int, str]]) -> None:
    """Set the dots of one curve; a cell takes the style of the newest curve in it."""

    def dot(px: int, py: int) -> None:
        if 0 <= py < high:
            bits, _ = cells.get((px // 2, py // 4), (0, ""))
            cells[(px // 2, py // 4)] = (bits | DOTS[px % 2][py % 4], series.style)

    def row(y: float) -> int:
        share = frame.y_share(y)
        if share is None or share != share:  # a span too wide for a float gives no number
            return high * 2
        return round((1 - min(max(share, -1.0), 2.0)) * (high - 1))

    last: tuple[int, int] | None = None
    for px, values in _columns(finite_points(series.points), frame, wide):
        first, bottom, top, at = (row(v) for v in values)
        for py in range(max(0, top), min(high - 1, bottom) + 1):
            dot(px, py)
        if last is not None and not series.marks:
            _join(last, (px, first), dot, high)
        last = (px, at)


def _join(a: tuple[int, int], b: tuple[int, int], dot: Callable[[int, int], None], high: int) -> None:
    """Dots between two points, without a gap in steep places; what lies outside the frame is left out."""
    steps = max(b[0] - a[0], min(abs(b[1] - a[1]), 4 * high), 1)
    for i in range(1, steps):
        dot(a[0] + round((b[0] - a[0]) * i / steps), a[1] + round((b[1] - a[1]) * i / steps))


def draw(
    series: Sequence[Series],
    width: int,
    height: int,
    *,
    log: bool = False,
    x_name: str = "",
    clip: bool = True,
    x_span: tuple[float, float] | None = None,
    margin: int = 0,
) -> list[Line]:
    """A chart in `width` x `height` cells, axes and legend included."""
    frame = frame_of(series, log=log, clip=clip)
    if frame is None or width < 20 or height < 4:
        return [Line(("no points yet" if frame is None else "too small for a chart", "muted"))]
    if x_span is not None:
        frame = Frame(x_span[0], x_span[1], frame.y0, frame.y1, log)
    rows = height - 2
    places = sorted({*range(0, rows, max(1, min(4, rows // 3 or 1))), rows - 1})
    if len(places) > 2 and places[-1] - places[-2] < 2:
        del places[-2]  # two labels one above the other say one thing twice
    labels = dict(zip(places, ticks([frame.y_at(1 - r / max(1, rows - 1)) for r in places]), strict=True))
    margin = max(margin, *(len(t) for t in labels.values()))
    wide = width - margin - 2
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for s in series:
        _plot(s, frame, wide * 2, rows * 4, cells)
    out = []
    for r in range(rows):
        line = Line((fit(labels.get(r, ""), margin, "right"), "muted"), ("┤" if r in labels else "│", "track"))
        blank = 0
        for c in range(wide):
            cell = cells.get((c, r))
            if cell is None:
                blank += 1
                continue
            line.add(" " * blank).add(chr(0x2800 + cell[0]), cell[1])
            blank = 0
        out.append(line)
    return [*out, _x_axis(frame, margin, wide), _legend(series, margin, width, x_name)]


def _x_axis(frame: Frame, margin: int, wide: int) -> Line:
    """The range in equal parts, each label under its place."""
    parts = 4 if wide >= 50 else 2 if wide >= 24 else 1
    texts = ticks([frame.x0 + (frame.x1 - frame.x0) * i / parts for i in range(parts + 1)])
    row = ""
    for i, text in enumerate(texts):
        at = round((wide - 1) * i / parts)
        left = 0 if i == 0 else wide - len(text) if i == parts else at - len(text) // 2
        if left > len(row) or not row:
            row = row.ljust(left) + text
    return Line((" " * margin + "└", "track"), (row[:wide], "muted"))


def _legend(series: Sequence[Series], margin: int, width: int, x_name: str) -> Line:
    """What is drawn how, and what the x axis means at its right end."""
    line = Line((" " * (margin + 1), ""))
    for s in series:
        line.add("━ " if not s.marks else "• ", s.style).add(s.name + "   ", "muted")
    room = width - line.width - 1
    told = x_name if len(x_name) <= room else x_name.split(" ")[0]
    return line.add(fit(told, room, "right"), "muted") if room >= len(told) else line
