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
    assert len({t.value for t in told}) > 8             # repeats differ by their noise
    assert lab.store.count_runs("outcome = 'completed'") == 16
    lab.close()
