"""Two sights on a machine without a GPU: one real wave analysed end to end, and a tune of the embedded default.

    python -m tests.bench.sights wave [--budget 20]       3 repeats of the script and a 2 × 2 grid, each cell twice; about 6 minutes
    python -m tests.bench.sights tune [--budget 20]       about 26 runs, of which 6 are twice as long; about 18 minutes

Prints each command and what it said, for docs/benchmarks.md. Wants a quiet machine: a wall-clock budget measures the load as well. The lab
is kept in --folder (default: a temporary one), so an interrupted tune goes on when the command is given again with the same folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAINER = Path(__file__).resolve().parents[2] / "trainer"
HOSTS = """[trainer]
folder = {folder}
budget = "prepare.py:TIME_BUDGET"
data_command = ["{{python}}", "prepare.py"]
[policy]
budget_s = {budget}
handed_ahead = 0  # a run started ahead would take CPU time from the one before
[[host]]
name = "here"
kind = "local"
"""


class Sight:
    """One lab, and the commands given to it."""

    def __init__(self, folder: Path, budget_s: float) -> None:
        self.lab = folder / "lab"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts.toml").write_text(HOSTS.format(folder=json.dumps(str(TRAINER)), budget=f"{budget_s:g}"))

    def say(self, *words: str) -> bool:
        """Give a command, print it and its answer; whether it went well."""
        print("$ overnight", *words, flush=True)
        began = time.monotonic()
        done = subprocess.run([Path(sys.executable).with_name("overnight"), "--lab", self.lab, *words], check=False)
        print(f"[{time.monotonic() - began:.0f} s, exit code {done.returncode}, load {os.getloadavg()[0]:.1f}]\n", flush=True)
        return done.returncode == 0


def wave(sight: Sight) -> bool:
    """Repeats for the noise, a grid whose factors depend on each other (width is their product), the analysis, the board."""
    return all(
        (
            sight.say("run", "--baseline", "--seeds", "3", "--wait"),
            sight.say("wave", "--grid", "DEPTH=1,2", "--grid", "ASPECT_RATIO=48,96", "--repeats", "2", "--wait"),
            sight.say("analyze", "w2"),
            sight.say("noise"),
            sight.say("leaderboard"),
        )
    )


def tune(sight: Sight, budget_s: float) -> bool:
    """The tuning loop on the script's own knobs, then the board."""
    budgets = ("--budget", f"{budget_s:g}", "--longer", f"{2 * budget_s:g}")
    return sight.say("tune", *budgets, "--waves", "2", "--size", "8") and sight.say("leaderboard")


def main(argv: list[str] | None = None) -> int:
    """Show one of the sights."""
    parser = argparse.ArgumentParser(description="Two sights on a machine without a GPU.")
    parser.add_argument("what", choices=("wave", "tune"))
    parser.add_argument("--budget", type=float, default=20.0)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args(argv)
    folder = args.folder or Path(tempfile.mkdtemp(prefix=f"overnight-{args.what}-"))
    sight = Sight(folder.absolute(), args.budget)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, lab {sight.lab}\n", flush=True)
    try:
        good = wave(sight) if args.what == "wave" else tune(sight, args.budget)
    finally:
        sight.say("daemon", "stop")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
