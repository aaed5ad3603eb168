"""The control room in a real terminal (tmux), with the real daemon and simulated GPUs behind it: keys go in, the pane is read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.daemonctl import stop_daemon
from runner.engines import surface
from runner.lab import Lab, open_lab

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed (make test-deps)"),
]
HOSTS = """
[trainer]
folder = "trainer"
[policy]
budget_s = 120
[[host]]
name = "sim"
kind = "fake"
speed = 1
crash_share = 0.0
types = { "NVIDIA H100 80GB HBM3" = 3, "NVIDIA H200" = 1 }
"""


class Pane:
    """A tmux server of our own with one window of 120x36."""

    def __init__(self, command: str, folder: Path, **env: str) -> None:
        self.socket = f"overnight-test-{uuid.uuid4().hex[:8]}"
        keep = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "OVERNIGHT_LOCK_DIR")}
        self.env = {**keep, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8", **env}
        self._tmux(
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-s",
            "t",
            "-x",
            "120",
            "-y",
            "36",
            "-c",
            str(folder),
            f"{command}; echo ENDED $?; sleep 60",
        )

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-L", self.socket, *words], env=self.env, capture_output=True, text=True, timeout=20, check=False)
        return done.stdout

    def keys(self, *keys: str) -> None:
        """Press keys by tmux's names."""
        self._tmux("send-keys", "-t", "t", *keys)

    def text(self, *, colours: bool = False) -> str:
        """What the pane shows."""
        return self._tmux("capture-pane", "-p", "-t", "t", *(["-e"] if colours else []))

    def until(self, holds: Callable[[str], bool], deadline_s: float = 60.0) -> str:
        """Wait until the pane shows something."""
        end = time.monotonic() + deadline_s
        while not holds(text := self.text()):
            assert time.monotonic() < end, f"not shown within {deadline_s:g} s:\n{text}"
            time.sleep(0.05)
        return text

    def close(self) -> None:
        """End the server and what runs in it."""
        self._tmux("kill-server")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "hosts.toml").write_text(HOSTS)
    (tmp_path / "trainer" / "train.py").write_text("".join(f"{k} = {v!r}\n" for k, v in surface.DEFAULTS.items()))
    (tmp_path / "trainer" / "prepare.py").write_text("TIME_BUDGET = 120\n")
    yield tmp_path
    if (tmp_path / "lab" / "lab.db").exists():
        lab = open_lab(tmp_path / "lab")
        stop_daemon(lab)
        lab.close()


def test_a_run_is_submitted_watched_cancelled_and_the_daemon_outlives_the_screen(folder: Path) -> None:
    pane = Pane(f"{sys.executable} -c 'from tui.app import run; import sys; sys.exit(run())'", folder)
    try:
        pane.until(lambda t: "4 GPUs busy" in t and "sim:3" in t)  # the lab was made, the daemon started, the GPUs found
        lab = open_lab(folder / "lab")
        from runner import verbs
        from runner.records import Submission

        run = verbs.submit(lab, Submission(overrides={"MATRIX_LR": 0.05}), who="cli").run_ids[0]
        shown = pane.until(lambda t: run in t and "MFU" in t and "loss 8" not in t and "% of" not in t and _mfu(t))
        assert "1/4 GPUs busy" in shown
        pane.keys("Enter")
        pane.until(lambda t: f"{run} · loss" in t and "MATRIX_LR" in t and "tok/sec" in t)
        pane.keys("x")
        pane.until(lambda t: f"Cancel {run}?" in t)
        time.sleep(0.35)  # the box is deaf to keys for 300 ms by design
        pane.keys("Enter")
        pane.until(lambda t: f"Cancel {run}?" not in t)
        assert lab.store.run(run).wanted == "run"  # type: ignore[union-attr]
        pane.keys("x")
        pane.until(lambda t: f"Cancel {run}?" in t)
        time.sleep(0.35)
        pane.keys("y")
        pane.until(lambda t: "cancelled" in t)
        _ended(lab, run)
        pane.keys("q")
        pane.until(lambda t: "Leaderboard" in t)
        pane.keys("q")
        pane.until(lambda t: "ENDED 0" in t)
        assert lab.store.daemon() is not None and time.time() - lab.store.daemon().beat_at < 5  # type: ignore[union-attr]
        lab.close()
    finally:
        pane.close()


def _mfu(text: str) -> bool:
    return any("%" in word and word[0].isdigit() for line in text.splitlines() if "MFU" in line for word in line.split())


def _ended(lab: Lab, run: str) -> None:
    end = time.monotonic() + 30
    while lab.store.run(run).outcome != "cancelled":  # type: ignore[union-attr]
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("env", "has", "lacks"), [({}, "38;5;", "38;2;"), ({"COLORTERM": "truecolor"}, "38;2;", "38;5;"), ({"NO_COLOR": "1"}, "GPUs", "38;")]
)
def test_colours_follow_the_terminal(folder: Path, env: dict[str, str], has: str, lacks: str) -> None:
    log = folder / "bytes"
    pane = Pane(f"script -q -c \"{sys.executable} -c 'from tui.app import run; run(readonly=True)'\" {log}", folder, **env)
    try:
        pane.until(lambda t: "GPUs" in t and "There is no lab" in t)
        sent = log.read_bytes().decode(errors="replace")
        assert has in sent and lacks not in sent
        pane.keys("q")
        pane.until(lambda t: "ENDED" in t)
    finally:
        pane.close()


def test_a_fault_of_the_screen_is_a_sentence_and_a_file(folder: Path) -> None:
    program = folder / "broken.py"
    program.write_text(
        "from tui.widgets.gpuwall import GpuWall\n"
        "def broken(self, snapshot): raise KeyError('a fault')\n"
        "GpuWall.show_snapshot = broken\n"
        "from tui.app import run\nimport sys\nsys.exit(run())\n"
    )
    pane = Pane(f"{sys.executable} {program}", folder)
    try:
        shown = pane.until(lambda t: "ENDED 1" in t)
        assert "The screen failed (KeyError)" in shown and "Traceback" not in shown
        assert "a fault" in (folder / "lab" / "tui-error.log").read_text()
    finally:
        pane.close()
