"""Balanced waves: what they ask, how they move, and what they do about sizes that do not fit, edges, short budgets and other scales."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from runner.research.balanced import Balanced, Rung, ladder
from runner.research.knobs import knobs_of
from runner.research.noise import Noise
from runner.research.response import Datum, Prior, Response, usual_noise
from runner.research.strategy import Told, Trial

START = {"TOTAL_BATCH_SIZE": 2**19, "MATRIX_LR": 0.04, "ADAM_BETA1": 0.8, "WEIGHT_DECAY": 0.2, "DEPTH": 8, "ASPECT_RATIO": 64, "SEED": 42}
BEST = {"TOTAL_BATCH_SIZE": 2**18, "MATRIX_LR": 0.06, "ADAM_BETA1": 0.9, "WEIGHT_DECAY": 0.08, "DEPTH": 8, "ASPECT_RATIO": 84}
KNOBS = knobs_of(START)


def loss(c: dict[str, Any], scale: float = 1.0) -> float:
    return 1.0 + scale * sum(0.004 * (KNOBS[k].to(c[k]) - KNOBS[k].to(v)) ** 2 for k, v in BEST.items())


def search(strategy: Balanced, waves: int, seed: int, *, fits: Any = lambda c: True, scale: float = 1.0, noise: float = 0.0009) -> None:
    rng = random.Random(seed)
    for _ in range(waves):
        told = []
        for trial in strategy.ask():
            ok = fits(trial.constants)
            told.append(Told(trial, loss(trial.constants, scale) + rng.gauss(0, noise) if ok else None, "completed" if ok else "crashed"))
        strategy.tell(told)


def test_the_first_wave_changes_one_constant_at_a_time_to_both_sides() -> None:
    trials = Balanced(dict(START)).ask()
    assert [t.role for t in trials].count("base") == 4
    changed = [[k for k in KNOBS if t.constants[k] != START[k]] for t in trials if t.role == "step"]
    assert sorted(changed) == sorted([[k] for k in KNOBS for _ in range(2)])


def test_later_waves_are_mirror_images_that_move_everything() -> None:
    search_ = Balanced(dict(START), (Rung(pairs=6),), seed=3)
    search(search_, 1, 0)
    center, trials = search_.incumbent, search_.ask()
    assert len(trials) == 12
    signs = np.array([[np.sign(t.constants[k] - center[k]) for k in KNOBS] for t in trials])
    assert (signs.sum(axis=0) == 0).all()
    assert (np.abs(signs[:6] + signs[6:]) == 0).all()
    assert (np.abs(signs).sum(axis=0) >= 4).all()


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_the_valley_is_found_whatever_the_scale_of_the_metric(scale: float) -> None:
    ends = []
    for seed in range(6):
        found = Balanced(dict(START), (Rung(pairs=6),), seed=seed)
        search(found, 5, seed, scale=scale, noise=0.0009 * scale)
        ends.append((loss(found.incumbent, scale) - 1.0) / scale)
    assert loss(START) > 1.015
    assert sorted(ends)[4] < 0.0015


def test_sizes_that_do_not_fit_together_are_given_up() -> None:
    def fits(c: dict[str, Any]) -> bool:
        return bool(c["DEPTH"] * c["ASPECT_RATIO"] <= 8 * 70)

    for seed in range(4):
        found = Balanced(dict(START), (Rung(pairs=6),), seed=seed)
        search(found, 8, seed, fits=fits)
        assert loss(found.incumbent) < 1.006
        assert fits(found.ran)


def test_a_value_beyond_which_all_diverged_is_not_tried_again() -> None:
    found = Balanced(dict(START), seed=1)
    trials = found.ask()
    found.tell([Told(t, None, "diverged") if t.constants["MATRIX_LR"] > 0.05 else Told(t, loss(t.constants), "completed") for t in trials])
    assert found.incumbent["MATRIX_LR"] < 0.08
    assert all(t.constants["MATRIX_LR"] < 0.08 for t in found.ask())


def test_a_rate_that_diverges_is_left_again_and_blames_no_other_constant() -> None:
    start, knobs = {**START, "MATRIX_LR": 0.075}, knobs_of({**START, "MATRIX_LR": 0.075})

    def value(c: dict[str, Any]) -> float:  # lower and lower with the rate, and then over the edge
        return loss({**c, "MATRIX_LR": BEST["MATRIX_LR"]}) - 0.004 * float(np.log2(c["MATRIX_LR"]))

    for seed in range(4):
        found, rng = Balanced(start, (Rung(pairs=3),), seed=seed), random.Random(seed)
        for _ in range(12):
            found.tell(
                [
                    Told(t, None, "diverged")
                    if t.constants["MATRIX_LR"] > 0.12
                    else Told(t, value(t.constants) + rng.gauss(0, 0.0009), "completed")
                    for t in found.ask()
                ]
            )
        assert 0.06 < found.incumbent["MATRIX_LR"] <= 0.12
        assert loss({**found.incumbent, "MATRIX_LR": BEST["MATRIX_LR"]}) < 1.004
    assert knobs.keys() == found.knobs.keys()


def test_a_wave_that_crashed_leads_back_to_where_runs_had_results() -> None:
    found = Balanced(dict(START), (Rung(pairs=6),), seed=1)
    search(found, 1, 0)
    moved = dict(found.incumbent)
    found.tell([Told(t, None, "crashed") for t in found.ask()])
    assert found.ran == START
    assert [found.incumbent[k] for k in ("DEPTH", "ASPECT_RATIO")] != [moved[k] for k in ("DEPTH", "ASPECT_RATIO")]


def test_the_ladder_screens_short_and_confirms_on_the_target() -> None:
    found = Balanced(dict(START), ladder(300.0, pairs=3))
    first = found.ask()
    assert {(t.budget_s, t.confirm) for t in first} == {(100.0, False)}
    found.tell([Told(t, loss(t.constants), "completed") for t in first])
    second = found.ask()
    assert {(t.budget_s, t.confirm) for t in second} == {(300.0, True)}
    assert len(second) == 6


def test_a_longer_budget_is_foreseen_to_want_a_larger_batch() -> None:
    def seen(octaves: float) -> list[Datum]:
        points = [START, *({**START, "TOTAL_BATCH_SIZE": 2**n} for n in (17, 18, 20))]
        values = [0.004 * (np.log2(p["TOTAL_BATCH_SIZE"]) - 18) ** 2 for p in points]
        return [Datum(p, v, "short", octaves) for p, v in zip(points, values, strict=True)]

    best = {}
    for octaves in (0.0, -2.0):
        response = Response(KNOBS, seen(octaves), {**START, "TOTAL_BATCH_SIZE": 2**18}, 0.0005, Prior())
        moves = np.zeros((2, len(KNOBS)))
        moves[:, list(KNOBS).index("TOTAL_BATCH_SIZE")] = (-1, 1)
        down, up = response.change(moves)
        best[octaves] = up - down
    assert best[-2.0] < best[0.0] - 0.001


def test_a_pruned_run_is_a_hint_and_no_more() -> None:
    found = Balanced(dict(START), seed=1)
    trials = found.ask()
    found.tell([Told(t, 0.9 if t.role == "step" else 1.0, "pruned" if t.role == "step" else "completed", t.role == "step") for t in trials])
    heard = Balanced(dict(START), seed=1)
    heard.tell([Told(t, 0.9 if t.role == "step" else 1.0, "completed") for t in heard.ask()])
    one = Response(KNOBS, found._known(), START, 0.001, Prior())
    two = Response(KNOBS, heard._known(), START, 0.001, Prior())
    move = np.eye(len(KNOBS))
    assert np.abs(one.change(move)).max() < np.abs(two.change(move)).max()


def test_few_repeats_that_agree_do_not_make_the_noise_zero() -> None:
    assert usual_noise(0.0, 1, 1.0) > 5e-4
    assert usual_noise(0.01, 400, 1.0) == pytest.approx(0.01, rel=0.02)
    assert usual_noise(None, 0, 3.0) == pytest.approx(3e-3)


def test_a_script_without_numbers_has_nothing_to_ask() -> None:
    nothing: list[Trial] = Balanced({"OPTIMIZER": "muon", "SEED": 1}).ask()
    assert nothing == []


def test_the_noise_of_the_class_counts_where_it_is_better_known() -> None:
    found = Balanced(dict(START), floor=Noise(0.004, 200))
    search(found, 1, 0)
    assert found.sd == pytest.approx(0.004, rel=0.05)
    found = Balanced(dict(START), floor=Noise(0.004, 1))
    search(found, 1, 0)
    assert found.sd < 0.0025
