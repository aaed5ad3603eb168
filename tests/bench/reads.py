"""How long the reads behind every face take over a lab of 10,000 runs: p50 and p99 in milliseconds.

    python -m tests.bench.reads [--runs 10000] [--rounds 200]

Budget: leaderboard and list p99 ≤ 50 ms. A read-only connection, as the faces use; one process, nothing else running.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from runner import queries, verbs
from runner.lab import Lab, open_lab
from runner.records import Phase, Submission
from tests.runner.labs import make_lab


def fill(lab: Lab, runs: int) -> None:
    """A lab with `runs` ended runs in three classes, 16 live ones and a queue of 40."""
    rng = random.Random(1)
    first = lab.store.run(verbs.submit(lab, Submission(), who="cli").run_ids[0])
    assert first is not None
    now = time.time()
    common = {"created_at": now, "purpose": "experiment", "source_sha": first.source_sha, "budget_s": 300.0, "agent": "mcp:bench"}
    with lab.store.transaction():
        for n in range(runs):
            done = rng.random() > 0.1
            lab.store.insert_run(
                **{**common, "created_at": now - runs + n, "effective_sha": f"e{n // 2}", "overrides": {"MATRIX_LR": n}},
                constants=first.constants,
                hypothesis=f"what if {n}",
                phase=Phase.ENDED,
                outcome="completed" if done else "crashed",
                val_bpb=rng.gauss(0.99, 0.01) if done else None,
                class_key=f"GPU {n % 3}",
                wall_s=330.0,
                started_at=now - 400,
                ended_at=now - runs + n,
                gpu_name="NVIDIA H200",
                trust="claimed",
                wave_id=f"w{n // 12}",
            )
        for n in range(56):
            live = n < 16
            phase = Phase.RUNNING if live else Phase.QUEUED
            place = {"gpu_uuid": f"GPU-{n}", "share": 0.3} if live else {}
            lab.store.insert_run(**common, effective_sha=f"q{n}", phase=phase, **place)
        for n in range(16):
            lab.store.upsert_gpu(f"GPU-{n}", host="h", idx=n, name="NVIDIA H200", state="busy", since=now, run_id=f"r{runs + 2 + n:04d}")


def timed(act: Callable[[], object], rounds: int) -> tuple[float, float]:
    """(p50, p99) in milliseconds."""
    spent = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        spent.append((time.perf_counter() - start) * 1e3)
    return statistics.median(spent), statistics.quantiles(spent, n=100)[98]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        writer = make_lab(Path(folder))
        fill(writer, args.runs)
        wave = writer.store.insert_wave(created_at=0.0, kind="grid", base_sha="x", factors={}, repeats=1, budget_s=300.0, agent="cli")
        lab = open_lab(writer.path, readonly=True)
        acts: dict[str, Callable[[], object]] = {
            "leaderboard": lambda: queries.leaderboard(lab),
            "list_runs, 50 as objects": lambda: queries.run_objects(lab, queries.list_runs(lab).rows),
            "list_runs by text": lambda: queries.list_runs(lab, text="what if 77"),
            "lab_line": lambda: queries.lab_line(lab),
            "gpu_objects, 16": lambda: queries.gpu_objects(lab),
            "queue": lambda: queries.queue(lab),
            "wave_object": lambda: queries.wave_object(lab, queries.known_wave(lab, wave)),
        }
        print(f"| read over {args.runs:,} runs | p50 ms | p99 ms |\n|---|---:|---:|")
        for name, act in acts.items():
            p50, p99 = timed(act, args.rounds)
            print(f"| {name} | {p50:.1f} | {p99:.1f} |")
        lab.close()
        writer.close()


if __name__ == "__main__":
    main()
