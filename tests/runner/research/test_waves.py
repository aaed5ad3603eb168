"""The analysis of a wave as the lab holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import verbs
from runner.errors import UnknownName
from runner.lab import Lab
from runner.records import Submission, WaveRequest
from runner.research.waves import analyse_wave, heat_map, noise_floor
from tests.runner.labs import finish, make_lab

FACTORS = {"MATRIX_LR": [0.02, 0.04, 0.08], "DEPTH": [6, 10]}


@pytest.fixture
def lab(tmp_path: Path):
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


def truth(cell: dict[str, float]) -> float:
    return 1.0 + {0.02: 0.02, 0.04: 0.0, 0.08: 0.05}[cell["MATRIX_LR"]] + {6: 0.0, 10: -0.03}[int(cell["DEPTH"])]


def test_a_grid_with_a_crash_a_refuted_claim_and_a_floor(lab: Lab) -> None:
    base = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    for run_id, value in zip([base, *verbs.repeat(lab, base, 2, who="cli").run_ids], (1.1, 1.102, 1.098), strict=True):
        finish(lab, run_id, value)
    sent = verbs.submit_wave(lab, WaveRequest(factors=FACTORS), who="cli")
    runs = lab.store.runs("wave_id = ?", (sent.wave_id,))
    waiting = analyse_wave(lab, str(sent.wave_id))
    assert "6 of 6 runs have not ended" in waiting.notes[0]
    for run in runs[:-2]:
        finish(lab, run.id, truth(run.cell or {}))
    finish(lab, runs[-2].id, None)
    finish(lab, runs[-1].id, 0.1, trust="refuted")
    found = analyse_wave(lab, str(sent.wave_id))
    assert (found.completed, found.sd_from) == (4, "class")
    assert found.sd == pytest.approx(0.002)
    assert noise_floor(lab, "cpu", 20.0).dof == 2
    assert found.predicted_best is not None
    assert found.predicted_best.cell == {"MATRIX_LR": 0.04, "DEPTH": 10}
    assert {str(m) for m in found.missing} == {str(r.cell) for r in runs[-2:]}
    heat = heat_map(lab, str(sent.wave_id), "MATRIX_LR", "DEPTH")
    assert heat.values[0] == [pytest.approx(1.02), pytest.approx(0.99)]
    assert heat.values[2] == [None, None]
    assert heat.counts == [[1, 1], [1, 1], [0, 0]]


def test_names_that_do_not_exist(lab: Lab) -> None:
    with pytest.raises(UnknownName, match="wave"):
        analyse_wave(lab, "w9")
    wave = verbs.submit_wave(lab, WaveRequest(factors=FACTORS), who="cli").wave_id
    with pytest.raises(UnknownName) as caught:
        heat_map(lab, str(wave), "MATRIX_LRS", "DEPTH")
    assert "MATRIX_LR" in str(caught.value)


def test_levels_that_came_out_as_one_model_are_named(lab: Lab) -> None:
    factors = {"DEPTH": [6, 8, 10, 12], "MATRIX_LR": [0.02, 0.04]}
    sent = verbs.submit_wave(lab, WaveRequest(factors=factors), who="cli")
    width = {6: 512, 8: 640, 10: 640, 12: 768}
    for n, run in enumerate(lab.store.runs("wave_id = ?", (sent.wave_id,))):
        cell = run.cell or {}
        finish(lab, run.id, 1.0 + n / 100, model_config={"n_embd": width[cell["DEPTH"]], "n_layer": 8})
    notes = analyse_wave(lab, str(sent.wave_id)).notes
    assert [n for n in notes if "same model" in n] == [
        "DEPTH = 8, 10 gave one and the same model, because sizes are rounded: their difference is noise."
    ]
