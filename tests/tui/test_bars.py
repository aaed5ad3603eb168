"""The header and the alerts: what they say of a night, what leaves first when the room is short, and that stale data shows its age."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tui import rows, scenes
from tests.tui.rows import NOW
from tests.tui.still import snapshot_of
from tui.snapshot import Snapshot
from tui.widgets.bars import alert_lines, alerts, header


@pytest.fixture
def night(tmp_path: Path) -> Snapshot:
    return snapshot_of(scenes.busy(tmp_path))


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_header_fits_and_keeps_what_matters(night: Snapshot, width: int) -> None:
    line = header(night, width, NOW)
    assert line.fitted(width).width == width
    assert "●" in line.text
    if width >= 60:
        assert "14/16 GPUs busy" in line.text
    if width >= 120:
        assert "queue 9" in line.text and "0.981202" in line.text and "agent 16m ago" in line.text


def test_data_that_stopped_coming_shows_its_age(night: Snapshot) -> None:
    assert "old" not in header(night, 200, NOW + 2).text
    assert "data 45s old" in header(night, 60, NOW + 45).text


def test_a_lab_that_cannot_be_read_is_said_first() -> None:
    unread = Snapshot(lab="/x/lab", problem="The lab database is damaged.")
    assert "cannot be read" in header(unread, 120, NOW).text
    assert alerts(unread, NOW) == [("bad", "The lab database is damaged.")]
    assert "reading the lab" in header(Snapshot(lab="/x/lab"), 120, NOW).text


def test_worst_first(tmp_path: Path) -> None:
    found = alerts(snapshot_of(scenes.host_down(tmp_path)), NOW)
    assert [s for s, _ in found] == sorted((s for s, _ in found), key=("bad", "warn", "info").index)
    texts = " / ".join(t for _, t in found)
    assert "Host beta is down for 5m: beta does not answer on port 22" in texts
    assert "alpha:3 is quarantined for 1m: " in texts and "41 GiB still held by pid 8812" in texts
    assert "the queue is paused (p resumes) with 9 runs waiting" in texts


def test_idle_gpus_name_the_agents_last_call(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    with lab.store.transaction():
        for run in lab.store.runs("phase = 'queued'"):
            lab.store.update_run(run.id, phase="ended", outcome="cancelled", ended_at=NOW)
    texts = [t for _, t in alerts(snapshot_of(lab), NOW)]
    assert any("2 GPUs idle, the longest for 2m: the queue is empty; the agent's last call was 16m ago" in t for t in texts)


@pytest.mark.parametrize(("left", "says"), [(1, "while 1 run waits: its GPU type"), (3, "while 3 runs wait: their GPU type")])
def test_idle_gpus_beside_a_queue_are_counted_in_grammar(tmp_path: Path, left: int, says: str) -> None:
    lab = scenes.busy(tmp_path)
    with lab.store.transaction():
        for run in lab.store.runs("phase = 'queued'")[left:]:
            lab.store.update_run(run.id, phase="ended", outcome="cancelled", ended_at=NOW)
    assert any(says in t for _, t in alerts(snapshot_of(lab), NOW))


def test_a_dead_daemon_is_said(tmp_path: Path) -> None:
    lab = scenes.busy(tmp_path)
    rows.kill_daemon(lab)
    snapshot = snapshot_of(lab)
    assert "no daemon" in header(snapshot, 120, NOW).text
    assert any("No daemon serves this lab" in t for _, t in alerts(snapshot, NOW))


def test_the_same_flag_is_said_once_and_what_is_left_out_is_counted(night: Snapshot) -> None:
    many = replace(night, flags=night.flags * 5)
    assert alerts(many, NOW) == alerts(night, NOW)
    found = [("bad", f"flag {i}") for i in range(9)]
    lines = alert_lines(found, 60, 3)
    assert len(lines) == 3 and "and 7 more" in lines[2].text
    assert alert_lines(found, 60, 0) == []
    assert len(alert_lines(found[:3], 60, 3)) == 3


def test_a_change_that_waits_for_a_human_is_told_once(night: Snapshot) -> None:
    assert night.state is not None
    waits = "hosts.toml changed, and this waits for a human."
    state = replace(night.state, daemon_alive=True, daemon_silent_s=None, policy_pending=waits, daemon_note=f"{waits}; alpha: refused")
    told = alerts(replace(night, state=state), NOW)
    assert [a for a in told if "waits" in a[1]] == [("warn", waits)] and ("bad", "alpha: refused") in told
    told = alerts(replace(night, state=replace(state, daemon_note=waits)), NOW)
    assert [a for a in told if "waits" in a[1]] == [("warn", waits)]


def test_a_night_of_crashes_is_said(tmp_path: Path) -> None:
    """Crashed runs make room for the next ones: the GPUs look busy, and nothing else on the first page would tell."""
    lab = rows.empty_lab(tmp_path, "alpha")
    for n in range(1, 4):
        lab.store.event("daemon", "ended", f"r000{n}", "crashed: The GPU's memory was too small for it: [/x]")
    night = snapshot_of(lab)
    events = [replace(e, at=NOW - 60) for e in night.events]
    told = [text for _, text in alerts(replace(night, events=tuple(events)), NOW)]
    assert any("3 of the last 3 runs crashed, r0003 1m ago: The GPU's memory" in text for text in told)
    fine = [replace(e, verb="ended", why="completed", at=NOW - 30) for e in events]
    assert not any("crashed" in text for _, text in alerts(replace(night, events=(*fine, *events)), NOW)), (
        "half of them is no night of crashes"
    )
    old = [replace(e, at=NOW - 7200) for e in events]
    assert not any("crashed" in text for _, text in alerts(replace(night, events=tuple(old)), NOW))


def test_approval_mode_stands_in_the_header(night: Snapshot) -> None:
    assert night.state is not None
    assert "APPROVAL" not in header(night, 120, NOW).text
    assert "APPROVAL m" in header(replace(night, state=replace(night.state, approval="ask")), 120, NOW).text


def test_a_flag_of_a_gpu_names_its_place_and_quarantine_is_said_once(tmp_path: Path) -> None:
    lab = scenes.host_down(tmp_path)
    lab.store.raise_flag("GPU-alpha-03", "orphan_process", "bad", "held by pid 8812")
    lab.store.raise_flag("GPU-alpha-05", "foreign_process", "warn", "9 GiB in use by pid 77")
    texts = [t for _, t in alerts(snapshot_of(lab), NOW)]
    assert sum("alpha:3" in t or "GPU-alpha-03" in t for t in texts) == 1, texts
    assert any(t.startswith("alpha:5 foreign_process") for t in texts), texts


def test_a_frozen_read_only_screen_says_both(night: Snapshot) -> None:
    assert "│ read-only FROZEN z │" in header(night, 200, NOW, readonly=True, frozen=True).text
    assert "│ FROZEN z │" in header(night, 200, NOW, frozen=True).text and "│  " not in header(night, 200, NOW).text
