"""Preflight by the daemon: before the first run on a GPU model and when a check asks, in a slot of its own, and never in the way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner import measuring, queries, verbs
from runner.errors import UnknownName
from runner.health import View, detect
from runner.lab import Lab
from runner.onhost import inspecting
from runner.records import Run, Submission
from runner.research.tune import Plan, Tune
from tests.runner.daemons import ended, serving, until
from tests.runner.labs import make_lab
from tests.runner.onhost.rig import FakeNvml

pytestmark = pytest.mark.timeout(240)
GPU = "NVIDIA H100 80GB HBM3"
# A stand-in for trainer/preflight.py: keeps and prints what that promises, without a GPU.
PREFLIGHT = """
import json, os, sys, time
mode = open(os.path.join(os.environ["OVERNIGHT_DATA"], "mode")).read() if os.path.exists(os.environ["OVERNIGHT_DATA"] + "/mode") else "ok"
if mode == "hang":
    time.sleep(600)
if mode == "fail":
    print("error: no kernel image is available", file=sys.stderr)
    sys.exit(1)
quick = "--quick" in sys.argv
found = {"v": 1, "quick": quick, "gpu_name": GPU, "driver": None, "torch": "2.11.0", "matmul_flops": 7.0e14, "peak_flops": 989.5e12,
         "choices": {"ATTENTION": "cudnn", "COMPILE": "both", "DEVICE_TOKENS": None if quick else 65536}, "refused": []}
os.makedirs(os.environ["OVERNIGHT_DATA"], exist_ok=True)
json.dump(found, open(os.environ["OVERNIGHT_DATA"] + "/preflight-x.json", "w"))
open(os.environ["OVERNIGHT_DATA"] + "/times", "a").write(f"{os.environ['CUDA_VISIBLE_DEVICES']} {quick}\\n")
print("a line of a compiler")
print(json.dumps(found))
"""
# Takes its attention from what preflight kept, as trainer/settings.py does, and says so.
TRAIN = """
import json, os
SEED = 42
DEPTH = 8
TAG = ""
found = json.load(open(os.environ["OVERNIGHT_DATA"] + "/preflight-x.json"))["choices"] if TAG != "blind" else {}
with open("events.jsonl", "a") as file:
    start = {"event": "start", "attributes": {"attention": found.get("ATTENTION", "default")}, "flops_per_token": 2.7e8}
    print(json.dumps(start), file=file)
