"""The daemon with the real local engine: each case is a real subprocess that goes wrong in its own way."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from runner import queries, reading, reconcile, verbs
from runner.errors import LabError
from runner.lab import Lab
from runner.records import Run, Submission, WaveRequest
from runner.research import trust
from tests.runner.daemons import ended, local_lab, name_the_budget, serving, until

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def own_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU locks of these tests' own: the CPU slot is shared by everybody on a machine."""
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    made = local_lab(tmp_path, "hung_after_summary_s = 1\nwall_extra_s = 60")
    yield made
    made.close()


def submit(lab: Lab, budget_s: float = 20, **overrides: Any) -> str:
    return verbs.submit(lab, Submission(overrides=overrides, budget_s=budget_s, allow_duplicate=True), who="cli").run_ids[0]


async def run_one(lab: Lab, **overrides: Any) -> Run:
    async with serving(lab):
        return (await ended(lab, submit(lab, **overrides)))[0]


async def test_a_run_is_read_as_upstream_prints_it(lab: Lab) -> None:
    run = await run_one(lab)
    assert (run.outcome, run.val_bpb, run.num_steps, run.params_m, run.mfu_reported) == ("completed", 0.9979, 10, 50.3, 39.8)
    assert run.flops_per_token == 2.1e8 and run.model_config and run.model_config["n_embd"] == 512
    assert [p.step for p in lab.store.points(run.id)] == list(range(10))
    assert run.started_at and run.first_step_at and run.ended_at and run.started_at <= run.first_step_at <= run.ended_at
    assert run.wall_s and run.wall_s < 20 and run.exit_code == 0 and run.trust == "unverifiable"
    assert run.class_key and run.class_key.startswith("CPU ")
    assert run.log_offset == run.log_bytes == (lab.run_dir(run.id) / "out.log").stat().st_size
    assert lab.store.gpus()[0].run_id is None


async def test_budget_and_overrides_reach_the_script_and_later_edits_do_not(lab: Lab) -> None:
    run_id = submit(lab, budget_s=7, TAG="mine")
    (lab.policy().trainer.folder / "train.py").write_text("raise SystemExit('edited after submission')")
    async with serving(lab):
        (run,) = await ended(lab, run_id)
    text = queries.read_log(lab, run_id).text
    assert run.outcome == "completed" and "budget 7 tag mine" in text and str(lab.run_dir(run_id) / "work") in text


async def test_nan_for_ever_is_stopped_as_diverged(lab: Lab) -> None:
    run = await run_one(lab, MODE="nan")
    assert (run.outcome, run.cause, run.val_bpb) == ("diverged", "nan", None)


async def test_fail_glued_to_the_progress_line_is_diverged(lab: Lab) -> None:
    run = await run_one(lab, MODE="fail")
    assert (run.outcome, run.exit_code) == ("diverged", 1) and run.step == 4


async def test_exit_0_without_summary_is_no_result(lab: Lab) -> None:
    run = await run_one(lab, MODE="no_summary")
    assert run.outcome == "no_result" and "done" in (run.last_lines or "")


async def test_a_crash_before_the_first_step_was_never_training(lab: Lab) -> None:
    async with serving(lab):
        run_id = submit(lab, MODE="crash_before_step")
        seen: set[Any] = set()
        while not (run := lab.store.run(run_id)) or not run.ended:
            await until(lambda: True)
            if run:
                seen.add(run.stage)
            await __import__("asyncio").sleep(0.01)
    assert (run.outcome, run.cause, run.first_step_at) == ("crashed", "attention_backend", None)
    assert "training" not in seen and "compiling" in seen


async def test_hang_after_the_summary_keeps_the_result(lab: Lab) -> None:
    run = await run_one(lab, MODE="hang")
    assert (run.outcome, run.val_bpb) == ("completed", 0.9979)
    assert "hung_after_summary" in [f.kind for f in lab.store.flags(run.id)]


async def test_a_child_that_outlives_its_parent_is_gone_before_the_slot_is_free(lab: Lab) -> None:
    run = await run_one(lab, MODE="child")
    assert run.outcome == "completed"
    assert "orphans" in [f.kind for f in lab.store.flags(run.id)]
    assert not _processes_of(lab, run.id)


