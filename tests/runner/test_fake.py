"""Simulated GPUs: the surface, the course of a run, and the daemon over a fleet of them with its faults."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from runner import reconcile, telemetry, verbs
from runner.engines import simrun, surface
from runner.errors import PolicyError
from runner.lab import Lab
from runner.records import Run, Submission, WaveRequest
from tests.runner.daemons import ended, fake_lab, serving, until

pytestmark = pytest.mark.timeout(240)


def submit(lab: Lab, **kw: object) -> str:
    return verbs.submit(lab, Submission(allow_duplicate=True, **{"budget_s": 300, **kw}), who="cli").run_ids[0]  # type: ignore[arg-type]


def get(lab: Lab, run_id: str) -> Run:
    run = lab.store.run(run_id)
    assert run is not None
    return run


def test_surface_is_deterministic_and_has_the_known_shape() -> None:
    base = surface.score({}, "H100", 300, 1)
    assert base.val_bpb == surface.score({}, "H100", 300, 1).val_bpb != surface.score({}, "H100", 300, 2).val_bpb
    assert surface.score({}, "H200").val_bpb < surface.score({}, "H100").val_bpb  # type: ignore[operator]
    assert surface.score({"TOTAL_BATCH_SIZE": 2**18, "WEIGHT_DECAY": 0.1}).val_bpb < base.val_bpb  # type: ignore[operator]
    assert surface.score({}, budget_s=1200).val_bpb < base.val_bpb - 0.04  # type: ignore[operator]
    assert surface.score({"DEVICE_BATCH_SIZE": 96}).outcome == "crashed" and surface.score({"MATRIX_LR": 0.5}).outcome == "diverged"
    with pytest.raises(KeyError, match="NO_SUCH"):
        surface.score({"NO_SUCH": 1})
    assert base.curve(0.1) > base.curve(0.5) > base.curve(1.0) and math.isfinite(base.curve(1.0))


@pytest.mark.parametrize("line", ["DEPTH = 0", "TOTAL_BATCH_SIZE = 0", "MATRIX_LR = -1.0", "DEVICE_BATCH_SIZE = 1024", "WEIGHT_DECAY = -3"])
def test_absurd_constants_crash_the_run_and_nothing_else(line: str) -> None:
    script = simrun.write_script("r0001", line + "\n", "NVIDIA H100 80GB HBM3", 300, 0.0)
    assert script.exit_code == 1 and b"Traceback" in script.log.bytes


def test_constants_are_read_from_the_source_and_unknown_ones_ignored() -> None:
    text = "import torch\nDEPTH = 2**3\nTOTAL_BATCH_SIZE: int = 2**18\nWINDOW = 'SSSL'\nif True:\n    MATRIX_LR = 9\n"
    assert simrun.constants_of(text, surface.DEFAULTS) == {"DEPTH": 8, "TOTAL_BATCH_SIZE": 2**18}


async def test_a_wave_on_simulated_gpus_is_ranked_by_the_surface(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 4}\nspeed = 400\n")
    factors = {"MATRIX_LR": [0.005, 0.03], "WEIGHT_DECAY": [0.1, 2.0]}
    async with serving(lab):
        ids = verbs.submit_wave(lab, WaveRequest(factors=factors, budget_s=300), who="mcp:bot").run_ids
        runs = await ended(lab, *ids)
        await until(lambda: all(g.telemetry and g.run_id is None for g in lab.store.gpus()))
    assert [r.outcome for r in runs] == ["completed"] * 4
    ranked = sorted(runs, key=lambda r: r.val_bpb or 9)
    assert ranked[0].cell == {"MATRIX_LR": 0.03, "WEIGHT_DECAY": 0.1} and ranked[-1].cell == {"MATRIX_LR": 0.005, "WEIGHT_DECAY": 2.0}
    assert all(r.training_s == 300.1 and 300 < (r.wall_s or 0) < 340 and r.gpu_name == "NVIDIA H100 80GB HBM3" for r in runs)
    assert len({r.gpu_uuid for r in runs}) == 4 and len({r.class_key for r in runs}) == 1
    lab.close()


async def test_types_and_a_run_that_fits_nowhere(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 1, H200 = 1}\nspeed = 400\n")
    async with serving(lab) as daemon:
        daemon.dispatcher.started -= 100
        first, second = submit(lab, gpu_type="H200"), submit(lab, gpu_type="h200")
        nowhere = submit(lab, gpu_type="B200")
        await until(lambda: lab.store.flags(nowhere))
        assert "no host has a GPU like 'B200'" in lab.store.flags(nowhere)[0].evidence
        runs = await ended(lab, first, second)
        assert {r.gpu_name for r in runs} == {"NVIDIA H200"} and get(lab, nowhere).phase == "queued"
        verbs.cancel(lab, [nowhere], who="cli")
        await ended(lab, nowhere)
        assert not lab.store.flags(nowhere)
    lab.close()


async def test_a_lost_link_is_unreachable_and_comes_back_whole(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 1}\nspeed = 80\n")
    down = lab.path / "fake" / "sim" / "down"
    async with serving(lab):
        run_id = submit(lab)
        await until(lambda: get(lab, run_id).step)
        await until(lambda: lab.store.samples("run_id = ?", (run_id,)))
        down.touch()
        await until(lambda: get(lab, run_id).phase == "unreachable")
        assert get(lab, run_id).unreachable_since and get(lab, run_id).outcome is None
        await until(lambda: lab.store.hosts()[0].state == "down")
        waiting = submit(lab)
        down.unlink()
        run, later = await ended(lab, run_id, waiting)
    assert run.outcome == later.outcome == "completed" and run.unreachable_since is None
    log = (lab.run_dir(run_id) / "out.log").read_bytes()
    assert run.log_offset == len(log) and len(lab.store.points(run_id)) == log.count(b"\rstep ")
    lab.close()


async def test_a_restarted_host_loses_its_runs_and_they_are_retried_once(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 2}\nspeed = 60\n")
    async with serving(lab):
        ids = [submit(lab), submit(lab)]
        await until(lambda: all(get(lab, i).step for i in ids))
        (lab.path / "fake" / "sim" / "boot_id").write_text("another-boot")
        runs = await ended(lab, *ids)
        assert [r.outcome for r in runs] == ["lost", "lost"] and "restarted" in (runs[0].cause_text or "")
        retries = await until(lambda: lab.store.runs("retry_of IS NOT NULL"))
        assert sorted(r.retry_of for r in retries) == ids
        verbs.cancel(lab, [r.id for r in retries], who="cli")
        await ended(lab, *(r.id for r in retries))
    lab.close()


async def test_a_lost_gpu_takes_no_run_and_comes_back(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 2}\nspeed = 400\n")
    async with serving(lab):
        uuids = await until(lambda: [g.uuid for g in lab.store.gpus()])
        (lab.path / "fake" / "sim" / "lost").write_text(uuids[0])
        await until(lambda: [g.state for g in lab.store.gpus()] == ["lost", "free"])
        runs = await ended(lab, submit(lab), submit(lab))
        assert {r.gpu_uuid for r in runs} == {uuids[1]}
        (lab.path / "fake" / "sim" / "lost").unlink()
        await until(lambda: [g.state for g in lab.store.gpus()] == ["free", "free"])
    lab.close()


async def test_standby_is_withdrawn_for_a_higher_priority_and_for_a_pause(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 1}\nspeed = 30\n")
    async with serving(lab):
        first = submit(lab, budget_s=900)
        await until(lambda: get(lab, first).step)
        second = submit(lab, budget_s=60)
        await until(lambda: get(lab, second).stage == "standby")
        third = submit(lab, budget_s=60, priority=5)
        await until(lambda: get(lab, third).stage == "standby")
        assert get(lab, second).phase == "queued" and get(lab, second).host is None
        verbs.pause_queue(lab, True, who="tui")
        await until(lambda: get(lab, third).phase == "queued")
        verbs.cancel(lab, [first], who="tui")
        assert (await ended(lab, first))[0].outcome == "cancelled"
        verbs.pause_queue(lab, False, who="tui")
        runs = await ended(lab, second, third)
    assert [r.outcome for r in runs] == ["completed", "completed"] and (runs[1].started_at or 0) < (runs[0].started_at or 0)
    lab.close()


async def test_paused_and_drained_hosts_and_hosts_that_come_and_go(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 1}\nspeed = 400\n")
    async with serving(lab) as daemon:
        await until(lambda: lab.store.gpus())
        verbs.pause_host(lab, "sim", True, who="tui")
        run_id = submit(lab)
        await until(lambda: daemon.dispatcher.plan().blocked.get(run_id) == "sim: it is paused")
        verbs.pause_host(lab, "sim", False, who="tui")
        await ended(lab, run_id)
        text = lab.hosts_file.read_text()
        lab.accept(text + '\n[[host]]\nname = "more"\nkind = "fake"\ntypes = {A100 = 2}\n')
        lab.hosts_file.write_text(text + '\n[[host]]\nname = "more"\nkind = "fake"\ntypes = {A100 = 2}\n')
        await until(lambda: len(lab.store.gpus()) == 3)
        lab.accept(text)
        lab.hosts_file.write_text(text)
        await until(lambda: len(lab.store.gpus()) == 1)
        assert [h.state for h in lab.store.hosts()] == ["removed", "up"]
    lab.close()


async def test_a_quarantined_gpu_takes_no_run_until_it_is_released(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 1}\nspeed = 400\n")
    async with serving(lab) as daemon:
        uuid = (await until(lambda: [g.uuid for g in lab.store.gpus()]))[0]
        daemon.roster.set_device(uuid, "quarantined", "40960 MiB still in use after r0000 ended (4 MiB before it)")
        await until(lambda: lab.store.gpus()[0].state == "quarantined")
    async with serving(lab) as daemon:  # it outlives the daemon
        run_id = submit(lab)
        await until(lambda: "quarantined: 40960 MiB" in daemon.dispatcher.plan().blocked.get(run_id, ""))
        wrong, right = (
            verbs.ask(lab, "gpu_release", {"uuid": "FAKE-nowhere"}, who="tui"),
            verbs.ask(lab, "gpu_release", {"uuid": uuid}, who="tui"),
        )
        answer = await until(lambda: (r := verbs.answer(lab, right)).state == "done" and r)
        assert answer.result["was"] == "quarantined" and answer.result["state"] == "free"
        refused = await until(lambda: (r := verbs.answer(lab, wrong)).state == "failed" and r)
        assert refused.error["code"] == "unknown_name" and "FAKE-nowhere" in refused.error["message"]
        await ended(lab, run_id)
    lab.close()


async def test_a_surface_from_a_file_and_a_missing_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from dataclasses import dataclass\nDEFAULTS = {'X': 1.0}\n@dataclass\nclass Result:\n    outcome: str\n    val_bpb: float\n"
        "    training_s: float\n    curve: object\ndef score(c, gpu='H100', budget_s=300.0, seed=0):\n"
        "    return Result('completed', 0.5 + c.get('X', 1.0) / 10, budget_s, lambda x: 3.0)\n"
    )
    lab = fake_lab(tmp_path, host=f'types = {{H100 = 1}}\nspeed = 400\nsurface = "{mine}"\n', script="X = 3.0\n")
    async with serving(lab):
        assert (await ended(lab, submit(lab)))[0].val_bpb == 0.8
    lab.close()
    from runner.engines.fake import FakeEngine
    from runner.policy import HostPolicy

    with pytest.raises(PolicyError, match="no such Python file"):
        FakeEngine(lab, HostPolicy("sim", "fake", surface=str(tmp_path / "absent.py")))
    with pytest.raises(PolicyError, match="1 to 64"):
        FakeEngine(lab, HostPolicy("sim", "fake", types={"H100": 65}))


async def test_a_withdrawal_that_comes_too_late_changes_nothing(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 1}\nspeed = 100\n")
    async with serving(lab) as daemon:
        run_id = submit(lab)
        await until(lambda: get(lab, run_id).step)
        roster = daemon.roster
        assert await reconcile.ask_stop(roster, roster.engines["sim"], roster.tracks[run_id], "withdrawn", "a slot on other is free")
        run = (await ended(lab, run_id))[0]
        assert (run.outcome, run.cause_text) == ("completed", None)
    lab.close()


async def test_a_disk_below_its_floor_takes_no_new_run_and_says_so(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, host="types = {H100 = 1}\nspeed = 400\nmin_free_disk_mib = 1000000000\n")
    async with serving(lab) as daemon:
        run_id = submit(lab)
        flag = (await until(lambda: [f for f in lab.store.flags("sim") if f.kind == "disk_low"]))[0]
        assert "floor 1000000000 MiB" in flag.evidence
        await until(lambda: "its disk is below the floor" in daemon.dispatcher.plan().blocked.get(run_id, ""))
        text = lab.hosts_file.read_text().replace("min_free_disk_mib = 1000000000", "min_free_disk_mib = 1")
        lab.accept(text)
        lab.hosts_file.write_text(text)
        assert (await ended(lab, run_id))[0].outcome == "completed"
        await until(lambda: not lab.store.flags("sim"))
    lab.close()


async def test_a_host_that_never_answers_is_down_only_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "CONNECT_S", 2.0)
    lab = fake_lab(tmp_path, host="types = {H100 = 1}\nspeed = 400\n")
    (lab.path / "fake" / "sim").mkdir(parents=True)
    (lab.path / "fake" / "sim" / "down").touch()
    async with serving(lab):
        await until(lambda: [h.state for h in lab.store.hosts()] == ["new"])
        assert not lab.store.flags("sim")
        await until(lambda: [h.state for h in lab.store.hosts()] == ["down"] and lab.store.flags("sim"))
    lab.close()


async def test_limits_of_the_night_hold_the_queue_and_say_so(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, policy="max_gpu_hours = 0.05\nmax_wall_hours = 1", host="types = {H100 = 1}\nspeed = 400\n")
    async with serving(lab) as daemon:
        first = submit(lab, budget_s=100)
        await ended(lab, first)
        daemon.roster.store.update_run(first, wall_s=200.0)
        daemon.dispatcher.counted_at = float("-inf")
        kept = {"source_sha": get(lab, first).source_sha, "effective_sha": "x", "budget_s": 100, "agent": "cli", "phase": "queued"}
        second = lab.store.insert_run(created_at=1.0, purpose="experiment", **kept)
        await until(lambda: "GPU hours are used up" in daemon.dispatcher.plan().blocked.get(second, ""))
        lab.store.set_setting("night_started_at", 1.0)
        daemon.roster.store.update_run(first, wall_s=10.0)
        daemon.dispatcher.counted_at = float("-inf")
        await until(lambda: "the night is over" in daemon.dispatcher.plan().blocked.get(second, ""))
        assert get(lab, second).phase == "queued"
    lab.close()


@pytest.mark.parametrize(
    ("script", "rows"),
    [
        ("DEVICE_BATCH_SIZE = None\nTOTAL_BATCH_SIZE = 2**17\n", 64),  # our trainer: as many as fit and divide the total batch
        ("DEVICE_BATCH_SIZE: int | None = None\nTOTAL_BATCH_SIZE = None\n", 128),
        ("DEVICE_BATCH_SIZE = None\nTOTAL_BATCH_SIZE = 3000\n", 128),  # nothing divides it: it ends at its assert
        ("DEVICE_BATCH_SIZE = 32\nTOTAL_BATCH_SIZE = 2**17\n", 32),
    ],
)
def test_a_device_batch_left_to_the_script_fits_its_total_batch(script: str, rows: int) -> None:
    assert simrun.constants_of(script, surface.DEFAULTS)["DEVICE_BATCH_SIZE"] == rows
