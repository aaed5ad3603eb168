"""What is sent to the terminal: a page that opens or comes back is one picture, and what stands there is not sent again."""

from __future__ import annotations

import re
import signal
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from textual import events
from textual._compositor import LayoutUpdate
from textual.drivers.linux_driver import LinuxDriver
from textual.geometry import Size
from textual.screen import Screen

from runner.lab import Lab
from tests.tui.driving import opened, until
from tui.app import ControlRoom
from tui.picture import MOVE, Picture
from tui.terminal import Terminal
from tui.widgets.dialogs import Confirm
from tui.widgets.view import View

HEIGHT = 3


class Glass:
    """As much of a terminal as the pictures need: what each cell shows, with its colours."""

    def __init__(self) -> None:
        self.cells: dict[tuple[int, int], str] = {}
        self.cursor = (1, 1)

    def write(self, data: str) -> None:
        before, *rest = MOVE.split(data)
        assert not before
        for row, column, text in zip(map(int, rest[::3]), map(int, rest[1::3]), rest[2::3], strict=True):
            colour, at = "", column
            for part in re.split(r"(\x1b\[[\d;]*m|\n)", text):
                if part.startswith("\x1b"):
                    colour = part
                for letter in part if part and part[0] not in "\x1b\n" else "":
                    self._put(row, at, letter + colour, cell_len(letter))
                    at += cell_len(letter)
            self.cursor = (row, at)

    def _put(self, row: int, at: int, shown: str, width: int) -> None:
        """A letter; half of a wide one that stood there is no letter any more."""
        for column in range(at, at + width):
            if self.cells.get((row, column)) == "half":
                self.cells.pop((row, column - 1), None)
            if self.cells.get((row, column + 1)) == "half":
                self.cells.pop((row, column + 1), None)
            self.cells[row, column] = "half" if column > at else shown


@st.composite
def writes(draw: st.DrawFn) -> str:
    """Whole pictures and parts of one, in few texts, so that the same comes again."""
    out = []
    for _ in range(draw(st.integers(1, 5))):
        row, column = draw(st.integers(1, HEIGHT)), draw(st.sampled_from([1, 1, 4, 5, 7]))
        for word in draw(st.lists(st.sampled_from(["abc", "de", "f", "漢字", "   "]), min_size=1, max_size=3)):
            colour = draw(st.sampled_from(["31", "32"]))
            out.append(f"\x1b[{row};{column}H\x1b[{colour}m{word}\x1b[0m")
            column += cell_len(word)
            if draw(st.booleans()):  # the next stands in the same piece
                out.append(f"\x1b[{colour}mgh\x1b[0m")
                column += 2
        out.append(draw(st.sampled_from(["", "\n"])))
    at = draw(st.integers(1, HEIGHT))
    return "".join(out) + draw(st.sampled_from(["", f"\x1b[{at};1H"]))


@given(st.lists(writes(), max_size=8))
def test_leaving_out_what_stands_there_leaves_the_same_picture(everything: list[str]) -> None:
    whole, spared, picture = Glass(), Glass(), Picture()
    for data in everything:
        whole.write(data)
        spared.write(picture.news(data))
        assert spared.cells == whole.cells
        if re.search(r"H$", data):
            assert spared.cursor == whole.cursor


def test_what_stands_there_is_left_out_text_by_text() -> None:
    picture = Picture()
    red, green = "\x1b[31mab\x1b[0m", "\x1b[32mcd\x1b[0m"
    parts = f"\x1b[1;1H{red}\x1b[1;3H{green}\n\x1b[2;1Hef\x1b[1;1H"
    assert picture.news(parts) == f"\x1b[1;1H{red}\x1b[1;3H{green}\x1b[2;1Hef\x1b[1;1H"
    assert picture.news(parts) == ""
    assert picture.news(f"\x1b[1;1H{red}{green}\n\x1b[2;1Hef\x1b[1;1H") == "", "the same row at once"
    assert picture.news(f"\x1b[1;1H{green}{green}\n\x1b[2;1HeF\x1b[1;1H") == f"\x1b[1;1H{green}\x1b[2;1HeF\x1b[1;1H"
    assert picture.news("\x1b[1;2Hx") and picture.news(f"\x1b[1;1H{green}{green}") == f"\x1b[1;1H{green}", "overwritten in part"
    assert picture.news("\x1b[1;1H\x1b[31mab") and picture.news(f"\x1b[1;1H{green}{green}") == f"\x1b[1;1H{green}{green}", "colours left on"


