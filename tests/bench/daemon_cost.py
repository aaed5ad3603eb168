"""What the daemon costs with 16 live runs that print 20 progress lines a second each: share of a core, memory, lag of what it recorded.

    python -m tests.bench.daemon_cost [--seconds 60] [--runs 16] [--rate 20]

Everything is real but the driver: the local engine on 16 GPUs of the NVML stand-in (needs gcc), real supervisors, real processes that
print upstream's progress lines. Only the daemon's own process is counted (its sampler is a second line). Budget: ≤ 10 % of a core, ≤
150 MB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from runner import daemonctl, verbs
from runner.lab import Lab
from runner.records import WaveRequest
from tests.bench.usage import Usage, descendants
from tests.runner.daemons import TINY
from tests.runner.labs import make_lab
from tests.runner.onhost.rig import STUB, FakeNvml


def stand_in(folder: Path, count: int) -> None:
    """`count` GPUs of a stand-in driver for every process started from here on."""
    gcc = shutil.which("gcc") or shutil.which("cc")
    if gcc is None:
        raise SystemExit("no C compiler: the NVML stand-in cannot be built (apt-get install gcc)")
    folder.mkdir()
    library = str(folder / "libnvidia-ml.so.1")
    subprocess.run([gcc, "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, str(STUB)], check=True)
    fake = FakeNvml(folder)
    for n in range(count):
        fake.card(f"GPU-{n:02d}", util=97, power=600000)
    os.environ.update(fake.env, OVERNIGHT_LOCK_DIR=str(folder / "locks"))


def main() -> None:
    """Start the runs, measure, cancel them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=16)
    parser.add_argument("--rate", type=float, default=20.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stand_in(folder / "nvml", args.runs)
        hosts = '[[host]]\nname = "here"\nkind = "local"\n'
        lab = make_lab(folder / "work", policy="min_free_disk_mib = 1\ngrace_s = 1\nwall_extra_s = 7200", hosts=hosts, script=TINY)
        daemonctl.ensure_daemon(lab)
        overrides = {"STEPS": 100_000, "STEP_S": 1 / args.rate}
        wave = WaveRequest(factors={"TAG": [f"t{n}" for n in range(args.runs)]}, overrides=overrides, budget_s=3600)
        ids = verbs.submit_wave(lab, wave, who="cli").run_ids
        try:
            wait(lambda: lab.store.count_runs("step > 0") == args.runs)
            pid = daemonctl.daemon_pid(lab) or 0
            own, sampler = Usage(pid), [Usage(child) for child in descendants(pid)]
            before = offsets(lab)
            time.sleep(args.seconds)
            own.stop()
            for other in sampler:
                other.stop()
            read = offsets(lab) - before
            seen = reactions(lab)
            behind = [(lab.run_dir(r.id) / "out.log").stat().st_size - r.log_offset for r in lab.store.runs("phase = 'running'")]
        finally:
            verbs.cancel(lab, ids, who="cli", force=True)
            wait(lambda: not lab.store.count_runs("phase != 'ended'"))
            daemonctl.stop_daemon(lab)
        busy = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        print(f"{args.runs} live runs, {args.rate:g} progress lines a second each, {own.wall_s:.0f} s, {busy}")
        print(f"  daemon          {100 * own.cpu_share:.1f} % of a core, {own.peak_mib:.0f} MiB peak   (budget 10 %, 150 MB)")
        print(f"  its sampler     {100 * sum(s.cpu_share for s in sampler):.1f} % of a core, {sum(s.peak_mib for s in sampler):.0f} MiB")
        print(
            f"  read            {read / own.wall_s / 1000:.0f} kB of log a second; at most {max(behind)} bytes of a log unread at the end"
        )
        half, worst = 1000 * seen[len(seen) // 2], 1000 * seen[-1]
        print(f"  client's write  acted on after p50 {half:.0f} ms, worst of {len(seen)} {worst:.0f} ms   (budget 100 ms)")
        lab.close()


def reactions(lab: Lab, count: int = 100) -> list[float]:
    """Seconds from a client's cancel of a waiting run to its end by the daemon, sorted: how soon a write is seen and acted on."""
    found = []
    for n in range(count):
        wave = WaveRequest(factors={"TAG": [f"w{n}"]}, budget_s=3600, gpu_type="no such card")
        (run_id,) = verbs.submit_wave(lab, wave, who="cli").run_ids
        began = time.monotonic()
        verbs.cancel(lab, [run_id], who="cli")
        while not (run := lab.store.run(run_id)) or not run.ended:
            time.sleep(0.002)
        found.append(time.monotonic() - began)
    return sorted(found)


def offsets(lab: Lab) -> int:
    """Bytes of log read so far, of all runs."""
    return int(lab.store.tally("sum(log_offset)")[0][0])


def wait(state: object, limit_s: float = 120.0) -> None:
    """Wait for a state with a deadline."""
    end = time.monotonic() + limit_s
    while not state():  # type: ignore[operator]
        if time.monotonic() > end:
            raise SystemExit("the runs did not come up (or down) in time")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
