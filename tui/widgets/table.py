"""A table of thousands of rows that costs what is visible: columns that fit, a cursor that follows its row, marks, sort and filter.

Rows are dictionaries (run objects and the like); a column turns one row into one cell. Cells come cleaned from the column, never as markup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message

from ..lines import Line, Span, cells, fit
from .view import View, message_line

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `cell` gives its span, `order` its sort value; those with the highest `drop` leave first when the room is short.

    `short` gives a shorter text, for a row whose text is wider than the column.
    """

    key: str
    title: str
    width: int
    cell: Callable[[Row], Span]
    align: str = "left"
    order: Callable[[Row], Any] | None = None
    drop: int = 0
    flex: bool = False
    short: Callable[[Row], Span] | None = None
    grow: int = 0  # cells it may have more, before the flexible columns share what is left

    def fitting(self, row: Row, width: int) -> Span:
        """The cell in exactly `width` cells."""
        text, style = self.cell(row)
        if self.short is not None and cells(text) > width:
            text, style = self.short(row)
        return (fit(text, width, self.align), style)


def fit_columns(columns: Iterable[Column], width: int) -> list[tuple[Column, int]]:
    """The columns that fit into `width` cells, with their widths; a flexible column takes what is left."""
    chosen = list(columns)
    while len(chosen) > 1 and sum(c.width + 1 for c in chosen) - 1 > width:
        worst = max(c.drop for c in chosen)
        if worst == 0:
            break
        last = max(i for i, c in enumerate(chosen) if c.drop == worst)
        del chosen[last]
    spare = max(0, width - (sum(c.width + 1 for c in chosen) - 1))
    more: dict[str, int] = {}
    for column in (c for c in chosen if c.grow):
        more[column.key] = min(column.grow, spare)
        spare -= more[column.key]
    flexible = [c.key for c in chosen if c.flex]
    more |= {key: more.get(key, 0) + spare // len(flexible) for key in flexible}
    return [(c, c.width + more.get(c.key, 0)) for c in chosen]


class Table(View):
    """Rows under a header. Enter posts `Chosen`; Space marks; `s` and `S` sort."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "move(1)", "down", show=False),
        Binding("k,up", "move(-1)", "up", show=False),
        Binding("g,home", "move(-10000000)", "top", show=False),
        Binding("G,end", "move(10000000)", "bottom", show=False),
        Binding("ctrl+d,pagedown", "page(1)", "page down", show=False),
        Binding("ctrl+u,pageup", "page(-1)", "page up", show=False),
        Binding("enter", "choose", "open"),
        Binding("space", "mark", "mark", show=False),
        Binding("s", "sort", "sort by the next column", show=False),
        Binding("S", "reverse", "reverse the order", show=False),
        Binding("vertical_line", "columns", "columns", key_display="|", show=False, tooltip="Choose the columns of this table"),
    ]
    fixed = 1

    @dataclass
    class Chosen(Message):
        """Enter or a second click on a row."""

        table: Table
        key: str

    @dataclass
    class ColumnsAsked(Message):
        """Somebody wants other columns; the page asks which, and remembers them."""

        table: Table

    @dataclass
    class Moved(Message):
        """The cursor is on another row."""

        table: Table
        key: str | None

        def can_replace(self, message: Message) -> bool:
            """Only the newest position matters."""
            return isinstance(message, Table.Moved) and message.table is self.table

    def __init__(
        self, columns: Iterable[Column], *, key: str = "id", id: str | None = None, title: str = "", empty: str = "nothing here yet"
    ) -> None:
        super().__init__(id=id, title=title)
        self.columns = list(columns)
        self.hidden: frozenset[str] = frozenset()
        self.key_name = key
        self._empty = empty
        self.name_shown = title
        self.note = ""
        self.note_right = ""
        self.rows: list[Row] = []
        self.all_rows: list[Row] = []
        self._given: Iterable[Row] | None = None
        self.marks: set[str] = set()
        self.cursor_key: str | None = None
        self.cursor = 0
        self.sort_key: str | None = None
        self.backward = False
        self.keep: Callable[[Row], bool] | None = None
        self._layout: tuple[int, list[tuple[Column, int]]] = (-1, [])

    # facts in

    def show(self, rows: Iterable[Row]) -> None:
        """Take new rows; the cursor stays on its key, and only what differs is drawn."""
        if rows is self._given:
            return
        self._given = rows
        self.all_rows = list(rows)
        self._arrange()

    @property
    def empty(self) -> str:
        """What stands where no row is."""
        return self._empty

    @empty.setter
    def empty(self, words: str) -> None:
        """Say something else from now on, also while the rows (none) stay the same."""
        if words != self._empty:
            self._empty = words
            if not self.rows:
                self.changed()

    def take_columns(self, columns: Iterable[Column]) -> bool:
        """Show other columns from now on; whether they are others than before."""
        wanted = list(columns)
        if [(c.key, c.title) for c in wanted] == [(c.key, c.title) for c in self.columns]:
            return False
        self.columns = wanted
        self._layout = (-1, [])
        return True

    def refine(self, keep: Callable[[Row], bool] | None, note: str = "") -> None:
        """Show only rows that `keep` accepts; `note` stands in the title."""
        self.keep, self.note = keep, note
        self._arrange()

    def _arrange(self) -> None:
        rows = self.all_rows if self.keep is None else [r for r in self.all_rows if self.keep(r)]
        column = next((c for c in self.columns if c.key == self.sort_key), None)
        if column is not None and column.order is not None:
            order = column.order
            known = [r for r in rows if order(r) is not None]
            known.sort(key=order, reverse=self.backward)
            rows = known + [r for r in rows if order(r) is None]
        self.rows = rows
        self.marks &= {str(r[self.key_name]) for r in self.all_rows} if self.marks else set()
        self._follow()
        shown = f"{len(rows)}/{len(self.all_rows)}" if self.keep else str(len(rows))
        self._say(shown)
        self.changed()

    def _say(self, shown: str) -> None:
        mark = f" · {len(self.marks)} marked" if self.marks else ""
        by = next((c for c in self.columns if c.key == self.sort_key), None)
        if by is not None:
            mark += f" · by {by.title or by.key} {'▾' if self.backward else '▴'}"
        self.caption(f"{self.name_shown} {shown}{mark}" + (f" · /{self.note}" if self.note else ""), self.note_right)

    def _follow(self) -> None:
        if self.cursor_key is not None:
            for i, row in enumerate(self.rows):
                if row[self.key_name] == self.cursor_key:
                    self.cursor = i
                    return
        self.cursor = max(0, min(self.cursor, len(self.rows) - 1))
        key = str(self.rows[self.cursor][self.key_name]) if self.rows else None
        if key != self.cursor_key:
            self.cursor_key = key
            self.post_message(self.Moved(self, key))

    # drawing

    @property
    def count(self) -> int:
        """Rows after the filter; an empty table has one row that says so."""
        return max(1, len(self.rows))

    def line_at(self, index: int, width: int) -> Line:
        """The header for -1, else the row."""
        if self._layout[0] != width:
            self._layout = (width, fit_columns([c for c in self.columns if c.key not in self.hidden], width - 1))
        if index < 0:
            return self._header()
        if not self.rows:
            return message_line(self.empty if not self.all_rows else "nothing matches the filter", width)
        row = self.rows[index]
        marked = str(row[self.key_name]) in self.marks
        line = Line(style="cursor" if index == self.cursor else "")
        line.add("●" if marked else " ", "mark")
        for i, (column, wide) in enumerate(self._layout[1]):
            text, style = column.fitting(row, wide)
            line.add((" " if i else "") + text, style)
        return line.measured(sum(wide + 1 for _, wide in self._layout[1]))

    def _header(self) -> Line:
        line = Line((" ", "muted"))
        for i, (column, wide) in enumerate(self._layout[1]):
            arrow = ("▾" if self.backward else "▴") if column.key == self.sort_key else ""
            line.add(" " if i else "").add(fit(column.title + arrow, wide, column.align), "head")
        return line

    # keys and mouse

    def action_move(self, by: int) -> None:
        """Move the cursor, keeping it in sight."""
        self._go(self.cursor + by)

    def action_page(self, by: int) -> None:
        """Move the cursor by a page."""
        self._go(self.cursor + by * max(1, self.rows_high - 1))

    def _go(self, index: int) -> None:
        if not self.rows:
            return
        self.cursor = max(0, min(index, len(self.rows) - 1))
        self.cursor_key = str(self.rows[self.cursor][self.key_name])
        self._reveal(*self.place_of(self.cursor))
        self.post_message(self.Moved(self, self.cursor_key))
        self.changed()

    def place_of(self, index: int) -> tuple[int, int]:
        """The first row of text that shows row `index`, and how many there are."""
        return (index, 1)

    def _reveal(self, first: int, rows: int) -> None:
        top, high = round(self.scroll_y), max(1, self.rows_high)
        if first < top:
            self.scroll_to(y=first, animate=False)
        elif first + rows > top + high:
            self.scroll_to(y=first + rows - max(high, rows), animate=False)

    def action_choose(self) -> None:
        """Open the row under the cursor."""
        if self.cursor_key is not None and self.rows:
            self.post_message(self.Chosen(self, self.cursor_key))

    def action_mark(self) -> None:
        """Mark or unmark the row, and step on."""
        if self.cursor_key is None or not self.rows:
            return
        self.marks ^= {self.cursor_key}
        self._say(f"{len(self.rows)}/{len(self.all_rows)}" if self.keep else str(len(self.rows)))
        self._go(self.cursor + 1)

    def action_columns(self) -> None:
        """Let the page ask."""
        self.post_message(self.ColumnsAsked(self))

    def hide(self, keys: Iterable[str]) -> None:
        """Leave these columns out; one always stays."""
        known = [c.key for c in self.columns]
        hidden = frozenset(k for k in keys if k in known)
        self.hidden = hidden if len(hidden) < len(known) else frozenset()
        self._layout = (-1, [])
        self.changed()

    def unmark(self) -> bool:
        """Take all marks away; whether there were any."""
        had = bool(self.marks)
        if had:
            self.marks.clear()
            self._say(f"{len(self.rows)}/{len(self.all_rows)}" if self.keep else str(len(self.rows)))
            self.changed()
        return had

    def action_sort(self) -> None:
        """Sort by the next sortable column; after the last, by the given order."""
        shown = [c for c, _ in self._layout[1]] or self.columns  # cards have no columns, and an order all the same
        keys: list[str | None] = [None, *[c.key for c in shown if c.order is not None]]
        at = keys.index(self.sort_key) if self.sort_key in keys else 0
        self.sort_key = keys[(at + 1) % len(keys)]
        self._arrange()

    def action_reverse(self) -> None:
        """Turn the order round."""
        self.backward = not self.backward
        self._arrange()

    def on_click(self, event: events.Click) -> None:
        """A click moves the cursor; on the row that has it, opens it; on a header, sorts."""
        offset = event.get_content_offset(self)
        if offset is None:
            return
        if offset.y == 0:
            self._sort_at(offset.x)
            return
        index = offset.y - 1 + round(self.scroll_y)
        if index < len(self.rows):
            again = index == self.cursor and event.chain > 1
            self._go(index)
            if again:
                self.action_choose()

    def _sort_at(self, x: int) -> None:
        left = 1
        for column, wide in self._layout[1]:
            if left <= x < left + wide and column.order is not None:
                self.backward = not self.backward if self.sort_key == column.key else False
                self.sort_key = column.key
                self._arrange()
                return
            left += wide + 1

    def selected(self) -> list[str]:
        """The marked rows, or else the one under the cursor."""
        if self.marks:
            return [str(r[self.key_name]) for r in self.rows if r[self.key_name] in self.marks]
        return [self.cursor_key] if self.cursor_key is not None and self.rows else []

    def row(self) -> Row | None:
        """The row under the cursor."""
        return self.rows[self.cursor] if self.rows else None

    def on_resize(self, event: events.Resize) -> None:
        """Choose the columns again."""
        self._layout = (-1, [])
        self._drawn.clear()
        self.virtual_size = Size(self.scrollable_content_region.width, self.count + self.fixed)