@pytest.mark.parametrize("other", ["\x1b[2J", "\x1b[?1049h\x1b[2J", "text", "\x1b]52;c;aGk=\x07", "\x1bc", "\r\n"])
def test_what_is_not_understood_passes_and_everything_is_sent_again(other: str) -> None:
    picture = Picture()
    row = "\x1b[1;1Habc"
    assert picture.news(row) == row and picture.news(row) == ""
    for harmless in ("\x1b[?2026h", "\x1b[?25l\x1b[>1u", "\x1b[?2026$p"):
        assert picture.news(harmless) == harmless and picture.news(row) == ""
    assert picture.news(other) == other
    assert picture.news(row) == row


@pytest.mark.parametrize("key", ["2", "3", "4", "5", "6", "enter", "question_mark", "x"])
async def test_a_page_that_opens_and_one_that_comes_back_are_one_picture(lab: Lab, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    picture, sent, whole = Picture(), [0], [0]
    display = ControlRoom._display

    def spy(self: ControlRoom, screen: Screen[Any], renderable: Any) -> None:
        if renderable is not None and not self._batch_count:
            data = renderable.render_segments(self.console)
            sent.append(len(picture.news(data)))
            if isinstance(renderable, LayoutUpdate):
                whole.append(len(data))
        display(self, screen, renderable)

    monkeypatch.setattr(ControlRoom, "_display", spy)
    async with opened(lab, size=(120, 40)) as (room, pilot):
        await pilot.pause(0.2)
        for press in (key, "escape"):
            before = room.screen
            if isinstance(before, Confirm):
                before._opened = 0.0
            sent.clear()
            whole.clear()
            await pilot.press(press)
            await until(lambda old=before: room.screen is not old)
            await pilot.pause(0.3)
            assert not room._batch_count
            assert 0 < sum(sent) < 1.3 * max(whole), (press, sent, whole)


async def test_the_whole_screen_is_drawn_anew_on_demand_and_after_a_change_of_its_size(lab: Lab) -> None:
    row = "\x1b[1;1Habc"
    async with opened(lab) as (room, pilot):
        room.picture.news(row)
        await pilot.press("ctrl+r")
        await until(lambda: room.picture.news(row) == row)
    forgot: list[int] = []
    driver = Terminal.__new__(Terminal)
    driver.picture = mock.Mock(forget=lambda: forgot.append(1))
    with mock.patch.object(LinuxDriver, "process_message"):
        driver.process_message(events.Resize(Size(80, 24), Size(80, 24)))
        driver.process_message(events.AppFocus())
    assert forgot == [1]
    before = signal.getsignal(signal.SIGWINCH)
    with mock.patch.object(LinuxDriver, "start_application_mode", lambda self: signal.signal(signal.SIGWINCH, lambda *_: forgot.append(2))):
        driver.start_application_mode()
    try:
        signal.raise_signal(signal.SIGWINCH)
    finally:
        signal.signal(signal.SIGWINCH, before)
    assert forgot == [1, 1, 2], "what the driver does with it follows"


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (200, 60)])
async def test_no_pane_keeps_a_scroll_bar_that_it_does_not_need(lab: Lab, size: tuple[int, int]) -> None:
    """A bar that stays from a layout before costs a column, and says that there is more where there is none."""
    async with opened(lab, size=size) as (room, pilot):
        opens = [partial(room.action_page, n) for n in ("runs", "waves", "hosts", "events", "lineage")]
        for show in (*opens, lambda: room.open_run("r0020"), lambda: room.open_run("r0005"), lambda: room.open_wave("w1")):
            show()
            await pilot.pause(0.3)
            for pane in room.screen.query(View):
                assert not pane.show_vertical_scrollbar or pane.virtual_size.height > pane.size.height, (room.screen, pane)
