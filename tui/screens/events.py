"""What happened: the flags that are up, worst first, then the audit trail, newest first, under one filter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from runner.lab import Lab
from runner.records import Event

from ..lines import Line, safe, wrap_words
from ..snapshot import Snapshot
from ..tables import EVENTS, event_rows, flag_rows
from ..widgets.table import Table
from ..widgets.view import Lines
from .page import PAGE_KEYS, Page

SHOWN = 2000


def load_events(lab: Lab) -> tuple[Event, ...]:
    """The newest events."""
    return tuple(lab.store.events(limit=SHOWN))


class EventsPage(Page):
    """Flags and events."""

    NAME = "events"
    BINDINGS: ClassVar[list[BindingType]] = [
        *PAGE_KEYS,
        Binding("e", "export", "export", show=False, tooltip="Write the table to a TSV file"),
    ]
    DEFAULT_CSS = """
    EventsPage #events { height: 1fr; }
    EventsPage #told { height: 3; border: none; color: $text-muted; }
    """

    def body(self) -> Iterable[Widget]:
        """One table, and the row under the cursor in full."""
        yield Table(EVENTS, key="event", id="events", title="Flags and events", empty="nothing happened yet")
        yield Lines(id="told")

    def on_mount(self) -> None:
        """Begin to read."""
        self.room.source.watch("events", load_events)
        self.query_one("#told").can_focus = False
        self.query_one("#events").focus()

    def on_unmount(self) -> None:
        """Read no longer."""
        self.room.source.unwatch("events")

    def show_body(self, snapshot: Snapshot) -> None:
        """The rows."""
        table, now = self.query_one("#events", Table), self.room.now()
        found = snapshot.views.get("events")
        events = found if isinstance(found, tuple) else snapshot.events
        table.show([*flag_rows(snapshot.flags, now), *event_rows(events, now)])
        self._tell(table)

    def _tell(self, table: Table) -> None:
        row, width = table.row(), max(20, self.size.width - 2)
        text = safe(row.get("why") or "", 1000) if row else ""
        self.query_one("#told", Lines).show([Line((t, "")) for t in wrap_words(text, width, 3)])

    def on_table_moved(self, event: Table.Moved) -> None:
        """Tell the row in full."""
        self._tell(event.table)

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Open what it is about."""
        self.room.open_subject(event.table.row())

    def action_export(self) -> None:
        """Write the table."""
        self.room.export(self.query_one("#events", Table))
