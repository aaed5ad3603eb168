"""A whole night in miniature by a scripted agent, over MCP only: the real server on stdio, the real daemon, simulated GPUs.

It prints what the conversation cost: characters ÷ 4 of everything the tools returned, for each finished run, in the dearer of the two
forms a client may show to its model. The budget is 400 tokens a run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, Implementation

from mcp_server.client import our_environment
from runner.daemonctl import stop_daemon
from runner.engines.surface import SCRIPT
from runner.lab import Lab
from tests.mcp_server.conftest import rows_of, text_of
from tests.runner.labs import make_lab

TOKENS_A_RUN = 400
MAX_RUNS = 24
HOSTS = (
    '[[host]]\nname = "sim"\nkind = "fake"\ntypes = { "NVIDIA H100 80GB HBM3" = 6, "NVIDIA H200" = 2 }\nspeed = 200\ncrash_share = 0.05\n'
)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    opened = make_lab(tmp_path, policy=f"max_runs = {MAX_RUNS}\nmax_budget_s = 900", hosts=HOSTS, script=SCRIPT)
    yield opened
    stop_daemon(opened)
    opened.close()


class Night:
    """The scripted agent: a client, and the size of all it was told."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.text = 0
        self.structured = 0
        self.calls = 0

    async def __call__(self, tool: str, **arguments: Any) -> dict[str, Any]:
        result = await self.client.call_tool(tool, arguments)
        assert isinstance(result, CallToolResult)
        assert not result.is_error, text_of(result)
        self.calls += 1
        self.text += len(text_of(result))
        self.structured += len(json.dumps(result.structured_content, ensure_ascii=False, separators=(",", ":")))
        assert result.structured_content is not None
        return dict(result.structured_content)

    async def results(self, **scope: Any) -> list[dict[str, Any]]:
        """Every result of a scope, by waits with the cursor."""
        rows: list[dict[str, Any]] = []
        cursor: dict[str, str] = {}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            told = await self("wait_for_results", until="all", timeout_s=25, **scope, **cursor)
            rows += rows_of(told, "results")
            if not told["pending"]:
                return rows
            cursor = {"cursor": told["cursor"]}
        raise AssertionError("the night stands still")


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_night_in_miniature_ends_with_decisions_inside_its_token_budget(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    server = StdioServerParameters(command=sys.executable, args=["-I", "-m", "mcp_server", "--lab", str(lab.path)], env=our_environment())
    async with Client(server, client_info=Implementation(name="scripted", version="1")) as client:
        program = await client.read_resource("lab://program")
        assert "wave" in getattr(program.contents[0], "text", "")
        night = Night(client)
        assert (await night("list_gpus"))["types"]
        await one_night(night)
        board = await night("leaderboard")
    runs = lab.store.runs()
    finished = [run for run in runs if run.ended]
    assert len(runs) <= MAX_RUNS and len(finished) == len(runs), "the night ended inside its budget, with nothing left going"
    assert {run.agent for run in runs} == {"mcp:scripted"}
    assert rows_of(board, "ranked")
    verdicts = [run for run in runs if run.verdict]
    assert len(verdicts) >= 2 and all(run.verdict_why for run in verdicts)
    promoted = [run for run in runs if run.purpose == "promotion"]
    assert len(promoted) == 2 and all("H200" in (run.gpu_name or "") for run in promoted)
    tokens = max(night.text, night.structured) / 4 / len(finished)
    with capsys.disabled():
        print(
            f"\nscripted night: {len(finished)} finished runs, {night.calls} calls; {night.text / 4:.0f} tokens as text, "
            f"{night.structured / 4:.0f} as structured content; {tokens:.0f} a finished run (budget {TOKENS_A_RUN})"
        )
    assert tokens <= TOKENS_A_RUN


async def one_night(night: Night) -> None:
    """Baseline with repeats, a 3×4 wave, its analysis, promotion of the top two, decisions with reasons."""
    await night("run_experiment", purpose="baseline", seeds=3, gpu_type="H100", request_id="baseline")
    await night.results()
    wave = await night(
        "submit_wave",
        factors={"DEPTH": [6, 8, 10], "MATRIX_LR": [0.02, 0.03, 0.05, 0.08]},
        gpu_type="H100",
        hypothesis="a deeper model wants a lower matrix learning rate",
        request_id="wave-1",
    )
    results = await night.results(wave=wave["wave"])
    assert len(results) == len(wave["runs"]["rows"])
    analysis = await night("analyze_wave", wave=wave["wave"])
    assert rows_of(analysis, "factors")
    good = sorted((row for row in results if row["outcome"] == "completed"), key=lambda row: row["val_bpb"])
    best, second, worst = good[0], good[1], good[-1]
    for row in (best, second):
        await night("decide", id=row["id"], action="promote", gpu_type="H200", why="top two of the wave", request_id=f"promote-{row['id']}")
    promoted = await night.results(ids=[i for i in await ids_of_promotions(night)])
    assert [row["outcome"] for row in promoted].count("completed") >= 1
    evidence = f"best of its wave at {best['val_bpb']}, and it held on the H200"
    await night("decide", id=best["id"], action="keep", why=evidence, override=True)
    await night("decide", id=worst["id"], action="discard", why=f"worst of its wave at {worst['val_bpb']}")


async def ids_of_promotions(night: Night) -> list[str]:
    """The runs on the way, which are the two promotions."""
    listed = rows_of(await night("list_runs", mine=True, limit=2), "runs")
    return [row["id"] for row in listed]
