"""The store: real SQLite, several connections, and the sentences for what can go wrong with a database file."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from runner import schema
from runner.errors import LabError
from runner.records import Phase, Point, Run, Sample
from runner.store import RUN_COLUMNS, Store


def new_run(store: Store) -> str:
    return store.insert_run(
        created_at=time.time(), purpose="experiment", source_sha="s", effective_sha="e", budget_s=20.0, agent="cli", phase=Phase.QUEUED
    )


@pytest.fixture
def store(tmp_path: Path):
    opened = Store(tmp_path / "lab.db", create=True)
    yield opened
    opened.close()


def test_the_record_and_the_table_have_the_same_columns(store: Store) -> None:
    assert {row[1] for row in store._read("PRAGMA table_info(runs)")} == RUN_COLUMNS


def test_ids_are_never_reused(store: Store) -> None:
    first = new_run(store)
    store._write("DELETE FROM runs")
    assert (first, new_run(store)) == ("r0001", "r0002")


def test_json_columns_come_back_as_they_went(store: Store) -> None:
    run_id = new_run(store)
    store.update_run(run_id, attributes={"batch": [1, 2.5, None]}, overrides={"A": "x"})
    run = store.run(run_id)
    assert isinstance(run, Run)
    assert (run.attributes, run.overrides, run.model_config, run.phase) == ({"batch": [1, 2.5, None]}, {"A": "x"}, None, "queued")


def test_an_unknown_column_is_refused(store: Store) -> None:
    with pytest.raises(KeyError, match="nonsense"):
        store.update_run(new_run(store), nonsense=1)


def test_non_finite_json_never_enters(store: Store) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        store.update_run(new_run(store), attributes={"x": float("nan")})


def test_a_failed_transaction_leaves_nothing(store: Store) -> None:
    with pytest.raises(RuntimeError), store.transaction():
        new_run(store)
        with store.transaction():
            new_run(store)
        raise RuntimeError
    assert store.count_runs() == 0
    assert new_run(store) == "r0001"


def test_reading_a_stretch_twice_doubles_no_point(store: Store) -> None:
    run_id = new_run(store)
    points = [Point(n, 1.0, n / 10, 2.0, 3.0, 4.0, None) for n in range(5)]
    store.add_points(run_id, points[:3])
    store.add_points(run_id, points)
    assert store.points(run_id) == points


def test_flags_are_edge_triggered(store: Store) -> None:
    assert store.raise_flag("r1", "slow", "warn", "0.7 of the median")
    assert not store.raise_flag("r1", "slow", "warn", "0.6 of the median")
    assert [f.evidence for f in store.flags("r1")] == ["0.6 of the median"]
    assert store.clear_flag("r1", "slow") and not store.clear_flag("r1", "slow")
    assert store.flags() == [] and len(store.flags(cleared=True)) == 1
    assert store.raise_flag("r1", "slow", "warn", "again")


def test_samples_are_thinned(store: Store) -> None:
    store.add_samples(Sample("GPU-a", at, "r1", util_pct=50.0) for at in range(100))
    assert store.thin_samples(50, 10) == 45
    assert [s.at for s in store.samples("gpu_uuid = ?", ("GPU-a",))][:7] == [0, 10, 20, 30, 40, 50, 51]


def test_another_connection_sees_a_change_by_data_version(store: Store) -> None:
    reader = Store(store.path, readonly=True)
    before = reader.data_version()
    new_run(store)
    assert reader.data_version() != before and reader.count_runs() == 1
    with pytest.raises(LabError, match="may not be written"):
        new_run(reader)
    reader.close()


def test_many_writers_lose_nothing(store: Store) -> None:
    def write() -> None:
        own = Store(store.path)
        for _ in range(25):
            new_run(own)
        own.close()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    ids = [r.id for r in store.runs()]
    assert len(ids) == len(set(ids)) == 100


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    Store(tmp_path / "lab.db", create=True).close()
    with sqlite3.connect(tmp_path / "lab.db") as db:
        db.execute(f"PRAGMA user_version = {schema.VERSION + 1}")
    db.close()
    with pytest.raises(LabError, match="newer Overnight"):
        Store(tmp_path / "lab.db")


@pytest.mark.parametrize("content", [b"hello world" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_damaged_file_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lab.db").write_bytes(content)
    with pytest.raises(LabError, match="damaged or not a database"):
        Store(tmp_path / "lab.db")


def test_a_database_of_somebody_else_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "lab.db")
    db.execute("CREATE TABLE theirs(x)")
    db.commit()
    db.close()
    with pytest.raises(LabError, match="not a lab's"):
        Store(tmp_path / "lab.db")


def test_an_absent_database_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="Submit a run or start the daemon"):
        Store(tmp_path / "lab.db", readonly=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_read_only_folder_is_a_sentence(tmp_path: Path) -> None:
    Store(tmp_path / "lab.db", create=True).close()
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(LabError, match=r"may not be written|cannot be opened"):
            new_run(Store(tmp_path / "lab.db"))
    finally:
        tmp_path.chmod(0o700)


def test_a_lab_of_the_first_schema_opens_is_read_and_is_brought_forward(tmp_path: Path) -> None:
    path = tmp_path / "lab.db"
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA journal_mode = WAL")
        for statement in schema.TABLES.split(";\n"):
            db.execute(statement)
        db.execute("PRAGMA user_version = 1")
    db.close()
    old = Store(path, readonly=True)
    before = old.changes("ranking")
    opened = Store(path)
    run_id = new_run(opened)
    assert old.changes("ranking") != before, "an older lab that is only read: any change counts"
    old.close()
    before = opened.changes("ranking")
    opened.update_run(run_id, outcome="completed", val_bpb=1.0)
    assert opened.changes("ranking") != before
    opened.close()
    assert Store(path).run(run_id) is not None


def test_the_ranking_counter_moves_with_all_that_ranking_reads_and_with_nothing_else(store: Store) -> None:
    run_id = new_run(store)
    store.update_run(run_id, phase="running", loss=2.0, val_bpb=1.0)
    start = store.changes("ranking")
    store.update_run(run_id, loss=1.9, tok_s=3.0)
    new_run(store)
    assert store.changes("ranking") == start
    seen = {start}
    for columns in (
        {"outcome": "completed"},
        {"val_bpb": 0.9},
        {"trust": "verified", "verified_bpb": 0.9},
        {"trust_why": "held: odd"},
        {"verdict": "discard"},
        {"class_key": "H200"},
        {"outcome": "crashed"},
    ):
        store.update_run(run_id, **columns)
        seen.add(store.changes("ranking"))
    assert len(seen) == 8


def test_the_counter_of_ended_runs_moves_with_their_ends_alone(store: Store) -> None:
    run_id = new_run(store)
    start = store.changes("ended")
    store.update_run(run_id, phase="running", wall_s=1.0, outcome=None)
    new_run(store)
    assert store.changes("ended") == start
    store.update_run(run_id, phase="ended", outcome="crashed", wall_s=3.0)
    crashed = store.changes("ended")
    store.update_run(run_id, val_bpb=1.0)
    assert store.changes("ended") == crashed != start
    store.update_run(run_id, phase="queued", outcome=None)  # a run that was not to have ended
    assert store.changes("ended") != crashed
