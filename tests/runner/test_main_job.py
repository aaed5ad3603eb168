"""The main job with nothing simulated: an agent over MCP, the daemon, the local engine, the shipped trainer on this machine's CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mcp_server.client import play
from runner import queries
from runner.daemonctl import stop_daemon
from runner.lab import Lab, open_lab
from runner.mfu import mfu_percent

pytest.importorskip("torch", reason="needs the trainer extra")
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

TRAINER = Path(__file__).parents[2] / "trainer"
BUDGET_S = 2


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "hosts.toml").write_text(
        f'[trainer]\nfolder = "{TRAINER}"\n[policy]\nhanded_ahead = 0\n[[host]]\nname = "here"\nkind = "local"\ngpus = []\n'
    )
    opened = open_lab(tmp_path / "lab", create=True)
    yield opened
    stop_daemon(opened)
    opened.close()


def test_an_agent_measures_a_baseline_and_edits_of_the_shipped_trainer(lab: Lab) -> None:
    said: list[str] = []
    plan = {
        "baseline": {"purpose": "baseline", "budget_s": BUDGET_S, "request_id": "main-baseline"},
        "waves": [{"cells": [{"TOTAL_BATCH_SIZE": 1024}, {"OPTIMIZER": "adamw"}], "budget_s": BUDGET_S, "request_id": "main-wave"}],
    }
    asyncio.run(play(lab.path, plan, said.append))
    runs = lab.store.runs("purpose != 'verify'")  # the daemon may check a new best meanwhile
    assert {(r.outcome, r.agent) for r in runs} == {("completed", "mcp:demo")}, said
    assert [r.purpose for r in runs] == ["baseline", "experiment", "experiment"]
    for run in runs:
        assert run.val_bpb is not None and 1 < run.val_bpb < 9 and run.num_steps and run.training_s and run.exit_code == 0
        assert run.evaluator and run.data_hash and run.torch and run.flops_per_token and run.class_key and run.class_key.startswith("CPU")
        assert (run.stage, run.attributes is not None, mfu_percent(run, lab.policy())) == (None, True, None)
        assert lab.store.points(run.id) and (lab.run_dir(run.id) / "work" / "events.jsonl").is_file()
    assert len({r.class_key for r in runs}) == 1 and len({r.source_sha for r in runs}) == 3
    board = queries.leaderboard(lab)
    assert [row["id"] for row in board["rows"]] == [r.id for r in sorted(runs, key=lambda r: r.val_bpb or 9)]
    assert "TOTAL_BATCH_SIZE = 1024" in (lab.run_dir(runs[1].id) / "work" / "train.py").read_text()
    assert f"TIME_BUDGET = {BUDGET_S}" in (lab.run_dir(runs[1].id) / "work" / "prepare.py").read_text()
