"""What every pane shares: its name and the note at the end of that line, the cursor without colours, ASCII for poor fonts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual.color import Color
from textual.scrollbar import ScrollBar

from runner.lab import Lab
from tests.tui import rows, scenes
from tests.tui.driving import opened, screen_text, until
from tests.tui.still import Still
from tui.lines import safe
from tui.plain import SIGNS, ascii_only
from tui.screens.hosts import trouble_lines
from tui.screens.run import RunPage
from tui.snapshot import Deliver, Snapshot
from tui.widgets.dialogs import Field, Form
from tui.widgets.gpuwall import GpuWall
from tui.widgets.table import Table


async def test_the_note_of_a_pane_is_seen(lab: Lab) -> None:
    async with opened(lab, size=(160, 50)) as (room, pilot):
        assert "noise ±0.0009, 2 dof" in screen_text(room)
        room.screen.query_one("#board").focus()
        await pilot.pause()
        assert "noise ±0.0009, 2 dof" in screen_text(room), "the focus draws the line anew"
        await pilot.press("2")
        await until(lambda: "runs" in room.snapshot.views)
        await pilot.pause()
        assert "of 37 runs" in screen_text(room)
        await pilot.resize_terminal(60, 20)
        await pilot.pause()
        assert "Runs 37" in screen_text(room)
        room.open_run("r0005")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        await pilot.resize_terminal(160, 50)
        await pilot.press("slash", *"step 0095", "enter")
        await until(lambda: "matches, n b" in screen_text(room))


@pytest.mark.parametrize("where", ["#gpus", "#board"])
async def test_the_cursor_is_seen_without_colours(lab: Lab, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with opened(lab, size=(100, 30)) as (room, pilot):
        room.screen.query_one(where).focus()
        await pilot.press("j")
        await pilot.pause()
        table = room.screen.query_one(where, Table)
        drawn = [table.render_line(y) for y in range(1, 4)]
        reversed_rows = [y for y, strip in enumerate(drawn) if all(s.style is not None and s.style.reverse for s in strip)]
        assert reversed_rows == [1]


async def test_the_selected_card_is_told_by_its_frame(lab: Lab) -> None:
    async with opened(lab, size=(160, 50)) as (room, pilot):
        await pilot.press("right")
        wall = room.screen.query_one(GpuWall)
        assert wall.mode == "cards"
        assert screen_text(room).count("┏") == 1
        room.screen.query_one("#board").focus()
        await pilot.pause()
        assert "┏" not in screen_text(room), "no card is meant while another pane has the keys"


@given(st.text(alphabet=st.one_of(st.characters(), st.sampled_from("─│█⣿⡇宽字±·✓")), max_size=40))
def test_ascii_keeps_every_cell_in_its_place(text: str) -> None:
    shown = safe(text)
    assert ascii_only(shown).isascii() and len(ascii_only(shown)) == cell_len(shown)


def test_the_glyphs_of_the_screen_have_a_likeness() -> None:
    assert all(len(to) == 1 and to.isascii() and cell_len(sign) == 1 for sign, to in SIGNS.items())
    assert ascii_only("⣀⠉⡇") == ".':"


@pytest.fixture
def many(tmp_path: Path) -> Lab:
    lab = scenes.busy(tmp_path)
    for i in range(48):
        rows.add_gpu(lab, "gamma", i, rows.H100)
    lab.store.upsert_host("gamma", kind="ssh", state="up", since=rows.NOW - 7000, paused=0, drain=0)
    return lab


async def test_sixty_four_gpus_in_two_columns_with_one_cursor(many: Lab) -> None:
    async with opened(many, size=(200, 60)) as (room, pilot):
        wall = room.screen.query_one(GpuWall)
        assert (wall.mode, wall.beside, wall.count) == ("rows", 2, 32)
        shown = screen_text(room)
        assert all(f"gamma:{i} " in shown for i in (0, 15, 16, 47)) and "alpha:0 " in shown, "none is out of sight"
        await pilot.press("down", "right")
        assert wall.row()["uuid"] == wall.rows[33]["uuid"]  # type: ignore[index]
        marked = [(y, sum(len(s.text) for s in wall.render_line(y) if s.style and s.style.bold and s.style.bgcolor)) for y in (1, 2)]
        assert marked[1][1] > 60 > marked[0][1], "the row is marked in its own column only"
        await pilot.press("left", "up", "k")
        assert wall.cursor == 0
        await pilot.click("#gpus", offset=(110, 4))
        assert wall.cursor == 32 + 2
        await pilot.press("G")
        assert wall.cursor == 63 and round(wall.scroll_y) == 0
        await pilot.press("slash", *"gamma", "enter")
        assert len(wall.rows) == 48 and wall.count == 24


async def test_the_cursor_stays_in_sight_where_gpus_do_not_fit(many: Lab) -> None:
    async with opened(many, size=(80, 24)) as (room, pilot):
        wall = room.screen.query_one(GpuWall)
        await pilot.press("G")
        await until(lambda: "gamma:47" in screen_text(room))
        await pilot.press("g")
        await until(lambda: "alpha:0 " in screen_text(room))
        assert wall.beside == 1


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_ascii_reaches_every_corner(lab: Lab, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScrollBar, "renderer", ScrollBar.renderer)  # put back after the test
    async with opened(lab, size=size, ascii_only=True) as (room, pilot):
        for keys in ("1", "2", "3", "4", "5", "6", "colon", "escape", "question_mark", "escape", "1", "x", "escape", "P", "escape", "T"):
            await pilot.press(keys)
            await pilot.pause()
            shown = screen_text(room)
            assert shown.isascii(), f"{keys}: {sorted({c for c in shown if not c.isascii()})}"
        room.complain("It failed · and says — so…")
        room.open_run("r0020")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        await pilot.pause()
        assert screen_text(room).isascii() and "It failed . and" in screen_text(room)
        room.open_wave("w1")
        await until(lambda: "wave:w1" in room.snapshot.views)
        await pilot.pause()
        assert screen_text(room).isascii()


@pytest.mark.parametrize("theme", ["overnight", "daylight", "textual-light", "solarized-light", "gruvbox", "nord"])
async def test_lines_and_cursors_are_seen_in_every_theme(lab: Lab, theme: str) -> None:
    """White lines on a white page were lost once."""
    async with opened(lab, size=(100, 30)) as (room, pilot):
        room.theme = theme
        await pilot.pause()
        for where in ("#gpus", "#board"):
            pane = room.screen.query_one(where, Table)
            ground = pane.background_colors[1]
            track, cursor = pane._style("track").color, pane._style("cursor").bgcolor
            for drawn in (track, cursor):
                assert drawn is not None and drawn.triplet is not None
                assert abs(Color(*drawn.triplet).brightness - ground.brightness) > 0.04, (where, drawn, ground)


class Late(Still):
    """A source whose first reading takes its time: what is told before it is that nothing is known."""

    def start(self, deliver: Deliver) -> None:
        self.deliver_now = lambda: super(Late, self).start(deliver)
        deliver(Snapshot(problem="reading …"))


async def test_an_empty_queue_is_not_called_unread(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    source = Late(lab)
    async with opened(lab, source=source) as (room, pilot):
        assert screen_text(room).count("not read yet") == 2
        source.deliver_now()
        await until(lambda: room.snapshot.seen)
        await pilot.pause()
        shown = screen_text(room)
        assert "the queue is empty" in shown and "no run has a result yet" in shown and "not read yet" not in shown


async def test_a_box_says_what_enter_does_in_it(tmp_path: Path) -> None:
    async with opened(scenes.empty_lab(tmp_path)) as (room, pilot):
        room.push_screen(Form("One", [Field("a", "A")]))
        await until(lambda: "Enter sends · Esc cancels" in screen_text(room))
        await pilot.press("escape")
        room.push_screen(Form("Two", [Field("a", "A"), Field("b", "B")]))
        await until(lambda: "Enter next line, in the last one sends" in screen_text(room))
        await pilot.press("enter")
        assert isinstance(room.screen, Form)
        await pilot.press("enter")
        await until(lambda: not isinstance(room.screen, Form))


def test_a_gpu_in_trouble_is_told_in_its_own_state_and_not_its_runs() -> None:
    lost = {"host": "alpha", "index": 3, "state": "lost", "run": "r0001", "note": "for 9 s: its host no longer reports it"}
    (line,) = trouble_lines([lost], 80)
    assert line.text == "alpha:3 lost: for 9 s: its host no longer reports it"
