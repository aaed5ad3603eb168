"""Resources, prompts, completions and change notifications, as a client sees them."""

from __future__ import annotations

import asyncio
import json

import pytest
from mcp import Client, MCPError
from mcp.types import PromptReference, ResourceTemplateReference, ResourceUpdatedNotification, TextContent, TextResourceContents

from mcp_server.desk import Desk
from mcp_server.notices import Bus, serve_subscriptions
from mcp_server.prompts import PROMPT_ARGUMENTS
from mcp_server.server import build_server
from runner import verbs
from runner.lab import Lab
from runner.records import Submission, WaveRequest
from tests.mcp_server.conftest import Agent
from tests.runner.labs import finish

pytestmark = pytest.mark.timeout(30)


async def read(agent: Agent, uri: str) -> str:
    """The text of a resource."""
    (content,) = (await agent.client.read_resource(uri)).contents
    assert isinstance(content, TextResourceContents)
    return content.text


async def test_every_resource_can_be_read(agent: Agent, lab: Lab) -> None:
    verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [4, 6]}), who="mcp:mcp")
    finish(lab, "r0001", 1.25)
    lab.run_dir("r0001").mkdir(parents=True)
    (lab.run_dir("r0001") / "out.log").write_text("step 1\rstep 2\n\x1b[31mdone\n")
    listed = {str(r.uri) for r in (await agent.client.list_resources()).resources}
    assert listed == {"lab://program", "lab://leaderboard"}
    templates = {t.uri_template for t in (await agent.client.list_resource_templates()).resource_templates}
    assert templates == {f"lab://runs/{{run_id}}{part}" for part in ("", "/log", "/source", "/diff")} | {"lab://waves/{wave_id}"}
    assert json.loads(await read(agent, "lab://runs/r0001"))["val_bpb"] == 1.25
    log = await read(agent, "lab://runs/r0001/log")
    assert "untrusted" in log and "| step 2\n| done" in log and "\x1b" not in log
    assert "DEPTH = 4" in await read(agent, "lab://runs/r0001/source")
    assert "-DEPTH = 8\n" in await read(agent, "lab://runs/r0001/diff")
    assert json.loads(await read(agent, "lab://waves/w1"))["total"] == 2
    assert "r0001" in await read(agent, "lab://leaderboard")
    with pytest.raises(MCPError, match="no run 'r0099'"):
        await read(agent, "lab://runs/r0099/log")


async def test_the_trainers_own_program_goes_before_the_shipped_one(agent: Agent, lab: Lab) -> None:
    assert "Research program" in await read(agent, "lab://program")
    (lab.policy().trainer.folder / "program.md").write_text("# mine\x1b[2J\n")
    assert await read(agent, "lab://program") == "# mine\n"
    prompt = await agent.client.get_prompt("start_research", {"goal": "a smaller model"})
    content = prompt.messages[0].content
    assert isinstance(content, TextContent) and "# mine" in content.text and "a smaller model" in content.text
    assert "wherever it starts the script, use run_experiment" in content.text, "a program that knows no tools is translated"


async def test_prompts_are_listed_and_rendered(agent: Agent) -> None:
    prompts = {p.name for p in (await agent.client.list_prompts()).prompts}
    assert prompts == {"start_research", "plan_wave", "review_night", "tune_training"}
    content = (await agent.client.get_prompt("plan_wave", {"runs": "12", "constants": "DEPTH"})).messages[0].content
    assert isinstance(content, TextContent) and "at most 12 runs" in content.text and "DEPTH" in content.text
    with pytest.raises(MCPError, match="Did you mean plan_wave"):
        await agent.client.get_prompt("plan_waves")
    with pytest.raises(MCPError, match="Did you mean leaderboard"):
        await agent.client.call_tool("leaderbord", {})


async def test_prompts_refuse_what_is_not_there(agent: Agent) -> None:
    for name, arguments, said in (
        ("plan_wave", {"runs": "many"}, "runs must be a whole number from 1 to 512; got 'many'"),
        ("plan_wave", {"runs": "-3"}, "whole number"),
        ("plan_wave", {"base": "r9999"}, "There is no run 'r9999'"),
        ("plan_wave", {"constants": "DEPTH, MATRIX_LRR"}, "Did you mean MATRIX_LR"),
        ("tune_training", {"budget": "abc"}, "budget must be a number of seconds; got 'abc'"),
        ("tune_training", {"budget": "1e9"}, "outside what the policy allows"),
    ):
        with pytest.raises(MCPError, match=said):
            await agent.client.get_prompt(name, arguments)
    content = (await agent.client.get_prompt("tune_training")).messages[0].content
    assert isinstance(content, TextContent) and "at a budget of 20 s" in content.text
    with pytest.raises(MCPError) as refused:
        await agent.client.get_prompt("zzz")
    assert str(refused.value).count("start_research") == 1


