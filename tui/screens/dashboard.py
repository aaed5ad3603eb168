"""The first page: a panel per GPU, the queue, the leaderboard, and what happened last where there is room.

`lay_out` is a pure function of the room and of how much there is to show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget

from runner.research.classes import gpu_of

from ..deeds import RUN_BINDINGS
from ..lines import Line, safe
from ..runview import RunLoader, RunView, curve_lines
from ..snapshot import Snapshot
from ..tables import BOARD, EVENTS, QUEUE, event_rows
from ..widgets.gpus import choose_mode, row_columns
from ..widgets.gpuwall import GpuWall
from ..widgets.table import Table
from ..widgets.view import Lines
from ..words import number, short_gpu
from .page import PAGE_KEYS, Page

LISTS_HIGH = 14  # rows that queue and leaderboard keep before a curve gets what is spare
WATCH_LOW, WATCH_HIGH = 12, 24


@dataclass(frozen=True, slots=True)
class Plan:
    """How the room is shared: GPU mode and height, queue height (0: beside the board), an events column, a curve below (0: none)."""

    mode: str
    beside: int
    gpus_high: int
    queue_high: int
    events: bool
    watch_high: int = 0


def lay_out(gpus: int, waiting: int, width: int, height: int, ranked: int = 10) -> Plan:
    """Share `width` x `height` cells among GPUs, queue, leaderboard and events; what has few rows leaves its room to the others."""
    wide = width >= 104
    lists = (8 if wide else 11) if height >= 20 else 6  # below cards, queue and leaderboard keep a few rows each
    mode, beside, high = choose_mode(gpus, width, max(4, height - lists - 2))
    if mode == "rows" and gpus:
        asked = max(3, 2 + (max(waiting, ranked) if wide else waiting + 2 + ranked))
        beside, high = row_columns(gpus, width, max(4, height * 6 // 10, min(height - asked, height - lists)))
    rest = height - high
    queue_high = 0 if wide else max(3, min(waiting + 2, max(rest * 4 // 10, rest - ranked - 2), rest - 3))
    spare = rest - (LISTS_HIGH if wide else LISTS_HIGH + queue_high)
    return Plan(mode, beside, high, queue_high, width >= 176, min(spare, WATCH_HIGH) if spare >= WATCH_LOW and gpus else 0)


class Dashboard(Page):
    """GPUs above, queue and leaderboard below."""

    NAME = "dashboard"
    BINDINGS: ClassVar[list[BindingType]] = [
        *RUN_BINDINGS,
        *PAGE_KEYS,
        Binding("c", "next_class", "class", show=False, tooltip="Show the leaderboard of the next class or budget"),
        Binding("H", "pause_host", "pause host", show=False, tooltip="Start nothing new on the host of the GPU under the cursor, or go on"),
        Binding("r", "release", "release GPU", show=False, tooltip="Ask the daemon to take a quarantined GPU back"),
        Binding("e", "export", "export", show=False, tooltip="Write the table in focus to a TSV file"),
    ]
    DEFAULT_CSS = """
    Dashboard #lists { height: 1fr; }
    Dashboard #queue { width: 2fr; }
    Dashboard #board { width: 3fr; margin-left: 1; }
    Dashboard #events { width: 2fr; margin-left: 1; display: none; }
    Dashboard.-stacked #lists { layout: vertical; }
    Dashboard.-stacked #queue, Dashboard.-stacked #board { width: 100%; height: 1fr; margin-left: 0; }
    Dashboard.-events #events { display: block; }
    Dashboard #watch { display: none; }
    Dashboard.-watch #watch { display: block; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._plan: Plan | None = None
        self._watched: object = None

    def body(self) -> Iterable[Widget]:
        """The four panes."""
        yield GpuWall(id="gpus")
        yield Horizontal(
            Table(QUEUE, id="queue", title="Queue", empty="the queue is empty (`overnight connect`)"),
            Table(BOARD, id="board", title="Leaderboard", empty="no run has a result yet"),
            Table(EVENTS, key="event", id="events", title="Events", empty="nothing happened yet"),
            id="lists",
        )
        yield Lines(id="watch")

    def on_mount(self) -> None:
        """Keys go to the GPUs first."""
        self.query_one(GpuWall).focus()

    def show_body(self, snapshot: Snapshot) -> None:
        """Share the room, then fill it."""
        wall, queue, board = self.query_one(GpuWall), self.query_one("#queue", Table), self.query_one("#board", Table)
        alerts_high = len(self.query_one("#alerts").lines)  # type: ignore[attr-defined]
        ranked = len((snapshot.board or {}).get("rows") or [])
        plan = lay_out(len(snapshot.gpus), len(snapshot.queue), self.size.width, self.size.height - 2 - alerts_high, ranked)
        if plan != self._plan:
            self._plan = plan
            wall.styles.height = plan.gpus_high
            self.set_class(plan.queue_high > 0, "-stacked")
            self.set_class(plan.events, "-events")
            queue.styles.height = plan.queue_high or None
            wall.set_mode(plan.mode, plan.beside)
            self.set_class(plan.watch_high > 0, "-watch")
            self.query_one("#watch").styles.height = plan.watch_high or 1
        queue.empty = "the queue is empty (`overnight connect`)" if snapshot.seen else "not read yet"
        board.empty = "no run has a result yet" if snapshot.seen else "not read yet"
        if not snapshot.seen:
            wall.empty = "reading the lab …" if snapshot.problem is None else "the lab cannot be read; the line above says why"
        else:
            wall.empty = no_gpu(snapshot)
        wall.show_snapshot(snapshot)
        queue.show(snapshot.queue)
        self._show_board(board, snapshot)
        self._show_watched(snapshot, wall)
        if plan.events:
            self.query_one("#events", Table).show(event_rows(snapshot.events, self.room.now()))

    def _show_watched(self, snapshot: Snapshot, wall: GpuWall) -> None:
        """The curve of the run on the GPU under the cursor, where the room is there for it."""
        run = (wall.row() or {}).get("run") if self._plan and self._plan.watch_high else None
        if run != self._watched:
            if self._watched is not None:
                self.room.source.unwatch(f"watch:{self._watched}")
            self._watched = run
            if run is not None:
                self.room.source.watch(f"watch:{run}", RunLoader(str(run), log=False))
        pane = self.query_one("#watch", Lines)
        found = snapshot.views.get(f"watch:{run}")
        if isinstance(found, RunView):
            region = pane.scrollable_content_region
            pane.caption(f"{run} · loss by share of the budget · {safe(found.run.get('hypothesis') or found.run.get('purpose'), 80)}")
            pane.show(curve_lines(found, region.width, region.height))
        elif pane.display:
            pane.caption("Curve")
            pane.show([Line(("no run on this GPU" if run is None else "reading the run …", "muted"))])

    def _show_board(self, board: Table, snapshot: Snapshot) -> None:
        found = snapshot.board or {}
        board.name_shown, board.note_right = board_title(found)
        board.show(found.get("rows") or [])

    # keys

    def on_table_moved(self, event: Table.Moved) -> None:
        """Watch the run of another GPU."""
        if event.table.id == "gpus" and self.drawable:
            self._show_watched(self.room.snapshot, self.query_one(GpuWall))

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Enter opens the run of the row."""
        if event.table.id == "gpus":
            ids = self.query_one(GpuWall).run_ids()
            if ids:
                self.room.open_run(ids[0])
            else:
                self.room.say("this GPU has no run")
        elif event.table.id == "events":
            self.room.open_subject(event.table.row())
        else:
            self.room.open_run(event.key)

    def action_next_class(self) -> None:
        """The next (class, budget) that has results."""
        found = (self.room.snapshot.board or {}).get("classes") or []
        if not found:
            self.room.say("no class has a result yet")
            return
        board = self.room.snapshot.board or {}
        at = next(
            (i for i, c in enumerate(found) if (c.get("class"), c.get("budget_s")) == (board.get("class"), board.get("budget_s"))), -1
        )
        after = found[(at + 1) % len(found)]
        self.room.choose_class(after.get("class"), after.get("budget_s"))

    def _gpu(self) -> dict[str, Any]:
        return dict(self.query_one(GpuWall).row() or {})

    def action_pause_host(self) -> None:
        """Pause or resume the host of the GPU under the cursor."""
        host = self._gpu().get("host")
        if host:
            self.room.toggle_host(str(host))

    def action_release(self) -> None:
        """Ask for the GPU under the cursor back."""
        gpu = self._gpu()
        if gpu.get("state") == "quarantined":
            self.room.release_gpu(gpu)
        else:
            self.room.say("only a quarantined GPU can be released")

    def action_export(self) -> None:
        """Write the table in focus."""
        table = self.filtered()
        if table is not None:
            self.room.export(table)


def no_gpu(snapshot: Snapshot) -> str:
    """Why there is no GPU, as far as it is known."""
    state = snapshot.state
    if snapshot.problem or (state is not None and state.daemon_note):
        return "no GPU is known: the alerts above say why"
    if state is None or not state.daemon_alive:
        return "no GPU is known yet: the daemon looks for them when it starts"
    if not snapshot.hosts:
        return "the daemon runs and has no host yet"
    return "no GPU was found: 4 shows what each host answered"


def board_title(board: Mapping[str, Any]) -> tuple[str, str]:
    """The class and budget ranked, and how far the noise is known."""
    if not board.get("rows"):
        return ("Leaderboard", "")
    classes = board.get("classes") or []
    at = next(
        (i for i, c in enumerate(classes, 1) if (c.get("class"), c.get("budget_s")) == (board.get("class"), board.get("budget_s"))), 1
    )
    name = f"Leaderboard {short_gpu(gpu_of(str(board.get('class') or 'unknown class')))} {number(board.get('budget_s'))} s"
    if len(classes) > 1:
        name += f" (c: {at} of {len(classes)})"
    sd = board.get("noise_sd")
    return (name + " ·", f"noise ±{number(sd, 4)}, {board.get('noise_n')} dof" if sd else "noise unknown: N repeats a run")