print("step 00001 (1.0%) | loss: 3.0 | lrm: 1.00 | dt: 9ms | tok/sec: 300,000 | mfu: 1.0% | epoch: 1 | remaining: 9s    ")
print("---")
print("val_bpb:          0.9979")
print("depth:            8")
"""


@pytest.fixture
def lab(tmp_path: Path, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """A lab on a machine with two GPUs of one model, whose trainer has a preflight."""
    monkeypatch.setenv("OVERNIGHT_LOCK_DIR", str(tmp_path / "locks"))
    for key, value in nvml.env.items():
        monkeypatch.setenv(key, value)
    nvml.card("GPU-a")
    nvml.card("GPU-b")
    policy = "min_free_disk_mib = 1\nmin_budget_s = 0.1\ngrace_s = 0.5\nwall_extra_s = 60"
    made = make_lab(tmp_path / "work", policy=policy, hosts='[[host]]\nname = "here"\nkind = "local"\n', script=TRAIN)
    (made.policy().trainer.folder / "preflight.py").write_text(f"GPU = {GPU!r}\n{PREFLIGHT}")
    yield made
    made.close()


def submit(lab: Lab, tag: str) -> str:
    return verbs.submit(lab, Submission(overrides={"TAG": tag}, budget_s=20), who="cli").run_ids[0]


def preflights(lab: Lab) -> list[Run]:
    return lab.store.runs("purpose = 'preflight'")


async def check(lab: Lab) -> list[dict[str, Any]]:
    """`hosts check` of the one host: its checks called preflight."""
    request = verbs.ask(lab, "hosts_check", {}, who="cli")
    answer = await until(lambda: (r := verbs.answer(lab, request)).state in ("done", "failed") and r)
    assert answer.state == "done", answer.error
    return [c for c in answer.result["hosts"][0]["checks"] if c["name"] == "preflight"]


async def test_the_first_run_on_a_gpu_waits_for_a_measurement_and_uses_it(lab: Lab) -> None:
    async with serving(lab) as daemon:
        first, second = submit(lab, "a"), submit(lab, "b")
        runs = await ended(lab, first, second)
        (measured,) = preflights(lab)
        assert measured.outcome == "completed"
        assert (measured.cause_text or "").startswith(f"{GPU}: 700 TFLOP/s, 71 % of its peak; attention cudnn")
        assert (measured.class_key, measured.val_bpb, measured.gpu_type) == (None, None, GPU)
        assert all((r.started_at or 0) >= (measured.ended_at or 0) for r in runs)  # on the other GPU, too
        assert [r.attributes for r in runs] == [{"attention": "cudnn"}] * 2
        info = await until(lambda: (lab.store.hosts()[0].info or {}).get("preflights"))
        assert info[0]["matmul_flops"] == 7.0e14 and info[0]["quick"] is True
        assert daemon.runs_watch._measured(lab.store.gpus()[0]) == 7.0e14
        board = queries.leaderboard(lab)
        assert {row["id"] for row in board["rows"]} | {r["id"] for r in board["unranked"]} <= {first, second}
    async with serving(lab):  # a new daemon does not measure again
        await ended(lab, submit(lab, "c"))
    assert len(preflights(lab)) == 1


async def test_a_measurement_that_fails_is_one_sentence_and_holds_nothing_up(lab: Lab) -> None:
    (lab.data_dir).mkdir(parents=True, exist_ok=True)
    (lab.data_dir / "mode").write_text("fail")
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, "blind"))
        (measured,) = preflights(lab)
        assert run.outcome == "completed" and run.attributes == {"attention": "default"}
        assert (measured.outcome, measured.cause) == ("crashed", "preflight")
        assert "could not be measured" in (measured.cause_text or "") and "no kernel image" in (measured.cause_text or "")
        flag = next(f for f in lab.store.flags("here") if f.kind == "preflight_failed")
        assert measured.id in flag.evidence and flag.severity == "info"
        assert lab.store.hosts()[0].state == "up"
        (lab.data_dir / "mode").write_text("ok")
        (asked,) = await check(lab)  # a person's check tries again
        await ended(lab, str(asked["value"]))
        assert not [f for f in lab.store.flags("here") if f.kind == "preflight_failed"]


async def test_one_that_hangs_is_ended_by_its_own_limit(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "QUICK_LIMIT_S", 1)
    lab.data_dir.mkdir(parents=True, exist_ok=True)
    (lab.data_dir / "mode").write_text("hang")
    async with serving(lab):
        (run,) = await ended(lab, submit(lab, "blind"))
        (measured,) = preflights(lab)
        assert run.outcome == "completed" and measured.outcome == "timed_out"
        assert "time limit" in (measured.cause_text or "") and "the trainer's presets" in (measured.cause_text or "")


async def test_a_check_measures_what_is_not_known_and_then_shows_it(lab: Lab) -> None:
    async with serving(lab):
        (asked,) = await check(lab)
        assert asked["ok"] is None and asked["text"].startswith(f"{asked['value']} measures {GPU} in the next free slot")
        await ended(lab, asked["value"])
        await until(lambda: (lab.store.hosts()[0].info or {}).get("preflights"))
        (shown,) = await check(lab)
        assert shown["ok"] is True and shown["text"].endswith("device tokens 65536") and shown["value"] == 7.0e14
        await ended(lab, submit(lab, "a"))
    assert [r.id for r in preflights(lab)] == [asked["value"]]
    assert (lab.data_dir / "times").read_text().endswith(" False\n")


async def test_it_runs_beside_no_other_run(lab: Lab) -> None:
    async with serving(lab):
        runs = [submit(lab, tag) for tag in "abc"]
        await check(lab)
        rows = await ended(lab, *runs)
        others = await ended(lab, *(r.id for r in preflights(lab)))
        assert others
        for one in others:
            same = [r for r in rows if r.gpu_uuid == one.gpu_uuid]
            assert all((r.started_at or 0) >= (one.ended_at or 0) or (r.ended_at or 0) <= (one.started_at or 0) for r in same)


async def test_a_tune_has_the_whole_preflight_run_first_and_outlives_a_daemon(lab: Lab) -> None:
    plan = Plan(20.0, (), waves=1, size=4, knobs=("DEPTH",))
    async with serving(lab):
        await until(lambda: lab.store.gpus() and not Tune(lab, plan).ground.kept)
        assert await until(lambda: Tune(lab, plan).advance() and preflights(lab))
    async with serving(lab):  # the daemon and the tune are others now
        await until(lambda: not Tune(lab, plan).pending())
        assert Tune(lab, plan).advance()
        tune = Tune(lab, plan)
        (measured,) = preflights(lab)
        rows = await ended(lab, *(r.id for r in tune.runs()))
        assert (measured.outcome, measured.budget_s) == ("completed", measuring.FULL_LIMIT_S)
        assert all((r.started_at or 0) >= (measured.ended_at or 0) and r.attributes == {"attention": "cudnn"} for r in rows)
        (chosen,) = await until(lambda: Tune(lab, plan).ground.rows())
        assert (chosen["attention"], chosen["compile"], chosen["device_tokens"]) == ("cudnn", "both", 65536)
        assert verbs.measure(lab, who="mcp:a").run_ids == []
    assert (lab.data_dir / "times").read_text().count(" False\n") == 1 == len(preflights(lab))


async def test_what_an_agent_asks_to_be_measured_waits_for_approval_and_holds_nobody_up(lab: Lab) -> None:
    async with serving(lab):
        await until(lambda: lab.store.gpus())
        verbs.set_approval(lab, "ask", who="cli")
        (asked,) = verbs.measure(lab, who="mcp:a", request_id="m").run_ids
        assert verbs.measure(lab, who="mcp:a", request_id="m").run_ids == [asked]
        assert verbs.measure(lab, who="cli", host="here").run_ids == [asked]  # no second one
        assert lab.store.run(asked).phase == "proposed"  # type: ignore[union-attr]
        with pytest.raises(UnknownName, match="nowhere"):
            verbs.measure(lab, who="cli", host="nowhere")
        await ended(lab, submit(lab, "blind"))
        assert lab.store.run(asked).phase == "proposed"  # type: ignore[union-attr]
        verbs.approve(lab, [asked], who="cli")
        (done,) = await ended(lab, asked)
        assert done.outcome == "completed"


def test_what_a_preflight_left_is_read_with_care(tmp_path: Path) -> None:
    assert inspecting.preflights(str(tmp_path / "nowhere")) == []
    whole = {"gpu_name": GPU, "matmul_flops": 7e14, "quick": False, "choices": {"ATTENTION": "cudnn", "COMPILE": None, "X": 1}, "junk": [1]}
    (tmp_path / "preflight-a.json").write_text(json.dumps(whole))
    for name, text in (("b", "[1]"), ("c", "{"), ("d", '{"choices": 3}'), ("e", "null")):
        (tmp_path / f"preflight-{name}.json").write_text(text)
    (one,) = inspecting.preflights(str(tmp_path))
    assert one == {"gpu_name": GPU, "matmul_flops": 7e14, "quick": False, "choices": {"ATTENTION": "cudnn"}, "at": one["at"]}
    info = {"preflights": [one]}
    assert measuring.found_on(info, "another") is None and measuring.found_on(info, GPU, "580") == one
    assert measuring.found_on({"preflights": [{**one, "driver": "570"}]}, GPU, "580") is None
    assert measuring.matmul_flops(info, GPU) == 7e14 and measuring.matmul_flops(None, GPU) is None


def test_the_floor_holds_for_a_card_without_a_known_peak(lab: Lab) -> None:
    run = lab.store.run(submit(lab, "a"))
    assert run is not None
    import dataclasses

    run = dataclasses.replace(run, phase="running", share=0.2, tok_s=3000.0, flops_per_token=2.7e8)
    view = View(run=run, now=0.0, mfu_percent=None, measured_flops=7e14, achieved_flops=3000 * 2.7e8)
    (low,) = [f for f in detect(view) if f.kind == "mfu_low"]
    assert "3,000 tokens/s" in low.evidence and "648,148" in low.evidence and "700.0 TFLOP/s" in low.evidence
    fine = dataclasses.replace(view, achieved_flops=3e14, run=dataclasses.replace(run, tok_s=1.1e6))
    assert not [f for f in detect(fine) if f.kind == "mfu_low"]
