"""The pane of all GPUs: the cards and rows of gpus.py, laid out in the room there is, with a cursor that moves over both."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from ..lines import Line
from ..snapshot import Snapshot
from .gpus import CARD_HIGH, COLUMNS, card
from .table import Row, Table
from .view import message_line


class GpuWall(Table):
    """All GPUs, as cards or as rows, side by side where there is room; Enter opens the run on the GPU under the cursor."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("h,left", "across(-1)", "left", show=False),
        Binding("l,right", "across(1)", "right", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(COLUMNS, key="uuid", id=id, title="GPUs", empty="no GPU is known yet: the daemon looks for them when it starts")
        self.mode, self.beside = "rows", 1
        self._cards: dict[int, tuple[Row, int, bool, list[Line]]] = {}

    def show_snapshot(self, snapshot: Snapshot) -> None:
        """Take the GPUs of a snapshot, each with its run and its history."""
        self.show(
            [
                {**g, "run_object": snapshot.live.get(str(g.get("run"))), "history": snapshot.history.get(str(g.get("uuid")), ())}
                for g in snapshot.gpus
            ]
        )

    def set_mode(self, mode: str, beside: int) -> None:
        """Cards or rows; chosen by the screen from the room there is."""
        if (mode, beside) != (self.mode, self.beside):
            self.mode, self.beside = mode, beside
            self.fixed = 0 if mode == "cards" else 1
            self._drawn.clear()
            self.refresh()
            self.changed()

    @property
    def count(self) -> int:
        """Rows of text."""
        if not self.rows:
            return super().count
        return self._deep * (CARD_HIGH if self.mode == "cards" else 1)

    @property
    def _deep(self) -> int:
        """How many GPUs stand one below the other."""
        return max(1, -(-len(self.rows) // self.beside))

    def line_at(self, index: int, width: int) -> Line:
        """A table row, or several side by side, or the slice of the cards that lies on this row."""
        if not self.rows:
            return message_line(self.empty, width) if index >= 0 else super().line_at(index, width)
        if self.mode == "rows":
            return super().line_at(index, width) if self.beside == 1 else self._abreast(index, width)
        first, wide = index // CARD_HIGH * self.beside, width // self.beside
        line = Line()
        for at in range(first, min(first + self.beside, len(self.rows))):
            line.extend(self._card(at, wide)[index % CARD_HIGH].spans)
        return line.measured(wide * min(self.beside, len(self.rows) - first))

    def _abreast(self, index: int, width: int) -> Line:
        """One row of text of a table in several columns, which are read downwards, one after the other."""
        wide = width // self.beside
        line = Line()
        for at in range(index, len(self.rows), self._deep) if index >= 0 else [index] * self.beside:
            row = super().line_at(at, wide).fitted(wide)
            line.extend([(text, f"{row.style} {style}".strip()) for text, style in row.spans])
        return line

    def place_of(self, index: int) -> tuple[int, int]:
        """Where a GPU is drawn."""
        if self.mode == "cards":
            return (index // self.beside * CARD_HIGH, CARD_HIGH)
        return (index % self._deep, 1)

    def _card(self, at: int, width: int) -> list[Line]:
        row, selected = self.rows[at], at == self.cursor and self.has_focus
        kept = self._cards.get(at)
        if kept is not None and kept[0] is row and kept[1] == width and kept[2] == selected:
            return kept[3]
        made = card(row, width, selected)
        self._cards[at] = (row, width, selected, made)
        return made

    def action_across(self, by: int) -> None:
        """Move to the GPU beside."""
        self._go(self.cursor + by * (1 if self.mode == "cards" else self._deep if self.beside > 1 else 0))

    def action_move(self, by: int) -> None:
        """Move to the GPU below or above."""
        self._go(self.cursor + by * (self.beside if self.mode == "cards" else 1))

    def on_focus(self) -> None:
        """Show which card the keys act on."""
        self.changed()

    def on_blur(self) -> None:
        """No card is selected while another pane has the keys."""
        self.changed()

    def on_click(self, event: events.Click) -> None:
        """A click selects a GPU; a second one opens its run."""
        if self.mode == "rows" and self.beside == 1:
            return  # Textual calls the table's own handler next
        event.prevent_default()
        offset = event.get_content_offset(self)
        if offset is None or not self.rows:
            return
        wide = max(1, self.scrollable_content_region.width // self.beside)
        across, down = min(self.beside - 1, offset.x // wide), offset.y - self.fixed + round(self.scroll_y)
        if offset.y < self.fixed:
            self._sort_at(offset.x % wide)
            return
        at = down // CARD_HIGH * self.beside + across if self.mode == "cards" else across * self._deep + down
        if down < self.count and at < len(self.rows):
            again = at == self.cursor and event.chain > 1
            self._go(at)
            if again:
                self.action_choose()

    def run_ids(self) -> list[str]:
        """The runs on the marked GPUs, or on the one under the cursor."""
        keys = set(self.selected())
        return [str(r["run"]) for r in self.rows if r["uuid"] in keys and r.get("run")]