async def test_time_limit_ends_a_run_that_ignores_term(tmp_path: Path) -> None:
    lab = local_lab(tmp_path, "wall_extra_s = 0\nwall_factor = 1")
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, budget_s=1, MODE="ignore_term"))
        assert run.outcome == "timed_out" and not _processes_of(lab, run.id)
    lab.close()


async def test_cancel_is_cancelled_only_when_it_is_gone(lab: Lab) -> None:
    async with serving(lab):
        run_id = submit(lab, MODE="ignore_term")
        await until(lambda: (lab.store.run(run_id) or 0) and lab.store.run(run_id).step)  # type: ignore[union-attr]
        verbs.cancel(lab, [run_id], who="tui", why="enough")
        await until(lambda: lab.store.run(run_id).phase == "finishing")  # type: ignore[union-attr]
        (run,) = await ended(lab, run_id)
    assert (run.outcome, run.cause_text) == ("cancelled", "cancelled by tui: enough") and not _processes_of(lab, run_id)


async def test_order_is_kept_and_cancel_of_a_waiting_run_is_immediate(lab: Lab) -> None:
    ids = [submit(lab, TAG=tag) for tag in "abcd"]
    verbs.cancel(lab, [ids[2]], who="cli")
    verbs.set_priority(lab, [ids[3]], who="cli", priority=1)
    async with serving(lab):
        runs = await ended(lab, *ids)
    assert [r.outcome for r in runs] == ["completed", "completed", "cancelled", "completed"]
    assert runs[2].started_at is None
    started = sorted((r.started_at, r.id) for r in runs if r.started_at)
    assert [i for _, i in started] == [ids[3], ids[0], ids[1]]
    for (_, a), (later, _) in itertools.pairwise(started):
        assert (lab.store.run(a).ended_at or 0) <= later + 0.5  # type: ignore[union-attr]


async def test_two_runs_never_share_the_slot_and_cancelling_one_leaves_the_other(lab: Lab) -> None:
    async with serving(lab):
        first, second = submit(lab, MODE="long"), submit(lab, TAG="second", STEP_S=0.1)
        await until(lambda: lab.store.run(first).step)  # type: ignore[union-attr]
        assert lab.store.run(second).started_at is None  # type: ignore[union-attr]
        verbs.cancel(lab, [first], who="cli")
        a, b = await ended(lab, first, second)
    assert (a.outcome, b.outcome) == ("cancelled", "completed") and a.ended_at and b.started_at and a.ended_at <= b.started_at + 0.5


async def test_a_withdrawal_that_comes_too_late_is_ignored_and_a_later_cancel_is_not(lab: Lab) -> None:
    async with serving(lab) as daemon:
        run_id = submit(lab, MODE="long")
        await until(lambda: lab.store.run(run_id).step)  # type: ignore[union-attr]
        await daemon.roster.engines["here"].stop(run_id, "here", "withdrawn")
        step = lab.store.run(run_id).step  # type: ignore[union-attr]
        await until(lambda: len(lab.store.points(run_id)) >= 10 and (lab.run_dir(run_id) / "out.log").stat().st_size > 4000)
        assert lab.store.run(run_id).phase == "running" and step is not None  # type: ignore[union-attr]
        verbs.cancel(lab, [run_id], who="cli")
        assert (await ended(lab, run_id))[0].outcome == "cancelled"


async def test_a_frozen_supervisor_is_said_to_be_frozen_and_its_run_goes_on(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconcile, "FROZEN_S", 3.0)
    async with serving(lab):
        run_id = submit(lab, MODE="long")
        await until(lambda: lab.store.run(run_id).step)  # type: ignore[union-attr]
        supervisor = json.loads((lab.run_dir(run_id) / "status.json").read_text())["supervisor"]["pid"]
        os.kill(supervisor, signal.SIGSTOP)
        await until(lambda: [f for f in lab.store.flags(run_id) if f.kind == "supervisor_frozen"])
        assert lab.store.run(run_id).phase == "running"  # type: ignore[union-attr]
        os.kill(supervisor, signal.SIGCONT)
        await until(lambda: not [f for f in lab.store.flags(run_id) if f.kind == "supervisor_frozen"])
        verbs.cancel(lab, [run_id], who="cli", force=True)
        await ended(lab, run_id)


