"""The server as clients start it: a process on stdio, with the real daemon and simulated GPUs; nothing is lost when any of them dies."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mcp import MCPError, StdioServerParameters

from mcp_server.client import our_environment
from mcp_server.stdin import whole_characters
from runner.daemonctl import daemon_pid, stop_daemon
from runner.engines.surface import SCRIPT
from runner.lab import Lab
from tests.mcp_server.conftest import Agent, connected, rows_of
from tests.runner.labs import make_lab

pytestmark = pytest.mark.timeout(60)
SIMULATED = (
    '[[host]]\nname = "sim"\nkind = "fake"\ntypes = { "NVIDIA H100 80GB HBM3" = 2, "NVIDIA H200" = 1 }\nspeed = 40\ncrash_share = 0\n'
)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    opened = make_lab(tmp_path, hosts=SIMULATED, script=SCRIPT)
    yield opened
    stop_daemon(opened)
    opened.close()


def command(lab: Lab, *more: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> StdioServerParameters:
    """How a client starts the server."""
    arguments = ["-I", "-W", "error", "-m", "mcp_server", "--lab", str(lab.path), *more]
    return StdioServerParameters(command=sys.executable, args=arguments, cwd=cwd, env={**our_environment(), **(env or {})})


async def finished(agent: Agent, ids: list[str]) -> list[dict[str, object]]:
    """All results of some runs, by as many waits as it takes."""
    rows: list[dict[str, object]] = []
    cursor: str | None = None
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline:
        told = await agent("wait_for_results", ids=ids, timeout_s=10, **({"cursor": cursor} if cursor else {}))
        rows += rows_of(told, "results")
        cursor = told.get("cursor")
        if not told["pending"]:
            return rows
    raise AssertionError(f"not finished in time: {rows}")


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_stdio_starts_the_daemon_and_runs_come_back(lab: Lab, mode: str) -> None:
    async with connected(command(lab), mode) as agent:
        began = time.monotonic()
        answer = await agent("submit_wave", factors={"DEPTH": [6, 8]}, budget_s=20)
        assert time.monotonic() - began < 10, "submitting waits for nothing"
        rows = await finished(agent, [r["id"] for r in rows_of(answer, "runs")])
    assert {row["outcome"] for row in rows} == {"completed"} and all(isinstance(row["val_bpb"], float) for row in rows)
    assert daemon_pid(lab), "the daemon outlives the client"


async def test_a_daemon_stopped_by_hand_stays_stopped_until_something_is_submitted(lab: Lab) -> None:
    async with connected(command(lab)) as agent:
        first = await agent("run_experiment", budget_s=20)
        await finished(agent, [first["id"]])
        stop_daemon(lab)
        deadline = time.monotonic() + 20
        while not any("stopped by hand" in note for note in (await agent("list_runs")).get("notes", [])):
            assert time.monotonic() < deadline
        assert daemon_pid(lab) is None
        second = await agent("run_experiment", budget_s=20, overrides={"DEPTH": 6})
        assert [row["outcome"] for row in await finished(agent, [second["id"]])] == ["completed"]


def server_pid(lab: Lab) -> int:
    """The server process that this test's client started."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == os.getpid() and b"mcp_server" in words and str(lab.path).encode() in words:
            return int(entry.name)
    raise AssertionError("the server process is not there")


async def test_a_server_killed_in_the_middle_of_a_wait_loses_no_run(lab: Lab) -> None:
    ids: list[str] = []
    with pytest.raises((MCPError, AssertionError, OSError)):
        async with connected(command(lab)) as agent:
            ids += [r["id"] for r in rows_of(await agent("submit_wave", factors={"DEPTH": [6, 8]}, budget_s=60), "runs")]
            waiting = asyncio.create_task(agent("wait_for_results", ids=ids, timeout_s=50))
            while not lab.store.count_runs("phase = 'running'"):
                await asyncio.sleep(0.05)
            os.kill(server_pid(lab), signal.SIGKILL)
            await waiting
    async with connected(command(lab, "--agent", "second")) as agent:
        rows = await finished(agent, ids)
        assert [row["outcome"] for row in rows] == ["completed", "completed"]
        assert (await agent("wait_for_results"))["pending"] == 0, "another agent's runs are not this one's"


async def test_a_folder_with_hostile_modules_and_a_noisy_import_does_not_reach_the_protocol(lab: Lab, tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in ("runner", "mcp_server", "torch", "json", "sitecustomize"):
        (folder / f"{name}.py").write_text("print('{\"banner\": 1}', flush=True)\nraise SystemExit('hostile module imported')\n")
    async with connected(command(lab, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)})) as agent:
        answer = await agent("run_experiment", budget_s=20)
        assert [row["outcome"] for row in await finished(agent, [answer["id"]])] == ["completed"]


