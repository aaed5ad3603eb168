"""How long MCP calls take for four clients at once, with 16 live runs under a real daemon and 10,000 past ones.

    python -m tests.bench.mcp_load [--runs 10000] [--rounds 60] [--pause 0.25] [--transport http|stdio|both]

Budget: submit p99 ≤ 100 ms, reads p99 ≤ 50 ms, no answer above 8,000 characters (2,000 tokens). Each client calls every tool in turn, in
both protocol eras, through the SDK's own client, with a pause of up to `--pause` seconds between calls (an agent thinks for longer). Over
HTTP one server serves all four; over stdio each client has a server of its own. The clients share one process, whose work is part of what
they measure. "cpu ms" is the server's own CPU time for one answer, taken call by call with one client alone: it does not depend on what
else the machine does. The script is the shipped trainer/train.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
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
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, Implementation

from runner import verbs
from runner.daemonctl import ensure_daemon, stop_daemon
from runner.lab import Lab
from runner.records import Phase, Submission, WaveRequest
from tests.mcp_server.conftest import chars, text_of
from tests.runner.labs import make_lab

CLIENTS = 4
SCRIPT = (Path(__file__).parents[2] / "trainer" / "train.py").read_text()
SETTLED_S = 1.0  # the servers have started by then; what a start costs is not the question here
ALONE = 12  # calls of each tool by one client alone
LIVE = 16
BUDGET_MS = {"run_experiment": 100.0, "submit_wave": 100.0}
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


def cpu_ms(pids: Iterable[int]) -> float:
    """CPU time of all threads of some processes so far, to the microsecond (Linux)."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has just ended
                total += int(task.read_text().split()[0])
    return total / 1e6


