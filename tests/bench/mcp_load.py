"""How long MCP calls take over HTTP: four clients at once, 16 live runs under a real daemon, 10,000 past ones. p50 and p99 in milliseconds.

    python -m tests.bench.mcp_load [--runs 10000] [--rounds 60] [--pause 0.25]

Budget: submit p99 ≤ 100 ms, reads p99 ≤ 50 ms, no answer above 8,000 characters (2,000 tokens). Each client calls every tool in turn, in
both protocol eras, through the SDK's own client, with a pause of up to `--pause` seconds between calls (an agent thinks for longer); the
clients share one process of their own, whose work is part of what is measured. The server's own CPU time per call is printed beside it,
because it does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, Implementation

from runner import verbs
from runner.daemonctl import ensure_daemon, stop_daemon
from runner.engines.surface import SCRIPT
from runner.lab import Lab
from runner.records import Phase, Submission, WaveRequest
from tests.mcp_server.conftest import chars, text_of
from tests.runner.labs import make_lab

CLIENTS = 4
LIVE = 16
BUDGET_MS = {"run_experiment": 100.0}
READ_BUDGET_MS = 50.0
BUDGET_CHARS = 8000
HOSTS = f'[[host]]\nname = "sim"\nkind = "fake"\ntypes = {{ "NVIDIA H100 80GB HBM3" = {LIVE} }}\nspeed = 1\ncrash_share = 0\n'


def past_runs(lab: Lab, runs: int) -> None:
    """Ended runs in three classes, in waves of twelve, one in ten crashed."""
    rng = random.Random(1)
    first = lab.store.run(verbs.submit(lab, Submission(), who="cli").run_ids[0])
    assert first is not None
    verbs.cancel(lab, [first.id], who="cli")
    now = time.time()
    with lab.store.transaction():
        for n in range(runs):
            done = rng.random() > 0.1
            lab.store.insert_run(
                created_at=now - runs + n,
                purpose="baseline" if n < 3 else "experiment",
                source_sha=first.source_sha,
                effective_sha=f"e{n // 2}" if n >= 3 else "base",
                overrides={"MATRIX_LR": round(rng.random(), 3), "DEPTH": n % 12},
                constants=first.constants,
                hypothesis=f"what if {n}",
                budget_s=300.0,
                agent=f"mcp:client-{n % CLIENTS}",
                phase=Phase.ENDED,
                outcome="completed" if done else "crashed",
                val_bpb=rng.gauss(0.99, 0.01) if done else None,
                class_key=f"GPU {n % 3}",
                gpu_name="NVIDIA H200",
                wall_s=330.0,
                training_s=300.0,
                started_at=now - 86400,
                ended_at=now - 86400 + n,
                tok_s=1e6,
                trust="claimed",
            )


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_server(lab: Lab) -> tuple[subprocess.Popen[str], str]:
    """The HTTP server; the process and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mcp_server", "--lab", str(lab.path), "--http", "127.0.0.1:0"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    found = re.search(r"http://\S+/mcp", process.stderr.readline())
    assert found
    return process, found[0]


async def client_rounds(
    number: int, url: str, token: str, rounds: int, pause: float, spent: dict[str, list[float]], largest: dict[str, int]
) -> None:
    """One client: every tool in turn, `rounds` times."""
    rng = random.Random(number)
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60) as http:
        mode = "legacy" if number % 2 else "auto"
        transport = streamable_http_client(url, http_client=http)
        async with Client(transport, mode=mode, client_info=Implementation(name=f"client-{number}", version="1")) as client:
            for turn in range(rounds):
                for tool, arguments in calls(number, turn, rng):
                    await asyncio.sleep(rng.random() * pause)
                    began = time.perf_counter()
                    result = await client.call_tool(tool, arguments)
                    spent[tool].append((time.perf_counter() - began) * 1e3)
                    assert isinstance(result, CallToolResult) and not result.is_error, f"{tool} {arguments}: {text_of(result)}"
                    largest[tool] = max(largest[tool], chars(result))


def calls(number: int, turn: int, rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """What an agent asks in one turn."""
    past = f"r{rng.randrange(2, 9000):04d}"
    rate = round(0.001 + (number * 1000 + turn) * 1e-5, 6)
    return [
        ("run_experiment", {"overrides": {"MATRIX_LR": rate}, "hypothesis": "one more", "request_id": f"{number}-{turn}"}),
        ("list_gpus", {}),
        ("leaderboard", {"limit": 50}),
        ("list_runs", {"limit": 100}),
        ("list_runs", {"text": "what if 77", "outcome": "completed"}),
        ("get_run", {"id": past}),
        ("get_metrics", {"ids": [past]}),
        ("read_log", {"id": past}),
        ("analyze_wave", {"wave": "w1"}),
        ("wait_for_results", {"timeout_s": 0}),
    ]


async def measure(url: str, token: str, rounds: int, pause: float) -> tuple[dict[str, list[float]], dict[str, int]]:
    """All clients at once."""
    spent: dict[str, list[float]] = defaultdict(list)
    largest: dict[str, int] = defaultdict(int)
    await asyncio.gather(*(client_rounds(n, url, token, rounds, pause, spent, largest) for n in range(CLIENTS)))
    return spent, largest


def main() -> int:
    """Fill, serve, measure, print; 0 when every budget is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.25)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lab = make_lab(Path(folder), hosts=HOSTS, policy="max_budget_s = 7200\nmax_queue = 100000", script=SCRIPT)
        past_runs(lab, args.runs)
        verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": list(range(4, 4 + LIVE))}, budget_s=3600), who="cli")
        ensure_daemon(lab)
        deadline = time.monotonic() + 60
        while lab.store.count_runs("phase = 'running'") < LIVE and time.monotonic() < deadline:
            time.sleep(0.2)
        live = lab.store.count_runs("phase = 'running'")
        process, url = start_server(lab)
        try:
            token = (lab.path / "mcp.token").read_text().strip()
            cpu_s = cpu_seconds(process.pid)
            spent, largest = asyncio.run(measure(url, token, args.rounds, args.pause))
            cpu_s = cpu_seconds(process.pid) - cpu_s
        finally:
            process.terminate()
            process.communicate(timeout=20)
            stop_daemon(lab)
            lab.close()
    return show(spent, largest, args.runs, live, cpu_s)


def show(spent: dict[str, list[float]], largest: dict[str, int], runs: int, live: int, cpu_s: float) -> int:
    """The table; 1 when a budget is missed."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"{runs} past runs, {live} live, {CLIENTS} clients; {os.cpu_count()} cores, load {load}, Python {platform.python_version()}")
    print(f"{'tool':18} {'calls':>6} {'p50 ms':>8} {'p99 ms':>8} {'budget':>8} {'chars':>7}")
    missed = False
    for tool, values in spent.items():
        p50, p99 = statistics.median(values), statistics.quantiles(values, n=100)[98]
        budget = BUDGET_MS.get(tool, READ_BUDGET_MS)
        over = p99 > budget or largest[tool] > BUDGET_CHARS
        missed = missed or over
        print(f"{tool:18} {len(values):6} {p50:8.1f} {p99:8.1f} {budget:8.0f} {largest[tool]:7}{'  over' if over else ''}")
    count = sum(len(values) for values in spent.values())
    print(f"server CPU: {cpu_s / count * 1e3:.1f} ms a call over {count} calls")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
