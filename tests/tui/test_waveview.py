"""The heat map of a wave: one class on one scale, and each cell without a value says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.lab import Lab
from runner.research.effects import Result, analyse
from tests.tui import rows, scenes
from tests.tui.rows import CLASS_H200, H200
from tui.waveview import WaveLoader, duplicate_lines, effect_lines, heat_lines


def wave_of(lab: Lab, cells: list[tuple[Any, ...]]) -> str:
    """A wave of (rate, depth, val, how) cells."""
    wave = lab.store.insert_wave(
        created_at=rows.NOW, kind="grid", title="t", hypothesis=None, base_sha="x", base_run=None,
        factors={"RATE": [0.1, 0.2, 0.3], "DEPTH": [6, 8]}, repeats=1, budget_s=300.0, agent="cli",
    )  # fmt: skip
    for rate, depth, val, how in cells:
        facts = {"wave_id": wave, "cell": {"RATE": rate, "DEPTH": depth}}
        if how.get("phase"):
            rows.add_run(lab, **facts, **how)
        else:
            rows.ended(lab, val, at=10, **facts, **how)
    return wave


def test_results_of_two_classes_do_not_share_a_scale(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    wave = wave_of(
        lab,
        [
            (0.1, 6, 1.00, {}), (0.2, 6, 0.98, {}), (0.2, 8, 0.50, {"gpu": H200}), (0.1, 8, None, {"cause": "oom"}),
            (0.3, 6, None, {"phase": "queued"}), (0.3, 8, 0.2, {"trust_why": "held: too good"}),
        ],
    )  # fmt: skip
    view = WaveLoader(wave)(lab)
    assert view.heat is not None and view.heat.left_out == 1 and view.heat.class_key != CLASS_H200
    shown = [line.text for line in heat_lines(view, 60)]
    assert "1.0000" in shown[2] and "crashed" in shown[2]
    assert "█  0.9800" in shown[3] and "elsewhere" in shown[3], "the best of this class is the darkest, whatever another card reached"
    assert "to come" in shown[4] and "in doubt" in shown[4]
    assert "0.5000" not in "".join(shown)
    assert "1 result of other classes cannot be compared" in " ".join(shown)


def test_repeats_of_a_cell_are_no_duplicates(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    same = {"effective": "one"}
    wave = wave_of(lab, [(0.1, 6, 1.0, same), (0.1, 6, 1.01, same), (0.2, 6, 0.98, {"effective": "two"}), (0.3, 8, 0.99, same)])
    view = WaveLoader(wave)(lab)
    assert [line.text for line in duplicate_lines(view)] == ["r0001 and r0004 are the same source in effect"]


def test_a_main_effect_says_that_it_depends_on_another_factor(tmp_path: Path) -> None:
    """The level that is best on average is the worst beside one of the other factor's levels: the bars alone would mislead."""
    lab = scenes.empty_lab(tmp_path)
    cells = [(0.1, 6, 1.00), (0.1, 8, 0.90), (0.2, 6, 0.91), (0.2, 8, 0.99), (0.3, 6, 0.95), (0.3, 8, 0.95)]
    crossed = wave_of(lab, [(a, b, v + e, {}) for a, b, v in cells for e in (0.0, 0.001)])
    told = [line.text for line in effect_lines(WaveLoader(crossed)(lab).analysis, 100)]
    assert "Interactions clear of the noise" in told
    assert [t.strip() for t in told if "average" in t] == [
        "an average: which level is best depends on DEPTH",
        "an average: which level is best depends on RATE",
    ]
    plain = wave_of(lab, [(a, b, 1.0 + a + b / 100 + e, {}) for a in (0.1, 0.2, 0.3) for b in (6, 8) for e in (0.0, 0.001)])
    assert not any("average" in line.text for line in effect_lines(WaveLoader(plain)(lab).analysis, 100))


def test_a_level_that_ran_and_cannot_be_told_apart_is_not_one_without_a_result() -> None:
    cells = [({"RATE": 0.1, "DEPTH": 6}, 1.0), ({"RATE": 0.2, "DEPTH": 8}, 0.9), ({"RATE": 0.3, "DEPTH": 8}, None)]
    runs = [Result(f"r{n}", cell, value, "H100", "completed" if value else "crashed") for n, (cell, value) in enumerate(cells)]
    told = [line.text.strip() for line in effect_lines(analyse(runs), 100)]
    assert sum("these runs cannot tell its levels apart" in line for line in told) == 2
    assert {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in told if line[:2] in ("0.", "6 ", "8 ")} == {
        "0.1": "not told apart from the rest  n 1", "0.2": "not told apart from the rest  n 1", "0.3": "no result",
        "6": "not told apart from the rest  n 1", "8": "not told apart from the rest  n 1",
    }  # fmt: skip


def test_the_heat_map_says_what_is_dark_and_what_it_averages_over(tmp_path: Path) -> None:
    lab = scenes.empty_lab(tmp_path)
    wave = wave_of(lab, [(0.1, 6, 1.0, {}), (0.2, 8, 0.9, {})])
    assert "█ is best" in [line.text for line in heat_lines(WaveLoader(wave)(lab), 60)]
    three = lab.store.insert_wave(
        created_at=rows.NOW, kind="grid", title="t", hypothesis=None, base_sha="x", base_run=None,
        factors={"RATE": [0.1, 0.2], "DEPTH": [6, 8], "WIDTH": [1, 2]}, repeats=1, budget_s=300.0, agent="cli",
    )  # fmt: skip
    rows.ended(lab, 1.0, at=10, wave_id=three, cell={"RATE": 0.1, "DEPTH": 6, "WIDTH": 1})
    assert "█ is best; means over WIDTH" in [line.text for line in heat_lines(WaveLoader(three)(lab), 60)]
