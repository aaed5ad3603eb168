"""Where no screen can be shown: the lab as plain rows, exit code 0; what cannot be read, a sentence and 1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from runner import queries
from tests.tui import rows, scenes
from tui import app
from tui.opening import once_lines


def test_the_table_holds_gpus_queue_and_leaderboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = scenes.busy(tmp_path)
    with mock.patch("time.time", lambda: rows.NOW):
        assert app.run_once(lab.path) == 0
    out = capsys.readouterr().out
    assert "alpha:5" in out and "r0020" in out and "MFU 50.7%" in out
    assert "0.981202" in out and "Queue (9)" in out
    assert "\x1b" not in out


def test_a_hosts_file_that_cannot_be_used_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts.toml").write_text("[policy\n")
    assert app.run_once(tmp_path / "lab") == 2 and "is not valid TOML" in capsys.readouterr().err
    assert app.run_once(tmp_path / "lab") == 0  # there is a lab by now
    assert f"! {tmp_path}/hosts.toml is not valid TOML" in capsys.readouterr().out


def test_a_dumb_terminal_gets_the_table(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    code = "import sys; from tui.app import run; sys.exit(run(sys.argv[1]))"
    root = Path(__file__).parents[2]
    env = {"TERM": "dumb", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(lab.path)], capture_output=True, text=True, timeout=15, env=env, cwd=root, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert "Leaderboard" in done.stdout and "no result yet" in done.stdout


def test_hostile_text_reaches_no_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = scenes.hostile(tmp_path)
    assert app.run_once(lab.path) == 0
    out = capsys.readouterr().out
    assert not [c for c in out if c != "\n" and (ord(c) < 32 or 127 <= ord(c) < 160)]


def test_the_queue_says_what_a_run_changes_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = scenes.empty_lab(tmp_path)
    scenes.add_run(lab, overrides={"MODE": "ok", "DEPTH": 6}, hypothesis=None)
    assert app.run_once(lab.path) == 0
    out = capsys.readouterr().out
    assert "MODE=ok DEPTH=6" in out and "{" not in out


def test_a_damaged_database_is_a_sentence_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = scenes.empty_lab(tmp_path)
    lab.close()
    lab.db_path.write_bytes(b"no database" * 100)
    assert app.run_once(lab.path) == 1
    err = capsys.readouterr().err
    assert "damaged" in err and "Traceback" not in err


def test_ascii_and_a_terminals_width(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lab = scenes.busy(tmp_path)
    assert app.run_once(lab.path, ascii_only=True) == 0
    assert capsys.readouterr().out.isascii()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert app.run_once(lab.path) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) == 80


def test_figures_of_a_host_that_is_down_are_not_shown_as_if_they_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Old samples and a remaining time that nobody counts down are dashes, as on the screen."""
    lab = scenes.host_down(tmp_path)
    with mock.patch("time.time", lambda: rows.NOW):
        assert app.run_once(lab.path) == 0
    out = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip().startswith(("alpha:", "beta:"))}
    assert "unreachable 5 min 40 s" in out["beta:0"] and "host down since" in out["beta:0"]
    assert not any(word.endswith(("W", "C")) and word[:-1].isdigit() for word in out["beta:0"].split()) and "MFU -" in out["beta:0"]
    assert "MFU 50.7%" in out["alpha:5"] and any(word.endswith("W") for word in out["alpha:5"].split())


@pytest.mark.parametrize(("width", "lost"), [(120, ""), (80, "C"), (60, "WC%")])
def test_a_gpus_row_holds_what_matters_in_a_narrow_terminal(tmp_path: Path, width: int, lost: str) -> None:
    lab = scenes.host_down(tmp_path)
    with mock.patch("time.time", lambda: rows.NOW):
        lines = once_lines(lab, width)
    found = {line.split()[0]: line for line in lines if line.strip().startswith("alpha:")}
    assert all(len(line) <= width for line in found.values())
    busy, free = found["alpha:5"].split(), found["alpha:6"].split()
    assert {"H100", "busy", "r0020", "training", "MFU", "50.7%"} <= set(busy) and "free" in free
    for unit in "WC":
        assert any(w.endswith(unit) and w[:-1].isdigit() for w in free) == (unit not in lost)
    after = lines[lines.index(found["alpha:3"]) + 1]
    assert "quarantined" in found["alpha:3"] and "still held by" in after and after.startswith("      "), "a note gets a row"


def test_a_pipe_gets_every_column(tmp_path: Path) -> None:
    with mock.patch("time.time", lambda: rows.NOW):
        lines = once_lines(scenes.busy(tmp_path))
    assert (
        "  alpha:5        H100 80GB        busy         r0020   training                   40%   2:58   MFU 50.7%   99%  645W  65C" in lines
    )


def test_a_lab_no_daemon_has_served_shows_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = scenes.empty_lab(tmp_path)
    before = lab.store.data_version()
    assert app.run_once(lab.path) == 0
    out = capsys.readouterr().out
    gpus = out.split("GPUs\n")[1].split("\n\nQueue")[0].splitlines()
    assert gpus and all("unwatched" in row and "no daemon runs" in row for row in gpus), out
    assert lab.store.gpus() == [] and lab.store.data_version() == before, "looking writes nothing"
    rows.beat(lab)
    assert app.run_once(lab.path) == 0
    assert "unwatched" not in capsys.readouterr().out, "what a daemon serves, the daemon tells"


def test_the_leaderboard_says_what_a_run_changes_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = scenes.busy(tmp_path)
    board = queries.leaderboard(lab, limit=15)["rows"]
    changed = next(r for r in board if r["changes"])
    assert app.run_once(lab.path) == 0
    line = next(row for row in capsys.readouterr().out.split("Leaderboard")[1].splitlines() if changed["id"] in row)
    assert all(f"{name}={value}" in line for name, value in changed["changes"].items())
