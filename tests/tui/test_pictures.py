"""Twelve pictures: three sizes of an empty lab, a busy night and a night with a host down; a question, a run and a wave.

The scenes stand still at one moment in UTC, so the pictures depend on Textual's version (pinned) and on nothing of the machine.
Renew them after a change that was looked at: `pytest tests/tui/test_pictures.py --snapshot-update`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from tests.tui import scenes, still
from tests.tui.driving import until
from tui.app import ControlRoom
from tui.screens.run import RunPage
from tui.screens.wave import WavePage
from tui.widgets.dialogs import Confirm

SIZES = [(80, 24), (120, 40), (200, 60)]
Then = Callable[[Pilot[None]], Awaitable[None]]


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The clock in the header is the reader's local time; pictures are taken in UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def taken(snap_compare: Any, folder: Path, scene: str, size: tuple[int, int], then: Then | None = None) -> bool:
    """Whether the scene looks as it did when it was looked at last."""
    lab = getattr(scenes, scene)(folder / "night")
    room = ControlRoom(still.Still(lab), lab.path, clock=still.clock())

    async def settle(pilot: Pilot[None]) -> None:
        await until(lambda: room.snapshot.seen)
        await pilot.pause()
        if then is not None:
            await then(pilot)
            await pilot.pause()

    return bool(snap_compare(room, terminal_size=size, run_before=settle))


@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("scene", ["empty_lab", "busy", "host_down"])
def test_dashboard(snap_compare: Any, tmp_path: Path, scene: str, size: tuple[int, int]) -> None:
    assert taken(snap_compare, tmp_path, scene, size)


def test_question(snap_compare: Any, tmp_path: Path) -> None:
    async def ask(pilot: Pilot[None]) -> None:
        await pilot.press("right", "x")
        await until(lambda: isinstance(pilot.app.screen, Confirm))

    assert taken(snap_compare, tmp_path, "busy", (120, 40), ask)


def test_run_page(snap_compare: Any, tmp_path: Path) -> None:
    async def show(pilot: Pilot[None]) -> None:
        room = pilot.app
        assert isinstance(room, ControlRoom)
        room.open_run("r0020")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view() and len(room.screen.view().rivals) == 1)  # type: ignore[union-attr]

    assert taken(snap_compare, tmp_path, "busy", (120, 40), show)


def test_wave_page(snap_compare: Any, tmp_path: Path) -> None:
    async def show(pilot: Pilot[None]) -> None:
        room = pilot.app
        assert isinstance(room, ControlRoom)
        room.open_wave("w1")
        await until(lambda: isinstance(room.screen, WavePage) and "wave:w1" in room.snapshot.views)

    assert taken(snap_compare, tmp_path, "busy", (120, 40), show)
