"""The reader: what it reads, when it reads again, and that whatever happens to the lab becomes a sentence on the screen."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from pathlib import Path
from unittest import mock

import pytest

from tests.tui import scenes
from tests.tui.driving import DEADLINE_S
from tests.tui.rows import NOW
from tests.tui.still import snapshot_of
from tui.gpuwords import mfu_text, note, sample_of
from tui.hand import Deed, Hand
from tui.snapshot import Failed, Reader, Snapshot, pulse


def test_one_snapshot_holds_the_night(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    snapshot = snapshot_of(lab)
    assert snapshot.problem is None and snapshot.state is not None
    assert len(snapshot.gpus) == 16 and len(snapshot.live) == 14 and len(snapshot.queue) == 9
    assert snapshot.state.best_id == "r0005" and snapshot.board is not None and snapshot.board["rows"][0]["id"] == "r0005"
    assert all(r["id"] != "r0013" for r in snapshot.board["rows"]), "a refuted claim is not ranked"


def test_the_reader_never_writes(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    before = lab.store.data_version()
    Reader(lab.path).take()
    assert lab.store.data_version() == before


def test_a_missing_damaged_newer_or_replaced_database_is_a_sentence(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "lab")
    assert "There is no lab" in str(reader.take().problem)
    lab = scenes.busy(tmp_path)
    lab.close()
    assert reader.take().problem is None
    kept = tmp_path / "kept.db"
    shutil.copy(lab.db_path, kept)
    os.replace(_garbage(tmp_path), lab.db_path)
    damaged = reader.take()
    assert "damaged" in str(damaged.problem) and len(damaged.gpus) == 16, "the facts stay as last seen"
    newer = tmp_path / "newer.db"
    shutil.copy(kept, newer)
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    os.replace(newer, lab.db_path)
    assert "newer Overnight" in str(reader.take().problem)
    os.replace(kept, lab.db_path)
    mended = reader.take()
    assert mended.problem is None and len(mended.gpus) == 16
    reader._close()


def _garbage(folder: Path) -> Path:
    path = folder / "garbage"
    path.write_bytes(b"this is no database" * 200)
    return path


def test_a_view_that_fails_does_not_blind_the_others(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)

    def broken(_: object) -> None:
        raise ZeroDivisionError("ouch")

    snapshot = snapshot_of(lab, {"bad": broken, "good": lambda lab: lab.store.count_runs()})
    assert isinstance(snapshot.views["bad"], Failed) and "ouch" in snapshot.views["bad"].sentence
    assert snapshot.views["good"] == lab.store.count_runs()


def test_ages_move_on_while_nothing_else_does(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    reader = Reader(lab.path, interval_s=0.05)
    taken: list[Snapshot] = []
    enough = threading.Event()

    def deliver(snapshot: Snapshot) -> None:
        taken.append(snapshot)
        if len(taken) >= 3:
            enough.set()

    reader.start(deliver)
    assert enough.wait(DEADLINE_S)
    reader.stop()
    assert taken[-1].at > taken[0].at
    assert taken[-1].board is taken[0].board, "the leaderboard is not ranked again while no run ends"


def test_a_verb_that_fails_leaves_the_hand_working(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    done: list[Deed] = []
    three = threading.Event()

    def report(deed: Deed) -> None:
        done.append(deed)
        if len(done) == 3:
            three.set()

    hand = Hand(lab.path, report)
    hand.do("boom", lambda lab: 1 / 0)
    hand.do("no such run", lambda lab: __import__("runner.verbs").verbs.cancel(lab, ["r9999"], who="tui"))
    hand.do("count", lambda lab: [str(lab.store.count_runs())])
    assert three.wait(DEADLINE_S)
    hand.stop()
    assert [d.ok for d in done] == [False, False, True]
    assert "ZeroDivisionError" in done[0].sentence and "r9999" in done[1].sentence


def test_a_screen_that_opens_late_shows_what_was_before(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    snapshot = snapshot_of(lab)
    past = snapshot.history["GPU-alpha-05"]
    assert len(past) > 20, "two minutes of samples are kept for this GPU"
    mfu = next(g["mfu_percent"] for g in snapshot.gpus if g["uuid"] == "GPU-alpha-05")
    assert all(v is None or abs(v - mfu) < 0.1 * mfu for v in past)


def test_gpus_of_a_removed_host_are_gone(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    lab.store.upsert_host("beta", state="removed")
    snapshot = snapshot_of(lab)
    assert {g["host"] for g in snapshot.gpus} == {"alpha"} and [h.name for h in snapshot.hosts] == ["alpha"]


def test_what_is_not_read_again_grows_old(tmp_path: Path) -> None:
    """A daemon that died writes nothing more: its last figures must not look alive for the rest of the night."""
    lab = scenes.busy(tmp_path)
    reader = Reader(lab.path)
    with mock.patch("time.time", lambda: NOW):
        first = reader.take()
    for later in (NOW + 1, NOW + 2, NOW + 60):
        with mock.patch("time.time", lambda later=later: later):
            last = reader.take()
    before, after = (next({**g, "run_object": s.live[g["run"]]} for g in s.gpus if g["run"] == "r0020") for s in (first, last))
    assert mfu_text(before) == "50.7%" and sample_of(before)["power_w"] > 0
    assert mfu_text(after) == "-" and not sample_of(after) and note(after)[0] == "no data for 1m"
    assert after["since_s"] == pytest.approx(before["since_s"] + 60)
    assert last.queue[0]["age_s"] == pytest.approx(first.queue[0]["age_s"] + 60)
    assert pulse(before) is not None and pulse(after) is None, "nor does its history go on"
    reader._close()
