"""Renders the README's pictures from the real screens: `make shots`, or `python tests/shots.py [--out docs/pictures]`.

The labs are those of the screen's tests (real databases at one fixed moment), so a picture shows what the screen draws and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from textual.pilot import Pilot

from tests.tui import scenes
from tests.tui.driving import opened, until
from tui.app import ControlRoom
from tui.screens.lineage import LineagePage
from tui.screens.run import RunPage
from tui.screens.wave import WavePage

Then = Callable[[ControlRoom, Pilot[None]], Awaitable[None]]


async def run_page(room: ControlRoom, pilot: Pilot[None]) -> None:
    """A live run against its parent."""
    room.open_run("r0020")
    await until(lambda: isinstance(room.screen, RunPage) and (view := room.screen.view()) and view.rivals)


async def wave_page(room: ControlRoom, pilot: Pilot[None]) -> None:
    """A finished factorial wave."""
    room.open_wave("w1")
    await until(lambda: isinstance(room.screen, WavePage) and "wave:w1" in room.snapshot.views)


async def lineage_page(room: ControlRoom, pilot: Pilot[None]) -> None:
    """The night's progress."""
    await pilot.press("6")
    await until(lambda: isinstance(room.screen, LineagePage) and "progress" in room.snapshot.views)


SHOTS: dict[str, tuple[str, tuple[int, int], Then | None]] = {
    "dashboard": ("busy", (160, 46), None),
    "small": ("host_down", (80, 24), None),
    "run": ("busy", (140, 44), run_page),
    "wave": ("busy", (140, 40), wave_page),
    "lineage": ("busy", (140, 40), lineage_page),
}


async def shoot(out: Path) -> None:
    """Write every picture."""
    for name, (scene, size, then) in SHOTS.items():
        with tempfile.TemporaryDirectory() as folder:
            lab = getattr(scenes, scene)(Path(folder) / "night")
            async with opened(lab, size=size) as (room, pilot):
                if then is not None:
                    await then(room, pilot)
                await pilot.pause()
                path = out / f"{name}.svg"
                path.write_text(room.export_screenshot(title="overnight"), encoding="utf-8")
            lab.close()
        print(f"{path}  {path.stat().st_size // 1024} KiB")


def main() -> None:
    """Parse the folder and shoot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "pictures")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    os.environ["TZ"] = "UTC"
    time.tzset()
    asyncio.run(shoot(out))


if __name__ == "__main__":
    main()
