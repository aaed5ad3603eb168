"""Every run, newest first, with the filter looking through all of them and not only through what is on the screen."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from runner import queries
from runner.lab import Lab
from runner.records import Json
from runner.text import plural

from .. import filters
from ..deeds import RUN_BINDINGS
from ..lines import Line, safe, wrap_words
from ..snapshot import Failed, Snapshot
from ..tables import RUNS, what
from ..widgets.table import Table
from ..widgets.view import Lines
from .page import PAGE_KEYS, Page

SHOWN = 500  # rows read at once; a filter looks through all runs for as many
EVERY_S = 2.0
FILTERED_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Found:
    """Rows that were read, how many runs there are, and whether all of them were looked at."""

    rows: tuple[Json, ...]
    total: int
    whole: bool


class RunsLoader:
    """Reads the newest runs; read again when somebody did something, else every few seconds."""

    def __init__(self) -> None:
        self.filter: filters.Filter | None = None
        self._kept: tuple[object, float, Found] | None = None

    def __call__(self, lab: Lab) -> Found:
        """The rows."""
        wanted = self.filter
        stamp = (wanted.text if wanted else "", lab.store.tally("max(id)", table="events"))
        patience = FILTERED_EVERY_S if wanted else EVERY_S
        if self._kept is not None and self._kept[0] == stamp and time.monotonic() - self._kept[1] < patience:
            return self._kept[2]
        found = self._read(lab, wanted)
        self._kept = (stamp, time.monotonic(), found)
        return found

    def _read(self, lab: Lab, wanted: filters.Filter | None) -> Found:
        rows: list[Json] = []
        cursor: str | None = None
        total = 0
        while len(rows) < SHOWN:
            page = queries.list_runs(lab, limit=SHOWN, cursor=cursor)
            total = total or page.total
            objects = queries.run_objects(lab, page.rows)
            rows += [o for o in objects if wanted is None or wanted(o)]
            cursor = page.cursor
            if cursor is None or wanted is None:
                break
        return Found(tuple(rows[:SHOWN]), total, cursor is None and len(rows) <= SHOWN)


class RunsPage(Page):
    """All runs."""

    NAME = "runs"
    BINDINGS: ClassVar[list[BindingType]] = [
        *RUN_BINDINGS,
        *PAGE_KEYS,
        Binding("e", "export", "export", show=False, tooltip="Write the table to a TSV file"),
    ]
    DEFAULT_CSS = """
    RunsPage #runs { height: 1fr; }
    RunsPage #told { height: 3; border: none; color: $text-muted; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.loader = RunsLoader()

    def body(self) -> Iterable[Widget]:
        """One table, and what the run under the cursor is about in full."""
        yield Table(RUNS, id="runs", title="Runs", empty="no run was submitted yet")
        yield Lines(id="told")

    def on_mount(self) -> None:
        """Begin to read."""
        self.room.source.watch("runs", self.loader)
        self.query_one("#told").can_focus = False
        self.query_one("#runs").focus()

    def on_unmount(self) -> None:
        """Read no longer."""
        self.room.source.unwatch("runs")

    def show_body(self, snapshot: Snapshot) -> None:
        """The rows read, with the live ones' newest figures."""
        table = self.query_one("#runs", Table)
        found = snapshot.views.get("runs")
        if isinstance(found, Failed):
            table.empty = found.sentence
        elif isinstance(found, Found):
            table.empty = "no run matches the filter" if self.loader.filter and found.total else "no run was submitted yet"
            table.note_right = f"of {plural(found.total, 'run')}" + ("" if found.whole else f", the newest {len(found.rows)} shown")
            table.show([snapshot.live.get(str(r["id"]), r) for r in found.rows])
        else:
            table.empty = "reading the runs …"
        self._tell(table)

    def _tell(self, table: Table) -> None:
        """What the run is about in full, and how it ended; two rows and one."""
        row, width = table.row(), max(20, self.size.width - 2)
        ending = safe(row.get("cause_text") or row.get("verdict_why") or "", 1000) if row else ""
        told = wrap_words(what(row)[0], width, 2 if ending else 3) if row else []
        rest = wrap_words(ending, width, 3 - len(told))
        self.query_one("#told", Lines).show([*[Line((t, "")) for t in told], *[Line((t, "muted")) for t in rest]])

    def filter_changed(self, table: Table, found: filters.Filter | None) -> None:
        """Look through all runs, not only those read."""
        self.loader.filter = found
        self.room.source.poke()

    def on_table_moved(self, event: Table.Moved) -> None:
        """Tell about the run under the cursor."""
        self._tell(event.table)

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Open it."""
        self.room.open_run(event.key)

    def action_export(self) -> None:
        """Write the table."""
        self.room.export(self.query_one("#runs", Table))