async def test_bytes_that_break_the_reader_stop_no_other_run(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = reading.parse_log

    def brittle(chunk: bytes, final: bool) -> reading.LogDelta:
        if b"tag broken" in chunk:
            raise ZeroDivisionError("nobody foresaw this")
        return parse(chunk, final)

    monkeypatch.setattr(reading, "parse_log", brittle)
    async with serving(lab) as daemon:
        bad = submit(lab, TAG="broken", STEPS=40)
        await until(lambda: f"run {bad}" in daemon.roster.notes)
        assert "nobody foresaw this" in (await until(lambda: lab.store.daemon().note))  # type: ignore[union-attr]
        monkeypatch.setattr(reading, "parse_log", parse)
        good = submit(lab, TAG="fine")
        assert [r.outcome for r in await ended(lab, bad, good)] == ["completed", "completed"]


async def test_an_end_that_could_not_be_written_is_written_later(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    settled, full = trust.settled, [LabError("the disk is full")] * 3

    def failing(lab: Lab, run: Run) -> dict[str, Any]:
        if full:
            raise full.pop()
        return settled(lab, run)

    monkeypatch.setattr(trust, "settled", failing)
    async with serving(lab):
        (run,) = await ended(lab, submit(lab))
    assert full == [] and run.outcome == "completed"
    assert [e.subject for e in lab.store.events() if e.verb == "ended"] == [run.id]


async def test_pause_approval_and_a_paused_agent_hold_runs_back(lab: Lab) -> None:
    verbs.pause_queue(lab, True, who="tui")
    verbs.set_approval(lab, "ask", who="tui")
    asked = [verbs.submit(lab, Submission(overrides={"TAG": t}, budget_s=20), who="mcp:bot").run_ids[0] for t in "xyz"]
    async with serving(lab) as daemon:
        verbs.approve(lab, asked[:1], who="tui")
        verbs.decline(lab, asked[1:2], who="tui", why="not tonight")
        (declined,) = await ended(lab, asked[1])
        assert (declined.outcome, declined.started_at) == ("declined", None) and "not tonight" in (declined.cause_text or "")
        await until(lambda: lab.store.run(asked[0]).phase == "queued")  # type: ignore[union-attr]
        assert daemon.roster.tracks == {} and lab.store.run(asked[2]).phase == "proposed"  # type: ignore[union-attr]
        verbs.pause_queue(lab, False, who="tui")
        assert (await ended(lab, asked[0]))[0].outcome == "completed"


async def test_a_source_that_cannot_be_laid_out_ends_with_a_sentence(tmp_path: Path) -> None:
    lab = local_lab(tmp_path)
    name_the_budget(lab)
    run_id = submit(lab)
    (lab.policy().trainer.folder / "prepare.py").write_text("OTHER = 1\n")
    async with serving(lab):
        (run,) = await ended(lab, run_id)
    assert (run.outcome, run.cause) == ("crashed", "materialise") and "TIME_BUDGET" in (run.cause_text or "")
    lab.close()


async def test_wave_over_one_slot_is_gapless_and_every_run_counts_once(lab: Lab) -> None:
    sub = verbs.submit_wave(lab, WaveRequest(factors={"VAL_BPB": [0.99, 0.98, 0.97], "TAG": ["a", "b"]}, budget_s=20), who="mcp:bot")
    async with serving(lab):
        runs = await ended(lab, *sub.run_ids)
    assert [r.outcome for r in runs] == ["completed"] * 6
    assert {r.cell["VAL_BPB"]: r.val_bpb for r in runs if r.cell} == {0.99: 0.99, 0.98: 0.98, 0.97: 0.97}
    assert all(len(lab.store.points(r.id)) == 10 for r in runs)


def _processes_of(lab: Lab, run_id: str) -> list[int]:
    """Pids whose environment names the run of this lab."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            if f"OVERNIGHT_RUN_ID={run_id}\0".encode() in environ and str(lab.data_dir).encode() in environ:
                stat = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b") ", 1)[1]
                if stat[:1] not in b"ZX":
                    found.append(int(pid))
        except OSError:
            continue
    return found


async def test_a_daemon_whose_database_was_deleted_makes_room_for_the_next(lab: Lab) -> None:
    async with serving(lab) as daemon:
        await until(lambda: lab.store.daemon() is not None)
        assert not daemon.stop.is_set()
        for file in lab.path.glob("lab.db*"):
            file.unlink()
        await until(daemon.stop.is_set, 10)
