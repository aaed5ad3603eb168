"""What stays on disk of ended runs: the best few checkpoints, what is kept or may be verified, and every log."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import upkeep, verbs
from runner.lab import Lab
from runner.records import Submission
from tests.runner.daemons import ended, local_lab, serving, until

pytestmark = pytest.mark.timeout(240)


def submit(lab: Lab, bpb: float, tag: str = "") -> str:
    return verbs.submit(lab, Submission(overrides={"VAL_BPB": bpb, "TAG": tag}, budget_s=20), who="cli").run_ids[0]


def whole(lab: Lab, run_id: str) -> bool:
    """Whether the work folder is still whole."""
    return (lab.run_dir(run_id) / "work" / "train.py").exists()


async def test_only_the_best_and_the_wanted_keep_their_work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setattr(upkeep, "GRACE_S", 0.0)
    lab = local_lab(tmp_path, "keep_checkpoints = 1")
    async with serving(lab) as daemon:
        await until(lambda: daemon.roster.engines)
        daemon.roster.lab.store.set_setting("queue_paused", True)
        ids = [submit(lab, bpb, f"t{n}") for n, bpb in enumerate((0.99, 0.97, 0.98, 0.96))]
        crashed = verbs.submit(lab, Submission(overrides={"MODE": "fail"}, budget_s=20), who="cli").run_ids[0]
        daemon.roster.lab.store.set_setting("queue_paused", False)
        await ended(lab, *ids, crashed)
        lab.store.update_run(ids[0], verdict="keep")
        lab.store.update_run(ids[2], trust="claimed", trust_why="held: too good")
        lab.store.update_run(ids[1], trust="unverifiable", trust_why=None)
        assert set(await upkeep.tidy(daemon.roster)) >= {ids[1], crashed}
        assert [whole(lab, i) for i in (*ids, crashed)] == [True, False, True, True, False]
        assert all((lab.run_dir(i) / "out.log").stat().st_size for i in ids)
        lab.store.update_run(ids[2], trust="verified")
        await upkeep.tidy(daemon.roster)
        assert not whole(lab, ids[2]) and set(lab.store.setting("work_kept")) == {ids[0], ids[3]}
        assert await upkeep.tidy(daemon.roster) == []
    lab.close()


async def test_a_young_run_and_a_pending_verification_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))
    lab = local_lab(tmp_path, "keep_checkpoints = 0")
    async with serving(lab) as daemon:
        run_id = submit(lab, 0.99)
        await ended(lab, run_id)
        lab.store.update_run(run_id, trust="unverifiable", trust_why=None)
        assert await upkeep.tidy(daemon.roster) == [] and whole(lab, run_id)
        monkeypatch.setattr(upkeep, "GRACE_S", 0.0)
        lab.store.insert_request("verify", {"run": run_id}, "tui")
        assert run_id in upkeep.needed(daemon.roster, [run_id])
    lab.close()


def test_left_over_stages_go(tmp_path: Path) -> None:
    lab = local_lab(tmp_path)
    (lab.runs_dir / ".stage-r0001" / "work").mkdir(parents=True)

    class Roster:
        def __init__(self) -> None:
            self.lab = lab

    upkeep.sweep_stages(Roster())  # type: ignore[arg-type]
    assert list(lab.runs_dir.iterdir()) == []
    lab.close()
