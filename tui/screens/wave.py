"""A wave's page: heat map and effects above, its runs below; the keys for runs work there (P promotes from here)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget

from ..deeds import RUN_BINDINGS
from ..lines import Line
from ..snapshot import Failed, Snapshot
from ..tables import RUNS, wave_columns
from ..waveview import WaveLoader, WaveView, duplicate_lines, effect_lines, heading, heat_lines
from ..widgets.table import Table
from ..widgets.view import Lines, Strips
from .page import PAGE_KEYS, Page


class WavePage(Page):
    """One wave."""

    NAME = "wave"
    BINDINGS: ClassVar[list[BindingType]] = [
        *RUN_BINDINGS,
        *PAGE_KEYS,
        Binding("v", "next_pair", "factors", tooltip="The heat map of the next two factors"),
        Binding("e", "export", "export", show=False, tooltip="Write the runs of the wave to a TSV file"),
    ]
    DEFAULT_CSS = """
    WavePage #what { height: auto; max-height: 2; }
    WavePage #above { height: 1fr; }
    WavePage #heat { width: 2fr; }
    WavePage #effects { width: 3fr; }
    WavePage #runs { height: 1fr; }
    WavePage.-stacked #above { layout: vertical; height: 2fr; }
    WavePage.-stacked #heat, WavePage.-stacked #effects { width: 100%; height: 1fr; }
    WavePage.-flat #heat { display: none; }
    """

    def __init__(self, wave_id: str) -> None:
        super().__init__()
        self.wave_id = wave_id
        self.loader = WaveLoader(wave_id)

    def body(self) -> Iterable[Widget]:
        """What it is, map and effects, runs."""
        yield Strips(id="what")
        yield Horizontal(Lines(id="heat", title="Heat map"), Lines(id="effects", title="Effects"), id="above")
        yield Table(RUNS, id="runs", title="Runs", empty="this wave has no runs")

    def on_mount(self) -> None:
        """Begin to read."""
        self.room.source.watch(self.key, self.loader)
        self.query_one("#runs").focus()

    def on_unmount(self) -> None:
        """Read no longer."""
        self.room.source.unwatch(self.key)

    @property
    def key(self) -> str:
        """The name of the view in snapshots."""
        return f"wave:{self.wave_id}"

    def show_body(self, snapshot: Snapshot) -> None:
        """The four panes."""
        self.set_class(self.size.width < 110, "-stacked")
        what, found = self.query_one("#what", Strips), snapshot.views.get(self.key)
        if not isinstance(found, WaveView):
            failed = isinstance(found, Failed)
            what.show([Line((found.sentence if isinstance(found, Failed) else "reading the wave …", "bad" if failed else "muted"))])
            return
        rows = heading(found, self.room.now(), self.size.width)
        what.styles.height = len(rows)
        what.show(rows)
        self.set_class(found.heat is None, "-flat")  # without two factors there is no map
        heat, effects, same = self.query_one("#heat", Lines), self.query_one("#effects", Lines), duplicate_lines(found)
        wide = max(30, effects.scrollable_content_region.width)
        heat.show([*heat_lines(found, max(20, heat.scrollable_content_region.width)), Line(), *same])
        effects.show([*effect_lines(found.analysis, wide), *(same if found.heat is None else [])])
        table = self.query_one("#runs", Table)
        if table.take_columns(wave_columns(found.wave["factors"]) if found.wave["factors"] else RUNS):
            self.remembered_columns()
        table.show([snapshot.live.get(str(r["id"]), r) for r in found.runs])

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Open the run."""
        self.room.open_run(event.key)

    def action_next_pair(self) -> None:
        """The next two factors."""
        self.loader.pair += 1
        self.room.source.poke()

    def action_export(self) -> None:
        """Write the runs."""
        self.room.export(self.query_one("#runs", Table))