async def test_the_leaderboard_says_what_was_changed(agent: Agent, lab: Lab) -> None:
    verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [4]}), who="cli")
    finish(lab, "r0001", 1.25)
    header, names, row = (await read(agent, "lab://leaderboard")).splitlines()
    assert header.endswith(", budget 20 s")
    assert dict(zip(names.split("\t"), row.split("\t"), strict=True))["changes"] == "DEPTH=4"


async def test_ids_and_constants_are_completed(agent: Agent, lab: Lab) -> None:
    for depth in (4, 6):
        verbs.submit(lab, Submission(overrides={"DEPTH": depth}), who="cli")
    template = ResourceTemplateReference(type="ref/resource", uri="lab://runs/{run_id}/log")
    assert (await agent.client.complete(template, {"name": "run_id", "value": "r"})).completion.values == ["r0002", "r0001"]
    assert (await agent.client.complete(template, {"name": "run_id", "value": "%"})).completion.values == []
    plan = PromptReference(type="ref/prompt", name="plan_wave")
    found = await agent.client.complete(plan, {"name": "constants", "value": "DEPTH,matrix"})
    assert found.completion.values == ["DEPTH,MATRIX_LR"]


async def test_a_listening_client_is_told_what_changed_and_nothing_else(desk: Desk, lab: Lab) -> None:
    for depth in (4, 6):
        verbs.submit(lab, Submission(overrides={"DEPTH": depth}), who="cli")
    heard: list[str] = []
    async with Client(build_server(desk)) as client:
        async with client.listen(resource_subscriptions=["lab://runs/r0001", "lab://leaderboard"]) as changes:
            # the watcher takes its first look within a second; a change before that look is part of what it starts from
            await asyncio.sleep(0)

            async def collect() -> None:
                async for event in changes:
                    heard.append(event.uri)
                    if {"lab://runs/r0001", "lab://leaderboard"} <= set(heard):
                        return

            collecting = asyncio.create_task(collect())
            for step in range(1, 200):
                if collecting.done():
                    break
                lab.store.update_run("r0001", phase="running", step=step)
                lab.store.update_run("r0002", phase="running", step=step)
                if step == 30:
                    finish(lab, "r0001", 1.0)
                await asyncio.sleep(0.1)
            await asyncio.wait_for(collecting, 5)
    assert set(heard) == {"lab://runs/r0001", "lab://leaderboard"}


OLDER_ERA = pytest.mark.filterwarnings("ignore:resources/.*subscribe is removed")  # the SDK's client says so


@OLDER_ERA
async def test_a_client_of_the_older_era_may_subscribe(desk: Desk, lab: Lab) -> None:
    verbs.submit(lab, Submission(), who="cli")
    heard: set[str] = set()

    async def hear(message: object) -> None:
        if isinstance(message, ResourceUpdatedNotification):
            heard.add(str(message.params.uri))

    async with Client(build_server(desk), mode="legacy", message_handler=hear) as client:
        capabilities = client.server_capabilities
        assert capabilities and capabilities.resources and capabilities.resources.subscribe
        await client.subscribe_resource("lab://runs/r0001")
        await client.subscribe_resource("lab://leaderboard")
        await client.unsubscribe_resource("lab://leaderboard")
        for step in range(1, 200):
            if heard:
                break
            lab.store.update_run("r0001", phase="running", step=step)
            await asyncio.sleep(0.1)
        assert heard == {"lab://runs/r0001"}
        with pytest.raises(MCPError, match="begin with lab://"):
            await client.subscribe_resource("file:///etc/passwd")


@OLDER_ERA
async def test_a_subscription_ends_with_its_connection(desk: Desk) -> None:
    bus = Bus()
    server = build_server(desk)
    serve_subscriptions(server, bus)
    async with Client(server, mode="legacy") as client:
        await client.subscribe_resource("lab://leaderboard")
        assert bus.heard
    assert not bus.heard


async def test_a_prompts_unknown_argument_is_refused_by_name(agent: Agent) -> None:
    with pytest.raises(MCPError, match=r"plan_wave has no argument 'run'\. Did you mean 'runs'"):
        await agent.client.get_prompt("plan_wave", {"run": "4"})
    with pytest.raises(MCPError, match=r"review_night has no argument 'goal'\. It takes none"):
        await agent.client.get_prompt("review_night", {"goal": "x"})
    listed = {p.name: [a.name for a in p.arguments or []] for p in (await agent.client.list_prompts()).prompts}
    assert listed == PROMPT_ARGUMENTS


async def test_the_leaderboards_figures_are_short(agent: Agent, lab: Lab) -> None:
    for depth, bpb in ((8, 1 / 3), (4, 2 / 7)):
        run_id = verbs.submit(lab, Submission(overrides={"DEPTH": depth}), who="cli").run_ids[0]
        finish(lab, run_id, bpb)
    assert "\t0.285714\t0.047619\t" in await read(agent, "lab://leaderboard")
