"""The lineage page: the progress of the night and the tree of kept runs, with none, one, and more than a stack could hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.lab import Lab
from tests.tui import rows, scenes
from tests.tui.driving import opened, screen_text, until
from tui.lines import cells
from tui.screens.lineage import Progress, best_so_far, load_progress, progress_lines, tree_rows

CLASS = "H100 · torch 2"


def result(run_id: str, val: float, at: float, parent: str | None = None, verdict: str | None = "keep", purpose: str = "experiment") -> Any:
    return {
        "id": run_id, "ended_at": at, "val_bpb": val, "verdict": verdict, "parent": parent, "hypothesis": "h", "trust": "claimed",
        "verified_bpb": None, "purpose": purpose, "verdict_why": None,
    }  # fmt: skip


def progress(*found: Any) -> Progress:
    return Progress(CLASS, 300.0, tuple(found), {r["id"]: r["parent"] for r in found})


@pytest.mark.parametrize("kept", [1, 30, 3000])
def test_a_chain_of_kept_runs_takes_no_more_room_than_one(kept: int) -> None:
    chain = [result("r0000", 1.0, 0.0, verdict=None, purpose="baseline")]
    chain += [result(f"r{i:04d}", 1.0 - i / 1e5, 60.0 * i, f"r{i - 1:04d}") for i in range(1, kept + 1)]
    found = tree_rows(progress(*chain))
    assert [r["id"] for r in found] == [r["id"] for r in chain]
    assert {r["tree"] for r in found[1:]} == {"↳ "} and found[0]["tree"] == ""
    assert found[-1]["gain"] == pytest.approx(1e-5)


def test_branches_are_drawn_and_deep_ones_keep_their_ids() -> None:
    found = tree_rows(
        progress(
            result("r0001", 1.0, 0), result("r0002", 0.9, 1, "r0001"), result("r0003", 0.8, 2, "r0001"), result("r0004", 0.7, 3, "r0002")
        )
    )
    assert [r["tree"] + r["id"] for r in found] == ["r0001", "├─r0002", "│ ↳ r0004", "└─r0003"]
    bushy = [result("r0000", 1.0, 0)]
    for i in range(1, 60, 2):
        bushy += [result(f"r{i:04d}", 1.0, i, f"r{max(0, i - 2):04d}"), result(f"r{i + 1:04d}", 1.0, i, f"r{max(0, i - 2):04d}")]
    assert max(cells(r["tree"] + r["id"]) for r in tree_rows(progress(*bushy))) <= 16


def test_parents_in_a_circle_and_parents_that_were_not_kept() -> None:
    found = tree_rows(progress(result("r0001", 1.0, 0), result("r0002", 0.9, 1, "r0001", verdict=None), result("r0003", 0.8, 2, "r0002")))
    assert [(r["id"], r["tree"]) for r in found] == [("r0001", ""), ("r0003", "↳ ")]
    circle = Progress(CLASS, 300.0, (result("r0001", 1.0, 0, "r0009"),), {"r0009": "r0008", "r0008": "r0009"})
    assert [r["id"] for r in tree_rows(circle)] == ["r0001"]


def test_a_short_night_is_told_in_minutes() -> None:
    short = progress(*[result(f"r{i}", 1.0 - i / 100, 60.0 * i) for i in range(10)])
    long = progress(*[result(f"r{i}", 1.0 - i / 100, 3600.0 * i) for i in range(10)])
    assert "minutes" in progress_lines(short, 80, 16)[-1].text and progress_lines(short, 80, 16)[-2].text.rstrip().endswith("9.00")
    assert "hours" in progress_lines(long, 80, 16)[-1].text
    assert best_so_far(short.rows)[-1] == (540.0, 0.91)
    blink = progress(*[result(f"r{i}", 1.0 - i / 100, 0.5 * i) for i in range(10)])
    assert "seconds since" in progress_lines(blink, 80, 16)[-1].text


def test_failed_ideas_do_not_press_the_gains_into_one_row() -> None:
    night = [result(f"r{i}", 1.0 - i / 500, 600.0 * i) for i in range(10)] + [
        result(f"x{i}", 1.3, 600.0 * i + 5, verdict=None) for i in range(4)
    ]
    shown = progress_lines(progress(*sorted(night, key=lambda r: r["ended_at"])), 80, 16)
    assert float(shown[0].text.split("┤")[0]) < 1.02
    assert "4 worse ones above" in shown[-1].text
    nothing_gained = progress(*[result(f"r{i}", 1.0 + i / 100, 600.0 * i) for i in range(10)])
    assert float(progress_lines(nothing_gained, 80, 16)[0].text.split("┤")[0]) > 1.05


def test_what_is_not_ranked_is_not_progress(tmp_path: Path) -> None:
    """A refuted claim and one that is held are no best so far; a verified result counts with what was recomputed."""
    lab = scenes.empty_lab(tmp_path)
    rows.ended(lab, 0.99, at=500)
    rows.ended(lab, 0.98, at=400, trust="verified", verified_bpb=0.985)
    rows.ended(lab, 0.10, at=300, trust="refuted")
    rows.ended(lab, 0.20, at=200, trust_why="held: too good to be true")
    found = load_progress(None, None)(lab)
    assert [r["val_bpb"] for r in found.rows] == [0.99, 0.985]


async def test_the_baseline_is_not_called_kept(lab: Lab) -> None:
    async with opened(lab, size=(140, 40)) as (room, pilot):
        await pilot.press("6")
        await until(lambda: "progress" in room.snapshot.views)
        await pilot.pause()
        tree = screen_text(room).split("Lineage")[1].splitlines()
        assert "1 kept" in tree[0]
        assert "r0001" in tree[2] and "baseline" in tree[2] and "kept" not in tree[2]
        assert "↳ r0005" in tree[3] and "kept" in tree[3] and "verified" in tree[3]
        await pilot.press("e", "enter")
        await until(lambda: list(lab.path.glob("lineage-*.tsv")))


async def test_an_empty_lab_has_an_empty_lineage(tmp_path: Path) -> None:
    async with opened(scenes.empty_lab(tmp_path), size=(80, 24)) as (room, pilot):
        await pilot.press("6")
        await until(lambda: "progress" in room.snapshot.views)
        await pilot.pause()
        shown = screen_text(room)
        assert "Progress · 0 results" in shown and "no run has a result yet" in shown and "nothing was kept yet" in shown


async def test_what_was_kept_at_another_budget_is_not_denied(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    rows.ended(lab, 0.99, at=500, budget_s=20.0, verdict="keep")
    rows.ended(lab, 0.98, at=400)
    async with opened(lab, size=(140, 40)) as (room, pilot):
        await pilot.press("6")
        await until(lambda: "progress" in room.snapshot.views)
        await pilot.pause()
        shown = screen_text(room)
        assert "nothing was kept yet" not in shown and "of this class and budget was kept" in shown
