"""Driving the control room in tests: open it on a scene, press keys, wait for a state, read what is on the screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Input

from runner.lab import Lab
from tests.tui.still import Still, clock
from tui.app import ControlRoom
from tui.widgets.dialogs import Confirm, Form

DEADLINE_S = 10.0


@asynccontextmanager
async def opened(lab: Lab, size: tuple[int, int] = (140, 40), **how: Any) -> AsyncIterator[tuple[ControlRoom, Pilot[None]]]:
    """The control room on a lab that stands still at one moment, its first snapshot shown."""
    room = ControlRoom(how.pop("source", None) or Still(lab), lab.path, clock=how.pop("clock", clock()), **how)
    async with room.run_test(size=size) as pilot:
        await until(lambda: room.snapshot.seen or room.snapshot.problem is not None)
        await pilot.pause()
        yield room, pilot


async def until(holds: Callable[[], Any], deadline_s: float = DEADLINE_S) -> None:
    """Wait for a state; the failure says what it was waiting for."""
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, f"not reached within {deadline_s:g} s"
        await asyncio.sleep(0.01)


def screen_text(room: ControlRoom) -> str:
    """What the screen shows, row by row."""
    return "\n".join("".join(segment.text for segment in strip) for strip in room.screen._compositor.render_strips())


async def confirmed(room: ControlRoom, pilot: Any) -> None:
    """Answer the open question with y, once its deaf time is over."""
    await until(lambda: isinstance(room.screen, Confirm))
    question = room.screen
    assert isinstance(question, Confirm)
    question._opened -= 1.0
    await pilot.press("y")
    await until(lambda: not isinstance(room.screen, Confirm))


async def filled(room: ControlRoom, pilot: Any, *texts: str) -> None:
    """Type into the open form and send it."""
    await until(lambda: isinstance(room.screen, Form))
    inputs = list(room.screen.query(Input))
    for box, text in zip(inputs, texts, strict=False):
        box.value = text
    inputs[-1].focus()
    await pilot.pause()
    await pilot.press("enter")
