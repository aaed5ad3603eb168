"""wait_for_results through the SDK's client: each result once, to the agent that asked, however its waits are cut."""

from __future__ import annotations

import asyncio
import time

import pytest

from mcp_server.desk import Desk
from mcp_server.server import build_server
from runner import verbs
from runner.lab import Lab
from tests.mcp_server.conftest import Agent, chars, connected, rows_of
from tests.runner.labs import finish


async def test_waiting_tells_each_result_once(agent: Agent, lab: Lab) -> None:
    await agent("run_experiment", purpose="baseline")
    await agent("submit_wave", factors={"DEPTH": [4, 6]})
    finish(lab, "r0001", 1.0)
    first = await agent("wait_for_results", timeout_s=5)
    assert [r["id"] for r in rows_of(first, "results")] == ["r0001"] and first["pending"] == 2
    nothing = await agent("wait_for_results", timeout_s=0, cursor=first["cursor"])
    assert nothing["new"] == 0 and nothing["pending"] == 2
    finish(lab, "r0003", None, cause_text="out of memory")
    second = await agent("wait_for_results", timeout_s=5, cursor=nothing["cursor"])
    assert [(r["id"], r["outcome"], r["note"]) for r in rows_of(second, "results")] == [("r0003", "crashed", "«out of memory»")]
    finish(lab, "r0002", 0.9)
    third = await agent("wait_for_results", timeout_s=5, cursor=second["cursor"])
    assert [r["id"] for r in rows_of(third, "results")] == ["r0002"] and third["pending"] == 0
    done = await agent("wait_for_results", cursor=third["cursor"])
    assert done["new"] == 0 and "submit_wave" in done["next"]


async def test_waiting_without_a_cursor_leaves_old_results_out(agent: Agent, lab: Lab) -> None:
    await agent("submit_wave", factors={"DEPTH": [4, 6, 10]})
    finish(lab, "r0001", 1.0, ended_at=time.time() - 7200)
    finish(lab, "r0002", 1.1)
    told = await agent("wait_for_results", timeout_s=1)
    assert [r["id"] for r in rows_of(told, "results")] == ["r0002"]
    later = await agent("wait_for_results", timeout_s=0, cursor=told["cursor"])
    assert later["new"] == 0 and later["pending"] == 1
    by_wave = await agent("wait_for_results", timeout_s=0, wave="w1")
    assert {r["id"] for r in rows_of(by_wave, "results")} == {"r0001", "r0002"}


async def test_waiting_ends_at_once_when_a_run_ends(agent: Agent, lab: Lab) -> None:
    await agent("run_experiment")
    waiting = asyncio.create_task(agent("wait_for_results", ids=["r0001"], timeout_s=50))
    await asyncio.sleep(0)
    finish(lab, "r0001", 1.5)
    told = await asyncio.wait_for(waiting, 15)
    assert told["new"] == 1


async def test_waiting_sends_progress_and_can_be_cancelled(agent: Agent) -> None:
    await agent("run_experiment")
    seen: list[str | None] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        seen.append(message)

    call = asyncio.create_task(agent.client.call_tool("wait_for_results", {"timeout_s": 50}, progress_callback=progress))
    for _ in range(100):
        if seen:
            break
        await asyncio.sleep(0.05)
    assert seen and "1 queued" in (seen[0] or "")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await agent("list_runs"))["runs"]["rows"], "the server answers after a cancelled wait"


async def test_a_wait_for_all_ignores_the_first_result(agent: Agent, lab: Lab) -> None:
    await agent("submit_wave", factors={"DEPTH": [4, 6]})
    finish(lab, "r0001", 1.0)
    told = await agent("wait_for_results", wave="w1", until="all", timeout_s=1)
    assert told["pending"] == 1 and told["new"] == 1


async def test_what_a_human_cancelled_is_told_with_the_reason(agent: Agent, lab: Lab) -> None:
    await agent("submit_wave", factors={"DEPTH": [4, 6]})
    verbs.cancel(lab, ["r0001"], who="tui", why="the GPU is needed")
    finish(lab, "r0001", None, outcome="cancelled")
    told = await agent("wait_for_results", timeout_s=5)
    assert rows_of(told, "results")[0]["note"] == "cancelled by tui: the GPU is needed"
    assert "a human cancelled r0001" in told["lab"]
    await agent("cancel", ids=["r0002"])
    assert "r0002" not in (await agent("list_gpus"))["lab"], "its own cancellations are no news to it"


async def test_two_agents_whose_runs_alternate_each_get_all_their_results(desk: Desk, lab: Lab) -> None:
    for n in range(900):
        fields = {
            "created_at": 1.0,
            "purpose": "experiment",
            "source_sha": "x",
            "effective_sha": f"e{n}",
            "budget_s": 20.0,
            "phase": "queued",
        }
        lab.store.insert_run(**fields, agent="mcp:mcp" if n % 2 else "mcp:other")
    async with connected(build_server(desk)) as agent:
        told = await agent("wait_for_results", timeout_s=0)
        assert told["pending"] == 450 and told["new"] == 0
        assert chars(await agent.raw("wait_for_results", timeout_s=0)) <= 8000
        finish(lab, "r0900", 1.0)
        finish(lab, "r0002", 1.1)
        finish(lab, "r0003", 1.2)
        second = await agent("wait_for_results", timeout_s=5, cursor=told["cursor"])
        assert {r["id"] for r in rows_of(second, "results")} == {"r0002", "r0900"}
        third = await agent("wait_for_results", timeout_s=0, cursor=second["cursor"])
        assert third["new"] == 0 and third["pending"] == 448


async def test_ids_between_those_of_a_wait_are_not_passed_over(agent: Agent, lab: Lab) -> None:
    await agent("submit_wave", factors={"DEPTH": [4, 6, 10]})
    for n in (1, 2, 3):
        finish(lab, f"r000{n}", float(n))
    told = await agent("wait_for_results", ids=["r0001", "r0003"], timeout_s=0)
    assert told["new"] == 2
    more = await agent("wait_for_results", ids=["r0001", "r0002", "r0003"], timeout_s=0, cursor=told["cursor"])
    assert [r["id"] for r in rows_of(more, "results")] == ["r0002"]
