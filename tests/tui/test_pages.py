"""Finding the way: pages and back, filters, sorting, the mouse, and what each page follows while the lab moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from textual._compositor import Compositor

from runner.lab import Lab
from tests.tui.driving import filled, opened, screen_text, until
from tests.tui.still import snapshot_of
from tui.screens.dashboard import no_gpu
from tui.screens.hosts import HostsPage
from tui.screens.page import Page
from tui.screens.run import RunPage
from tui.screens.wave import WavePage
from tui.widgets.dialogs import FilterLine
from tui.widgets.gpuwall import GpuWall
from tui.widgets.logpane import LogPane
from tui.widgets.table import Table
from tui.widgets.view import Lines


async def test_escape_takes_marks_away_before_it_goes_back(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("2")
        await until(lambda: "runs" in room.snapshot.views)
        table = room.screen.query_one("#runs", Table)
        await until(lambda: table.rows)
        await pilot.press("space", "space")
        assert len(table.marks) == 2 and "2 marked" in screen_text(room)
        await pilot.press("escape")
        assert not table.marks and len(room.screen_stack) == 2
        await pilot.press("escape")
        assert len(room.screen_stack) == 1


async def test_pages_and_back(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        for key, name in (("2", "runs"), ("3", "waves"), ("4", "hosts"), ("5", "events"), ("6", "lineage")):
            await pilot.press(key)
            await until(lambda name=name: isinstance(room.screen, Page) and room.screen.NAME == name)
            assert len(room.screen_stack) == 2
        await pilot.press("escape")
        assert len(room.screen_stack) == 1
        await pilot.press("enter")
        await until(lambda: isinstance(room.screen, RunPage))
        await pilot.press("w")
        await until(lambda: isinstance(room.screen, WavePage))
        await pilot.press("q", "q")
        assert len(room.screen_stack) == 1
        await pilot.press("q")
        await until(lambda: not room.is_running)


async def test_the_filter_narrows_while_typing(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("2")
        await until(lambda: "runs" in room.snapshot.views)
        table = room.screen.query_one("#runs", Table)
        await until(lambda: len(table.rows) > 20)
        await pilot.press("slash", *"wave:w1")
        await until(lambda: len(table.rows) == 9)
        assert "wave:w1" in screen_text(room).splitlines()[-2], "what is typed is seen, above the keys"
        await pilot.press("enter")
        assert table.has_focus and "/wave:w1" in screen_text(room)
        await pilot.press("slash", *" vall<1")
        await until(lambda: "no number 'vall'" in screen_text(room) or "There is no" in room._message[0])
        await pilot.press("escape")
        await until(lambda: len(table.rows) > 20)
        assert not room.screen.query_one(FilterLine).has_class("-open")


async def test_sorting_follows_the_row_not_the_place(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("2")
        await until(lambda: "runs" in room.snapshot.views)
        table = room.screen.query_one("#runs", Table)
        await until(lambda: len(table.rows) > 20)
        await pilot.press("j", "j", "j")
        kept = table.cursor_key
        while table.sort_key != "val":
            await pilot.press("s")
        values = [r["val_bpb"] for r in table.rows if r["val_bpb"] is not None]
        assert values == sorted(values) and table.rows[-1]["val_bpb"] is None
        assert table.cursor_key == kept
        await pilot.press("S")
        values = [r["val_bpb"] for r in table.rows if r["val_bpb"] is not None]
        assert values == sorted(values, reverse=True) and table.rows[-1]["val_bpb"] is None


async def test_run_page_panes(lab: Lab) -> None:
    async with opened(lab, size=(140, 44)) as (room, pilot):
        room.open_run("r0005")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        page = room.screen
        assert isinstance(page, RunPage)
        await pilot.pause()
        shown = screen_text(room)
        assert "0.981202" in shown and "TOTAL_BATCH_SIZE" in shown and "verified" in shown and "reported 39.8 %" in shown
        assert "peak_vram_mb:     45060.2" in shown
        await pilot.press("d")
        await until(lambda: "-TOTAL_BATCH_SIZE" in screen_text(room) or "the sources are the same" in screen_text(room))
        await pilot.press("u")
        await until(lambda: "2.9 standard errors" in screen_text(room))
        await pilot.press("i")
        assert page.axis == "step"
        await pilot.press("o")
        assert page.metric == "tok_s"
        await pilot.press("o", "o", "o", "L")
        assert page.metric == "loss" and page.log_y
        await pilot.press("l", "slash", *"00950", "enter")
        log = page.query_one("#log", LogPane)
        assert any(s == "mark" for line in log.lines for _, s in line.spans)
        assert not log.following
        await pilot.press("G")
        assert log.following
        await pilot.press("O")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.run_id == "r0001")


async def test_an_unknown_run_says_so(lab: Lab) -> None:
    async with opened(lab) as (room, _):
        room.open_run("r9999")
        await until(lambda: "There is no run 'r9999'" in screen_text(room))


@pytest.mark.parametrize("size", [(160, 50), (80, 24)])
async def test_what_changes_in_the_lab_changes_on_the_screen(lab: Lab, size: tuple[int, int]) -> None:
    """Also after the focus moved, which makes every pane forget what it drew."""
    async with opened(lab, size=size) as (room, pilot):
        await pilot.press("tab", "tab", "shift+tab", "shift+tab")
        await pilot.pause()
        assert "14%" not in screen_text(room)
        lab.store.update_run("r0016", share=0.141, remaining_s=258.0)
        room.source.poke()
        await until(lambda: "14%" in screen_text(room))


async def test_the_mouse_selects_opens_and_sorts(lab: Lab) -> None:
    async with opened(lab, size=(160, 50)) as (room, pilot):
        await pilot.click("#gpus", offset=(45, 3))
        assert room.screen.query_one(GpuWall).cursor == 1
        await pilot.click("#board", offset=(6, 4))
        board = room.screen.query_one("#board", Table)
        assert board.cursor_key == board.rows[2]["id"]
        await pilot.click("#board", offset=(14, 1))
        assert board.sort_key == "val"
        await pilot.click("#board", offset=(6, 4), times=2)
        await until(lambda: isinstance(room.screen, RunPage))


async def test_a_large_screen_shows_the_curve_of_the_gpu_under_the_cursor(lab: Lab) -> None:
    async with opened(lab, size=(200, 60)) as (room, pilot):
        await pilot.press("right", "right")
        await until(lambda: "r0017 · loss by share of the budget" in screen_text(room))
        await pilot.press("right")
        await until(lambda: "r0018 · loss by share of the budget" in screen_text(room))
        assert [n for n in room.source._reader._views if n.startswith("watch:")] == ["watch:r0018"]  # type: ignore[attr-defined]


async def test_a_wave_tells_its_runs_apart_and_says_how_cells_failed(lab: Lab) -> None:
    for size in ((80, 24), (140, 40)):
        async with opened(lab, size=size) as (room, pilot):
            room.open_wave("w1")
            await until(lambda: isinstance(room.screen, WavePage) and "wave:w1" in room.snapshot.views)
            await pilot.pause()
            shown = screen_text(room)
            rows_shown = [line for line in shown.splitlines() if line.lstrip().startswith("r00")]
            assert len({" ".join(line.split()[4:9]) for line in rows_shown}) == len(rows_shown), "no two rows read the same"
            assert "2**17 0.05" in " ".join(next(line for line in rows_shown if "r0006" in line).split())
            heat = "\n".join(line.text for line in room.screen.query_one("#heat", Lines).lines)
            assert "crashed" in heat and "TOTAL_BATCH_SIZE down, MATRIX_LR across" in heat
            effects = "\n".join(line.text for line in room.screen.query_one("#effects", Lines).lines)
            assert "predicted best" in effects and "TOTAL_BATCH_SIZE=2**17, MATRIX_LR=0.04" in effects and "± -" not in effects


async def test_one_factor_has_no_map_and_no_empty_place_for_it(lab: Lab) -> None:
    async with opened(lab, size=(120, 40)) as (room, pilot):
        room.open_wave("w2")
        await until(lambda: isinstance(room.screen, WavePage) and "wave:w2" in room.snapshot.views)
        await pilot.pause()
        assert not room.screen.query_one("#heat").display and room.screen.query_one("#effects").size.width > 100


async def test_moving_the_focus_repaints_two_panes_and_not_the_screen(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole screen is 40 kB over ssh, for every press of Tab."""
    async with opened(lab, size=(160, 50)) as (room, pilot):
        await pilot.press("tab", "tab")
        await pilot.pause()
        whole: list[bool] = []
        real = Compositor.render_full_update

        def counted(self: Compositor, *args: Any, **how: Any) -> Any:
            whole.append(True)
            return real(self, *args, **how)

        monkeypatch.setattr(Compositor, "render_full_update", counted)
        await pilot.press("tab", "shift+tab")
        await pilot.pause()
        assert not whole
        assert room.focused is not None and "Esc" not in screen_text(room).splitlines()[-1] and "q quit" in screen_text(room)


