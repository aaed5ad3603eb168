"""The gap on a GPU between two queued runs: last process gone -> next process started. Local and over ssh, with the real daemon and
supervisors.

    python -m tests.bench.gap [--runs 25]

`gap` is from the supervisors' records; `script` from the last statement of one script to the first of the next (interpreter start and
end included). Where the script imports torch, `script` says what a standby with its imports done saves. The runs take a second each, so
that the next one's supervisor is there before the present one ends, as in any real night. Budget: local p50 <= 0.2 s, ssh p50 <= 0.6 s.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from runner import daemonctl, verbs
from runner.lab import Lab
from runner.records import Run, Submission
from tests.runner.engines import sshrig
from tests.runner.labs import make_lab
from tests.runner.onhost import rig

SCRIPT = """import os, time
IMPORTS
began = time.monotonic()
SEED = 42
end = began + SECONDS
while time.monotonic() < end:
    time.sleep(0.02)
print("val_bpb:          1.000000", flush=True)
print("stamps", began, time.monotonic(), flush=True)
"""


def script(imports: str = "") -> str:
    """A run of a second (of twelve with imports, so that a standby's are done in time); `began` is stamped when its imports are done."""
    return SCRIPT.replace("IMPORTS", imports).replace("SECONDS", "12.0" if imports else "1.0")


def measure(lab: Lab, runs: int) -> tuple[list[float], list[float]]:
    """Submit runs to the one slot of a lab; gaps by the supervisors' records and by the scripts' own clocks."""
    ids = []
    for n in range(runs):
        ids += verbs.submit(lab, Submission(overrides={"SEED": n}, budget_s=20, allow_duplicate=True), who="cli").run_ids
    daemonctl.ensure_daemon(lab)
    deadline = time.monotonic() + 60 + 30 * runs
    while not all(run and run.ended for run in map(lab.store.run, ids)):
        if time.monotonic() > deadline:
            left = [(r.id, r.phase, r.cause_text) for r in map(lab.store.run, ids) if r and not r.ended]
            raise SystemExit(f"the runs did not end: {left}")
        time.sleep(0.1)
    found: list[Run] = sorted((run for run in map(lab.store.run, ids) if run), key=lambda run: run.started_at or 0)
    bad = [(run.id, run.outcome, run.cause_text) for run in found if run.outcome != "completed"]
    if bad:
        raise SystemExit(f"not all runs completed: {bad}")
    gaps = [(b.started_at or 0) - (a.started_at or 0) - (a.wall_s or 0) for a, b in itertools.pairwise(found)]
    stamps = [stamps_of(lab, run) for run in found]
    scripts = [b[0] - a[1] for a, b in itertools.pairwise(stamps)]
    return gaps, scripts


def stamps_of(lab: Lab, run: Run) -> tuple[float, float]:
    """First and last statement of a run's script, monotonic."""
    line = next(line for line in (lab.run_dir(run.id) / "out.log").read_text().splitlines() if line.startswith("stamps"))
    return float(line.split()[1]), float(line.split()[2])


def one_lab(folder: Path, host: str, runs: int, *, imports: str = "", ahead: int = 1) -> tuple[list[float], list[float]]:
    """A lab with that host, measured and closed."""
    lab = make_lab(folder, policy=f"min_free_disk_mib = 1\nhanded_ahead = {ahead}\n", hosts=host, script=script(imports))
    try:
        return measure(lab, runs)
    finally:
        daemonctl.stop_daemon(lab)
        lab.close()


def row(name: str, figures: tuple[list[float], list[float]], budget_s: float | None) -> None:
    """One line of the table, milliseconds."""
    gaps, scripts = figures
    p50, p90, worst = statistics.median(gaps), statistics.quantiles(gaps, n=10)[-1], max(gaps)
    verdict = "" if budget_s is None else ("within" if p50 <= budget_s else "OVER") + f" {budget_s * 1000:.0f}"
    cells = [f"{1000 * x:8.0f}" for x in (p50, p90, worst, statistics.median(scripts))]
    print(f"{name:<34}{len(gaps):>5}{''.join(cells)}  {verdict}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=25)
    args = parser.parse_args()
    print(f"{'slot':<34}{'gaps':>5}{'p50 ms':>8}{'p90 ms':>8}{'max ms':>8}{'script':>8}  budget (p50)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["OVERNIGHT_LOCK_DIR"] = str(folder / "locks")
        row("local, CPU slot", one_lab(folder / "cpu", '[[host]]\nname = "here"\ngpus = []\n', args.runs), 0.2)
        if rig.compiler() is None:
            print("local and ssh GPUs: skipped, the NVML stand-in needs a C compiler")
            return
        (folder / "nvml").mkdir()
        library = rig.build_stub(folder / "nvml")
        fake = rig.FakeNvml(library)
        fake.card("GPU-a", used=500)
        before = dict(os.environ)
        os.environ.update(fake.env)
        row("local, GPU (NVML stand-in)", one_lab(folder / "gpu", '[[host]]\nname = "here"\n', args.runs), 0.2)
        if importlib.util.find_spec("torch"):
            few = max(args.runs // 4, 3)
            here = '[[host]]\nname = "here"\n'
            row("local, GPU, imports torch, cold", one_lab(folder / "cold", here, few, imports="import torch", ahead=0), None)
            row("local, GPU, imports torch, standby", one_lab(folder / "warm", here, few, imports="import torch"), None)
        os.environ.clear()
        os.environ.update(before)
        why = sshrig.missing()
        if why:
            print(f"ssh: skipped, {why}")
            return
        over_ssh(folder, library, args.runs)


def over_ssh(folder: Path, library: Path, runs: int) -> None:
    """The same through a real sshd in a namespace."""
    (folder / "ssh").mkdir()
    net: Any = sshrig.Net(folder / "ssh", library)
    try:
        host = net.add()
        host.nvml.card("GPU-1a", used=500)
        os.environ["OVERNIGHT_SSH_CONFIG"] = str(net.config)
        text = (
            f'[[host]]\nname = "gpu1"\nkind = "ssh"\naddress = "{host.address}"\nuser = "root"\nidentity = "{net.key}"\n'
            f'workdir = "{host.work}"\npython = "{sys.executable}"\n'
        )
        row("ssh, GPU (NVML stand-in)", one_lab(folder / "far", text, runs), 0.6)
        row("ssh, nothing handed ahead", one_lab(folder / "alone", text, runs, ahead=0), None)
    finally:
        net.close()
        shutil.rmtree(folder / "ssh", ignore_errors=True)


if __name__ == "__main__":
    main()
