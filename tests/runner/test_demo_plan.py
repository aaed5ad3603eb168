"""The demo's plans fit the trainers they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import demo, sources
from runner.demo_plan import EDITS, GPU_EDITS, real_plan, simulated_plan
from runner.errors import OvernightError
from runner.policy import load_policy

TRAINER = Path(__file__).parents[2] / "trainer"


@pytest.mark.parametrize("edit", [edit for _, edit in EDITS + GPU_EDITS], ids=str)
def test_every_edit_changes_a_constant_of_the_shipped_trainer(edit: dict[str, object]) -> None:
    text = (TRAINER / "train.py").read_text(encoding="utf-8")
    changed = sources.override(text, edit)
    assert {name: value for name, (_, value) in sources.changed_constants(text, changed).items()} == edit


@pytest.mark.parametrize("gpu", [False, True])
def test_the_real_plan_is_a_valid_policy_and_submits_what_it_says(tmp_path: Path, gpu: bool) -> None:
    plan = real_plan(TRAINER, gpu=gpu)
    policy = load_policy(tmp_path / "hosts.toml", text=plan.files["hosts.toml"])
    assert policy.trainer.folder == TRAINER and policy.limits.budget_s == plan.agent["baseline"]["budget_s"]
    (wave,) = plan.agent["waves"]
    assert wave["cells"] == [edit for _, edit in (GPU_EDITS if gpu else EDITS)] and wave["budget_s"] == plan.agent["baseline"]["budget_s"]


def test_the_simulated_plan_has_sixteen_gpus_of_two_types(tmp_path: Path) -> None:
    plan = simulated_plan()
    (host,) = load_policy(tmp_path / "hosts.toml", text=plan.files["hosts.toml"]).hosts
    assert host.kind == "fake" and sum(host.types.values()) == 16 and len(host.types) == 2
    constants = sources.constants(plan.files["trainer/train.py"])
    assert set(plan.agent["waves"][0]["factors"]) <= set(constants)


def test_a_busy_machine_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "has_gpu", lambda: False)
    assert demo.busy_words(2.1, 2) is None and "load 5.0 on 2 cores" in str(demo.busy_words(5.0, 2))
    monkeypatch.setattr(demo, "has_gpu", lambda: True)
    assert demo.busy_words(50.0, 2) is None


def test_a_demos_folder_may_be_there_and_empty_but_holds_nothing_of_others(tmp_path: Path) -> None:
    stage = demo.Stage(tmp_path / "new", simulated_plan())
    stage.folder.mkdir()
    assert demo.prepare(stage) is False and (stage.folder / "hosts.toml").is_file()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    for name in ("mine", "file"):
        with pytest.raises(OvernightError, match=r"is not a demo's folder, and not empty.*another name"):
            demo.prepare(demo.Stage(tmp_path / name, simulated_plan()))
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
