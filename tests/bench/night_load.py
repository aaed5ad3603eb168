"""A simulated night: 16 GPUs on two hosts, 910 runs, crashes, a cut link and a restarted host. How busy were the GPUs, and with what?

    python -m tests.bench.night_load [--runs 910] [--speed 100] [--crash-share 0.08]

The real daemon, detached, over the fake engine on a scaled clock; one client queues waves of 13 and keeps at most two waiting. Busy
share: slot seconds with a run on them over all slot seconds, from the first start to the moment the last wave leaves a slot without
work. Training share: slot seconds of training of completed runs over the same. Budget: ≥ 97 % and ≥ 88 %. Report 2's night had a
training share of 46 %. The scaled clock makes every real millisecond of the daemon `speed` times as expensive: a gap of 50 ms counts as
5 s at speed 100.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
import time
from pathlib import Path

from runner import daemonctl, verbs
from runner.engines import surface
from runner.lab import Lab
from runner.records import Run, WaveRequest
from tests.bench.usage import Usage
from tests.runner.labs import make_lab

HOSTS = """
[[host]]
name = "{name}"
kind = "fake"
types = {{H100 = 6, H200 = 2}}
speed = {speed}
crash_share = {crash}
"""
WAVE = 13


def main() -> None:
    """Run the night and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=910)
    parser.add_argument("--speed", type=float, default=100.0)
    parser.add_argument("--crash-share", type=float, default=0.08)
    parser.add_argument("--calm", action="store_true", help="no cut link and no restart")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        hosts = "".join(HOSTS.format(name=n, speed=args.speed, crash=args.crash_share) for n in ("alpha", "beta"))
        lab = make_lab(Path(folder), policy="min_free_disk_mib = 1\nmax_queue = 2000", hosts=hosts, script=surface.SCRIPT)
        daemonctl.ensure_daemon(lab)
        usage = Usage(daemonctl.daemon_pid(lab) or 0)
        began = time.time()
        try:
            faults(lab, args, began)
        finally:
            usage.stop()
            daemonctl.stop_daemon(lab)
        report(lab, args, usage)
        lab.close()


def faults(lab: Lab, args: argparse.Namespace, began: float) -> None:
    """Keep the queue fed until all runs are submitted and ended; cut beta's link early, restart it later."""
    rng = random.Random(7)
    submitted, cut_at, cut, restarted = 0, None, False, False
    beta = lab.path / "fake" / "beta"
    while True:
        waiting = lab.store.count_runs("phase = 'queued'")
        if submitted < args.runs and waiting < 2 * WAVE:
            submitted += submit(lab, rng, min(WAVE, args.runs - submitted))
        done = lab.store.count_runs("phase = 'ended'")
        if not args.calm and not cut and done > args.runs * 0.3:
            (beta / "down").touch()
            cut, cut_at = True, time.time()
        if cut_at and (time.time() - cut_at) * args.speed > 120:
            (beta / "down").unlink()
            cut_at = None
        if not args.calm and not restarted and done > args.runs * 0.6:
            (beta / "boot_id").write_text("restarted")
            restarted = True
        if submitted >= args.runs and not lab.store.count_runs("phase != 'ended'"):
            return
        if time.time() - began > 1800:
            raise SystemExit("the night did not end within half an hour")
        time.sleep(0.05)


def submit(lab: Lab, rng: random.Random, count: int) -> int:
    """One wave of an agent that varies three constants."""
    cells = [
        {
            "MATRIX_LR": round(rng.uniform(0.01, 0.08), 5),
            "WEIGHT_DECAY": round(rng.uniform(0.02, 0.4), 5),
            "SOFTCAP": rng.choice([10, 12, 15]),
        }
        for _ in range(count)
    ]
    return len(verbs.submit_wave(lab, WaveRequest(cells=cells, budget_s=300), who="mcp:bench").run_ids)


def shares(runs: list[Run], slots: int, speed: float) -> tuple[float, float, float]:
    """(busy share, training share, night in simulated hours): up to the moment when the queue was empty for good."""
    started = [r for r in runs if r.started_at and r.ended_at]
    begin = min(r.started_at or 0 for r in started)
    end = max(r.started_at or 0 for r in started)
    total = slots * (end - begin)
    busy = sum(min(r.ended_at or 0, end) - (r.started_at or 0) for r in started)
    training = 0.0
    for r in started:
        if r.outcome == "completed" and r.training_s:
            inside = (min(r.ended_at or 0, end) - (r.started_at or 0)) / max((r.ended_at or 0) - (r.started_at or 0), 1e-9)
            training += r.training_s / speed * inside
    return busy / total, training / total, (end - begin) * speed / 3600


def gaps(runs: list[Run]) -> list[float]:
    """Real seconds between two runs on a GPU, sorted."""
    by_gpu: dict[str, list[Run]] = {}
    for r in runs:
        if r.started_at and r.ended_at:
            by_gpu.setdefault(r.gpu_uuid or "", []).append(r)
    found = []
    for used in by_gpu.values():
        used.sort(key=lambda r: r.started_at or 0)
        found += [(b.started_at or 0) - (a.ended_at or 0) for a, b in itertools.pairwise(used)]
    return sorted(found)


def report(lab: Lab, args: argparse.Namespace, usage: Usage) -> None:
    """The table."""
    runs = lab.store.runs()
    outcomes = {o: n for o, n in lab.store.tally("outcome, count(*)", "1 GROUP BY outcome ORDER BY 2 DESC")}
    busy, training, hours = shares(runs, 16, args.speed)
    between = gaps(runs)
    print(f"{len(runs)} runs, 16 simulated GPUs on 2 hosts, speed {args.speed:g}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"  outcomes               {', '.join(f'{n} {o}' for o, n in outcomes.items())}")
    print(f"  night                  {hours:.2f} h simulated, {usage.wall_s:.0f} s real")
    print(f"  busy share             {100 * busy:.1f} %   (budget ≥ 97 %)")
    print(f"  training share         {100 * training:.1f} %   (budget ≥ 88 %; report 2's night 46 %)")
    print(
        f"  gap between runs       p50 {1000 * between[len(between) // 2]:.0f} ms, p99 {1000 * between[len(between) * 99 // 100]:.0f} ms, "
        f"max {1000 * between[-1]:.0f} ms (real)"
    )
    print(f"  daemon                 {100 * usage.cpu_share:.1f} % of a core, {usage.peak_mib:.0f} MiB peak")


if __name__ == "__main__":
    main()
