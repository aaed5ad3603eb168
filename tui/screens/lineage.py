"""How the night went: val_bpb over time with the best so far (the progress plot of autoresearch), and the tree of kept runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from runner import board
from runner.lab import Lab
from runner.text import plural

from ..chart import Series, draw
from ..deeds import RUN_BINDINGS
from ..lines import Line, Span, safe
from ..snapshot import Failed, Snapshot
from ..widgets.table import Column, Row, Table
from ..widgets.view import Lines
from ..words import age, number
from .page import PAGE_KEYS, Page

COLUMNS = "id, ended_at, val_bpb, verdict, parent, hypothesis, trust, verified_bpb, purpose, verdict_why"
NOTHING_KEPT = "nothing was kept yet: K keeps a run"
KEPT_ELSEWHERE = "nothing of this class and budget was kept: c shows the next"


@dataclass(frozen=True, slots=True)
class Progress:
    """The completed runs of one class and budget in the order in which they ended."""

    class_key: str | None
    budget_s: float | None
    rows: tuple[dict[str, Any], ...]
    parents: dict[str, str | None]


def load_progress(class_key: str | None, budget_s: float | None) -> Any:
    """A reader of the progress in a scope."""

    def load(lab: Lab) -> Progress:
        key, budget = board.scope_of(board.scopes(lab), class_key, budget_s)
        where = f"{board.RANKED} AND {board.CREDIBLE} AND val_bpb IS NOT NULL AND class_key IS ? AND budget_s IS ? ORDER BY ended_at"
        found = [dict(zip(COLUMNS.split(", "), r, strict=True)) for r in lab.store.tally(COLUMNS, where, (key, budget))]
        rows = tuple({**r, "val_bpb": counted(r)} for r in found)
        return Progress(
            key,
            budget,
            rows,
            dict(lab.store.tally("id, parent", "verdict = 'keep' OR id IN (SELECT parent FROM runs WHERE verdict = 'keep')")),
        )

    return load


def counted(row: dict[str, Any]) -> float:
    """What a result counts for, as on the leaderboard: the recomputed value where there is one."""
    verified = row["trust"] == "verified" and row["verified_bpb"] is not None
    return float(row["verified_bpb"] if verified else row["val_bpb"])


def best_so_far(rows: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
    """(time, best val_bpb until then), a step at each improvement."""
    out: list[tuple[float, float]] = []
    best: float | None = None
    last = None
    for row in rows:
        last = row["ended_at"]
        if best is None or row["val_bpb"] < best:
            if best is not None:
                out.append((last, best))
            best = row["val_bpb"]
            out.append((last, best))
    if best is not None and last is not None:
        out.append((last, best))
    return out


def progress_lines(progress: Progress, width: int, height: int) -> list[Line]:
    """The plot: every run a dot, the kept ones in their own colour, the best so far a line; time along the bottom."""
    if not progress.rows:
        return [Line(("no run has a result yet", "muted"))]
    start, end = min(r["ended_at"] for r in progress.rows), max(r["ended_at"] for r in progress.rows)
    unit, size = ("hours", 3600.0) if end - start >= 7200 else ("minutes", 60.0) if end - start >= 120 else ("seconds", 1.0)
    dots = [((r["ended_at"] - start) / size, r["val_bpb"], r["verdict"] == "keep") for r in progress.rows]
    worst = sorted(v for _, v, _ in dots)[int(len(dots) * 0.9)]
    first, least = dots[0][1], min(v for _, v, _ in dots)
    if least < first:  # the gains are what one looks for: a night's failed ideas would press them into one row
        worst = min(worst, first + (first - least))
    shown = [(x, v, k) for x, v, k in dots if v <= worst]
    best = [((x - start) / size, v) for x, v in best_so_far(progress.rows)]
    series = [
        Series(
            "every run" + (f" ({len(dots) - len(shown)} worse ones above)" if len(shown) < len(dots) else ""),
            [(x, v) for x, v, k in shown if not k],
            "muted",
            marks=True,
        ),
        Series("best so far", best, "best"),
        Series("kept", [(x, v) for x, v, k in shown if k], "own", marks=True),
    ]
    return draw(series, width, height, x_name=f"{unit} since the first result", clip=False)


def tree_rows(progress: Progress) -> list[Row]:
    """Kept runs as a tree, each under the kept run it came from; the first is the baseline."""
    by_id = {r["id"]: r for r in progress.rows}
    kept = {i for i, r in by_id.items() if r["verdict"] == "keep"}
    roots = [r["id"] for r in progress.rows if r["purpose"] == "baseline"][:1]
    members = kept | set(roots)

    def ancestor(run_id: str) -> str | None:
        seen = set()
        at = by_id[run_id]["parent"]
        while at is not None and at not in seen:
            if at in members:
                return str(at)
            seen.add(at)
            at = by_id[at]["parent"] if at in by_id else progress.parents.get(at)
        return None

    children: dict[str | None, list[str]] = {}
    for run_id in [r["id"] for r in progress.rows if r["id"] in members]:
        above = ancestor(run_id)
        children.setdefault(above if above != run_id else None, []).append(run_id)
    out: list[Row] = []

    def show(run_id: str, lead: str, joint: str, above: float | None) -> None:
        row = by_id[run_id]
        out.append({**row, "tree": indented(lead) + joint, "gain": above - row["val_bpb"] if above is not None else None})

    waiting: list[tuple[str, str, str, float | None]] = [(r, "", "", None) for r in reversed(children.get(None, []))]
    while waiting:  # a night's chain of kept runs may be deeper than Python's stack
        run_id, lead, joint, before = waiting.pop()
        show(run_id, lead, joint, before)
        below, value = children.get(run_id, []), by_id[run_id]["val_bpb"]
        deeper = lead + {"├─": "│ ", "└─": "  "}.get(joint, "")
        if len(below) == 1:  # what follows from the row above alone needs no room: a night is mostly one long chain
            waiting.append((below[0], deeper, "↳ ", value))
        else:
            joints = ["├─"] * (len(below) - 1) + ["└─"]
            waiting += [(child, deeper, j, value) for child, j in reversed(list(zip(below, joints, strict=False)))]
    return out


def indented(lead: str, most: int = 8) -> str:
    """The branches to the left of a run; of many, the nearest."""
    return lead if len(lead) <= most else "…" + lead[1 - most :]


def _gain(row: Row) -> Span:
    value = row.get("gain")
    if not isinstance(value, float):
        return ("", "")
    return ("0", "") if abs(value) < 5e-7 else (f"{value:+.6f}", "good" if value > 0 else "")


def _standing(row: Row) -> Span:
    """Kept, or the baseline that all is measured from: nobody kept that one."""
    return ("kept", "good") if row.get("verdict") == "keep" else ("baseline", "accent")


TREE = [
    Column("tree", "run", 18, lambda r: (f"{r['tree']}{safe(r['id'], 12)}", "strong")),
    Column("standing", "is", 8, _standing, drop=1),
    Column("val", "val_bpb", 8, lambda r: (number(r.get("val_bpb"), 6), ""), "right"),
    Column("gain", "gain", 9, _gain, "right"),
    Column("trust", "", 12, lambda r: (safe(r.get("trust") or "", 12), "muted"), drop=2),
    Column("why", "why", 12, lambda r: (safe(r.get("verdict_why") or r.get("hypothesis") or "", 300), ""), flex=True),
    Column("age", "ended", 6, lambda r: (age(r.get("age_s")), "muted"), "right", drop=3),
]


class LineagePage(Page):
    """Progress and lineage."""

    NAME = "lineage"
    BINDINGS: ClassVar[list[BindingType]] = [
        *RUN_BINDINGS,
        *PAGE_KEYS,
        Binding("c", "next_class", "class", show=False, tooltip="The next class or budget"),
        Binding("e", "export", "export", show=False, tooltip="Write the tree to a TSV file"),
    ]
    DEFAULT_CSS = """
    LineagePage #progress { height: 3fr; }
    LineagePage #tree { height: 2fr; }
    """

    def body(self) -> Iterable[Widget]:
        """The plot over the tree."""
        yield Lines(id="progress", title="Progress")
        yield Table(TREE, id="tree", title="Lineage", empty=NOTHING_KEPT)

    def on_mount(self) -> None:
        """Begin to read."""
        scope = self.room.snapshot.board or {}
        self.room.source.watch("progress", load_progress(scope.get("class"), scope.get("budget_s")))
        self.query_one("#tree").focus()

    def on_unmount(self) -> None:
        """Read no longer."""
        self.room.source.unwatch("progress")

    def show_body(self, snapshot: Snapshot) -> None:
        """Both panes."""
        pane, found = self.query_one("#progress", Lines), snapshot.views.get("progress")
        if not isinstance(found, Progress):
            pane.show([Line((found.sentence if isinstance(found, Failed) else "reading the runs …", "muted"))])
            return
        region = pane.scrollable_content_region
        scope = f" · {safe(found.class_key, 100)} · {number(found.budget_s)} s" if found.rows else ""
        pane.caption(f"Progress{scope} · {plural(len(found.rows), 'result')}")
        pane.show(progress_lines(found, region.width, region.height))
        now = self.room.now()
        tree, rows = self.query_one("#tree", Table), tree_rows(found)
        tree.empty = KEPT_ELSEWHERE if found.parents and found.rows else NOTHING_KEPT
        tree.note_right = f"{sum(1 for r in rows if r['verdict'] == 'keep')} kept"
        tree.show([{**r, "phase": "ended", "age_s": now - r["ended_at"]} for r in rows])

    def on_table_chosen(self, event: Table.Chosen) -> None:
        """Open it."""
        self.room.open_run(event.key)

    def action_next_class(self) -> None:
        """The next class that has results."""
        classes = (self.room.snapshot.board or {}).get("classes") or []
        found = self.room.snapshot.views.get("progress")
        if not classes or not isinstance(found, Progress):
            return
        at = next((i for i, c in enumerate(classes) if (c["class"], c["budget_s"]) == (found.class_key, found.budget_s)), -1)
        after = classes[(at + 1) % len(classes)]
        self.room.source.watch("progress", load_progress(after["class"], after["budget_s"]))

    def action_export(self) -> None:
        """Write the tree."""
        self.room.export(self.query_one("#tree", Table))