def children() -> set[int]:
    """Processes this one has started."""
    return {int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


@contextlib.contextmanager
def http_server(lab: Lab) -> Iterator[tuple[int, str]]:
    """The HTTP server: its process id and its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mcp_server", "--lab", str(lab.path), "--http", "127.0.0.1:0"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        found = re.search(r"http://\S+/mcp", process.stderr.readline())
        assert found
        yield process.pid, found[0]
    finally:
        process.terminate()
        process.communicate(timeout=20)


@contextlib.asynccontextmanager
async def client_of(number: int, lab: Lab, url: str | None) -> AsyncIterator[Client]:
    """A connected client, every second one in the older era; over stdio (with a server of its own) where there is no URL."""
    options: dict[str, Any] = {
        "mode": "legacy" if number % 2 else "auto",
        "client_info": Implementation(name=f"client-{number}", version="1"),
    }
    if url is None:
        server = StdioServerParameters(command=sys.executable, args=["-m", "mcp_server", "--lab", str(lab.path)])
        async with Client(stdio_client(server), **options) as client:
            yield client
        return
    token = (lab.path / "mcp.token").read_text().strip()
    async with httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=60) as http:
        async with Client(streamable_http_client(url, http_client=http), **options) as client:
            yield client


class Table:
    """What was measured, by tool."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = defaultdict(list)
        self.cpu_ms: dict[str, list[float]] = defaultdict(list)
        self.chars: dict[str, int] = defaultdict(int)
        self.connected = 0

    async def call(self, client: Client, tool: str, arguments: dict[str, Any]) -> None:
        """One call, timed."""
        began = time.perf_counter()
        result = await client.call_tool(tool, arguments)
        self.ms[tool].append((time.perf_counter() - began) * 1e3)
        assert isinstance(result, CallToolResult) and not result.is_error, f"{tool} {arguments}: {text_of(result)}"
        self.chars[tool] = max(self.chars[tool], chars(result))

    async def rounds(self, number: int, lab: Lab, url: str | None, rounds: int, pause: float) -> None:
        """One of several clients: every tool in turn, `rounds` times, once all are connected."""
        rng = random.Random(number)
        async with client_of(number, lab, url) as client:
            self.connected += 1
            while self.connected < CLIENTS:
                await asyncio.sleep(0.05)
            await asyncio.sleep(SETTLED_S)
            for turn in range(rounds):
                for tool, arguments in calls(number, turn, rng):
                    await asyncio.sleep(rng.random() * pause)
                    await self.call(client, tool, arguments)

    async def alone(self, lab: Lab, url: str | None, server: int | None) -> None:
        """One client alone: the server's CPU time for each answer. What the first call of a tool costs more is left out."""
        before, rng = children(), random.Random(99)
        async with client_of(99, lab, url) as client:
            pids = [server] if server is not None else children() - before
            aside = Table()
            for turn in range(ALONE + 1):
                for tool, arguments in calls(99, turn, rng):
                    began = cpu_ms(pids)
                    await aside.call(client, tool, arguments)
                    await asyncio.sleep(0.02)  # what the server does after its answer belongs to it too
                    if turn:
                        self.cpu_ms[tool].append(cpu_ms(pids) - began)


def calls(number: int, turn: int, rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """What an agent asks in one turn."""
    past = f"r{rng.randrange(2, 9000):04d}"
    rate = round(0.001 + (number * 1000 + turn) * 1e-5, 6)
    wave = {"factors": {"MATRIX_LR": [round(rate + n * 1e-6, 8) for n in range(1, 5)], "EMBEDDING_LR": [0.4, 0.5, 0.6]}}
    waves = [("submit_wave", {**wave, "request_id": f"{number}-wave-{turn}"})] if turn % 4 == 0 else []
    return [
        *waves,
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


async def measure(lab: Lab, url: str | None, server: int | None, rounds: int, pause: float) -> Table:
    """All clients at once, then one alone."""
    table = Table()
    await asyncio.gather(*(table.rounds(n, lab, url, rounds, pause) for n in range(CLIENTS)))
    await table.alone(lab, url, server)
    return table


def main() -> int:
    """Fill, serve, measure, print; 0 when every budget is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.25)
    parser.add_argument("--transport", choices=("http", "stdio", "both"), default="both")
    args = parser.parse_args()
    gc.freeze()  # the clients' own memory is not what is measured
    missed = False
    for transport in ("http", "stdio") if args.transport == "both" else (args.transport,):
        with tempfile.TemporaryDirectory() as folder:
            lab = make_lab(Path(folder), hosts=HOSTS, policy="max_budget_s = 7200\nmax_queue = 100000", script=SCRIPT)
            past_runs(lab, args.runs)
            verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": list(range(2, 2 + LIVE))}, budget_s=3600), who="cli")
            ensure_daemon(lab)
            deadline = time.monotonic() + 60
            while lab.store.count_runs("phase = 'running'") < LIVE and time.monotonic() < deadline:
                time.sleep(0.2)
            live = lab.store.count_runs("phase = 'running'")
            try:
                if transport == "http":
                    with http_server(lab) as (pid, url):
                        table = asyncio.run(measure(lab, url, pid, args.rounds, args.pause))
                else:
                    table = asyncio.run(measure(lab, None, None, args.rounds, args.pause))
            finally:
                stop_daemon(lab)
                lab.close()
        missed |= show(table, transport, args.runs, live)
    return int(missed)


def show(table: Table, transport: str, runs: int, live: int) -> bool:
    """Print the table; whether a budget is missed."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    machine = f"{os.cpu_count()} cores, load {load}, Python {platform.python_version()}"
    print(f"\n{transport}: {runs} past runs, {live} live, {CLIENTS} clients; {machine}")
    print(f"{'tool':18} {'calls':>6} {'p50 ms':>8} {'p99 ms':>8} {'budget':>8} {'cpu ms':>8} {'chars':>7}")
    missed = False
    for tool, values in table.ms.items():
        p50, p99 = statistics.median(values), statistics.quantiles(values, n=100, method="inclusive")[98]
        budget = BUDGET_MS.get(tool, READ_BUDGET_MS)
        over = p99 > budget or table.chars[tool] > BUDGET_CHARS
        missed = missed or over
        cpu = statistics.median(table.cpu_ms[tool])
        print(f"{tool:18} {len(values):6} {p50:8.1f} {p99:8.1f} {budget:8.0f} {cpu:8.1f} {table.chars[tool]:7}{'  over' if over else ''}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
