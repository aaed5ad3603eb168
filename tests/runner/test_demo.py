"""The demo: the real agent, server and daemon, on simulated GPUs; what it leaves, and how it goes on after an interruption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner import queries
from runner.daemonctl import daemon_status, stop_daemon
from runner.lab import Lab, open_lab
from tests.runner.commands import program, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def folder(tmp_path: Path):
    yield tmp_path / "demo"
    if (tmp_path / "demo" / "lab" / "lab.db").exists():
        lab = open_lab(tmp_path / "demo" / "lab")
        stop_daemon(lab)
        lab.close()


def test_an_agent_runs_a_wave_and_promotes_the_best(folder: Path, tmp_path: Path) -> None:
    said = program("demo", "--simulate", "--folder", folder, cwd=tmp_path)
    assert said.code == 0, said
    lab = open_lab(folder / "lab")
    runs = lab.store.runs()
    assert {r.agent for r in runs} == {"mcp:demo"} and {r.outcome for r in runs} == {"completed"}
    assert {r.gpu_name for r in runs if r.promoted_from} == {"NVIDIA H200"}
    board = queries.leaderboard(lab)
    best = sorted((r for r in runs if r.class_key == board["class"]), key=lambda r: r.val_bpb or 9)
    promoted = {r.promoted_from for r in runs if r.promoted_from}
    assert board["rows"][0]["id"] == best[0].id and promoted == {best[0].id, best[1].id}
    assert daemon_status(lab) is None
    lab.close()
    assert best[0].id in said.out and str(folder / "lab") in said.out and "connect claude" in said.out and "connect codex" in said.out
    assert [p.name for p in tmp_path.iterdir()] == ["demo"]


def wait_for(lab_path: Path, enough: int, deadline_s: float = 40) -> Lab:
    """The lab, once it has so many runs."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if (lab_path / "lab.db").exists():
            lab = open_lab(lab_path)
            if lab.store.count_runs() >= enough:
                return lab
            lab.close()
        time.sleep(0.05)
    raise AssertionError("the demo submitted nothing")


def test_an_interrupted_demo_goes_on_and_a_finished_one_starts_afresh(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-m", "runner.cli", "demo", "--simulate", "--folder", str(folder)]
    with started(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        lab = wait_for(folder / "lab", 3)
        before = [r.id for r in lab.store.runs()]
        lab.close()
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130
    again = program("demo", "--simulate", "--folder", folder, cwd=tmp_path)
    assert again.code == 0 and "going on where it was" in again.out
    lab = open_lab(folder / "lab")
    runs = lab.store.runs()
    assert [r.id for r in runs][: len(before)] == before and len(runs) == 3 + 12 + 2
    keys = json.loads((folder / "plan.json").read_text())["baseline"]["request_id"]
    lab.close()
    fresh = program("demo", "--simulate", "--folder", folder, cwd=tmp_path)
    assert fresh.code == 0 and json.loads((folder / "plan.json").read_text())["baseline"]["request_id"] != keys
    assert "going on" not in fresh.out


def test_a_folder_of_somebody_elses_is_never_removed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    said = program("demo", "--simulate", "--folder", folder, cwd=tmp_path)
    assert (said.code, said.err.count("\n")) == (1, 1) and (folder / "thesis.tex").read_text() == "precious"
