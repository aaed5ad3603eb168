"""The analysis of a wave as the lab holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner import queries, verbs
from runner.errors import UnknownName
from runner.lab import Lab
from runner.records import Submission, WaveRequest
from runner.research.classes import class_key
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


def test_report_ones_own_sequence_comes_out_as_its_author_read_it(lab: Lab) -> None:
    """Baseline, fused-optimizer compile, 2**18, 2**17, then the longer budget: attributes may win, and a budget is a rung of its own."""
    told = [
        (1.165452, {"compile": "none"}, {"TOTAL_BATCH_SIZE": 2**19}),
        (1.155400, {"compile": "optimizer"}, {"TOTAL_BATCH_SIZE": 2**19}),
        (1.108381, {"compile": "optimizer"}, {"TOTAL_BATCH_SIZE": 2**18}),
        (1.089424, {"compile": "optimizer"}, {"TOTAL_BATCH_SIZE": 2**17}),
    ]
    ids = []
    facts = {"gpu_name": "NVIDIA GeForce RTX 5090", "torch": "2.9", "driver": "580", "evaluator": "e"}
    key = class_key(facts)
    for n, (value, attributes, overrides) in enumerate(told):
        wish = Submission(
            overrides={**overrides, **({"NAME": "fused"} if n else {})}, budget_s=20, purpose="experiment" if n else "baseline"
        )
        ids.append(verbs.submit(lab, wish, who="cli").run_ids[0])
        finish(lab, ids[-1], value, class_key=key, attributes=attributes)
    long = verbs.promote(lab, ids[-1], who="cli", budget_s=80).run_ids[0]
    finish(lab, long, 0.999445, class_key=key, attributes=told[-1][1], budget_s=80.0)
    shown = queries.leaderboard(lab, class_key=key, budget_s=20.0)
    assert [r["id"] for r in shown["rows"]] == ids[::-1]
    assert [round(r["gain"], 6) for r in shown["rows"]] == [0.076028, 0.057071, 0.010052, 0.0]
    assert [(s["budget_s"], s["id"]) for s in shown["ladder"]] == [(20.0, ids[-1]), (80.0, long)]
    assert [s["class"] for s in shown["classes"]] == [key, key]  # one class: what the agent changed is no part of it
    assert {r["badge"] for r in shown["rows"]} == {"unknown", "baseline"}  # nothing was repeated


def test_a_cell_that_was_known_before_counts_with_its_results(lab: Lab) -> None:
    base = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    for run_id, value in zip([base, *verbs.repeat(lab, base, 2, who="cli").run_ids], (1.1, 1.102, 1.098), strict=True):
        finish(lab, run_id, value)
    sent = verbs.submit_wave(lab, WaveRequest(factors={"MATRIX_LR": [0.02, 0.04], "DEPTH": [8, 10]}), who="cli")
    assert sent.notes[0] == f"Left out MATRIX_LR=0.04, DEPTH=8: in effect the same as {base}."
    for run_id, value in zip(sent.run_ids, (1.0, 1.0, 1.0), strict=True):
        finish(lab, run_id, value)
    found = analyse_wave(lab, str(sent.wave_id))
    assert (found.runs, found.completed, found.missing) == (3, 3, [])
    assert {(e.factor, e.level): e.n for e in found.effects} == {
        ("MATRIX_LR", 0.02): 2, ("MATRIX_LR", 0.04): 4, ("DEPTH", 8): 4, ("DEPTH", 10): 2}  # fmt: skip
    assert found.predicted_best is not None and found.predicted_best.ran
    assert f"Cells known before count with the results of {base}" in " ".join(found.notes)
    assert heat_map(lab, str(sent.wave_id), "MATRIX_LR", "DEPTH").values == [[1.0, 1.0], [pytest.approx(1.1), 1.0]]
    lab.store.update_run(base, class_key="another GPU")
    assert analyse_wave(lab, str(sent.wave_id)).blocks == {}  # results of classes that the wave has none of tell it nothing


def test_a_list_is_read_against_the_script_it_started_from(lab: Lab) -> None:
    base = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    for run_id, value in zip([base, *verbs.repeat(lab, base, 2, who="cli").run_ids], (1.1, 1.102, 1.098), strict=True):
        finish(lab, run_id, value)
    cells = [{"MATRIX_LR": 0.02}, {"DEPTH": 10}, {"MATRIX_LR": 0.08}, {"MATRIX_LR": 0.04}]
    sent = verbs.submit_wave(lab, WaveRequest(cells=cells), who="cli")
    for run_id, value in zip(sent.run_ids, (1.0, 1.05, 1.2), strict=True):
        finish(lab, run_id, value)
    found = analyse_wave(lab, str(sent.wave_id))
    assert (found.runs, found.completed) == (3, 3)
    assert {(f.factor, f.best, f.worst, f.badge) for f in found.factors} == {
        ("MATRIX_LR", 0.02, 0.08, "clear"), ("DEPTH", 10, 8, "clear")}  # fmt: skip
    assert {(e.factor, e.level): e.n for e in found.effects} == {
        ("MATRIX_LR", 0.02): 1, ("MATRIX_LR", 0.04): 4, ("MATRIX_LR", 0.08): 1, ("DEPTH", 8): 5, ("DEPTH", 10): 1}  # fmt: skip
    best = found.predicted_best
    assert best is not None and best.cell == {"MATRIX_LR": 0.02, "DEPTH": 10}
    assert best.value == pytest.approx(0.95) and not best.ran
    assert found.observed_best is not None and found.observed_best.cell == {"MATRIX_LR": 0.02, "DEPTH": 8}
