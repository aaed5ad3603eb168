"""What a submission is told will happen: where it stands among those before it, and what keeps it waiting."""

from __future__ import annotations

import time

from runner import verbs
from runner.lab import Lab
from tests.mcp_server.conftest import Agent
from tests.runner.labs import finish


def cards(lab: Lab, *names: str, host: str = "sim", state: str = "free") -> None:
    """GPUs of these names on one host that is up."""
    lab.store.upsert_host(host, kind="fake", state="up", since=time.time())
    for n, name in enumerate(names):
        lab.store.upsert_gpu(f"GPU-{n}", host=host, idx=n, name=name, state=state, since=time.time())


async def test_runs_that_want_another_type_do_not_stand_before_a_run(agent: Agent, lab: Lab) -> None:
    cards(lab, "NVIDIA H200", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090")
    for depth in (3, 4, 5):
        await agent("run_experiment", overrides={"DEPTH": depth}, gpu_type="H200")
    assert (await agent("submit_wave", factors={"DEPTH": [6, 7]}))["outlook"] == "starts at once: a GPU is idle"
    last = await agent("run_experiment", overrides={"DEPTH": 9})
    assert last["outlook"] == "number 3 in the queue; a GPU for it is free in about 20 s", "two wait for the H200, whose run takes 20 s"


async def test_a_gpu_type_is_meant_by_its_words(agent: Agent, lab: Lab) -> None:
    cards(lab, "NVIDIA GeForce RTX 4090")
    answer = await agent("run_experiment", overrides={"DEPTH": 3}, gpu_type="4090-rtx")
    assert answer["outlook"] == "starts at once: a GPU is idle" and "notes" not in answer


async def test_a_host_that_takes_no_run_is_named(agent: Agent, lab: Lab) -> None:
    cards(lab, "NVIDIA H200", "NVIDIA H200")
    lab.store.upsert_host("sim", drain=1)
    answer = await agent("run_experiment", overrides={"DEPTH": 3})
    assert answer["outlook"] == "waits: sim takes no new run: it is draining"
    lab.store.upsert_gpu("GPU-0", state="busy")
    answer = await agent("run_experiment", overrides={"DEPTH": 4})
    assert answer["outlook"] == "waits: sim takes no new run: it is draining", "a busy card of such a host is of no use to it"
    lab.store.upsert_host("sim", drain=0)
    assert "waits" not in (await agent("run_experiment", overrides={"DEPTH": 5}))["outlook"]


async def test_runs_that_may_land_on_different_types_say_so(agent: Agent, lab: Lab) -> None:
    cards(lab, "NVIDIA H200", "NVIDIA GeForce RTX 4090")
    (note,) = (await agent("run_experiment", purpose="baseline", seeds=3))["notes"]
    assert "2 types (NVIDIA GeForce RTX 4090, NVIDIA H200)" in note and "gpu_type" in note
    assert "notes" not in await agent("submit_wave", factors={"DEPTH": [4, 5]}, gpu_type="H200")
    assert "notes" not in await agent("run_experiment", overrides={"DEPTH": 6})


async def test_why_a_human_paused_is_told(agent: Agent, lab: Lab) -> None:
    verbs.pause_queue(lab, True, who="cli", why="cooling \x1b[31mdown")
    assert " · a human paused the queue: cooling down · " in (await agent("list_runs"))["lab"]
    verbs.pause_queue(lab, False, who="cli")
    assert "paused" not in (await agent("list_runs"))["lab"]


async def test_a_promotion_goes_somewhere_new(agent: Agent, lab: Lab) -> None:
    cards(lab, "NVIDIA H200", "NVIDIA GeForce RTX 4090")
    await agent("run_experiment", overrides={"DEPTH": 4}, gpu_type="H200")
    finish(lab, "r0001", 1.0, gpu_name="NVIDIA H200")
    assert "the same again is a repeat" in await agent.fails("decide", id="r0001", action="promote", gpu_type="h200")
    assert (await agent("decide", id="r0001", action="promote", gpu_type="4090"))["id"] == "r0002"
    assert "promoted there already: r0002" in await agent.fails("decide", id="r0001", action="promote", gpu_type="RTX 4090")
    finish(lab, "r0002", None)  # a crash told nothing: it may be tried again
    assert (await agent("decide", id="r0001", action="promote", gpu_type="4090"))["id"] == "r0003"
    assert (await agent("decide", id="r0001", action="promote", budget_s=60))["id"] == "r0004"
    assert "r0004" in await agent.fails("decide", id="r0001", action="promote", budget_s=60, gpu_type="NVIDIA H200")
    (first, *_) = (await agent("list_runs", limit=1))["runs"]["rows"]
    assert "promotes r0001" in first