async def test_a_sort_is_seen_also_where_there_is_no_heading(lab: Lab) -> None:
    async with opened(lab, size=(160, 50)) as (room, pilot):
        wall = room.screen.query_one(GpuWall)
        assert wall.mode == "cards"
        await pilot.press("s")
        await pilot.pause()
        assert wall.sort_key == "gpu" and "by GPU ▴" in screen_text(room)
        await pilot.press("S")
        await pilot.pause()
        assert wall.rows[0]["host"] == "beta" and "by GPU ▾" in screen_text(room)


async def test_an_event_about_a_host_or_its_gpu_opens_the_host(lab: Lab) -> None:
    lab.store.raise_flag("beta", "disk_low", "bad", "12 MiB free")
    async with opened(lab) as (room, pilot):
        for subject, host in (("beta", "beta"), ("GPU-beta-03", "beta"), ("alpha", "alpha")):
            room.open_subject({"subject": subject})
            await until(lambda: isinstance(room.screen, HostsPage))
            await pilot.pause()
            assert room.screen.query_one("#hosts", Table).cursor_key == host
            await pilot.press("escape")
        room.open_subject({"subject": "lab"})
        assert "no page of its own" in room._message[0]


async def test_a_comparison_with_a_run_that_is_not_there_says_so(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        room.open_run("r0008")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        await pilot.press("B")
        await filled(room, pilot, "r9999")
        await until(lambda: "There is no run 'r9999' to compare with" in screen_text(room))
        await pilot.press("B")
        await filled(room, pilot, "R0005")
        await until(lambda: "the sources are the same" in screen_text(room) and "against r0005" in screen_text(room))


async def test_the_key_of_the_page_that_is_shown_changes_nothing(lab: Lab) -> None:
    async with opened(lab) as (room, pilot):
        await pilot.press("2")
        page = room.screen
        await until(lambda: page.query_one("#runs", Table).rows)
        await pilot.press("j", "2")
        assert room.screen is page and page.query_one("#runs", Table).cursor_key != page.query_one("#runs", Table).rows[0]["id"]
        await pilot.press("enter")
        await until(lambda: isinstance(room.screen, RunPage))
        await pilot.press("2")
        await until(lambda: room.screen is page)
        await pilot.press("3", "1")
        assert room.screen.NAME == "dashboard" and len(room.screen_stack) == 1  # type: ignore[attr-defined]


async def test_the_figures_are_gone_to_where_they_have_a_place(lab: Lab) -> None:
    async with opened(lab, size=(140, 44)) as (room, pilot):
        room.open_run("r0005")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        page = room.screen
        await pilot.press("d", "f")
        assert page.has_class("-diff") and page.focused is page.query_one("#facts")
    async with opened(lab, size=(80, 24)) as (room, pilot):
        room.open_run("r0005")
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        await pilot.press("d", "f")
        assert room.screen.has_class("-facts") and room.screen.focused is room.screen.query_one("#figures")


def test_no_gpu_is_told_with_its_reason(lab: Lab) -> None:
    snapshot = snapshot_of(lab)
    state = snapshot.state
    assert state is not None and state.daemon_alive
    assert no_gpu(snapshot) == "no GPU was found: 4 shows what each host answered"
    assert no_gpu(replace(snapshot, hosts=())) == "the daemon runs and has no host yet"
    assert "when it starts" in no_gpu(replace(snapshot, state=replace(state, daemon_alive=False)))
    for broken in (replace(snapshot, problem="the daemon did not start"), replace(snapshot, state=replace(state, daemon_note="broken"))):
        assert no_gpu(broken) == "no GPU is known: the alerts above say why"
