"""What goes wrong around the screen: a locked, replaced or full database, a daemon that dies. Each is a sentence, and work goes on."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from runner.lab import Lab, open_lab
from tests.tui import rows, scenes
from tests.tui.driving import opened, screen_text, until
from tests.tui.rows import NOW
from tui import hand
from tui.gpuwords import sample_of
from tui.widgets.gpuwall import GpuWall
from tui.widgets.table import Table


async def test_a_locked_database_fails_the_verb_and_not_the_screen(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    async with opened(lab) as (room, pilot):
        blocker = sqlite3.connect(lab.db_path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        await pilot.press("p")
        await until(lambda: "pause the queue …" in screen_text(room))
        queue = room.screen.query_one("#queue", Table)
        queue.focus()
        await pilot.press("j")
        assert queue.cursor == 1, "keys work while the verb waits for the lock"
        await until(lambda: "has held it for more than 5 s" in room._message[0], 15)
        blocker.execute("ROLLBACK")
        blocker.close()
        await pilot.press("p")
        await until(lambda: lab.store.setting("queue_paused") is True)


async def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = scenes.busy(tmp_path)

    def full(path: Path, **how: bool) -> Lab:
        found = open_lab(path, **how)
        pages = found.store._db.execute("PRAGMA page_count").fetchone()[0]
        found.store._db.execute(f"PRAGMA max_page_count = {pages}")
        return found

    monkeypatch.setattr(hand, "open_lab", full)
    async with opened(lab) as (room, _):
        room.do("write a lot", lambda lab: lab.store.set_setting("large", "x" * 3_000_000))
        await until(lambda: "the disk is full" in room._message[0])
        assert "r0015" in screen_text(room)


async def test_a_database_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path / "a")
    other = scenes.empty_lab(tmp_path / "b")
    rows.beat(other)
    async with opened(lab) as (room, _):
        assert "14/16 GPUs busy" in screen_text(room)
        for store in (lab.store, other.store):
            store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        kept = tmp_path / "kept.db"
        shutil.copy(other.db_path, kept)
        os.replace(kept, lab.db_path)
        for name in ("lab.db-wal", "lab.db-shm"):
            (lab.path / name).unlink(missing_ok=True)
        room.source.poke()
        await until(lambda: "0/0 GPUs busy" in screen_text(room))


async def test_a_lab_that_vanishes_leaves_what_was_seen(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    async with opened(lab) as (room, _):
        os.rename(lab.path, tmp_path / "elsewhere")
        room.source.poke()
        await until(lambda: "There is no lab" in screen_text(room))
        assert "r0016" in screen_text(room), "the facts as last seen stay on the screen"
        os.rename(tmp_path / "elsewhere", lab.path)
        room.source.poke()
        await until(lambda: "There is no lab" not in screen_text(room))


async def test_a_daemon_that_dies_is_said_and_one_that_comes_back_too(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    async with opened(lab) as (room, _):
        rows.kill_daemon(lab)
        room.source.poke()
        await until(lambda: "No daemon serves this lab" in screen_text(room) and "no daemon" in screen_text(room))
        rows.beat(lab, age_s=45)
        room.source.poke()
        await until(lambda: "No daemon serves" not in screen_text(room) and "has written nothing for 45s" in screen_text(room))
        rows.beat(lab)
        room.source.poke()
        await until(lambda: "has written nothing" not in screen_text(room))


async def test_figures_grow_old_where_readings_fail(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    at = [NOW]
    async with opened(lab, clock=lambda: at[0]) as (room, pilot):
        wall = room.screen.query_one(GpuWall)
        assert sum(sample_of(row) != {} for row in wall.rows) > 10
        lab.store.close()
        lab.db_path.unlink()
        room.source.poke()
        await until(lambda: room.snapshot.problem is not None)
        assert any(sample_of(row) for row in wall.rows), "a second's failure hides nothing"
        at[0] += 12
        room._tick()
        await pilot.pause()
        assert not any(sample_of(row) for row in wall.rows) and "data 12s old" in screen_text(room)
        at[0] += 20
        room._tick()
        assert all(row["sample_age_s"] >= 32 for row in wall.rows if row.get("sample_age_s") is not None)
