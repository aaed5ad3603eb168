"""A run's page: its curve over the parent's and the best one's with the GPU under it, its figures, and log, diff or audit trail below."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget

from ..deeds import RUN_BINDINGS, Facts
from ..lines import Line, safe
from ..runview import AXES, METRICS, RunLoader, RunView, audit_lines, curve_lines, diff_lines, fact_lines
from ..snapshot import Failed, Snapshot
from ..widgets.dialogs import FilterLine
from ..widgets.logpane import LogPane
from ..widgets.view import Lines
from .page import Page

BELOW = ("log", "facts", "diff", "audit")


class RunPage(Page):
    """One run."""

    NAME = "run"
    BINDINGS: ClassVar[list[BindingType]] = [
        *RUN_BINDINGS,
        Binding("l", "below('log')", "log", show=False, tooltip="Show the log below"),
        Binding("d", "below('diff')", "diff", tooltip="Show the source's difference below"),
        Binding("u", "below('audit')", "audit", show=False, tooltip="Show who did what to the run"),
        Binding("f", "below('facts')", "figures", show=False, tooltip="To the figures; on narrow screens they are shown below"),
        Binding(
            "left_square_bracket",
            "turn(-1)",
            "pane before",
            key_display="[",
            show=False,
            tooltip="The pane before: log, figures, diff, audit",
        ),
        Binding("right_square_bracket", "turn(1)", "next pane", key_display="]", show=False, tooltip="The next pane"),
        Binding("i", "axis", "axis", show=False, tooltip="The curve by share of the budget, step or time"),
        Binding("o", "metric", "metric", show=False, tooltip="Loss, tokens/s, ms a step, MFU"),
        Binding("L", "log_scale", "log scale", show=False, tooltip="Logarithmic loss axis"),
        Binding("B", "diff_with", "compare with", show=False, tooltip="Compare with the parent, the best, or a run you name"),
        Binding("O", "open_parent", "its parent", show=False, tooltip="Open the run it is compared with"),
        Binding("slash", "filter", "search the log", key_display="/", show=False, tooltip="Search the log; n and b go on"),
    ]
    DEFAULT_CSS = """
    RunPage #above { height: 3fr; }
    RunPage #curve { width: 3fr; }
    RunPage #facts { width: 2fr; }
    RunPage #log, RunPage #diff, RunPage #audit, RunPage #figures { height: 2fr; display: none; }
    RunPage.-log #log, RunPage.-diff #diff, RunPage.-audit #audit, RunPage.-facts #figures { display: block; }
    RunPage.-narrow #facts { display: none; }
    """

    def __init__(self, run_id: str) -> None:
        super().__init__()
        self.run_id = run_id
        self.loader = RunLoader(run_id)
        self.lower = "log"
        self.metric, self.axis, self.log_y = "loss", "share", False

    def body(self) -> Iterable[Widget]:
        """Curve and figures above; one of four panes below."""
        yield Horizontal(Lines(id="curve", title=f"{self.run_id}"), Lines(id="facts", title="Run"), id="above")
        yield LogPane(id="log")
        yield Lines(id="diff", title="Diff")
        yield Lines(id="audit", title="Audit")
        yield Lines(id="figures", title="Run")

    def on_mount(self) -> None:
        """Begin to read the run."""
        self.room.source.watch(self.key, self.loader)
        self.query_one("#log").focus()

    def on_unmount(self) -> None:
        """Read it no longer."""
        self.room.source.unwatch(self.key)

    @property
    def key(self) -> str:
        """The name of the view in snapshots."""
        return f"run:{self.run_id}"

    def view(self, snapshot: Snapshot | None = None) -> RunView | None:
        """What is known of the run."""
        found = (snapshot or self.room.snapshot).views.get(self.key)
        return found if isinstance(found, RunView) else None

    # drawing

    def show_body(self, snapshot: Snapshot) -> None:
        """Fill the panes that are visible."""
        narrow = self.size.width < 100
        self.set_class(narrow, "-narrow")
        if self.lower == "facts" and not narrow:
            self.lower = "log"
        for name in BELOW:
            self.set_class(name == self.lower, f"-{name}")
        found = snapshot.views.get(self.key)
        curve = self.query_one("#curve", Lines)
        if not isinstance(found, RunView):
            curve.show(
                [
                    Line(
                        (
                            found.sentence if isinstance(found, Failed) else "reading the run …",
                            "bad" if isinstance(found, Failed) else "muted",
                        )
                    )
                ]
            )
            return
        best = self._best_of(snapshot, found)
        if best != self.loader.best_id:
            self.loader.best_id = best
            self.room.source.poke()
        self._show_curve(curve, found)
        facts = self.query_one("#figures" if narrow else "#facts", Lines)
        facts.show(fact_lines(found, max(20, facts.scrollable_content_region.width)))
        if narrow and not found.points and self.lower != "facts":  # a curve that is not there leaves its place to what is known
            known = fact_lines(found, max(20, curve.scrollable_content_region.width))
            curve.show(known if found.run.get("phase") == "ended" else [*curve.lines, *known])
        if self.lower == "log":
            log = self.query_one("#log", LogPane)
            log.empty = "it printed nothing" if found.run.get("phase") == "ended" else "no output yet"
            log.show_text(found.log)
        elif self.lower == "diff":
            self.query_one("#diff", Lines).show(diff_lines(found.diff))
        elif self.lower == "audit":
            self.query_one("#audit", Lines).show(audit_lines(found.events, self.room.now()))

    def _show_curve(self, pane: Lines, view: RunView) -> None:
        region = pane.scrollable_content_region
        what = safe(view.run.get("hypothesis") or view.run.get("purpose"), 80)
        pane.caption(f"{self.run_id} · {METRICS[self.metric]} by {AXES[self.axis]}{', log' if self.log_y else ''} · {what}", "o i L")
        pane.show(curve_lines(view, region.width, region.height, metric=self.metric, axis=self.axis, log=self.log_y))

    def _best_of(self, snapshot: Snapshot, view: RunView) -> str | None:
        """The best run of the same class and budget, when the leaderboard shows that one."""
        board = snapshot.board or {}
        rows = board.get("rows") or []
        same = view.run.get("class") in (None, board.get("class")) and view.run.get("budget_s") == board.get("budget_s")
        return str(rows[0]["id"]) if rows and same else None

    # keys

    def action_below(self, name: str) -> None:
        """Show a pane below; the figures have a place of their own where the screen is wide enough."""
        if name == "facts" and not self.has_class("-narrow"):
            self.query_one("#facts").focus()
            return
        self.lower = name
        if name == "diff" and not self.loader.want_diff:
            self.loader.want_diff = True
            self.room.source.poke()
        self.show_body(self.room.snapshot)
        self.query_one("#figures" if name == "facts" else f"#{name}").focus()
        self.call_after_refresh(lambda: self.show_body(self.room.snapshot))

    def action_turn(self, by: int) -> None:
        """Through the panes below."""
        names = [n for n in BELOW if n != "facts" or self.has_class("-narrow")]
        self.action_below(names[(names.index(self.lower) + by) % len(names)] if self.lower in names else names[0])

    def action_axis(self) -> None:
        """The next x axis."""
        self.axis = _after(list(AXES), self.axis)
        self.show_body(self.room.snapshot)

    def action_metric(self) -> None:
        """The next metric."""
        self.metric = _after(list(METRICS), self.metric)
        self.show_body(self.room.snapshot)

    def action_log_scale(self) -> None:
        """Linear or logarithmic."""
        self.log_y = not self.log_y
        self.show_body(self.room.snapshot)

    def action_diff_with(self) -> None:
        """Compare with the best, with the parent again, or with a run that is named."""
        from ..widgets.dialogs import Field, Form

        best = self.loader.best_id
        note = f"Best of its class: {best}." if best else "Its class has no best run yet."
        form = Form(
            f"Compare {self.run_id} with", [Field("run", "A run id (empty: its parent)", self.loader.diff_with or "")], notes=[note]
        )

        def take(got: dict[str, str] | None) -> None:
            if got is not None:
                self.loader.diff_with = got["run"].lower() or None
                self.room.source.poke()
                self.action_below("diff")

        self.room.push_screen(form, take)

    def action_open_parent(self) -> None:
        """Open the run this one is compared with."""
        view = self.view()
        if view and view.compared:
            self.room.open_run(view.compared)
        else:
            self.room.say("it has no parent")

    def action_filter(self) -> None:
        """Search the log."""
        self.action_below("log")
        self.query_one(FilterLine).open(self.query_one("#log", LogPane).needle)

    def _filter_typed(self, text: str) -> None:
        self.query_one("#log", LogPane).search(text)

    def _filter_closed(self) -> None:
        self.query_one("#log").focus()

    # the run

    def targets(self) -> list[str]:
        """This run."""
        return [self.run_id]

    def facts_of(self, run_id: str) -> Facts:
        """As read for this page."""
        view = self.view()
        return view.run if view and run_id == self.run_id else {}


def _after(names: list[Any], name: Any) -> Any:
    return names[(names.index(name) + 1) % len(names)]
