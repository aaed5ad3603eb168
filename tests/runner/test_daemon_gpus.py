"""The daemon on GPUs (the NVML stand-in below real engines and supervisors): neighbours, memory that stays, strangers, lost cards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import queries, verbs
from runner.lab import Lab
from runner.records import Gpu, Run, Submission
from tests.runner.commands import overnight
from tests.runner.daemons import TINY, ended, serving, until
from tests.runner.labs import make_lab
from tests.runner.onhost.rig import FakeNvml
from tui.opening import once_lines

pytestmark = pytest.mark.timeout(240)
HOST = '[[host]]\nname = "here"\nkind = "local"\n'


@pytest.fixture
def lab(tmp_path: Path, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A lab on a machine with two GPUs."""
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))
    for key, value in nvml.env.items():
        monkeypatch.setenv(key, value)
    nvml.card("GPU-a")
    nvml.card("GPU-b")
    policy = "min_free_disk_mib = 1\nmin_budget_s = 0.1\ngrace_s = 0.5\nwall_extra_s = 60"
    made = make_lab(tmp_path / "work", policy=policy, hosts=HOST, script=TINY)
    yield made
    made.close()


def submit(lab: Lab, **overrides: Any) -> str:
    return verbs.submit(lab, Submission(overrides=overrides, budget_s=20, allow_duplicate=True), who="cli").run_ids[0]


def get(lab: Lab, run_id: str) -> Run:
    run = lab.store.run(run_id)
    assert run is not None
    return run


def gpu(lab: Lab, uuid: str) -> Gpu:
    return next(g for g in lab.store.gpus() if g.uuid == uuid)


async def test_two_runs_on_two_gpus_and_cancelling_one_leaves_its_neighbour(lab: Lab) -> None:
    async with serving(lab):
        first, second = submit(lab, MODE="long"), submit(lab, MODE="long", TAG="b")
        await until(lambda: get(lab, first).step and get(lab, second).step)
        assert {get(lab, first).gpu_uuid, get(lab, second).gpu_uuid} == {"GPU-a", "GPU-b"}
        assert get(lab, first).gpu_name == "NVIDIA H100 80GB HBM3"
        await until(lambda: {g.state for g in lab.store.gpus()} == {"busy"} and all(g.telemetry for g in lab.store.gpus()))
        verbs.cancel(lab, [first], who="tui")
        assert (await ended(lab, first))[0].outcome == "cancelled"
        size = (lab.run_dir(second) / "out.log").stat().st_size
        await until(lambda: (lab.run_dir(second) / "out.log").stat().st_size > size + 1000)
        assert get(lab, second).phase == "running"
        verbs.cancel(lab, [second], who="tui", force=True)
        await ended(lab, second)
        assert lab.store.samples("run_id = ?", (second,))


async def test_memory_that_does_not_come_back_quarantines_the_gpu_until_it_is_released(lab: Lab, nvml: FakeNvml) -> None:
    async with serving(lab):
        run_id = submit(lab, STEPS=30)
        uuid = (await until(lambda: get(lab, run_id).step and get(lab, run_id).gpu_uuid)) or ""
        nvml.card(uuid, used=40000, procs=f"{os.getppid()}:39000")
        (run,) = await ended(lab, run_id)
        assert run.outcome == "completed" and run.val_bpb == 0.9979  # its result is not the memory's fault
        await until(lambda: gpu(lab, uuid).state == "quarantined")
        assert "40000 MiB still in use" in (gpu(lab, uuid).reason or "") and gpu(lab, uuid).holder
        shown = next(g for g in queries.gpu_objects(lab) if g["uuid"] == uuid)
        assert f"pid {os.getppid()}" in shown["note"] and "39000 MiB" in shown["note"] and shown["note"].startswith("for ")
        other = (await ended(lab, submit(lab, TAG="x")))[0]
        assert other.gpu_uuid != uuid  # it takes no run
        said = await released(lab, uuid)
        assert "40000 MiB are still in use by" in said and f"pid {os.getppid()}" in said and gpu(lab, uuid).state == "foreign"
        assert "was not quarantined, but foreign" in await released(lab, uuid)
        nvml.card(uuid, used=0, procs="")
        await until(lambda: gpu(lab, uuid).state == "free")


async def released(lab: Lab, uuid: str) -> str:
    """What a release says."""
    request = verbs.ask(lab, "gpu_release", {"uuid": uuid}, who="tui")
    await until(lambda: verbs.answer(lab, request).state == "done")
    return str((verbs.answer(lab, request).result or {})["text"])


async def test_a_stranger_keeps_our_runs_away_and_shows_who_it_is(lab: Lab, nvml: FakeNvml) -> None:
    nvml.card("GPU-a", used=40000, procs=f"{os.getpid()}:39000")
    async with serving(lab):
        await until(lambda: lab.store.gpus() and gpu(lab, "GPU-a").state == "foreign")
        assert "39000 MiB in use by" in (gpu(lab, "GPU-a").reason or "") and str(os.getpid()) in (gpu(lab, "GPU-a").reason or "")
        runs = await ended(lab, submit(lab), submit(lab, TAG="b"))
        assert {r.gpu_uuid for r in runs} == {"GPU-b"}
        nvml.card("GPU-a", used=0, procs="")
        await until(lambda: gpu(lab, "GPU-a").state == "free")


