"""Whatever comes from outside: markup, escapes, wide characters, NaN, huge and missing values, in every pane at every size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tui import rows, scenes
from tests.tui.driving import opened, screen_text, until
from tests.tui.still import snapshot_of
from tui.screens.run import RunPage
from tui.screens.wave import WavePage
from tui.widgets.gpus import card
from tui.widgets.gpuwall import GpuWall

SIZES = [(60, 20), (80, 24), (200, 60)]


@pytest.mark.parametrize("size", SIZES)
async def test_every_pane_survives_and_shows_no_control_character(tmp_path: Path, size: tuple[int, int]) -> None:
    lab = scenes.hostile(tmp_path)
    run, seen = lab.store.runs("outcome = 'completed'")[0].id, []
    async with opened(lab, size=size) as (room, pilot):
        assert room.snapshot.problem is None
        seen.append(screen_text(room))
        for key in "23456":
            await pilot.press(key)
            await pilot.pause()
            seen.append(screen_text(room))
            await pilot.press("j", "k", "s", "S")
        await pilot.press("colon")
        await pilot.pause()
        await pilot.press(*"pause", "escape")
        room.open_run(run)
        await until(lambda: isinstance(room.screen, RunPage) and room.screen.view())
        for key in ("l", "d", "u", "f", "i", "o", "o", "o", "L"):
            await pilot.press(key)
            await pilot.pause()
            seen.append(screen_text(room))
        room.open_wave("w1")
        await until(lambda: isinstance(room.screen, WavePage) and "wave:w1" in room.snapshot.views)
        await pilot.press("v", "K")
        await pilot.pause()
        seen.append(screen_text(room))
        await pilot.press("escape", "question_mark")
        await pilot.pause()
        room.complain("[/x] [red]")
        await pilot.pause()
        assert room.is_running
    for text in seen:
        assert not [c for c in text if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160 or 0x202A <= ord(c) <= 0x202E)]
    assert any("[/x]" in text for text in seen)


async def test_an_empty_lab_has_a_sentence_in_every_pane(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    async with opened(lab, size=(120, 40)) as (room, pilot):
        assert (
            "no GPU is known yet" in screen_text(room)
            and "the queue is empty" in screen_text(room)
            and "no run has a result yet" in screen_text(room)
        )
        assert "No daemon serves this lab" in screen_text(room)
        for key, sentence in (
            ("2", "no run was submitted yet"),
            ("3", "no wave was submitted yet"),
            ("4", "no host is known yet"),
            ("5", "nothing happened yet"),
            ("6", "no run has a result"),
        ):
            await pilot.press(key)
            await until(lambda sentence=sentence: sentence in screen_text(room))
        for key in ("x", "R", "K", "P", "space", "enter", "e", "y", "c", "r", "H", "w"):
            await pilot.press(key)
        assert room.is_running


async def test_figures_that_no_longer_move_do_not_look_alive(tmp_path: Path) -> None:
    lab = scenes.host_down(tmp_path)
    gpu = lab.store.gpus()[0]
    lab.store.upsert_gpu(gpu.uuid, telemetry={**(gpu.telemetry or {}), "at": rows.NOW - 90})
    async with opened(lab, size=(160, 50)) as (room, _):
        wall = room.screen.query_one(GpuWall)
        cards = {str(g["uuid"]): "\n".join(line.text for line in card(g, 40, False)) for g in wall.rows}
        assert "no data for 1m" in cards[gpu.uuid] and "W" not in cards[gpu.uuid].replace("MFU", "")
        lost = cards["GPU-beta-00"]
        assert "host down since" in lost and "no link" in lost and "51.3%" not in lost and "625" not in lost


async def test_a_cpu_slot_shows_its_speed_and_an_unknown_card_its_use(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    lab.store.upsert_host("here", kind="local", state="up", since=rows.NOW - 100, paused=0, drain=0)
    common = {
        "phase": "running",
        "stage": "training",
        "share": 0.5,
        "step": 57,
        "loss": 5.1,
        "remaining_s": 10.0,
        "host": "here",
        "budget_s": 20.0,
    }
    run = rows.add_run(lab, tok_s=1820.0, **common)
    lab.store.upsert_gpu("CPU:here", host="here", name="CPU", state="busy", since=rows.NOW - 20, run_id=run)
    other = rows.add_run(lab, tok_s=9e5, gpu_name="NVIDIA Unknown 9000", flops_per_token=3e8, **common)
    rows.add_gpu(lab, "here", 0, "NVIDIA Unknown 9000", run_id=other)
    rows.beat(lab)
    async with opened(lab, size=(100, 30)) as (room, _):
        shown = screen_text(room)
        assert "tok/s" in shown and "1.8k" in shown and "step 57" in shown and "budget 20 s" in shown
        wall = room.screen.query_one(GpuWall)
        unknown = "\n".join(line.text for line in card(wall.rows[-1] if wall.rows[-1]["index"] == 0 else wall.rows[0], 40, False))
        assert "?" in unknown and "MFU" not in unknown
        room.screen.query_one(GpuWall).set_mode("rows", 1)


def test_a_card_that_somebody_else_has_says_who(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    gpu = lab.store.gpus()[15]
    words = "held by another control room: lab 3339699bb12c, run r0007, user mira, pid 7271, since 20:33:34"
    lab.store.upsert_gpu(gpu.uuid, state="foreign", reason=words, run_id=None)
    row = next(g for g in snapshot_of(lab).gpus if g["uuid"] == gpu.uuid)
    text = " ".join(line.text.strip("│╭╮╰╯─ ") for line in card(row, 44, False))
    for word in ("another control room", "lab 3339699bb12c", "run r0007", "mira", "pid 7271", "20:33:34", "foreign for"):
        assert word in text
    assert all(line.width == 44 for line in card(row, 44, False)) and len(card(row, 44, False)) == 6
