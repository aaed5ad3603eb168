"""Effects of waves against textbook numbers and known truths; holes, crashes and blocks included."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import numpy as np
import pytest

from runner.research.effects import Analysis, Result, analyse, told_once
from runner.research.noise import Noise


def grid(
    truth: Any, factors: dict[str, list[Any]], *, repeats: int = 1, block: str = "", noise: float = 0.0, seed: int = 0
) -> list[Result]:
    rng = random.Random(seed)
    cells = [dict(zip(factors, combo, strict=True)) for combo in itertools.product(*factors.values())]
    return [Result(f"r{i:04d}", c, truth(c) + rng.gauss(0, noise), block) for i, c in enumerate(cells * repeats)]


def effect(found: Analysis, factor: str, level: Any) -> float | None:
    return next(e.effect for e in found.effects if (e.factor, e.level) == (factor, level))


# Box, Hunter and Hunter, Statistics for Experimenters, pilot plant 2**3 design: yields 60 72 54 68 52 83 45 80 in standard order.
YIELDS = [60, 72, 54, 68, 52, 83, 45, 80]


def test_the_pilot_plant_of_the_textbook() -> None:
    cells = [{"T": t, "C": c, "K": k} for k in "AB" for c in (20, 40) for t in (160, 180)]
    results = [Result(f"r{i}", cell, float(y)) for i, (cell, y) in enumerate(zip(cells, YIELDS, strict=True))]
    found = analyse(results, factors={"T": [160, 180], "C": [20, 40], "K": ["A", "B"]}, noise=Noise(2.0, 8), lower_is_better=False)
    # printed there: T 23, C -5, K 1.5, TC 1.5, TK 10, CK 0; an effect is the difference of the two levels, ours the deviation from the mean
    assert found.mean == pytest.approx(64.25)
    assert effect(found, "T", 180) == pytest.approx(23 / 2)
    assert effect(found, "C", 40) == pytest.approx(-5 / 2)
    assert effect(found, "K", "B") == pytest.approx(1.5 / 2)
    together = {(i.factors, i.levels): i for i in found.interactions}
    assert together[("T", "K"), (180, "B")].effect == pytest.approx(10 / 2)
    assert together[("C", "K"), (40, "B")].effect == pytest.approx(0)
    assert together[("T", "C"), (180, 40)].effect == pytest.approx(1.5 / 2)
    assert together[("T", "K"), (180, "B")].clear
    assert not together[("T", "C"), (180, 40)].clear
    # the error of an effect there is sigma * sqrt(4 / 8); ours is half of it
    assert together[("T", "K"), (180, "B")].se == pytest.approx(2.0 * (4 / 8) ** 0.5 / 2)
    summary = {f.factor: f for f in found.factors}
    assert (summary["T"].best, summary["T"].gain, summary["T"].badge) == (180, pytest.approx(23), "clear")
    assert summary["T"].se == pytest.approx(2.0 * (4 / 8) ** 0.5)
    assert summary["K"].badge == "within noise"
    assert found.predicted_best is not None
    assert found.predicted_best.cell == {"T": 180, "C": 20, "K": "B"}


def test_least_squares_agree_with_lstsq_when_cells_are_missing() -> None:
    factors = {"LR": [1, 2, 3], "WD": ["a", "b"]}
    results = grid(lambda c: c["LR"] * 0.1 + (c["WD"] == "b") * 0.5, factors, repeats=2, noise=0.05, seed=3)
    results = [Result(r.run_id, r.cell, None, "", "crashed") if i in (1, 4, 8) else r for i, r in enumerate(results)]
    found = analyse(results, factors=factors)
    good = [r for r in results if r.value is not None]
    x = np.array(
        [
            [
                1,
                r.cell["LR"] == 2,
                r.cell["LR"] == 3,
                r.cell["WD"] == "b",
                (r.cell["LR"] == 2) * (r.cell["WD"] == "b"),
                (r.cell["LR"] == 3) * (r.cell["WD"] == "b"),
            ]
            for r in good
        ],
        dtype=float,
    )
    beta = np.linalg.lstsq(x, np.array([r.value for r in good]), rcond=None)[0]
    b_minus_a = beta[3] + (beta[4] + beta[5]) / 3
    wd = next(f for f in found.factors if f.factor == "WD")
    assert wd.gain == pytest.approx(abs(b_minus_a))
    assert any("3 crashed" in n for n in found.notes)


def test_a_level_that_always_crashes_is_named_and_never_predicted() -> None:
    factors = {"LR": [1, 2], "DEPTH": [8, 16]}
    results = [
        Result(r.run_id, r.cell, None, "", "crashed") if r.cell["DEPTH"] == 16 else r
        for r in grid(lambda c: 1.0 - 0.1 * c["LR"], factors, repeats=2, noise=0.001)
    ]
    found = analyse(results, factors=factors)
    assert effect(found, "DEPTH", 16) is None
    assert effect(found, "LR", 2) == pytest.approx(-0.05, abs=0.005)
    assert found.predicted_best is not None
    assert found.predicted_best.cell == {"LR": 2, "DEPTH": 8}
    assert any("DEPTH = 16" in n for n in found.notes)
    assert len(found.missing) == 2


def test_a_cell_that_crashed_by_chance_may_be_the_predicted_best() -> None:
    factors = {"A": [1, 2, 3], "B": [1, 2, 3]}
    results = grid(lambda c: 1.0 - 0.1 * c["A"] - 0.1 * c["B"], factors)
    results[-1] = Result("r9", {"A": 3, "B": 3}, None, "", "crashed")
    found = analyse(results, factors=factors, noise=Noise(0.001, 5))
    assert found.predicted_best is not None
    assert (found.predicted_best.cell, found.predicted_best.ran) == ({"A": 3, "B": 3}, False)
    assert found.predicted_best.value == pytest.approx(0.4)
    assert found.observed_best is not None
    assert found.observed_best.cell in ({"A": 3, "B": 2}, {"A": 2, "B": 3})


def test_hardware_is_a_block_and_no_effect() -> None:
    """All runs of level 2 happen to sit on the faster card but one: raw means would credit the level with the hardware."""
    fast = [Result(f"f{i}", {"LR": 2}, 0.970, "H200") for i in range(5)] + [Result("f9", {"LR": 1}, 0.970, "H200")]
    slow = [Result(f"s{i}", {"LR": 1}, 0.990, "H100") for i in range(5)] + [Result("s9", {"LR": 2}, 0.990, "H100")]
    found = analyse(fast + slow, noise=Noise(0.001, 10))
    assert effect(found, "LR", 2) == pytest.approx(0.0, abs=1e-9)
    assert found.blocks["H200"] == pytest.approx(-0.01)
    assert next(f for f in found.factors).badge == "within noise"


def test_a_level_confounded_with_hardware_is_not_estimated() -> None:
    results = [Result("a", {"LR": 1}, 0.99, "H100"), Result("b", {"LR": 1}, 0.99, "H100"), Result("c", {"LR": 2}, 0.97, "H200")]
    found = analyse(results, noise=Noise(0.001, 10))
    assert effect(found, "LR", 2) is None
    assert found.factors[0].gain is None
    assert found.factors[0].badge == "unknown"


def test_error_bars_cover_the_truth() -> None:
    factors = {"A": [1, 2, 3], "B": [1, 2]}
    inside = total = 0
    for seed in range(200):
        found = analyse(grid(lambda c: 0.1 * c["A"], factors, repeats=3, noise=0.05, seed=seed), factors=factors)
        for e in found.effects:
            truth = 0.1 * (e.level - 2) if e.factor == "A" else 0.0
            assert e.effect is not None
            assert e.se is not None
            inside += abs(e.effect - truth) <= 2.18 * e.se  # t at 12 degrees of freedom
            total += 1
    assert 0.92 <= inside / total <= 0.98


def test_nothing_to_compare_is_said() -> None:
    assert analyse([]).notes == ["No run of this wave has a result."]
    one = analyse([Result("a", {"LR": 1}, 0.9)])
    assert one.mean == 0.9
    assert one.effects == []
    nan = analyse([Result("a", {"LR": 1}, float("nan")), Result("b", {"LR": 2}, 0.9)])
    assert nan.completed == 1


def test_lists_with_different_keys_use_the_base_as_a_level() -> None:
    results = [Result("a", {}, 1.0), Result("b", {"LR": 2}, 0.9), Result("c", {"WD": 3}, 0.95), Result("d", {"LR": 2, "WD": 3}, 0.85)]
    found = analyse(results, noise=Noise(0.001, 9))
    assert effect(found, "LR", 2) == pytest.approx(-0.05)
    assert effect(found, "LR", None) == pytest.approx(0.05)
    assert found.as_json()["predicted_best"]["cell"] == {"LR": 2, "WD": 3}


def test_a_level_that_pruning_cut_off_did_not_crash() -> None:
    factors = {"LR": [1, 2], "DEPTH": [8, 16]}
    ends = iter(["crashed", "pruned", "pruned", "pruned"])
    results = [
        Result(r.run_id, r.cell, None, "", next(ends)) if r.cell["DEPTH"] == 16 else r
        for r in grid(lambda c: 1.0 - 0.1 * c["LR"], factors, repeats=2, noise=0.001)
    ]
    notes = analyse(results, factors=factors).notes
    assert not any("crashed or diverged" in n for n in notes)
    assert any(n.startswith("No run with DEPTH = 16 came to its end") for n in notes)


def test_an_interaction_is_told_once_and_not_with_its_mirror_image() -> None:
    def truth(c: dict[str, Any]) -> float:
        return 1.0 + 0.05 * (c["A"] == 2 and c["B"] == "y") - 0.02 * (c["C"] == 3) * (c["A"] == 1)

    found = analyse(grid(truth, {"A": [1, 2], "B": ["x", "y"], "C": [1, 2, 3]}), noise=Noise(0.001, 10))
    told = told_once(found.interactions)
    assert [i.factors for i in told].count(("A", "B")) == 1  # of four that are equal but for the sign
    assert sorted(i.levels[1] for i in told if i.factors == ("A", "C")) == [1, 2, 3]  # of six
    assert all(i.effect is not None and i.effect <= 1e-9 for i in told)
    assert [abs(i.effect or 0) for i in told] == sorted((abs(i.effect or 0) for i in told), reverse=True)
    unknown = [dataclasses.replace(i, effect=None) for i in found.interactions]
    assert len(told_once(unknown)) == len(told) and told_once([]) == []


def test_repeats_that_agree_to_the_digit_make_nothing_clear() -> None:
    found = analyse(grid(lambda c: 0.9979 - 0.001 * (c["B"] == "y"), {"A": [1, 2], "B": ["x", "y"]}, repeats=2), noise=Noise(0.0, 3))
    assert (found.sd, found.sd_from) == (None, "-")
    assert {f.badge for f in found.factors} == {"unknown"} and not any(i.clear for i in found.interactions)
    assert effect(found, "B", "y") == pytest.approx(-0.0005)


def test_levels_that_never_met_in_one_class_are_compared_as_far_as_they_did() -> None:
    cells = [(0.02, "H200", 1.00), (0.05, "H200", 0.98), (0.03, "H100", 1.01), (0.06, "H100", 1.005)]
    results = [Result(f"r{n}", {"LR": lr}, value, block) for n, (lr, block, value) in enumerate(cells)]
    found = analyse(results, noise=Noise(0.001, 10))
    (factor,) = found.factors
    assert (factor.best, factor.worst, factor.badge) == (0.05, 0.02, "clear") and factor.gain == pytest.approx(0.02)
    assert all(e.effect is None for e in found.effects) and found.predicted_best is None
    assert any("Not every level of LR met every other" in note for note in found.notes)