def test_a_lab_that_cannot_be_used_is_one_sentence_and_an_exit_code(tmp_path: Path) -> None:
    folder = tmp_path / "lab"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    done = subprocess.run(
        [sys.executable, "-m", "mcp_server", "--lab", str(folder)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr and "chmod 700" in done.stderr


async def test_a_daemon_killed_while_an_agent_waits_is_started_again_and_one_that_was_stopped_is_not(lab: Lab) -> None:
    async with connected(command(lab)) as agent:
        answer = await agent("run_experiment", budget_s=120)
        deadline = time.monotonic() + 20
        while not lab.store.count_runs("phase = 'running'") and time.monotonic() < deadline:
            await agent("list_runs")
        pid = daemon_pid(lab)
        assert pid
        os.kill(pid, signal.SIGKILL)
        assert [row["outcome"] for row in await finished(agent, [answer["id"]])] == ["completed"]
        assert daemon_pid(lab) not in (None, pid)
        stop_daemon(lab)
        await agent("wait_for_results", timeout_s=0)
        await agent("list_runs")
        assert daemon_pid(lab) is None, "what a human stopped is left alone by reads"


NOISY = """
import os, subprocess, sys
from runner import queries
quiet = queries.lab_line
def noisy(lab):
    print("a library prints a banner")
    os.write(1, b"and writes to the file descriptor\\n")
    subprocess.run([sys.executable, "-c", "print('so does its child')"], check=True)
    return quiet(lab)
queries.lab_line = noisy
from mcp_server.server import main
sys.exit(main(sys.argv[1], start_daemon=False))
"""


async def test_what_a_library_prints_while_serving_stays_out_of_the_protocol(lab: Lab) -> None:
    noisy = StdioServerParameters(command=sys.executable, args=["-c", NOISY, str(lab.path)], env=our_environment())
    async with connected(noisy) as agent:
        for _ in range(3):
            assert "GPUs idle" in (await agent("leaderboard"))["lab"]


def test_by_hand_in_a_terminal_it_says_what_it_is_and_ends_with_an_interrupt(lab: Lab) -> None:
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mcp_server", "--lab", str(lab.path), "--no-daemon"],
        stdin=side,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "overnight connect" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    process.wait(30)
    process.stderr.close()
    os.close(terminal)
    os.close(side)
    assert process.returncode == 130


def test_a_lab_that_was_not_there_is_made_and_said(tmp_path: Path) -> None:
    lab = tmp_path / "mistyped"
    server = [sys.executable, "-I", "-m", "mcp_server", "--lab", str(lab), "--no-daemon"]
    for expected in (True, False):
        done = subprocess.run(server, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=40, check=True)
        assert (f"there was no lab at {lab}; made a new, empty one" in done.stderr) is expected


def test_a_message_with_half_a_character_is_answered(lab: Lab) -> None:
    server = [sys.executable, "-I", "-m", "mcp_server", "--lab", str(lab.path), "--no-daemon"]
    hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "cut", "version": "1"}}
    process = subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None

    def ask(message: dict[str, object]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        process.stdin.flush()

    try:
        ask({"id": 1, "method": "initialize", "params": hello})
        process.stdout.readline()
        ask({"method": "notifications/initialized"})
        cut = {"overrides": {"DEPTH": 6}, "hypothesis": "whole \U0001f999, half \ud83e."}
        ask({"id": 2, "method": "tools/call", "params": {"name": "run_experiment", "arguments": cut}})
        assert json.loads(process.stdout.readline())["id"] == 2
    finally:
        process.communicate(timeout=20)
    (run,) = lab.store.runs()
    assert run.hypothesis == "whole \U0001f999, half \ufffd."


@pytest.mark.parametrize(
    ("line", "mended"),
    [
        (rb"\ud83e\udd99 \uD83E \udd99", rb"\ud83e\udd99 \ufffd \ufffd"),
        (rb"\ud83d\ud83e\udd99", rb"\ufffd\ud83e\udd99"),
        (rb"\\ud800 \\\ud800", rb"\\ud800 \\\ufffd"),
        (rb"\u00e9 \n \ud8", rb"\u00e9 \n \ud8"),
    ],
)
def test_only_halves_are_replaced(line: bytes, mended: bytes) -> None:
    assert whole_characters(line) == mended
