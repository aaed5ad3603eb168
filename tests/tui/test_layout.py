"""Sharing the room: a pure function of sizes, for 0 to 64 GPUs from the smallest terminal to the largest."""

from __future__ import annotations

import pytest

from tui.screens.dashboard import lay_out
from tui.tables import BOARD, EVENTS, HOSTS, QUEUE, RUNS, WAVES
from tui.widgets.gpus import CARD_HIGH, CARD_WIDE, COLUMNS, choose_mode
from tui.widgets.table import fit_columns


@pytest.mark.parametrize("gpus", [0, 1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("width", [40, 60, 80, 104, 160, 240, 480])
@pytest.mark.parametrize("height", [8, 18, 22, 38, 58, 130])
def test_the_plan_fits(gpus: int, width: int, height: int) -> None:
    plan = lay_out(gpus, 5, width, height)
    assert 3 <= plan.gpus_high
    assert plan.gpus_high + plan.queue_high + plan.watch_high + 3 <= max(height, 10), "the leaderboard keeps three rows"
    assert plan.watch_high == 0 or plan.watch_high >= 12
    if plan.mode == "cards":
        assert width // plan.beside >= CARD_WIDE
        assert plan.gpus_high == -(-gpus // plan.beside) * CARD_HIGH + 1


def test_what_is_short_leaves_its_room() -> None:
    """Three GPUs in 80x24 are rows, so that queue and leaderboard are seen; an empty leaderboard leaves its place to the queue."""
    small = lay_out(3, 12, 80, 22, ranked=9)
    assert (small.mode, small.gpus_high) == ("rows", 5) and small.queue_high >= 6 and 22 - small.gpus_high - small.queue_high >= 8
    assert lay_out(3, 12, 80, 22, ranked=0).queue_high == 14
    assert lay_out(1, 0, 80, 22).mode == "cards" and lay_out(2, 0, 80, 22).mode == "cards"
    assert lay_out(64, 0, 160, 48, ranked=0).gpus_high > lay_out(64, 0, 160, 48, ranked=30).gpus_high


def test_many_gpus_stand_side_by_side_before_any_is_out_of_sight() -> None:
    plan = lay_out(64, 9, 200, 57)
    assert (plan.mode, plan.beside, plan.gpus_high) == ("rows", 2, 34)
    assert lay_out(64, 9, 80, 22).beside == 1
    assert lay_out(16, 9, 200, 30).beside == 1, "not before the room below runs out"


def test_cards_where_there_is_room_else_a_row_each() -> None:
    assert choose_mode(16, 160, 30)[0] == "cards"
    assert choose_mode(16, 80, 22)[0] == "rows"
    assert choose_mode(1, 80, 10)[0] == "cards"
    assert choose_mode(64, 160, 40)[0] == "rows"
    assert choose_mode(64, 400, 60)[0] == "cards"


@pytest.mark.parametrize(
    "columns", [QUEUE, BOARD, RUNS, EVENTS, WAVES, HOSTS, COLUMNS], ids=["queue", "board", "runs", "events", "waves", "hosts", "gpus"]
)
@pytest.mark.parametrize("width", [58, 78, 118, 198, 400])
def test_columns_fit_and_the_room_is_used(columns: list, width: int) -> None:  # type: ignore[type-arg]
    chosen = fit_columns(columns, width)
    used = sum(w + 1 for _, w in chosen) - 1
    assert used <= width
    if any(c.flex for c, _ in chosen):
        assert used >= width - 1