async def test_another_lab_on_the_same_gpus_never_shares_one_and_sees_whose_it_is(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = "min_free_disk_mib = 1\nmin_budget_s = 0.1\ngrace_s = 0.5"
    rival = make_lab(tmp_path / "rival", policy=policy, hosts=HOST, script=TINY)
    async with serving(lab):
        mine = [submit(lab, MODE="long"), submit(lab, MODE="long", TAG="b")]
        await until(lambda: all(get(lab, i).step for i in mine))
        async with serving(rival):
            await until(lambda: [g.state for g in rival.store.gpus()] == ["foreign", "foreign"])  # before anything was tried there
            notes = [str(g["note"]) for g in queries.gpu_objects(rival)]
            for note, run_id in zip(sorted(notes, key=lambda n: n.split("run ")[1]), mine, strict=True):
                age, _, who = note.partition(": ")
                assert age.startswith("for ")
                assert who.startswith(f"held by another control room: lab {lab.store.meta('lab_id')}, run {run_id}, user ")
                assert ", pid " in note and ", since " in note
            assert "held by another control room" in overnight(capsys, "--lab", rival.path, "gpus").out
            assert "held by another control room" in "\n".join(once_lines(rival))
            theirs = submit(rival)
            await until(lambda: "held by another control room" in (queries.why_waiting(rival, get(rival, theirs)) or ""))
            verbs.cancel(lab, [mine[0]], who="cli", force=True)
            (run,) = await ended(rival, theirs)  # it starts as soon as the lock is seen to be gone
            assert run.outcome == "completed" and not [e for e in rival.store.events(subject=theirs) if e.verb == "not_started"]
            verbs.cancel(lab, mine[1:], who="cli", force=True)
            await until(lambda: [g.state for g in rival.store.gpus()] == ["free", "free"])
        await ended(lab, *mine)
    rival.close()


async def test_two_entries_of_a_machine_without_cards_share_its_one_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))
    hosts = HOST + "gpus = []\n" + HOST.replace("here", "again") + "gpus = []\n"
    made = make_lab(tmp_path / "work", policy="min_free_disk_mib = 1\nmin_budget_s = 0.1\ngrace_s = 0.5", hosts=hosts, script=TINY)
    async with serving(made):
        await until(lambda: len(made.store.gpus()) == 2)
        first = submit(made, MODE="long")
        await until(lambda: get(made, first).step)
        other = await until(lambda: next((g for g in made.store.gpus() if g.state == "foreign"), None))
        assert f"{first} of this lab has it through host {get(made, first).host}" in other.reason and other.host != get(made, first).host
        second = submit(made, TAG="b")
        await until(lambda: get(made, second).phase == "queued")
        verbs.cancel(made, [first], who="cli", force=True)
        await ended(made, first, second)
        assert get(made, second).outcome == "completed"
    made.close()


async def test_a_deselected_card_keeps_its_run_takes_no_other_and_is_then_forgotten(lab: Lab) -> None:
    async with serving(lab):
        runs = [submit(lab, MODE="long"), submit(lab, MODE="long", TAG="b")]
        await until(lambda: all(get(lab, i).step for i in runs))
        text = lab.hosts_file.read_text().replace('name = "here"', 'name = "here"\ngpus = ["GPU-a"]')
        lab.hosts_file.write_text(text)  # fewer cards: in force without a human
        await until(lambda: lab.policy().hosts[0].gpus == ["GPU-a"])
        waits = submit(lab, TAG="c")
        there = next(i for i in runs if get(lab, i).gpu_uuid == "GPU-b")
        size = (lab.run_dir(there) / "out.log").stat().st_size
        await until(lambda: (lab.run_dir(there) / "out.log").stat().st_size > size + 1000)
        assert gpu(lab, "GPU-b").state == "busy" and not lab.store.flags(there)
        verbs.cancel(lab, [there], who="cli", force=True)
        await ended(lab, there)
        await until(lambda: [g.uuid for g in lab.store.gpus()] == ["GPU-a"])
        assert get(lab, waits).started_at is None and get(lab, waits).gpu_uuid in (None, "GPU-a")
        verbs.cancel(lab, [i for i in runs if i != there], who="cli", force=True)
        assert (await ended(lab, waits))[0].gpu_uuid == "GPU-a"


async def test_a_card_that_falls_off_the_bus_is_lost_and_flagged_on_its_run(lab: Lab, nvml: FakeNvml) -> None:
    async with serving(lab):
        run_id = submit(lab, MODE="long")
        uuid = (await until(lambda: get(lab, run_id).step and get(lab, run_id).gpu_uuid)) or ""
        nvml.card(uuid, lost=1)
        await until(lambda: [f for f in lab.store.flags(run_id) if f.kind == "gpu_lost"])
        assert get(lab, run_id).phase == "running"  # what becomes of the run is the run's to say
        verbs.cancel(lab, [run_id], who="cli", force=True)
        await ended(lab, run_id)
        other = (await ended(lab, submit(lab, TAG="x")))[0]
        assert other.gpu_uuid != uuid


async def test_two_entries_that_are_one_machine_do_not_double_its_cards(lab: Lab) -> None:
    text = lab.hosts_file.read_text() + '\n[[host]]\nname = "again"\nkind = "local"\n'
    lab.accept(text)
    lab.hosts_file.write_text(text)
    async with serving(lab) as daemon:
        await until(lambda: any("the same GPUs" in n for n in daemon.roster.notes.values()))
        assert len(lab.store.gpus()) == 2 and len({g.host for g in lab.store.gpus()}) == 1
        runs = await ended(lab, submit(lab), submit(lab, TAG="b"), submit(lab, TAG="c"))
        assert [r.outcome for r in runs] == ["completed"] * 3
