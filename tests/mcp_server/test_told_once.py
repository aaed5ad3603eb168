"""What the reading tools say of results: each is told once, so the doubt must come with it; what repeats tell; how runs are found again."""

from __future__ import annotations

from pathlib import Path

import pytest
from mcp import Client

from mcp_server.desk import Desk
from mcp_server.server import build_server
from runner import queries
from runner.keeper import Keeper
from runner.lab import Lab
from tests.mcp_server.conftest import Agent, rows_of
from tests.runner.labs import finish


async def test_a_held_claim_is_told_with_its_doubt_and_compared_with_nothing(agent: Agent, lab: Lab) -> None:
    await agent("run_experiment", purpose="baseline")
    for depth in (4, 6):
        await agent("run_experiment", overrides={"DEPTH": depth})
    finish(lab, "r0001", 1.0)
    finish(lab, "r0002", 0.0001, trust_why="held: it claims 300 s of training and ran for 0.1 s", trust="unverifiable")
    finish(lab, "r0003", 0.9)
    rows = {row["id"]: row for row in rows_of(await agent("wait_for_results", timeout_s=0), "results")}
    assert rows["r0002"]["change"] is None
    assert rows["r0002"]["note"] == "held: it claims 300 s of training and ran for 0.1 s (not ranked)"
    assert rows["r0003"]["change"] == -0.1 and rows["r0003"]["note"] is None
    lab.store.raise_flag("r0002", "held", "warn", "held: it claims 300 s of training and ran for 0.1 s")
    rows = {row["id"]: row for row in rows_of(await agent("wait_for_results", timeout_s=0), "results")}
    assert rows["r0002"]["note"].count("held") == 1, "the flag that comes later says nothing more"


async def test_nothing_is_compared_with_a_held_baseline(agent: Agent, lab: Lab) -> None:
    await agent("run_experiment", purpose="baseline")
    await agent("run_experiment", overrides={"DEPTH": 4})
    finish(lab, "r0001", 0.001, trust_why="held: too good")
    finish(lab, "r0002", 0.9)
    (first, second) = rows_of(await agent("wait_for_results", timeout_s=0), "results")
    assert first["id"] == "r0001" and second["change"] is None


async def test_a_held_claim_is_not_a_waves_best(agent: Agent, lab: Lab) -> None:
    await agent("submit_wave", factors={"DEPTH": [4, 6]})
    finish(lab, "r0001", 0.0001, trust_why="held: too good")
    finish(lab, "r0002", 0.9)
    wave = lab.store.wave("w1")
    assert wave is not None and queries.wave_object(lab, wave)["best"] == 0.9


async def test_repeats_tell_the_noise(agent: Agent, lab: Lab) -> None:
    await agent("run_experiment", purpose="baseline", seeds=3)
    for n, value in enumerate((1.0, 1.002, 1.004), 1):
        finish(lab, f"r000{n}", value)
    answer = await agent("analyze_wave", wave="w1")
    (row,) = rows_of(answer, "repeats")
    assert (row["runs"], row["mean"], row["lowest"], row["highest"], row["noise_sd"]) == (3, 1.002, 1.0, 1.004, 0.002)
    assert row["smallest_clear_gain"] == 0.009937, "t of two degrees of freedom (4.303) times 0.002 times the root of 4/3"
    assert "best_cells" not in answer and "wave of factors" in answer["next"]
    finish(lab, "r0002", None)
    finish(lab, "r0003", None)
    answer = await agent("analyze_wave", wave="w1")
    assert rows_of(answer, "repeats")[0]["smallest_clear_gain"] is None and "tells no noise" in answer["next"]
    assert [row["id"] for row in rows_of(answer, "failed")] == ["r0002", "r0003"]


async def test_runs_are_found_by_what_their_column_shows(agent: Agent, lab: Lab) -> None:
    await agent("submit_wave", factors={"MATRIX_LR": [0.05, 0.06], "DEPTH": [4, 6]})
    await agent("run_experiment", overrides={"ADAM_BETAS": [0.7, 0.9], "NAME": "wide"})

    async def found(text: str) -> list[str]:
        return [row["id"] for row in rows_of(await agent("list_runs", text=text), "runs")]

    assert await found("MATRIX_LR=0.05") == ["r0002", "r0001"]
    assert await found("matrix_lr=0.06 DEPTH=6") == ["r0004"]
    assert await found("ADAM_BETAS=0.7,0.9") == ["r0005"]
    assert await found("NAME=wide") == ["r0005"]
    assert await found("MATRIX_LR") == ["r0004", "r0003", "r0002", "r0001"]
    assert await found("MATRIX_LR=0.07") == []


async def test_an_override_that_a_factor_would_hide_is_refused(agent: Agent, lab: Lab) -> None:
    said = await agent.fails("submit_wave", factors={"DEPTH": [4, 6]}, overrides={"DEPTH": 9})
    assert "DEPTH is both a factor and an override" in said and not lab.store.runs()


async def test_an_empty_name_is_no_default(agent: Agent, lab: Lab) -> None:
    for name in ("path", "base", "parent", "gpu_type", "host"):
        assert f"{name} must be text of 1 to" in await agent.fails("run_experiment", **{name: ""})
    assert not lab.store.runs()


async def test_a_class_is_found_by_the_part_that_only_it_has(agent: Agent, lab: Lab) -> None:
    for depth in (4, 6, 10):
        await agent("run_experiment", overrides={"DEPTH": depth})
    finish(lab, "r0001", 1.0, class_key="H200 · torch 2.13")
    finish(lab, "r0002", 1.0, class_key="H100 · torch 2.13")
    assert (await agent("leaderboard", class_key="h100"))["class"] == "H100 · torch 2.13"
    assert "is part of 2 classes" in await agent.fails("leaderboard", class_key="2.13")
    assert "Known: " in await agent.fails("leaderboard", class_key="A100")
    elsewhere = await agent("leaderboard", budget_s=61)
    assert elsewhere["ranked"]["rows"] == [] and "leaderboard() shows where most is" in elsewhere["next"]


async def test_a_log_without_the_word_says_so(agent: Agent, lab: Lab) -> None:
    await agent("run_experiment", overrides={"DEPTH": 4})
    folder = lab.run_dir("r0001")
    folder.mkdir(parents=True)
    (folder / "out.log").write_text("step 1\n")
    result = await agent.raw("read_log", id="r0001", grep="zzz")
    assert "| (no line contains it)" in str(result.content)


async def test_a_client_that_connects_does_not_start_what_a_human_stopped(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Path] = []
    monkeypatch.setattr(Keeper, "_start", lambda keeper: started.append(keeper.path))
    lab.store.set_setting("daemon_stopped", True)
    desk = Desk(lab.path)
    try:
        async with Client(build_server(desk)) as client:
            agent = Agent(client)
            assert any("stopped by hand" in note for note in (await agent("list_runs"))["notes"])
            assert not started
            await agent("run_experiment", overrides={"DEPTH": 4})
            assert started == [lab.path], "whoever submits wants it again"
    finally:
        desk.close()
