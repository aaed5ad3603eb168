"""The tuning loop on a known surface: it finds the batch, survives being stopped, and ends in report 1's table."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runner.errors import BadValue, Refused
from runner.lab import Lab
from runner.research import tune as tune_module
from runner.research.axes import BATCH, RATE, axes_of, said
from runner.research.tune import Plan, Tune
from tests.runner.labs import finish, make_lab

SCRIPT = "SEED = 42\nTOTAL_BATCH_SIZE = 2**19\nDEVICE_BATCH_SIZE = 128\nMATRIX_LR = 0.04\nEMBEDDING_LR = 0.6\nDEPTH = 8\n"
PLAN = Plan(20.0, (80.0,), waves=4, size=8)


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    opened = make_lab(tmp_path, script=SCRIPT)
    (opened.policy().trainer.folder / "prepare.py").write_text("TIME_BUDGET = 300\nMAX_SEQ_LEN = 2048\n")
    yield opened
    opened.close()


def truth(constants: dict[str, Any], budget_s: float) -> float:
    batch, rate = math.log2(constants["TOTAL_BATCH_SIZE"]), math.log2(constants["MATRIX_LR"] / 0.04)
    return 1.1 + 0.008 * (batch - 17.2) ** 2 + 0.004 * (rate - 0.4) ** 2 - 0.05 * math.log2(budget_s / 20)


def play(lab: Lab, tune: Tune) -> None:
    """Bring what is pending to its end, with a little noise that depends on the seed alone."""
    for run in tune.pending():
        c = run.constants
        assert c["TOTAL_BATCH_SIZE"] % (c["DEVICE_BATCH_SIZE"] * 2048) == 0  # no slot is spent on an assert that must fail
        finish(lab, run.id, truth(c, run.budget_s) + 0.0005 * math.sin(run.seq), budget_s=run.budget_s, tokens_m=50.0, num_steps=100)


def finished(lab: Lab, plan: Plan) -> Tune:
    steps = 0
    while Tune(lab, plan).advance():  # a new object at every step: everything is in the lab
        play(lab, Tune(lab, plan))
        steps += 1
        assert steps < 20
    return Tune(lab, plan)


def ends_well(tune: Tune) -> None:
    rows = tune.table()
    assert [r["budget_s"] for r in rows] == sorted(r["budget_s"] for r in rows)
    short = [r for r in rows if r["budget_s"] == 20.0]
    assert short[-1]["val_bpb"] < next(r for r in short if r["badge"] == "baseline")["val_bpb"] - 0.01
    assert short[-1]["badge"] == "clear"
    longest = [r for r in rows if r["budget_s"] == 80.0]
    assert longest[0]["badge"] == "baseline"
    assert longest[-1]["changes"]
    assert longest[-1]["runs"] >= 2
    assert longest[-1]["badge"] == "clear"
    assert longest[-1]["val_bpb"] < short[-1]["val_bpb"]


def test_it_finds_the_batch_and_promotes_along_the_budget(lab: Lab) -> None:
    tune = finished(lab, PLAN)
    best = tune.best()
    assert best is not None
    assert best.constants["TOTAL_BATCH_SIZE"] == 2**17
    assert {r.purpose for r in tune.runs()} == {"baseline", "repeat", "tune"}
    assert {r.purpose for r in tune.runs() if r.budget_s == 80.0 and not r.overrides.keys() - {"SEED"}} == {"baseline"}
    ends_well(tune)


def test_optuna_finds_it_too(lab: Lab) -> None:
    pytest.importorskip("optuna", reason="the `tune` extra is not installed")
    tune = finished(lab, Plan(20.0, (80.0,), waves=5, size=10, optimizer="optuna", knobs=(BATCH, RATE)))
    best = tune.best()
    assert best is not None
    assert best.constants["TOTAL_BATCH_SIZE"] in (2**17, 2**18)
    ends_well(tune)


@pytest.mark.parametrize("optimizer", ["waves", "optuna"])
def test_a_tune_that_was_stopped_asks_what_it_would_have_asked(tmp_path: Path, optimizer: str) -> None:
    if optimizer == "optuna":
        pytest.importorskip("optuna", reason="the `tune` extra is not installed")
    asked = []
    for stop in (True, False):
        folder = tmp_path / str(stop)
        folder.mkdir()
        with closing(make_lab(folder, script=SCRIPT)) as lab:
            (lab.policy().trainer.folder / "prepare.py").write_text("TIME_BUDGET = 300\nMAX_SEQ_LEN = 2048\n")
            plan = Plan(20.0, (80.0,), waves=2, size=8, optimizer=optimizer)
            tune = Tune(lab, plan)
            while tune.advance():
                tune = Tune(lab, plan) if stop else tune
                play(lab, tune)
            asked.append([r.overrides for r in tune.runs()])
    assert len(asked[0]) > 20
    assert asked[0] == asked[1]


def test_a_step_that_was_cut_off_half_way_is_the_same_step_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = Tune(lab, PLAN)
    assert tune.advance()
    play(lab, tune)
    real, left = tune_module.verbs.submit, [3]

    def cut(*args: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(*args, **named)

    monkeypatch.setattr(tune_module.verbs, "submit", cut)
    with pytest.raises(KeyboardInterrupt):
        tune.advance()
    monkeypatch.setattr(tune_module.verbs, "submit", real)
    before = lab.store.count_runs()
    again = Tune(lab, PLAN)
    assert again.advance()
    assert before == 2 + 3
    assert lab.store.count_runs() == len(again.runs())


def test_a_step_that_would_pass_a_limit_is_not_begun(tmp_path: Path) -> None:
    with closing(make_lab(tmp_path, script=SCRIPT, policy="max_runs = 6")) as lab:
        tune = Tune(lab, PLAN)
        assert tune.advance()
        play(lab, tune)
        with pytest.raises(Refused, match="max_runs"):
            Tune(lab, PLAN).advance()
        assert lab.store.count_runs() == 2
        assert [r["badge"] for r in Tune(lab, PLAN).table()] == ["baseline"]


def test_a_point_becomes_constants_that_fit(lab: Lab) -> None:
    tune = Tune(lab, PLAN)
    assert tune.axes.overrides({}) == {}
    assert tune.axes.overrides({BATCH: 2**17, RATE: 0.5, "DEPTH": 6}) == {
        "TOTAL_BATCH_SIZE": 2**17,
        "DEVICE_BATCH_SIZE": 64,
        "MATRIX_LR": 0.02,
        "EMBEDDING_LR": 0.3,
        "DEPTH": 6,
    }
    assert said({BATCH: 2**17, RATE: 0.5, "DEPTH": 6}) == "batch 131072, rate x 0.5, DEPTH 6"


def test_axes_are_found_in_the_script_or_named() -> None:
    constants = {"DEPTH": None, "ASPECT_RATIO": 64, "TOTAL_BATCH_SIZE": None, "MATRIX_LR": 0.04, "OPTIMIZER": "muon", "WEIGHT_DECAY": 0.2}
    assert axes_of(constants) == (BATCH, RATE, "DEPTH", "ASPECT_RATIO")
    assert axes_of(constants, ("WEIGHT_DECAY", BATCH)) == ("WEIGHT_DECAY", BATCH)
    with pytest.raises(BadValue, match="OPTIMIZER cannot be tuned") as refused:
        axes_of(constants, ("OPTIMIZER",))
    assert "WEIGHT_DECAY" in str(refused.value.next_step)
    with pytest.raises(Refused, match="nothing to tune"):
        axes_of({"NAME": "x"})


def test_what_the_script_leaves_open_is_read_from_the_baseline(tmp_path: Path) -> None:
    script = "SEED = 1\nDEPTH = None\nASPECT_RATIO = 64\nTOTAL_BATCH_SIZE = None\nMATRIX_LR = 0.04\n"
    with closing(make_lab(tmp_path, script=script)) as lab:
        tune = Tune(lab, PLAN)
        assert tune.advance()
        for run in tune.pending():
            finish(lab, run.id, 1.64, depth=2, attributes={"total_batch": 2048})
        assert tune.advance()
        assert tune.axes.own == {BATCH: 2048, RATE: 1.0, "DEPTH": 2, "ASPECT_RATIO": 64}
        tried = [r.overrides for r in tune.pending()]
        assert {"DEPTH": 1} in tried
        assert {"ASPECT_RATIO": 96} in tried
        assert {"TOTAL_BATCH_SIZE": 1024} in tried
        assert all(set(o) <= {"SEED"} for o in tried[:2])


GPU = "NVIDIA H200"
WHOLE = {"gpu_name": GPU, "quick": False, "matmul_flops": 7.9e14, "peak_flops": 9.895e14,
         "choices": {"ATTENTION": "cudnn", "COMPILE": "both", "DEVICE_TOKENS": 65536}}  # fmt: skip


def measurable(lab: Lab, *, uuid: str = "GPU-1", name: str = GPU, found: dict[str, Any] | None = None) -> None:
    """Give a lab a trainer with a preflight, and one host with one card as the daemon would write them."""
    (lab.policy().trainer.folder / "preflight.py").write_text("")
    host = lab.policy().hosts[0].name
    lab.store.upsert_host(host, kind="local", state="up", since=0.0, info={"preflights": [found] if found else []})
    lab.store.upsert_gpu(uuid, host=host, idx=0, name=name, mem_total_mib=1, state="free", since=0.0)


def test_the_gpus_are_measured_before_anything_is_tuned(lab: Lab) -> None:
    measurable(lab)
    assert Tune(lab, PLAN).advance()
    (measuring,) = lab.store.runs()
    assert (measuring.purpose, measuring.gpu_type, measuring.budget_s > 300) == ("preflight", GPU, True)
    tune = Tune(lab, PLAN)  # another process, after a kill
    assert tune.advance() and [r.id for r in tune.pending()] == [measuring.id]
    assert tune.ground.lines() == [f"{measuring.id} measures {GPU} of {measuring.want_host}"]
    lab.store.update_run(measuring.id, phase="ended", outcome="completed", cause_text=f"{GPU}: 790 TFLOP/s; attention cudnn")
    measurable(lab, found=WHOLE)
    tune = Tune(lab, PLAN)
    assert tune.advance() and [r.purpose for r in tune.pending()] == ["baseline", "baseline"]
    assert tune.ground.lines() == [f"{measuring.id} measured {GPU}: 790 TFLOP/s; attention cudnn"]
    (row,) = tune.ground.rows()
    assert (row["attention"], row["compile"], row["device_tokens"], row["quick"]) == ("cudnn", "both", 65536, False)
    Tune(lab, PLAN, restart=True).advance()  # it is known now
    assert lab.store.count_runs("purpose = 'preflight'") == 1


def test_a_preflight_that_fails_or_is_cancelled_holds_no_tune_up(lab: Lab) -> None:
    measurable(lab)
    Tune(lab, PLAN).advance()
    lab.store.update_run("r0001", phase="ended", outcome="crashed", cause_text="it could not be measured")
    assert Tune(lab, PLAN).advance()
    assert [r.purpose for r in Tune(lab, PLAN).pending()] == ["baseline", "baseline"]
    assert Tune(lab, PLAN).ground.lines() == ["r0001 it could not be measured"]


def test_where_nothing_can_be_measured_it_says_so_and_goes_on(tmp_path: Path) -> None:
    cases: list[tuple[str, str, str, dict[str, Any]]] = [
        ("upstream", "", "has no preflight.py", {}),
        ("cpu", "", "has no GPU", {"uuid": "CPU:here", "name": "a CPU"}),
        ("fake", '[[host]]\nname = "sim"\nkind = "fake"\ntypes = {H100 = 1}\n', "simulated", {"name": "H100"}),
        ("known", "", "was measured before: NVIDIA H200: 790 TFLOP/s", {"found": WHOLE}),
        ("limit", "", "not measured first: 1 run of", {}),
    ]
    for name, hosts, words, card in cases:
        limit = "max_gpu_hours = 0.1" if name == "limit" else ""
        with closing(make_lab(tmp_path / name, script=SCRIPT, hosts=hosts, policy=limit)) as lab:
            if name != "upstream":
                measurable(lab, **card)
            tune = Tune(lab, PLAN)
            assert tune.advance() and {r.purpose for r in tune.pending()} == {"baseline"}, name
            (line,) = tune.ground.lines()
            assert words in line


def test_a_quick_measurement_is_not_enough_and_a_type_limits_what_is_measured(lab: Lab) -> None:
    measurable(lab, found={**WHOLE, "quick": True})
    lab.store.upsert_gpu("GPU-2", host=lab.policy().hosts[0].name, idx=1, name="NVIDIA A100", mem_total_mib=1, state="free", since=0.0)
    tune = Tune(lab, Plan(20.0, (80.0,), gpu_type="H200"))
    assert tune.advance()
    (run,) = tune.pending()
    assert (run.gpu_type, run.priority) == (GPU, 0.0)  # nobody else waits for it
    assert [r["gpu_name"] for r in tune.ground.rows()] == [GPU]


def test_it_waits_until_the_daemon_has_seen_the_hosts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    (lab.policy().trainer.folder / "preflight.py").write_text("")
    tune = Tune(lab, PLAN)
    assert tune.advance() and not lab.store.count_runs() and tune.ground.kept is None
    monkeypatch.setattr("runner.research.ground.LOOK_S", 0.0)
    assert tune.advance() and [r.purpose for r in tune.pending()] == ["baseline", "baseline"]
    assert "does not answer" in tune.ground.lines()[0]


def test_nothing_is_asked_twice_while_runs_are_pending(lab: Lab) -> None:
    tune = Tune(lab, PLAN)
    assert tune.advance()
    assert tune.advance()
    assert lab.store.count_runs() == 2
    assert Tune(lab, PLAN, restart=True).runs() == []


def test_a_restart_clears_the_old_queue(lab: Lab) -> None:
    old = Tune(lab, PLAN)
    old.advance()
    first, second = (r.id for r in old.pending())
    lab.store.update_run(first, phase="running")
    tune = Tune(lab, PLAN, restart=True)
    waiting, live = tune.clear_away()
    assert second in waiting and f"{first} goes on" in live
    assert [lab.store.run(i).wanted for i in (first, second)] == ["run", "cancel"]  # type: ignore[union-attr]
    assert tune.clear_away() == [] and Tune(lab, PLAN).clear_away() == []
    assert tune.advance() and {first, second}.isdisjoint(r.id for r in tune.runs())


def test_what_cannot_be_tuned_says_so(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="optimizer"):
        Tune(lab, Plan(20.0, (), optimizer="magic"))
    tune = Tune(lab, PLAN)
    tune.advance()
    for run in tune.pending():
        finish(lab, run.id, None)
    (lab.policy().trainer.folder / "train.py").write_text(SCRIPT.replace("2**19", "None"))
    with pytest.raises(Refused, match="baseline has no result"):
        Tune(lab, PLAN).advance()
    other = make_lab(tmp_path / "other", script="NAME = 'x'\n")
    with pytest.raises(Refused, match="nothing to tune"):
        Tune(other, PLAN)
    other.close()


def test_a_small_machine_has_small_batches(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, script=SCRIPT.replace("2**19", "None").replace("DEVICE_BATCH_SIZE = 128", "DEVICE_BATCH_SIZE = None"))
    tune = Tune(lab, PLAN)
    tune.advance()
    for run in tune.pending():
        finish(lab, run.id, 1.68, attributes={"total_batch": 2048})
    tune.advance()
    batches = {r.constants["TOTAL_BATCH_SIZE"] for r in tune.pending()}
    assert batches == {None, 1024, 4096}
    lab.close()
