"""Experiments and waves through the SDK's client: where their source comes from, what repeats nothing, what limits and approval say."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mcp.types import Implementation

from mcp_server.desk import Desk
from mcp_server.server import build_server
from runner import verbs
from runner.lab import Lab
from runner.records import Submission
from tests.mcp_server.conftest import Agent, connected, rows_of, text_of
from tests.runner.labs import finish


async def test_a_run_is_submitted_with_its_place_and_the_next_call(agent: Agent, lab: Lab) -> None:
    answer = await agent("run_experiment", overrides={"DEPTH": 10}, hypothesis="deeper is better")
    run = lab.store.run(answer["id"])
    assert run is not None and run.constants["DEPTH"] == 10 and run.hypothesis == "deeper is better"
    assert answer["phase"] == "queued" and answer["outlook"] == "number 1 in the queue"
    assert answer["next"] == f"wait_for_results(ids=['{run.id}'])"


async def test_a_preflight_is_asked_for_and_told_like_a_run(agent: Agent, lab: Lab) -> None:
    answer = await agent("run_experiment", purpose="preflight")
    assert answer["outlook"] == "nothing to measure" and "has no preflight.py" in answer["notes"][0]
    (lab.policy().trainer.folder / "preflight.py").write_text("")
    assert "simulated" in (await agent("run_experiment", purpose="preflight"))["notes"][0]
    text = lab.hosts_file.read_text() + '[[host]]\nname = "box"\nkind = "local"\n'
    lab.accept(text)
    lab.store.upsert_host("box", kind="local", state="up", since=0.0, info={})
    lab.store.upsert_gpu("GPU-1", host="box", idx=0, name="NVIDIA H200", mem_total_mib=1, state="free", since=0.0)
    refused = await agent.fails("run_experiment", purpose="preflight", overrides={"DEPTH": 1})
    assert "takes no overrides" in refused
    answer = await agent("run_experiment", purpose="preflight", gpu_type="H200", request_id="p")
    run = lab.store.run(answer["id"])
    assert run is not None and (run.purpose, run.gpu_type, run.agent[:4]) == ("preflight", "NVIDIA H200", "mcp:")
    assert answer["next"] == f"wait_for_results(ids=['{run.id}'])"
    lab.store.update_run(run.id, phase="ended", outcome="completed", cause_text="NVIDIA H200: 790 TFLOP/s; attention cudnn")
    said = text_of(await agent.raw("wait_for_results", ids=[run.id]))
    assert "attention cudnn" in said
    assert not (await agent("leaderboard")).get("rows")


async def test_the_same_request_id_never_starts_a_second_run(agent: Agent, lab: Lab) -> None:
    first = await agent("run_experiment", overrides={"DEPTH": 10}, request_id="k1")
    again = await agent("run_experiment", overrides={"DEPTH": 10}, request_id="k1")
    assert again["id"] == first["id"] and "nothing new" in again["replay"]
    wave = await agent("submit_wave", factors={"DEPTH": [4, 6]}, request_id="k2")
    assert (await agent("submit_wave", factors={"DEPTH": [4, 6]}, request_id="k2"))["wave"] == wave["wave"]
    finish(lab, first["id"], 1.0)
    repeats = await agent("decide", id=first["id"], action="repeat", seeds=2, request_id="k3")
    assert rows_of(repeats, "runs") == rows_of(await agent("decide", id=first["id"], action="repeat", seeds=2, request_id="k3"), "runs")
    assert lab.store.count_runs() == 5


async def test_two_submissions_of_one_key_at_once_start_one_run(agent: Agent, lab: Lab) -> None:
    answers = await asyncio.gather(*(agent("run_experiment", overrides={"DEPTH": 5}, request_id="once") for _ in range(6)))
    assert {a["id"] for a in answers} == {"r0001"} and lab.store.count_runs() == 1


async def test_an_equal_source_is_refused_with_the_earlier_runs_id(agent: Agent, lab: Lab) -> None:
    await agent("run_experiment", overrides={"DEPTH": 10})
    told = await agent.fails("run_experiment", overrides={"DEPTH": 10, "SEED": 7})
    assert "r0001" in told and "repeat" in told and lab.store.count_runs() == 1
    await agent("run_experiment", overrides={"DEPTH": 10}, allow_duplicate=True)
    assert lab.store.count_runs() == 2


async def test_a_file_changed_after_submission_changes_nothing(agent: Agent, lab: Lab) -> None:
    script = lab.policy().trainer.folder / "train.py"
    before = script.read_text()
    answer = await agent("run_experiment", path="train.py", purpose="baseline")
    script.write_text("raise SystemExit(1)\n")
    run = lab.store.run(answer["id"])
    assert run is not None and lab.source_text(run.source_sha) == before


async def test_a_diff_and_an_earlier_run_are_bases(agent: Agent, lab: Lab) -> None:
    first = await agent("run_experiment", overrides={"DEPTH": 10})
    diff = "--- a/train.py\n+++ b/train.py\n@@ -3,2 +3,2 @@\n-MATRIX_LR = 0.04\n+MATRIX_LR = 0.08\n TOTAL_BATCH_SIZE = 2**17\n"
    second = await agent("run_experiment", base=first["id"], diff=diff)
    run = lab.store.run(second["id"])
    assert run is not None and run.constants["DEPTH"] == 10 and run.constants["MATRIX_LR"] == 0.08 and run.parent == first["id"]
    shown = await agent("get_run", id=run.id)
    assert rows_of(shown, "changed_from_parent") == [{"constant": "MATRIX_LR", "parent": 0.04, "this": 0.08}]
    told = await agent("get_run", id=run.id, show="diff")
    assert told["against"] == first["id"] and "| +MATRIX_LR = 0.08" in told["output"]


async def test_a_wave_names_each_cell_and_its_analysis_says_what_is_missing(agent: Agent, lab: Lab) -> None:
    wave = await agent("submit_wave", factors={"DEPTH": [6, 8], "MATRIX_LR": [0.02, 0.03]}, title="first")
    cells = rows_of(wave, "runs")
    assert [(c["DEPTH"], c["MATRIX_LR"]) for c in cells] == [(6, 0.02), (6, 0.03), (8, 0.02), (8, 0.03)]
    for cell, bpb in zip(cells, [1.0, 1.1, 0.9, None], strict=True):
        finish(lab, cell["id"], bpb)
    told = await agent("analyze_wave", wave=wave["wave"])
    assert told["total"] == 4 and told["completed"] == 3
    seen = rows_of(told, "best_cells")[0]
    assert (seen["cell"], seen["val_bpb"], seen["run"]) == ({"DEPTH": 8, "MATRIX_LR": 0.02}, 0.9, "r0003")
    assert {f["factor"] for f in rows_of(told, "factors")} == {"DEPTH", "MATRIX_LR"}
    heat = {frozenset(row) for row in told["mean_val_bpb"]["rows"]}
    assert heat in ({frozenset({0.02, 1, 0.9}), frozenset({0.03, 1.1, None})}, {frozenset({6, 1, 1.1}), frozenset({8, 0.9, None})})
    assert rows_of(told, "failed")[0]["id"] == "r0004"


async def test_a_wave_of_repeats_is_analysed_too(agent: Agent, lab: Lab) -> None:
    wave = await agent("run_experiment", purpose="baseline", seeds=3)
    for cell, bpb in zip(rows_of(wave, "runs"), [1.0, 1.1, 0.9], strict=True):
        finish(lab, cell["id"], bpb)
    told = await agent("analyze_wave", wave=wave["wave"])
    assert told["completed"] == 3 and rows_of(told, "repeats")[0]["mean"] == 1


async def test_approval_mode_and_a_pause_are_told(agent: Agent, lab: Lab) -> None:
    verbs.set_approval(lab, "ask", who="tui")
    verbs.pause_queue(lab, True, who="tui", why="lunch")
    answer = await agent("run_experiment", overrides={"DEPTH": 4})
    assert answer["phase"] == "proposed" and "human" in answer["outlook"] and any("approve" in n for n in answer["notes"])
    assert "paused the queue" in answer["lab"] and "approval mode" in answer["lab"]
    verbs.decline(lab, ["r0001"], who="tui", why="too deep for tonight")
    told = await agent("wait_for_results", timeout_s=5)
    (row,) = rows_of(told, "results")
    assert row["outcome"] == "declined" and "too deep for tonight" in row["note"]
    second = await agent("run_experiment", overrides={"DEPTH": 6})
    verbs.approve(lab, [second["id"]], who="cli", why="go on")
    told = await agent("get_run", id=second["id"])
    assert (told["phase"], told["approval"], told["approval_why"]) == ("queued", "approved", "go on")


async def test_budgets_are_enforced_and_said_in_words(tmp_path: Path, agent: Agent, lab: Lab) -> None:
    lab.accept((lab.path.parent / "hosts.toml").read_text().replace("budget_s = 20\n", "budget_s = 20\nmax_runs = 3\n"))
    answer = await agent("submit_wave", factors={"DEPTH": [4, 6]})
    assert " · 1 run left" in answer["lab"]
    told = await agent.fails("submit_wave", factors={"DEPTH": [10, 12]})
    assert "max_runs = 3" in told and "1 left" in told and lab.store.count_runs() == 2


async def test_two_agents_may_use_the_same_request_id(desk: Desk, lab: Lab) -> None:
    server = build_server(desk)
    async with connected(server, client_info=Implementation(name="claude", version="1")) as claude:
        async with connected(server, client_info=Implementation(name="codex", version="1")) as codex:
            mine = await claude("run_experiment", overrides={"DEPTH": 4}, request_id="1")
            theirs = await codex("run_experiment", overrides={"DEPTH": 6}, request_id="1")
            assert mine["id"] != theirs["id"] and "replay" not in theirs
            for agent, who in ((codex, "mcp:codex"), (claude, "mcp:claude")):
                desk._noted_at = float("-inf")
                await agent("list_gpus")
                for _ in range(200):
                    if lab.store.setting("last_agent_call", {}).get("who") == who:
                        break
                    await asyncio.sleep(0.05)
                assert lab.store.setting("last_agent_call")["who"] == who, "each is heard by its own name"


async def test_what_a_code_change_changes_is_told(agent: Agent, lab: Lab) -> None:
    await agent("run_experiment")
    finish(lab, "r0001", 1.0)
    text = (lab.policy().trainer.folder / "train.py").read_text()
    new = text.replace("DEPTH = 8", "DEPTH = 12").replace("def main():", "def extra():\n    return 1\n\n\ndef main():\n    extra()")
    await agent("run_experiment", source=new)
    await agent("run_experiment", base="r0002", overrides={"MATRIX_LR": 0.1})
    await agent("run_experiment", source=text + "print(1)\n")
    tried = {r["id"]: r["changed"] for r in rows_of(await agent("list_runs"), "runs")}
    assert tried == {
        "r0001": {},
        "r0002": {"DEPTH": 12, "source": "+3 −0"},
        "r0003": {"MATRIX_LR": 0.1},
        "r0004": {"source": "+1 −0"},
    }
    await agent("run_experiment", source="".join(f"C{n} = {n}\n" for n in range(20)) + "print(C0)\n")
    last = rows_of(await agent("list_runs", limit=1), "runs")[0]["changed"]
    assert last == {**{f"C{n}": n for n in range(8)}, "more": 12, "source": "+1 −11"}, "constants that are gone are lines"
    finish(lab, "r0002", 0.9)
    row = rows_of(await agent("wait_for_results", ids=["r0002"]), "results")[0]
    assert row["what"] == {"DEPTH": 12, "source": "+3 −0"}
    assert "DEPTH=12 source=+3 −0" in text_of(await agent.raw("list_runs"))


LEFT = "budget_s = 20\nmax_runs_per_agent = 3\nmax_gpu_hours = 0.02\n"


async def test_each_agent_is_told_what_is_left_to_it(agent: Agent, lab: Lab) -> None:
    lab.accept((lab.path.parent / "hosts.toml").read_text().replace("budget_s = 20\n", LEFT))
    verbs.submit(lab, Submission(), who="cli")
    told = await agent("run_experiment", overrides={"DEPTH": 4})
    assert "2 of your 3 runs left" in told["lab"] and "0.02 GPU-hours left" in told["lab"]
    assert "2 of your 3 runs left" in await agent.fails("get_run", id="r0099")


async def test_a_duplicate_names_the_call_that_repeats_it(agent: Agent) -> None:
    await agent("run_experiment", overrides={"DEPTH": 4})
    assert "decide(id='r0001', action='repeat')" in await agent.fails("run_experiment", overrides={"DEPTH": 4})


async def test_only_a_result_is_promoted_and_never_to_less(agent: Agent, lab: Lab) -> None:
    await agent("run_experiment")
    assert "no result to promote (queued)" in await agent.fails("decide", id="r0001", action="promote", gpu_type="H200")
    finish(lab, "r0001", 1.0)
    assert "would be shorter" in await agent.fails("decide", id="r0001", action="promote", budget_s=10)
    assert lab.store.count_runs() == 1
