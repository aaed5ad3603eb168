"""The page of keys, the palette, the bottom line: what is bound is told, and a key that does nothing says why."""

from __future__ import annotations

import pytest
from textual.binding import Binding
from textual.scrollbar import ScrollBar

from runner.lab import Lab
from tests.tui import rows
from tests.tui.driving import opened, screen_text, until
from tui.app import ControlRoom
from tui.commands import BindingCommands
from tui.deeds import RUN_BINDINGS
from tui.screens import make_page
from tui.screens.dashboard import Dashboard
from tui.screens.page import Page
from tui.screens.run import RunPage
from tui.screens.wave import WavePage
from tui.widgets.dialogs import KeysPage
from tui.widgets.gpuwall import GpuWall
from tui.widgets.table import Table
from tui.widgets.view import Lines


@pytest.mark.parametrize("poor", [False, True])
async def test_help_lists_every_key_with_words(lab: Lab, poor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that do not apply to the run under the cursor: who asks what there is must find it."""
    monkeypatch.setattr(ScrollBar, "renderer", ScrollBar.renderer)
    async with opened(lab, size=(120, 60), ascii_only=poor) as (room, pilot):
        await pilot.press("question_mark")
        await until(lambda: isinstance(room.screen, KeysPage))
        lines = room.screen.lines  # type: ignore[attr-defined]
        told = " ".join(" ".join(line.text for line in lines).split())  # what is long goes on in the next row
        for binding in [b for b in [*RUN_BINDINGS, *ControlRoom.BINDINGS, *Dashboard.BINDINGS] if isinstance(b, Binding) and b.tooltip]:
            assert binding.tooltip in told, binding
        quiet = {line.spans[1][0] for line in lines if len(line.spans) == 2 and line.spans[0][1] == "muted"}
        assert "Run an ended run's source again as a new run" in quiet and "Ask the run to stop; its slot goes to the next one" not in quiet
        below = screen_text(room).split("Keys: dashboard")[1].splitlines()[1]
        assert "On this page" in below, "the box begins with its first line, not with a line of a pane within it"
        assert "Scroll Left" not in told and "Focus Next" not in told, "Textual's own words for keys nobody needs"
        assert (
            told.index("Show the leaderboard") < told.index("Ask the run to stop") < told.index("page down") < told.index("The next theme")
        )


@pytest.mark.parametrize("page", "123456")
async def test_the_way_back_and_the_pages_are_always_told(lab: Lab, page: str) -> None:
    async with opened(lab, size=(60, 20)) as (room, pilot):
        await pilot.press(page)
        await pilot.pause()
        bottom = screen_text(room).splitlines()[-1]
        assert ("Esc back" if page != "1" else "q quit") in bottom and "1-6 pages" in bottom and "? keys" in bottom


async def test_a_key_that_does_not_apply_says_why(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("R")
        assert room._message[0] == "requeue: not for r0015 (running)."
        await pilot.press(*["right"] * 14, "x")
        assert room._message[0] == "cancel: no run is under the cursor here."
        room.open_run("r0008")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        await pilot.press("x")
        assert room._message[0] == "cancel: not for r0008 (completed)."
    async with opened(lab, readonly=True) as (room, pilot):
        for key in ("x", "p", "m", "K"):
            room.say("")
            await pilot.press(key)
            assert "read-only" in room._message[0], key


async def test_the_palette_carries_out_what_it_lists(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("colon")
        await until(lambda: room.screen.query("CommandInput"))
        await pilot.press(*"pause queue")
        await until(lambda: len(room.screen.query_one("CommandList").options) > 0)  # type: ignore[attr-defined]
        await pilot.pause(0.3)
        await pilot.press("enter", "enter")
        await until(lambda: lab.store.setting("queue_paused") is True)


def test_no_key_is_bound_twice_and_every_key_has_words() -> None:
    pages: list[type[Page]] = [type(make_page(n)) for n in ("runs", "waves", "hosts", "events", "lineage")]
    for page in [*pages, Dashboard, RunPage, WavePage]:
        seen: dict[str, str] = {}
        for widget in (page, ControlRoom):
            for binding in widget.BINDINGS:
                assert isinstance(binding, Binding)
                assert binding.description and binding.tooltip, f"{page.__name__}: {binding.key} has no words"
                for key in binding.key.split(","):
                    assert key not in seen, f"{page.__name__}: {key} is {seen[key]} and {binding.action}"
                    seen[key] = binding.action
        moves = {k for b in [*Table.BINDINGS, *GpuWall.BINDINGS] if isinstance(b, Binding) for k in b.key.split(",")}
        assert not moves & seen.keys() - {"h", "l"} or page is RunPage, f"{page.__name__}: {moves & seen.keys()} move the cursor"


async def test_what_stands_for_nothing_is_said(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        for _ in range(14):
            await pilot.press("right")
        await pilot.press("enter")
        assert "no run" in room._message[0]
        await pilot.press("r")
        assert "only a quarantined GPU" in room._message[0]


async def test_a_proposal_is_found(lab: Lab) -> None:
    rows.add_run(lab, phase="proposed", approval="asked")
    async with opened(lab, size=(140, 40)) as (room, pilot):
        assert "1 run waits for approval, last in the queue" in screen_text(room)
        await pilot.press("a")
        assert "approve: not for r0015 (running). The proposals are last in the queue, on page 1." in room._message[0]


async def test_the_palette_begins_with_what_the_page_is_for(lab: Lab) -> None:
    async with opened(lab) as (room, _):
        found = [title for title, _, _ in BindingCommands(room.screen)._entries()]
        assert found[0].startswith("cancel") and found.index("lineage  [6]") < found.index("columns  [|]")


@pytest.mark.parametrize(("size", "page"), [((120, 40), "1"), ((80, 24), "enter"), ((60, 20), "1"), ((60, 20), "2"), ((44, 12), "4")])
async def test_what_a_key_does_is_told_to_its_end(lab: Lab, size: tuple[int, int], page: str) -> None:
    async with opened(lab, size=size) as (room, pilot):
        await pilot.press(page)
        await pilot.press("question_mark")
        await until(lambda: isinstance(room.screen, KeysPage))
        pane = room.screen.query_one("#keys", Lines)
        await until(lambda: pane.size.width > 0)
        assert max(line.width for line in pane.lines) <= pane.scrollable_content_region.width
        text = " ".join(" ".join(t for t, _ in line.spans) for line in pane.lines)
        assert "Back, and from the first page: quit. The daemon and the runs go on" in " ".join(text.split())


@pytest.mark.parametrize("key", ["question_mark", "x", "C", "colon"])
async def test_the_page_is_seen_behind_a_box_without_colours(lab: Lab, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to dim it with, so it would be gone."""
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(lab, size=(120, 40)) as (room, pilot):
        await pilot.press(key)
        await until(lambda: room.screen.is_modal)
        await until(lambda: "Overnight" in screen_text(room).splitlines()[0] and "busy" in screen_text(room).splitlines()[0])
