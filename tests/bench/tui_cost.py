"""What the control room costs: time to the first frame, CPU and bytes at 1 Hz, the delay of a key, and how fast it quits.

Run: `python tests/bench/tui_cost.py [--runs 10000] [--seconds 20]`. It opens the real screen on a real pseudo-terminal (160x50), over a
lab with 16 live GPUs and 10,000 past runs, while a writer plays the daemon: every second samples, progress and a beat, and now and then
a run ends. Times are wall clock: the load of the machine is printed beside them.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import random
import select
import signal
import sqlite3
import statistics
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from runner.lab import Lab, open_lab
from runner.records import Point, Sample
from tests.tui import rows, scenes

BUDGETS = {"first frame": 0.6, "idle CPU": 3.0, "bytes": 12_000.0, "key": 0.05, "quit": 0.5}
PROGRAM = """
import sys, time
from pathlib import Path
from tui import opening
opening.prepared = lambda path: BEFORE
opening.open_room(sys.argv[1], leave=True)
"""
USUAL = PROGRAM.replace("BEFORE", "None")
HUNG = PROGRAM.replace("BEFORE", "lambda: time.sleep(600)")


def big_lab(folder: Path, runs: int) -> Lab:
    """The busy night with `runs` ended runs behind it, at the present time."""
    rows.NOW = time.time()
    lab = scenes.busy(folder)
    rng = random.Random(1)
    with lab.store.transaction():
        for i in range(runs):
            val = 0.98 + rng.random() / 50 if rng.random() > 0.1 else None
            rows.ended(lab, val, at=3600 + i, hypothesis=f"run {i}", effective=f"big{i // 2}")
        for run in lab.store.runs("phase = 'running'"):
            lab.store.add_points(run.id, [Point(s, s * 0.3, s / 1000, 3.0, 1.6e6, 323.0, None) for s in range(600)])
    return lab


class Daemon(threading.Thread):
    """Writes what a daemon writes, once a second, through the store."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(daemon=True)
        self.lab, self.over, self.tick = lab, threading.Event(), 0

    def run(self) -> None:
        """Beat, samples, progress; every tenth second a run ends."""
        rng = random.Random(2)
        live = [(g.uuid, g.run_id, dict(g.telemetry or {})) for g in self.lab.store.gpus()]
        while not self.over.wait(1.0):
            self.tick += 1
            with self.lab.store.transaction():
                self.lab.store.beat(pid=1, boot_id="b", started_at=0.0, version="0", note=None)
                for uuid, run, telemetry in live:
                    self._second(uuid, run, telemetry, rng)
                if self.tick % 10 == 0:
                    rows.ended(self.lab, 0.985 + rng.random() / 100, at=0, hypothesis="just now")

    def _second(self, uuid: str, run: str | None, telemetry: dict[str, Any], rng: random.Random) -> None:
        """One second of one GPU and its run."""
        now, store = time.time(), self.lab.store
        telemetry.update(at=now, util_pct=rng.choice([97, 98, 99]), power_w=640 + rng.randint(-25, 25), temp_c=60 + rng.randint(0, 3))
        store.upsert_gpu(uuid, telemetry=telemetry)
        if run is None:
            return
        share, step, speed = 0.2 + self.tick / 300, 600 + self.tick * 3, 1.62e6 + rng.randint(-9000, 9000)
        loss = 3.2 - share / 4 + rng.random() / 100
        store.update_run(run, share=share, step=step, loss=loss, remaining_s=300 * (1 - share), tok_s=speed, last_output_at=now)
        store.add_points(run, [Point(step, None, share, loss, speed, 323.0, None)])
        store.add_samples([Sample(uuid, int(now), run, 98.0, 46000, 650.0, 700.0, 60.0, 1755, 1980, 0, speed)])


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, program: str, lab: Path, size: tuple[int, int] = (160, 50)) -> None:
        self.started = time.monotonic()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", PYTHONPATH=str(Path(__file__).resolve().parents[2]))
            os.execv(sys.executable, [sys.executable, "-c", program, str(lab)])
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.bytes = 0
        self.text = b""

    def read(self, seconds: float, until: Callable[[bytes], bool] | None = None) -> float | None:
        """Read for so long, or until a condition on everything read; returns when it held."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.fd], [], [], left)[0]:
                break
            try:
                piece = os.read(self.fd, 65536)
            except OSError:
                break
            self.bytes += len(piece)
            self.text = (self.text + piece)[-400_000:]
            if until is not None and until(self.text):
                return time.monotonic()
        return None

    def cpu_s(self) -> float:
        """User and system time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        """Resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def press(self, key: bytes) -> float:
        """Send a key and wait for the first byte that answers; the delay."""
        while select.select([self.fd], [], [], 0.02)[0]:
            self.read(0.02)
        sent = time.monotonic()
        os.write(self.fd, key)
        answered = self.read(2.0, until=lambda _: True)
        return (answered or time.monotonic()) - sent

    def quit_s(self, key: bytes = b"\x11") -> float:
        """Send Ctrl-Q and wait for the end; kills it after ten seconds."""
        sent = time.monotonic()
        os.write(self.fd, key)
        while time.monotonic() - sent < 10:
            self.read(0.01)
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                return time.monotonic() - sent
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return float("inf")


def measure(lab: Lab, seconds: float) -> list[tuple[str, float, str, float | None]]:
    """(what, value, unit, budget) rows."""
    table: list[tuple[str, float, str, float | None]] = []
    frames, filled, spent_s = [], [], []
    for _ in range(5):
        terminal = Terminal(USUAL, lab.path)
        seen = terminal.read(10, until=lambda t: b"Leaderboard" in t)
        frames.append((seen or float("inf")) - terminal.started)
        spent_s.append(terminal.cpu_s())
        seen = terminal.read(10, until=lambda t: b"r0016" in t)
        filled.append((seen or float("inf")) - terminal.started)
        terminal.quit_s()
    table.append(("first frame, median of 5", statistics.median(frames), "s", BUDGETS["first frame"]))
    table.append(("CPU until the first frame, median of 5", statistics.median(spent_s), "s", None))
    table.append(("GPUs and leaderboard filled, median of 5", statistics.median(filled), "s", None))
    daemon = Daemon(lab)
    daemon.start()
    terminal = Terminal(USUAL, lab.path)
    terminal.read(6)
    cpu, size, began = terminal.cpu_s(), terminal.bytes, time.monotonic()
    terminal.read(seconds)
    spent = time.monotonic() - began
    table.append(("CPU while 16 GPUs move at 1 Hz", 100 * (terminal.cpu_s() - cpu) / spent, "% of a core", BUDGETS["idle CPU"]))
    table.append(("bytes to the terminal", (terminal.bytes - size) / spent, "B/s", BUDGETS["bytes"]))
    table.append(("resident memory", terminal.rss_mib(), "MiB", None))
    delays = sorted(terminal.press(k) for k in [b"\t", b"j", b"k", b"\t", b"j"] * 20)
    table.append(("key to screen, median of 100", statistics.median(delays), "s", BUDGETS["key"]))
    table.append(("key to screen, 95th of 100", delays[int(0.95 * len(delays))], "s", BUDGETS["key"]))
    table.extend(openings(terminal))
    table.append(("quit", terminal.quit_s(), "s", BUDGETS["quit"]))
    terminal = Terminal(USUAL, lab.path)
    terminal.read(4)
    blocker = sqlite3.connect(lab.db_path, isolation_level=None)
    daemon.over.set()
    daemon.join()
    blocker.execute("BEGIN EXCLUSIVE")
    os.write(terminal.fd, b"p")
    terminal.read(1.0)
    table.append(("quit with the database locked and a verb waiting", terminal.quit_s(), "s", BUDGETS["quit"]))
    blocker.execute("ROLLBACK")
    blocker.close()
    terminal = Terminal(HUNG, lab.path)
    terminal.read(2.0)
    table.append(("quit with the reader hung", terminal.quit_s(), "s", BUDGETS["quit"]))
    return table


def openings(terminal: Terminal) -> list[tuple[str, float, str, float | None]]:
    """What it takes to open a page or box, and Esc to leave it: the delay of the answer and the bytes of the picture."""
    table: list[tuple[str, float, str, float | None]] = []
    delays, opened = [], []
    for key, word in ((b"?", "page of keys"), (b"2", "runs page"), (b":", "commands")):
        sizes, back = [], []
        for _ in range(5):
            before = terminal.bytes
            opened.append(terminal.press(key))
            terminal.read(0.6)
            sizes.append(terminal.bytes - before)
            before = terminal.bytes
            delays.append(terminal.press(b"\x1b"))
            terminal.read(0.6)
            back.append(terminal.bytes - before)
        table.append((f"{word} opened, median of 5", statistics.median(sizes), "B", None))
        table.append((f"{word} closed, median of 5", statistics.median(back), "B", None))
    delays.sort()
    table.append(("page or box to screen, median of 15", statistics.median(opened), "s", BUDGETS["key"]))
    table.append(("Esc to screen, median of 15", statistics.median(delays), "s", BUDGETS["key"]))
    table.append(("Esc to screen, slowest of 15", delays[-1], "s", BUDGETS["key"]))
    return table


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lab = big_lab(Path(folder), asked.runs)
        lab.close()
        lab = open_lab(lab.path)
        machine = f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        print(f"16 GPUs, {asked.runs:,} runs, 160x50, {asked.seconds:g} s; {machine}\n")
        print("| what | measured | budget |\n|---|---|---|")
        for what, value, unit, budget in measure(lab, asked.seconds):
            verdict = "" if budget is None else f" {'≤' if value <= budget else '> MISSED'} {budget:g}"
            print(f"| {what} | {value:.3g} {unit} |{verdict} |")
        lab.close()


if __name__ == "__main__":
    main()
