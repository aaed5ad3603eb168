"""A broken host or trainer folder stops the queue before it eats it, says why, and is tried again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner import fitness, queries, verbs
from runner.fitness import Fitness, host_at_fault
from runner.lab import Lab
from runner.records import Submission
from tests.runner.daemons import ended, local_lab, name_the_budget, serving, until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))


def submit(lab: Lab, count: int, **overrides: Any) -> list[str]:
    return [verbs.submit(lab, Submission(overrides={"TAG": f"t{n}", **overrides}, budget_s=20), who="cli").run_ids[0] for n in range(count)]


def test_three_different_runs_in_a_row_and_a_try_after_the_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(fitness.time, "monotonic", lambda: clock[0])
    fit = Fitness()
    assert [fit.failed("a", r, "no python") for r in ("r1", "r1", "r1", "r2")] == [False] * 4
    assert fit.hold("a") is None and fit.failed("a", "r3", "no python")
    assert fit.hold("a") == "the last 3 runs could not get going here: no python" and not fit.probing("a") and fit.hold("b") is None
    clock[0] += fitness.FIRST_HOLD_S
    assert fit.hold("a") is None and fit.probing("a")
    assert fit.failed("a", "r4", "no python") and fit.hold("a")  # one more failure is enough now, and the hold doubles
    clock[0] += fitness.FIRST_HOLD_S * 1.5
    assert fit.hold("a")
    assert fit.went_well("a") and fit.why("a") is None and not fit.went_well("a")


def test_a_check_makes_a_host_unfit_at_once_and_fit_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(fitness.time, "monotonic", lambda: clock[0])
    fit = Fitness()
    assert not fit.checked("a", None) and fit.checked("a", "torch: sees no GPU") and not fit.checked("a", "torch: sees no GPU")
    assert fit.hold("a") == "`hosts check` found: torch: sees no GPU"
    clock[0] += fitness.FIRST_HOLD_S
    assert fit.probing("a")  # a check may be wrong: one run is tried
    assert fit.checked("a", None) and fit.why("a") is None


async def test_a_check_that_finds_no_usable_python_holds_the_queue(tmp_path: Path) -> None:
    lab = local_lab(tmp_path)
    good = lab.hosts_file.read_text()
    bad = good.replace("gpus = []", 'gpus = []\npython = "/nowhere/python"')
    for text, state in ((bad, "unfit"), (good, "up")):
        lab.accept(text)
        lab.hosts_file.write_text(text)
        async with serving(lab):
            await until(lambda: [h.state for h in lab.store.hosts()] == ["up"])
            request = verbs.ask(lab, "hosts_check", {"hosts": []}, who="cli")
            await until(lambda i=request: verbs.answer(lab, i).state == "done")  # type: ignore[misc]
            await until(lambda s=state: [h.state for h in lab.store.hosts()] == [s])  # type: ignore[misc]
            assert lab.store.hosts()[0].checked_at
            (run_id,) = submit(lab, 1, TAG=state)
            if state == "unfit":
                await until(lambda: [g["state"] for g in queries.gpu_objects(lab)] == ["held"])
                assert (
                    "/nowhere/python does not exist" in (queries.gpu_objects(lab)[0]["note"] or "")
                    and queries.lab_state(lab).idle_gpus == 0
                )
                assert lab.store.run(run_id).phase == "queued"  # type: ignore[union-attr]
            else:
                assert (await ended(lab, run_id))[0].outcome == "completed"
    lab.close()


async def test_a_host_without_its_python_keeps_the_rest_of_the_queue(tmp_path: Path) -> None:
    lab = local_lab(tmp_path)
    good = lab.hosts_file.read_text()
    bad = good.replace("gpus = []", 'gpus = []\npython = "/nowhere/python"')
    lab.accept(bad)
    lab.hosts_file.write_text(bad)
    ids = submit(lab, 7)
    async with serving(lab):
        await until(lambda: [f for f in lab.store.flags("here") if f.kind == "unfit"])
        await until(lambda: lab.store.hosts()[0].state == "unfit")
        burnt = await until(lambda: not lab.store.count_runs("phase NOT IN ('queued', 'ended')") and lab.store.runs("outcome = 'crashed'"))
        assert [r.id for r in burnt] in (ids[:3], ids[:4])  # the fourth when it stood by already
        left = ids[len(burnt) :]
        assert "/nowhere/python" in (lab.store.run(ids[0]).cause_text or "")  # type: ignore[union-attr]
        lab.accept(good)
        lab.hosts_file.write_text(good)
        assert {r.outcome for r in await ended(lab, *left)} == {"completed"}
        assert not lab.store.flags("here")
        await until(lambda: lab.store.hosts()[0].state == "up")
    lab.close()


async def test_a_trainer_folder_that_cannot_be_laid_out_stops_the_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitness, "FIRST_HOLD_S", 1.0)
    lab = local_lab(tmp_path)
    name_the_budget(lab)
    ids = submit(lab, 5)
    prepare = lab.policy().trainer.folder / "prepare.py"
    text = prepare.read_text()
    prepare.write_text("NOTHING = 1\n")
    async with serving(lab):
        await until(lambda: [f for f in lab.store.flags("lab") if f.kind == "trainer_unusable"])
        prepare.write_text(text)
        runs = await ended(lab, *ids)
        assert [r.outcome for r in runs] == ["crashed"] * 2 + ["completed"] * 3
        assert not [f for f in lab.store.flags("lab") if f.kind == "trainer_unusable"]
    lab.close()


def test_what_a_script_can_cause_is_never_its_hosts_fault(tmp_path: Path) -> None:
    lab = local_lab(tmp_path)
    (run_id,) = submit(lab, 1)
    run = lab.store.run(run_id)
    assert run is not None
    crashed = replace(run, phase="ended", outcome="crashed")
    assert host_at_fault(replace(crashed, cause="exec_failed"))
    assert host_at_fault(replace(crashed, cause="import", cause_text="It ended in ModuleNotFoundError: No module named 'torch'."))
    assert not host_at_fault(replace(crashed, cause="import", cause_text="It ended in ModuleNotFoundError: No module named 'torchmagic'."))
    assert not host_at_fault(replace(crashed, cause="exec_failed", first_step_at=1.0))
    assert not host_at_fault(replace(crashed, cause="oom")) and not host_at_fault(replace(crashed, outcome="diverged", cause="no_gpu"))
    lab.close()
