"""The simulated night plays through the real store and scheduler, and its clock and counts add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.research.strategy import Trial
from tests.bench import night
from tests.runner.labs import make_lab


@pytest.mark.timeout(60)
def test_a_night_of_waves_reaches_the_best_and_counts_what_it_took() -> None:
    surface = night.Surface(None)
    entry = next(e for e in night.ENTRIES if e.name == "waves")
    found = night.night(surface, entry, 0, cap_hours=4.0)
    assert found.reached
    assert 0.1 < found.hours < 4.0
    assert found.gpu_hours <= found.hours * 16
    assert found.runs >= 28


def test_sixteen_runs_on_two_gpus_take_eight_turns(tmp_path: Path) -> None:
    surface = night.Surface(None)
    surface.crashes = 0.0
    lab = make_lab(tmp_path, script=surface.source())
    play = night.Night(surface, lab, ["H100", "H100"], 1, "off")
    told = play.play([Trial(dict(surface.start), "base")] * 16, None, None)
    one = night.START_S + night.BUDGET_S + night.EVAL_S
    assert play.now == pytest.approx(8 * one)
    assert play.gpu_s == pytest.approx(16 * one)
    assert [t.outcome for t in told] == ["completed"] * 16
    assert len({t.value for t in told}) > 8  # repeats differ by their noise
    assert lab.store.count_runs("outcome = 'completed'") == 16
    lab.close()


@pytest.mark.timeout(90)
def test_a_cheap_first_wave_and_small_later_ones_need_fewer_gpu_hours() -> None:
    surface = night.Surface(None)
    entries = {e.name: e for e in night.ENTRIES}
    plain, staged = ([night.night(surface, entries[name], seed, cap_hours=4.0) for seed in range(2)] for name in ("waves", "staged"))
    assert all(r.reached for r in (*plain, *staged))
    assert sum(r.gpu_hours for r in staged) < 0.8 * sum(r.gpu_hours for r in plain)


@pytest.mark.parametrize("name", ["narrow", "kinked"])
def test_the_further_surfaces_are_surfaces(name: str) -> None:
    surface = night.Surface(str(Path(night.__file__).parent / "surfaces" / f"{name}.py"))
    start = surface.start
    assert surface.repeats == 1  # its noise has a switch
    assert surface.noisy.score(start, "H100", 300.0, 7).val_bpb == surface.noisy.score(start, "H100", 300.0, 7).val_bpb
    assert surface.true(start, "H200") < surface.true(start, "H100")
    assert surface.true({**start, "TOTAL_BATCH_SIZE": 2**18}, "H200") < surface.true(start, "H200")
    assert surface.noisy.score({**start, "DEVICE_BATCH_SIZE": 512}, "H100", 300.0, 1).outcome == "crashed"
    with pytest.raises(KeyError, match="NOTHING"):
        surface.noisy.score({"NOTHING": 1})
