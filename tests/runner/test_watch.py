"""The daemon's watch: flags that go up once and come down, hopeless runs stopped, winners promoted; on simulated GPUs and real rows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from runner import verbs
from runner.lab import Lab
from runner.records import Point, Submission, WaveRequest
from runner.watch import QUIET_S, Watch
from tests.runner.daemons import ended, fake_lab, serving, until
from tests.runner.labs import finish, make_lab


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now


def running(lab: Lab, **observed: Any) -> str:
    run_id = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    lab.store.upsert_gpu("GPU-1", host="h", name="H100", state="busy", since=0.0, telemetry={"util_pct": 99, "throttle": 0x40})
    usual = {"phase": "running", "stage": "training", "gpu_uuid": "GPU-1", "gpu_name": "H100", "step": 9, "share": 0.3, "dt_ms": 300.0}
    lab.store.update_run(run_id, **{**usual, "started_at": 1e6, "last_output_at": 1e6, **observed})
    return run_id


def up(lab: Lab) -> set[str]:
    return {f.kind for f in lab.store.flags()}


def test_a_flag_goes_up_after_two_looks_and_comes_down_after_a_quiet_minute(lab: Lab) -> None:
    run_id, clock = running(lab), Clock()
    watch = Watch(lab, clock)
    watch.tick()
    assert up(lab) == set()  # once may be chance
    clock.now += 6
    lab.store.update_run(run_id, last_output_at=clock.now)
    watch.tick()
    assert up(lab) == {"throttled"}
    raised = lab.store.flags()[0].raised_at
    for step in range(40):  # a flapping sensor: bad at every second look
        clock.now += 6
        lab.store.update_run(run_id, last_output_at=clock.now)
        lab.store.upsert_gpu("GPU-1", telemetry={"util_pct": 99, "throttle": 0x40 if step % 2 else 0})
        watch.tick()
        assert up(lab) == {"throttled"}
    assert lab.store.flags()[0].raised_at == raised
    lab.store.upsert_gpu("GPU-1", telemetry={"util_pct": 99, "throttle": 0})
    for _ in range(3):
        clock.now += QUIET_S / 2 + 1
        lab.store.update_run(run_id, last_output_at=clock.now)
        watch.tick()
    assert up(lab) == set()
    run = lab.store.run(run_id)
    assert run is not None
    assert run.wanted == "run"  # no flag ever stops a run by itself


def test_only_the_policy_makes_a_flag_kill(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, policy='kill_on_flags = ["throttled"]')
    run_id, clock = running(lab), Clock()
    watch = Watch(lab, clock)
    for _ in range(2):
        watch.tick()
        clock.now += 6
    run = lab.store.run(run_id)
    assert run is not None
    assert run.wanted == "cancel"
    event = next(e for e in lab.store.events() if e.verb == "cancel")
    assert event.who == "daemon"
    assert "kill_on_flags" in str(event.why)
    lab.close()


def test_flags_of_the_end_and_of_a_source_that_is_no_edit(lab: Lab) -> None:
    first = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    again = verbs.submit(lab, Submission(hypothesis="a new optimizer", allow_duplicate=True), who="cli").run_ids[0]
    for run_id in (first, again):
        finish(lab, run_id, 1.0, wall_s=900.0, training_s=300.0)
    Watch(lab).tick()
    assert {(f.subject, f.kind) for f in lab.store.flags()} == {
        (first, "wall_over_training"),
        (again, "wall_over_training"),
        (again, "unchanged_source"),
    }


def test_each_end_is_settled_once_also_across_daemons_and_out_of_order(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [verbs.submit(lab, Submission(overrides={"DEPTH": n}), who="cli").run_ids[0] for n in range(1, 4)]
    finish(lab, ids[0], 1.0, wall_s=900.0, training_s=300.0)
    first = Watch(lab)
    first.tick()
    assert [f.subject for f in lab.store.flags()] == [ids[0]]
    lab.store.clear_flag(ids[0], "wall_over_training")  # a person took it down: nobody raises it again
    finish(lab, ids[1], 1.1, wall_s=900.0, training_s=300.0, ended_at=time.time() - 7200)  # its host was out of contact for hours
    second = Watch(lab)
    second.tick()
    assert [f.subject for f in lab.store.flags()] == [ids[1]]
    read: list[str] = []
    monkeypatch.setattr(Watch, "_settle_one", lambda self, run, now: read.append(run.id))
    third = Watch(lab)
    third.tick()
    finish(lab, ids[2], 1.2)
    third.tick()
    assert read == [ids[2]]  # a new daemon walks through nothing that was settled before


@pytest.mark.timeout(60)
async def test_hopeless_runs_are_stopped_and_the_others_are_not(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, 'pruning = "eager"', "types = {H100 = 12}\nspeed = 100\n")
    async with serving(lab):
        good = verbs.submit_wave(
            lab, WaveRequest(budget_s=300, factors={"MATRIX_LR": [0.03, 0.04, 0.05, 0.06], "WEIGHT_DECAY": [0.05, 0.1, 0.2]}), who="cli"
        )
        await ended(lab, *good.run_ids, deadline_s=30)
        bad = verbs.submit(lab, Submission(budget_s=300, overrides={"DEPTH": 4, "ASPECT_RATIO": 32}), who="cli").run_ids[0]
        spared = verbs.submit(
            lab, Submission(budget_s=300, overrides={"DEPTH": 4, "ASPECT_RATIO": 32}, purpose="repeat"), who="cli"
        ).run_ids[0]
        await until(lambda: (r := lab.store.run(bad)) and r.ended, 30)
        run = lab.store.run(bad)
        assert run is not None
        assert (run.outcome, run.cause) == ("pruned", "pruned")
        assert "finished runs of its class" in str(run.cause_text)
        assert run.share is not None
        assert run.share < 0.9
        (repeat,) = await ended(lab, spared)
        assert repeat.outcome == "completed"
    lab.close()


@pytest.mark.timeout(60)
async def test_the_best_of_a_wave_are_promoted_once(tmp_path: Path) -> None:
    lab = fake_lab(tmp_path, 'promote = {from = "H100", to = "H200", top = 2, seeds = 2}', "types = {H100 = 4, H200 = 2}\nspeed = 300\n")
    async with serving(lab):
        base = verbs.submit(lab, Submission(budget_s=300, gpu_type="H100"), who="cli").run_ids[0]
        await ended(lab, base)
        wave = verbs.submit_wave(
            lab,
            WaveRequest(base=base, budget_s=300, gpu_type="H100", factors={"TOTAL_BATCH_SIZE": [2**18], "WEIGHT_DECAY": [0.08, 0.1, 2.0]}),
            who="cli",
        )
        await ended(lab, *wave.run_ids)
        await until(lambda: lab.store.count_runs("purpose = 'promotion' AND phase = 'ended'") == 4, 30)
        promoted = lab.store.runs("purpose = 'promotion'")
        assert {r.gpu_type for r in promoted} == {"H200"}
        assert all("H200" in str(r.gpu_name) for r in promoted)
        by_value = sorted((r for r in map(lab.store.run, wave.run_ids) if r and r.val_bpb), key=lambda r: r.val_bpb or 9)
        assert {r.promoted_from for r in promoted} == {r.id for r in by_value[:2]}
        assert len({r.seed for r in promoted}) == 2
        event = next(e for e in lab.store.events() if e.verb == "promote")
        assert "promoted by policy" in str(event.why)
    lab.close()


def test_when_the_best_is_refuted_the_next_best_is_verified(lab: Lab) -> None:
    (lab.policy().trainer.folder / "verify.py").write_text("")
    ids = verbs.submit(lab, Submission(purpose="baseline"), who="cli").run_ids
    ids += [verbs.submit(lab, Submission(overrides={"DEPTH": n}), who="cli").run_ids[0] for n in range(1, 4)]
    for run_id, value in zip(ids, (1.0, 0.97, 0.98, 0.99), strict=True):
        finish(lab, run_id, value)
        Watch(lab).tick()

    def asked() -> list[str]:
        return [str(r.args["run"]) for r in lab.store.requests("asked")]

    assert asked() == [ids[1]]
    check = lab.store.insert_run(
        created_at=time.time(),
        purpose="verify",
        source_sha="s",
        effective_sha="s",
        base_run=ids[1],
        budget_s=20.0,
        agent="daemon",
        phase="running",
    )
    lab.store.update_run(ids[1], trust="refuted", trust_why="0.990000 is printed, 1.2 is recomputed")
    finish(lab, check, None, outcome="completed", trust=None)
    Watch(lab).tick()
    assert asked() == [ids[1], ids[2]]  # the second best came after it, and was never a new best


def test_pruning_leaves_each_level_of_a_wave_one_run(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, policy='pruning = "eager"')
    for n in range(12):
        (run_id,) = verbs.submit(lab, Submission(overrides={"DEPTH": 20 + n}), who="cli").run_ids
        lab.store.add_points(run_id, curve(1.0 + n / 20))
        finish(lab, run_id, 1.0 + n / 20)
    wish = WaveRequest(factors={"DEPTH": [50, 51], "MATRIX_LR": [0.02, 0.03]}, budget_s=20)
    ids = verbs.submit_wave(lab, wish, who="cli").run_ids
    for run_id in ids:
        lab.store.update_run(run_id, phase="running", stage="training", class_key="cpu", share=0.7)
        hopeless = (lab.store.run(run_id).cell or {})["DEPTH"] == 50  # type: ignore[union-attr]
        lab.store.add_points(run_id, [p for p in curve(1.9 if hopeless else 1.1) if p.share is not None and p.share <= 0.7])
    watch = Watch(lab, Clock())
    (stopped,) = [s.run_id for s in watch.tick()]
    (held,) = [e for e in lab.store.events() if e.verb == "not_pruned"]
    assert {stopped, held.subject} == {i for i in ids if (lab.store.run(i).cell or {})["DEPTH"] == 50}  # type: ignore[union-attr]
    assert "DEPTH = 50" in str(held.why)
    assert watch.tick() == []
    single = verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [60, 61]}, budget_s=20), who="cli").run_ids
    for run_id in single:  # a level that is one cell is its own answer
        lab.store.update_run(run_id, phase="running", stage="training", class_key="cpu", share=0.7)
        lab.store.add_points(run_id, [p for p in curve(1.9) if p.share is not None and p.share <= 0.7])
    assert {s.run_id for s in watch.tick()} == set(single)
    lab.close()


def test_a_repeat_is_never_pruned(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, policy='pruning = "eager"')
    for n in range(12):
        (run_id,) = verbs.submit(lab, Submission(overrides={"DEPTH": 20 + n}), who="cli").run_ids
        lab.store.add_points(run_id, curve(1.0 + n / 20))
        finish(lab, run_id, 1.0 + n / 20)
    (first,) = verbs.submit(lab, Submission(overrides={"DEPTH": 50}), who="cli").run_ids
    lab.store.update_run(first, phase="running", stage="training", class_key="cpu", share=0.7)
    lab.store.add_points(first, [p for p in curve(1.9) if p.share is not None and p.share <= 0.7])
    assert [s.run_id for s in Watch(lab, Clock()).tick()] == [first]
    lab.store.update_run(first, repeat_of="r0001")
    assert Watch(lab, Clock()).tick() == []
    lab.close()


def curve(final: float) -> list[Point]:
    return [Point(s, None, s / 50, 2 * final + 2 * (1 - s / 50), None, None, None) for s in range(51)]


def test_what_a_human_promoted_in_other_words_holds_no_other_promotion_back(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, policy='promote = {from = "H100", to = "H200", top = 2}')
    (base,) = verbs.submit(lab, Submission(), who="cli").run_ids
    finish(lab, base, 1.0, class_key="H100", gpu_name="NVIDIA H100")
    ids = verbs.submit_wave(lab, WaveRequest(base=base, factors={"DEPTH": [20, 21]}), who="cli").run_ids
    for run_id in ids:
        finish(lab, run_id, 0.9, class_key="H100", gpu_name="NVIDIA H100")
    by_hand = verbs.promote(lab, ids[0], who="tui", gpu_type="nvidia h200").run_ids
    Watch(lab, Clock()).tick()
    found = {r.id: r.promoted_from for r in lab.store.runs("purpose = 'promotion'")}
    assert sorted(found.values()) == sorted(ids) and by_hand[0] in found
    assert "promotion_refused" not in up(lab)
    lab.close()


def test_a_cliff_is_told_of_one_total_batch_and_an_mfu_that_cannot_be_is_no_measure(lab: Lab) -> None:
    facts = {"model_config": {"n": 1}, "gpu_name": "NVIDIA H100 80GB HBM3", "tok_s": 4e5, "flops_per_token": 1e9, "training_s": 20.0}
    ids = [verbs.submit(lab, Submission(overrides={"DEPTH": n}), who="cli").run_ids[0] for n in range(1, 5)]
    for n, run_id in enumerate(ids):
        constants = {"DEVICE_BATCH_SIZE": 64, "TOTAL_BATCH_SIZE": 2**19 if n < 3 else 2**18}
        finish(lab, run_id, 1.0, **facts, constants=constants, tokens_m=8.0 if n else 9e6)
    run_id = running(lab, class_key="cpu", constants={"DEVICE_BATCH_SIZE": 128, "TOTAL_BATCH_SIZE": 2**17})
    watch, gpu = Watch(lab, Clock()), lab.store.gpus()[0]
    for total, found in ((2**17, None), (2**18, (ids[3], 64, 4e5))):
        lab.store.update_run(run_id, model_config={"n": 1}, constants={"DEVICE_BATCH_SIZE": 128, "TOTAL_BATCH_SIZE": total})
        run = lab.store.run(run_id)
        assert run is not None
        view = watch._view(run, gpu, 1e6)
        assert view.smaller_batch == found
        assert len(view.class_mfu) == 3 and max(view.class_mfu) < 100
