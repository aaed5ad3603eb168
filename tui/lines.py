"""Lines of styled text, and the cell arithmetic under every pane.

A pane is a list of lines; a line is spans of (text, style word). Nothing here knows Textual, so panes can be tested as pure functions.
Text from outside is cleaned before it becomes a span: no control characters, no escapes, one row high, and never read as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

from runner.text import one_line

Span = tuple[str, str]

# The style words; widgets/view.py gives each a component class of the theme.
STYLES = (
    "good",
    "warn",
    "bad",
    "muted",
    "accent",
    "strong",
    "head",
    "bar",
    "track",
    "own",
    "best",
    "parent",
    "mark",
    "cursor",
    "title",
    "key",
)
BLOCKS = " ▏▎▍▌▋▊▉█"
LEVELS = "▁▂▃▄▅▆▇█"


def cells(text: str) -> int:
    """Cells that a text takes; most of ours is ASCII, one cell a character."""
    return len(text) if text.isascii() else cell_len(text)


def safe(text: object, limit: int = 400) -> str:
    """Outside text as one harmless row; None is `-`."""
    return "-" if text is None else one_line(str(text), limit)


def crop(text: str, width: int) -> str:
    """`text` in at most `width` cells, ending in `…` where something was cut."""
    if width <= 0:
        return ""
    if cells(text) <= width:
        return text
    return set_cell_size(text, width - 1).rstrip() + "…"


def fit(text: str, width: int, align: str = "left") -> str:
    """`text` in exactly `width` cells."""
    text = crop(text, width)
    room = max(0, width - cells(text))
    if align == "right":
        return " " * room + text
    if align == "centre":
        return " " * (room // 2) + text + " " * (room - room // 2)
    return text + " " * room


def wrap_words(text: str, width: int, most: int | None = None) -> list[str]:
    """One row of text as rows of at most `width` cells, broken between words; a word longer than a row is broken inside."""
    rows: list[str] = []
    for word in text.split():
        if rows and cells(rows[-1]) + 1 + cells(word) <= width:
            rows[-1] += " " + word
            continue
        while cells(word) > width > 0:
            head = set_cell_size(word, width).rstrip()
            rows.append(head)
            word = word[len(head) :]
        rows.append(word)
    if most is not None and len(rows) > most:
        rows = [*rows[: most - 1], crop(" ".join(rows[most - 1 :]), width)]
    return rows


class Line:
    """Spans in a row, with an optional style for the whole row (the cursor)."""

    __slots__ = ("_measured", "spans", "style")

    def __init__(self, *spans: Span, style: str = "") -> None:
        self.spans: list[Span] = [s for s in spans if s[0]]
        self.style = style
        self._measured: int | None = None

    def add(self, text: str, style: str = "") -> Line:
        """Append a span; returns the line, so that calls chain."""
        if text:
            self.spans.append((text, style))
            self._measured = None
        return self

    def extend(self, spans: Iterable[Span]) -> Line:
        """Append spans."""
        self.spans.extend(s for s in spans if s[0])
        self._measured = None
        return self

    def measured(self, width: int) -> Line:
        """Say how wide the row is where its maker knows: measuring every row anew was a third of the cost of a second."""
        self._measured = width
        return self

    @property
    def text(self) -> str:
        """The row without styles."""
        return "".join(t for t, _ in self.spans)

    @property
    def width(self) -> int:
        """Cells taken."""
        if self._measured is None:
            self._measured = sum(cells(t) for t, _ in self.spans)
        return self._measured

    def fitted(self, width: int) -> Line:
        """The same row in exactly `width` cells."""
        used = self.width
        if used == width:
            return self
        if used < width:
            return Line(*self.spans, (" " * (width - used), ""), style=self.style).measured(width)
        out, used = Line(style=self.style), 0
        for text, style in self.spans:
            room = width - used
            if room <= 0:
                break
            piece = crop(text, room)
            out.add(piece, style)
            used += cells(piece)
        return out.add(" " * max(0, width - used)).measured(width)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Line) and self.style == other.style and self.spans == other.spans

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Line({self.text!r})"


def changed_columns(old: Line | None, new: Line, width: int) -> tuple[int, int] | None:
    """The columns [from, to) in which two rows differ; None when they are equal."""
    if old is None or old.style != new.style:
        return (0, width)
    if old.spans == new.spans:
        return None
    start = _common(old.spans, new.spans, 1)
    same_length = old.width == new.width == width
    end = width - _common(old.spans[::-1], new.spans[::-1], -1) if same_length else width
    return (start, end) if start < end else (start, width)


def _common(a: Sequence[Span], b: Sequence[Span], step: int) -> int:
    """Cells that two rows share from the left (step 1), or from the right with the spans given backwards (step -1)."""
    shared = 0
    for (x, x_style), (y, y_style) in zip(a, b, strict=False):
        if x_style != y_style:
            return shared
        if x != y:
            same = 0
            for p, q in zip(x[::step], y[::step], strict=False):
                if p != q:
                    break
                same += 1
            return shared + cells(x[:same] if step == 1 else x[len(x) - same :])
        shared += cells(x)
    return shared


def bar(share: float | None, width: int, style: str = "bar") -> list[Span]:
    """A bar of eighths for a share of 0..1; an empty track when unknown."""
    if share is None or share != share:
        return [("·" * width, "track")]
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    head = "█" * full + (BLOCKS[rest] if rest else "")
    return [(head, style), ("·" * (width - len(head)), "track")]


def spark(values: Sequence[float | None], width: int, low: float | None = None, high: float | None = None) -> str:
    """The last `width` values as one row of bars; a gap stays a blank."""
    tail = list(values)[-width:]
    real = [v for v in tail if v is not None and v == v and abs(v) != float("inf")]
    if not real:
        return " " * width
    lo = min(real) if low is None else low
    hi = max(real) if high is None else high
    reach = hi - lo
    drawn = []
    for v in tail:
        if v is None or v != v or abs(v) == float("inf"):
            drawn.append(" ")
        elif reach <= 0:
            drawn.append(LEVELS[3])
        else:
            drawn.append(LEVELS[min(7, max(0, int((v - lo) / reach * 7.999)))])
    return "".join(drawn).rjust(width)
