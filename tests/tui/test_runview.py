"""What a run's page is made of: telemetry below the curve it belongs to, and words where there is no curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.lab import Lab
from runner.records import Point, Sample
from tests.tui import rows, scenes
from tests.tui.driving import opened, screen_text, until
from tests.tui.rows import NOW
from tui.runview import RunLoader, RunView, curve_lines, fact_lines, state_lines
from tui.screens.run import RunPage
from tui.telemetry import reached, telemetry_lines, trained_at

BUDGET = 300.0


def points(dt_ms: float, warm_up: int = 10, steps: int = 600) -> list[Point]:
    """A run whose first `warm_up` steps are not counted, as upstream's are not."""
    counted = steps - warm_up
    return [Point(s, None, max(0, s - warm_up) / counted, 3.0, None, dt_ms, None) for s in range(0, steps + 1, 10)]


def sample(at: float, power: float) -> Sample:
    return Sample("GPU-a", int(at), "r0001", 99.0, 40000, power, 700.0, 60.0, 1755, 1980, 0, None)


@pytest.mark.parametrize(
    ("run", "pace"),
    [
        ({"budget_s": BUDGET, "ended_at": None, "started_at": NOW}, 1.0),
        ({"budget_s": BUDGET, "ended_at": NOW + 400, "started_at": NOW - 20, "wall_s": 420.0}, 1.0),
        ({"budget_s": BUDGET, "ended_at": NOW + 32, "started_at": NOW - 2, "wall_s": 340.0}, 0.1),
    ],
)
@pytest.mark.parametrize("axis", ["share", "step", "t"])
def test_a_sample_stands_below_the_point_trained_at_that_moment(run: dict[str, Any], pace: float, axis: str) -> None:
    """Half of the steps take half of the time: the fall of the power at that moment lies in the middle of the chart, on any clock."""
    curve, spent = points(dt_ms=500.0), 300.0
    anchors = reached(run, curve, NOW, NOW + spent if run["ended_at"] is None else None)
    middle = next(p for p in curve if p.step == 300)
    share, step = trained_at(anchors, NOW + 150.0 * pace) or (0.0, 0.0)
    assert share == pytest.approx(middle.share, abs=0.01) and step == pytest.approx(300, abs=5)
    drawn = [sample(NOW + s * pace, 600.0 if s < 150 else 100.0) for s in range(0, 301, 10)]
    span = {"share": (0.0, 1.0), "t": (0.0, BUDGET), "step": (0.0, 600.0)}[axis]
    power = telemetry_lines(run, drawn, anchors, 111, 9, axis, span)[1].text[10:]
    edge = max(i for i, c in enumerate(power) if c == "█")
    assert 46 <= edge <= 54 and power.rstrip()[-1] == "▁" and len(power.rstrip()) >= 95


def test_samples_before_the_first_step_and_after_the_last_are_left_out() -> None:
    anchors = reached({"budget_s": BUDGET, "ended_at": None}, points(500.0), NOW, NOW + 300)
    assert trained_at(anchors, NOW - 60) is None and trained_at(anchors, NOW + 400) is None
    assert trained_at([], NOW) is None
    assert telemetry_lines({"budget_s": BUDGET}, [sample(NOW, 1.0)], [], 111, 9, "share", (0.0, 1.0)) == []


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"phase": "ended", "outcome": "crashed", "cause_text": "out of memory"}, "It ended without a step: out of memory"),
        ({"phase": "queued", "queue_position": 12}, "place 12 of the queue"),
        ({"phase": "proposed"}, "a approves"),
        ({"phase": "unreachable", "unreachable_s": 340.0}, "out of reach for 5m"),
        ({"phase": "running", "stage": "compiling", "age_s": 61.0}, "has not made a step yet (compiling), 1m"),
    ],
)
def test_a_run_without_a_curve_says_why(run: dict[str, Any], says: str) -> None:
    assert says in " ".join(line.text for line in state_lines(RunView(run), 300))


async def test_a_small_screen_tells_about_a_run_that_has_no_curve(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    cause = {"cause": "assert", "cause_text": "TOTAL_BATCH_SIZE must be a multiple of DEVICE_BATCH_SIZE"}
    crashed = rows.ended(lab, None, at=30, hypothesis="an odd batch", overrides={"TOTAL_BATCH_SIZE": 7}, **cause)
    async with opened(lab, size=(80, 24)) as (room, pilot):
        for run, told in (
            (crashed, ("must be a multiple of", "an odd batch", "it printed nothing")),
            ("r0031", ("place 3", "Constants  against r0005")),
        ):
            room.open_run(run)
            await until(lambda run=run: isinstance(room.screen, RunPage) and room.screen.run_id == run and room.screen.view())
            await pilot.pause()
            assert all(words in screen_text(room) for words in told), screen_text(room)


async def test_the_audit_of_a_run_knows_what_was_done_to_its_wave(lab: Lab) -> None:
    async with opened(lab, size=(140, 44)) as (room, pilot):
        room.open_run("r0007")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        await pilot.press("u")
        await until(lambda: "smaller batches make more steps" in screen_text(room).split("Audit")[1])
        assert "submit_wave" in screen_text(room)


def test_a_run_that_was_named_is_not_called_the_parent(lab: Lab) -> None:
    loader = RunLoader("r0008")
    parent = loader(lab)
    assert "parent" in parent.rivals and f"parent {parent.compared}" in curve_lines(parent, 100, 20)[-1].text
    loader.diff_with = "r0005"
    named = curve_lines(loader(lab), 100, 20)[-1].text
    assert "r0005" in named and "parent" not in named


def test_a_run_that_was_stopped_tells_how_far_it_trained(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    run = rows.ended(lab, None, at=100, outcome="pruned", training_s=None, share=0.25)
    assert "trained 25 % of it, in all" in " ".join(line.text for line in fact_lines(RunLoader(run)(lab), 80))


def test_the_comparison_is_not_cut_off_beside_the_result(lab: Lab) -> None:
    told = [line.text for line in fact_lines(RunLoader("r0008")(lab), 48)]
    assert any(text.strip().startswith(("+", "-", "0")) and "against r" in text for text in told)
