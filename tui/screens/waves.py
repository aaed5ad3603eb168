"""Every wave: what it varies, how far it is, and its best result. Enter opens it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from runner import queries, verbs
from runner.lab import Lab
from runner.records import Json

from ..asking import WHO
from ..snapshot import Failed, Snapshot
from ..tables import WAVES
from ..widgets.dialogs import Confirm
from ..widgets.table import Table
from .page import PAGE_KEYS, Page

SHOWN = 200


def load_waves(lab: Lab) -> list[Json]:
    """Wave objects, newest first, each with its age."""
    now = time.time()
    return [{**queries.wave_object(lab, w), "age_s": now - w.created_at} for w in lab.store.waves(SHOWN)]


class WavesPage(Page):
    """All waves."""

    NAME = "waves"
    BINDINGS: ClassVar[list[BindingType]] = [
        *PAGE_KEYS,
        Binding("x", "cancel_wave", "cancel wave", tooltip="Cancel every run of the wave that has not ended"),
        Binding("y", "copy_wave", "copy id", show=False, tooltip="Copy the wave's id"),
        Binding("e", "export", "export", show=False, tooltip="Write the table to a TSV file"),
    ]
    DEFAULT_CSS = "WavesPage #waves { height: 1fr; }"

    def body(self) -> Iterable[Widget]:
        """One table."""
        yield Table(WAVES, id="waves", title="Waves", empty="no wave was submitted yet")

    def on_mount(self) -> None:
        """Begin to read."""
        self.room.source.watch("waves", load_waves)
        self.query_one("#waves").focus()

    def on_unmount(self) -> None:
        """Read no longer."""
        self.room.source.unwatch("waves")

    def show_body(self, snapshot: Snapshot) -> None:
        """The rows."""
        table, found = self.query_one("#waves", Table), snapshot.views.get("waves")
        if isinstance(found, Failed):
            table.empty = found.sentence
        table.show(found if isinstance(found, list) else [])

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Open it."""
        self.room.open_wave(event.key)

    def action_cancel_wave(self) -> None:
        """Ask, then cancel what has not ended."""
        row = self.query_one("#waves", Table).row()
        if row is None:
            return
        wave = str(row["id"])
        lines = [f"{row['running']} runs are live and {row['queued']} wait; what the live ones have trained is lost."]
        self.room.push_screen(
            Confirm(f"Cancel {wave}?", lines),
            lambda yes: (
                self.room.do(f"cancel {wave}", lambda lab: verbs.cancel(lab, [wave], who=WHO, why="by keyboard") and None) if yes else None
            ),
        )

    def action_copy_wave(self) -> None:
        """Copy the id."""
        row = self.query_one("#waves", Table).row()
        if row is not None:
            self.room.copy(str(row["id"]))

    def action_export(self) -> None:
        """Write the table."""
        self.room.export(self.query_one("#waves", Table))
