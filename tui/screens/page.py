"""What every page has: the header, the alerts, the body, the `/` line and the line of keys; and how a snapshot reaches them.

A page is a pure view: `show_body(snapshot)` is called once a second and after every resize, and may only compare and draw.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, cast

from textual import actions, events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.reactive import Reactive
from textual.widget import Widget

from runner.errors import BadValue

from .. import filters
from ..deeds import RUN_ACTIONS, Facts, RunDeeds
from ..lines import Line, cells, safe
from ..snapshot import Snapshot
from ..widgets.bars import alert_lines, alerts, header
from ..widgets.dialogs import Field, FilterLine, Form
from ..widgets.table import Table
from ..widgets.view import Strips, View, Worded

if TYPE_CHECKING:
    from ..app import ControlRoom

SMALL = (40, 10)
UNASKED = frozenset({"copy", "copy_command", "open_wave"})  # run actions that write nothing


class Page(RunDeeds, Worded):
    """The frame around a body."""

    DEFAULT_CSS = """
    Page { layout: vertical; }
    Page > #header { background: $surface; height: 1; }
    Page > #alerts { height: auto; max-height: 3; }
    Page > #keys-line { height: 1; background: $surface; dock: bottom; }
    """
    AUTO_FOCUS = None
    focused: Reactive[Widget | None] = Reactive(None, repaint=False)  # Textual's own repaints the whole screen when the focus moves
    NAME: ClassVar[str] = "page"

    def __init__(self) -> None:
        super().__init__()
        self._hinted: tuple[object, Line] | None = None

    @property
    def room(self) -> ControlRoom:
        """The app, by its own type."""
        return cast("ControlRoom", self.app)

    # what pages give

    def body(self) -> Iterable[Widget]:
        """The widgets between the alerts and the keys."""
        return []

    def show_body(self, snapshot: Snapshot) -> None:
        """Draw what changed."""

    def filtered(self) -> Table | None:
        """The table `/` acts on."""
        focused = self.focused
        if isinstance(focused, Table):
            return focused
        return next(iter(self.query(Table)), None)

    # frame

    def compose(self) -> ComposeResult:
        """Header, alerts, body, filter, keys."""
        yield Strips(id="header")
        yield Strips(id="alerts")
        yield from self.body()
        yield FilterLine(self._filter_typed, self._filter_closed)
        yield Strips(id="keys-line")

    def on_mount(self) -> None:
        """Take up what was chosen before; what is known is drawn as soon as the panes have their sizes."""
        self.remembered_columns()

    def on_screen_resume(self) -> None:
        """Catch up with what happened while another page was shown."""
        self.show(self.room.snapshot)

    def laid_out(self) -> None:
        """The panes have their sizes: fill them."""
        self.show(self.room.snapshot)

    @property
    def drawable(self) -> bool:
        """Whether all panes are there: not before they were composed, and not while the page or the app closes."""
        return self.is_mounted and self.is_attached and self.app.is_running and self.size.width > 0 and bool(self.children)

    def show(self, snapshot: Snapshot) -> None:
        """Draw the frame and the body."""
        if not self.drawable:
            return
        if self.size.width < SMALL[0] or self.size.height < SMALL[1]:
            self.query_one("#header", Strips).show(
                [Line((f"need {SMALL[0]}x{SMALL[1]}, have {self.size.width}x{self.size.height}", "warn"))]
            )
            return
        self.show_frame(snapshot)
        self.show_alerts(snapshot)
        self.show_body(snapshot)

    def show_frame(self, snapshot: Snapshot) -> None:
        """Header and bottom line: what changes by the clock alone."""
        if self.drawable and self.size.width >= SMALL[0]:
            line = header(snapshot, self.size.width, self.room.now(), readonly=self.room.readonly, frozen=self.room.frozen)
            self.query_one("#header", Strips).show([line])
            self.show_keys()

    def show_alerts(self, snapshot: Snapshot) -> None:
        """As many alerts as the height allows."""
        most = 0 if self.size.height < 14 else 1 if self.size.height < 24 else 2 if self.size.height < 36 else 3
        lines = alert_lines(alerts(snapshot, self.room.now()), self.size.width, most)
        pane = self.query_one("#alerts", Strips)
        if len(lines) != len(pane.lines) or pane.styles.height is None:
            pane.styles.height = len(lines)
            pane.display = bool(lines)
        pane.show(lines)

    def show_keys(self) -> None:
        """The newest message, or the keys that work here."""
        if not self.drawable:
            return
        said = self.room.message()
        line = Line((" " + safe(said[0], 400), said[1])) if said else self._hints()
        self.query_one("#keys-line", Strips).show([line.fitted(self.size.width)])

    def _hints(self) -> Line:
        """The keys of the focused pane, its page and the app, made anew only when other ones may apply: asking all costs 4 ms."""
        targets = self.targets()
        phases = tuple(self.facts_of(i).get("phase") for i in targets[:20])
        key = (self.focused, tuple(targets[:20]), phases, self.size.width, len(self.app.screen_stack))
        if self._hinted is None or self._hinted[0] != key:
            self._hinted = (key, self._fresh_hints())
        return self._hinted[1]

    def _fresh_hints(self) -> Line:
        """As many verbs as fit before the way back, the pages and the page of keys, which are always there."""
        line, seen, tail = Line((" ", "")), set(), self._way_round()
        for active in self.active_bindings.values():
            binding = active.binding
            if not binding.show or not active.enabled or binding.action in seen:
                continue
            seen.add(binding.action)
            key = self.app.get_key_display(binding)
            key = "Enter" if key == "⏎" and self.room.ascii_only else key
            if line.width + cells(key) + len(binding.description) + tail.width + 3 > self.size.width:
                break
            line.add(key, "key").add(f" {binding.description}  ", "muted")
        return line.extend(tail.spans)

    def _way_round(self) -> Line:
        """The keys nobody should have to look for."""
        panes = sum(1 for pane in self.focus_chain if isinstance(pane, View))
        line = Line()
        for key, word, narrowest in (
            ("Esc", "back", 0) if len(self.app.screen_stack) > 1 else ("q", "quit", 0),
            ("Tab", "pane", 90 if panes > 1 else 10_000),
            ("1-6", "pages", 0),
            ("?", "keys", 0),
            (":", "commands", 76),
        ):
            if self.size.width >= narrowest:
                line.add("  " if line.spans else "").add(key, "key").add(f" {word}", "muted")
        return line

    def on_key(self, event: events.Key) -> None:
        """A key of this page that does not apply says why, instead of nothing. Bindings that apply are carried out after this."""
        for owner in (self, self.room):
            for binding in owner.BINDINGS:
                if isinstance(binding, Binding) and event.key in binding.key.split(","):
                    _, name, parameters = actions.parse(binding.action)
                    if not owner.check_action(name, parameters):
                        self.room.say(self._why_not(binding), "warn")
                    return

    def _why_not(self, binding: Binding) -> str:
        """Why a key does nothing here."""
        if self.room.readonly and binding.action.split("(")[0] not in UNASKED:
            return f"{binding.description}: this screen was opened read-only. Open it without --readonly to change anything."
        ids = self.targets()
        if not ids:
            return f"{binding.description}: no run is under the cursor here."
        states = sorted({safe(self.facts_of(i).get("outcome") or self.facts_of(i).get("phase"), 20) for i in ids})
        named = ids[0] if len(ids) == 1 else f"{len(ids)} runs"
        proposed = self.room.snapshot.state.proposed if self.room.snapshot.state else 0
        where = " The proposals are last in the queue, on page 1." if proposed and binding.action in ("approve", "decline") else ""
        return f"{binding.description}: not for {named} ({', '.join(states)}).{where}"

    def on_descendant_focus(self) -> None:
        """Other keys apply now; they are asked for once the focus is seen to have moved."""
        self.call_after_refresh(self.show_keys)

    def on_table_moved(self, event: Table.Moved) -> None:
        """Other keys may apply to another row."""
        self.show_keys()

    # columns

    def on_table_columns_asked(self, event: Table.ColumnsAsked) -> None:
        """A form with the columns shown; what is taken out is hidden, now and the next time."""
        table = event.table
        known = [c.key for c in table.columns]
        shown = " ".join(k for k in known if k not in table.hidden)

        def take(got: dict[str, str] | None) -> None:
            if got is not None:
                wanted = set(got["columns"].split())
                table.hide(k for k in known if k not in wanted)
                self.room.memory.put(f"hidden:{self.NAME}:{table.id}", sorted(table.hidden))

        notes = [f"There are: {' '.join(known)}"]
        self.room.push_screen(
            Form(f"Columns of {table.name_shown.rstrip(' ·')}", [Field("columns", "Columns to show", shown)], notes=notes), take
        )

    def remembered_columns(self) -> None:
        """Hide what was hidden before."""
        for table in self.query(Table):
            hidden = self.room.memory.get(f"hidden:{self.NAME}:{table.id}")
            if isinstance(hidden, list):
                table.hide(str(k) for k in hidden)

    # filter

    def action_filter(self) -> None:
        """Open the `/` line for the table in focus."""
        table = self.filtered()
        if table is not None:
            self._filtering = table
            self.query_one(FilterLine).open(table.note)

    def _filter_typed(self, text: str) -> None:
        table = getattr(self, "_filtering", None)
        if table is None:
            return
        try:
            found = filters.parse(text)
        except BadValue as error:
            self.room.say(str(error), "warn")
            return
        self.room.say("")
        table.refine(found, found.text if found else "")
        self.filter_changed(table, found)

    def filter_changed(self, table: Table, found: filters.Filter | None) -> None:
        """A page that reads more for a filter does it here."""

    def _filter_closed(self) -> None:
        table = getattr(self, "_filtering", None)
        if table is not None:
            table.focus()
        self.show_keys()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Run keys exist only where a run is meant, and writing ones not in read-only mode."""
        if action in RUN_ACTIONS:
            if self.room.readonly and action not in UNASKED:
                return False
            targets = self.targets()
            return bool(targets) and self.applies(action, targets)
        return True

    def applies(self, action: str, ids: list[str]) -> bool:
        """Whether an action makes sense for these runs; what is not known is allowed, the verb refuses with a sentence."""
        phases = {str(self.facts_of(i).get("phase")) for i in ids}
        if phases == {"None"}:
            return True
        if action == "cancel":
            return phases != {"ended"}
        if action in ("requeue", "decide", "verify"):
            return "ended" in phases
        if action == "priority":
            return any(self.facts_of(i).get("queue_position") or self.facts_of(i).get("phase") == "proposed" for i in ids)
        if action in ("approve", "decline"):
            return "proposed" in phases
        return True

    # runs

    def targets(self) -> list[str]:
        """Marked rows, or the row under the cursor, of the table in focus."""
        focused = self.focused
        runs = getattr(focused, "run_ids", None)
        if callable(runs):
            return cast("list[str]", runs())
        if isinstance(focused, Table) and focused.key_name == "id":
            return [i for i in focused.selected() if i.startswith("r")]
        return []

    def facts_of(self, run_id: str) -> Facts:
        """From the live runs, the queue, or the rows on the screen."""
        snapshot = self.room.snapshot
        if run_id in snapshot.live:
            return snapshot.live[run_id]
        focused = self.focused
        at_hand = focused.row() if isinstance(focused, Table) and focused.key_name == "id" else None
        rows = chain([at_hand or {}], snapshot.queue, *(t.all_rows for t in self.query(Table) if t.key_name == "id"))
        found: Facts = next((r for r in rows if r.get("id") == run_id), {})
        return {**found, "phase": "ended"} if found and "rank" in found else found


PAGE_KEYS = [
    Binding("slash", "filter", "filter", key_display="/", tooltip="Filter the table in focus: words, gpu:h200, val<0.99, flag:any"),
]
