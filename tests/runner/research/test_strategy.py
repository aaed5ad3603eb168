"""Knobs move as people move constants; strategies find a known valley through noise, crashes and constants that must fit together."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.research.balanced import Balanced, ladder
from runner.research.knobs import knob_of, knobs_of, mended_batch
from runner.research.strategy import Strategy, Told, Trial
from tests.bench.rivals import Greedy, Waves

START = {
    "TOTAL_BATCH_SIZE": 2**19,
    "DEVICE_BATCH_SIZE": 128,
    "MATRIX_LR": 0.04,
    "ADAM_BETA1": 0.8,
    "WEIGHT_DECAY": 0.2,
    "DEPTH": 8,
    "SEED": 42,
}


@pytest.mark.parametrize(
    ("name", "value", "up", "down"),
    [
        ("TOTAL_BATCH_SIZE", 2**19, 2**20, 2**18),
        ("MATRIX_LR", 0.04, 0.08, 0.02),
        ("ADAM_BETA1", 0.8, 0.9, 0.6),
        ("DEPTH", 8, 10, 6),
        ("WARMDOWN_RATIO", 0.5, 0.7, 0.3),
        ("FINAL_LR_FRAC", 0.0, 0.05, 0.0),
        ("ASPECT_RATIO", 64, 96, 43),
        ("SOFTCAP", 15.0, 30.0, 7.5),
    ],
)
def test_a_step_is_what_a_person_would_try(name: str, value: float, up: float, down: float) -> None:
    knob = knob_of(name, value)
    assert knob is not None
    assert (knob.moved(value, 1), knob.moved(value, -1)) == (pytest.approx(up), pytest.approx(down))
    assert type(knob.moved(value, 1)) is type(value) or knob.kind == "zero"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SEED", 42),
        ("OPTIMIZER", "muon"),
        ("COMPILE", True),
        ("DEPTH", None),
        ("HEAD_DIM", 128),
        ("ADAM_BETAS", (0.8, 0.95)),
        ("X", -1.0),
        ("OFFSET", 0),
    ],
)
def test_what_is_no_number_to_move_stays(name: str, value: Any) -> None:
    assert knob_of(name, value) is None


@given(st.sampled_from(sorted(knobs_of(START))), st.floats(-6, 6))
def test_any_step_gives_a_usable_value(name: str, step: float) -> None:
    value = knobs_of(START)[name].moved(START[name], step)
    assert math.isfinite(value)
    assert value >= 0
    assert isinstance(value, int) == isinstance(START[name], int)


def test_the_device_batch_follows_the_total() -> None:
    assert mended_batch({"TOTAL_BATCH_SIZE": 2**17, "DEVICE_BATCH_SIZE": 128}, 2048)["DEVICE_BATCH_SIZE"] == 64
    assert mended_batch({"TOTAL_BATCH_SIZE": 2**19, "DEVICE_BATCH_SIZE": 128}, 2048)["DEVICE_BATCH_SIZE"] == 128
    assert mended_batch({"TOTAL_BATCH_SIZE": 1000, "DEVICE_BATCH_SIZE": 8}, 2048) == {"TOTAL_BATCH_SIZE": 1000, "DEVICE_BATCH_SIZE": 8}
    assert mended_batch({"DEPTH": 3}, None) == {"DEPTH": 3}


BEST = {"TOTAL_BATCH_SIZE": 2**18, "MATRIX_LR": 0.06, "ADAM_BETA1": 0.9, "WEIGHT_DECAY": 0.08}
BEND = {"TOTAL_BATCH_SIZE": 0.004, "MATRIX_LR": 0.006, "ADAM_BETA1": 0.004, "WEIGHT_DECAY": 0.004}


def loss(c: dict[str, Any]) -> float:
    knobs = knobs_of(START)
    value = 1.0 + sum(b * (knobs[k].to(c[k]) - knobs[k].to(BEST[k])) ** 2 for k, b in BEND.items())
    return value + 0.002 * abs(c["DEPTH"] - 8)


def outcome(trial: Trial, rng: random.Random, crashes: float) -> Told:
    c = trial.constants
    if c["TOTAL_BATCH_SIZE"] % (c["DEVICE_BATCH_SIZE"] * 2048) or c["DEVICE_BATCH_SIZE"] > 128 or rng.random() < crashes:
        return Told(trial, None, "crashed")
    return Told(trial, loss(c) + rng.gauss(0, 0.0009), "completed")


def search(strategy: Strategy, waves: int, seed: int, crashes: float = 0.08) -> float:
    rng = random.Random(seed)
    for _ in range(waves):
        strategy.tell([outcome(t, rng, crashes) for t in strategy.ask()])
    return loss(strategy.incumbent)


def mend(c: dict[str, Any]) -> dict[str, Any]:
    return mended_batch(c, 2048)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Waves(dict(START), 16, mend=mend),
        lambda: Balanced(dict(START), mend=mend),
        lambda: Balanced(dict(START), ladder(300.0, pairs=6), mend=mend),
    ],
)
def test_waves_find_the_valley_through_noise_and_crashes(make: Callable[[], Strategy]) -> None:
    assert loss(START) > 1.015
    ends = [search(make(), 8, seed) for seed in range(12)]
    assert sorted(ends)[9] < 1.002  # ten of twelve
    assert max(ends) < 1.008


def test_greedy_improves_but_keeps_lucky_noise() -> None:
    ends = [search(Greedy(START, seed=seed, mend=mend), 60, seed) for seed in range(8)]
    assert max(ends) < loss(START)
    assert sorted(ends)[4] > 1.001


def test_the_old_base_stays_when_the_step_measures_worse() -> None:
    waves = Waves(dict(START), 16, mend=mend)
    rng = random.Random(1)
    waves.tell([outcome(t, rng, 0) for t in waves.ask()])
    assert waves.base != waves.incumbent == START
    roles = [t.role for t in waves.ask()]
    assert roles.count("old") == 2
    worse = [Told(t, 1.5 if t.role == "base" else 1.01, "completed") for t in waves.ask()]
    waves.tell(worse)
    assert waves.incumbent == START


def test_a_combination_that_never_runs_is_given_up() -> None:
    waves = Waves(dict(START), 16)  # nobody mends the batches: total 2**18 with 256 rows cannot run
    rng = random.Random(2)
    for _ in range(12):
        waves.tell([outcome(t, rng, 0) for t in waves.ask()])
    assert loss(waves.incumbent) < 1.006
    assert waves.incumbent["DEVICE_BATCH_SIZE"] <= 128


def test_a_pruned_run_counts_as_worse_and_no_more() -> None:
    waves = Waves(dict(START), 16, mend=mend)
    told = [
        Told(t, 0.2 if t.role == "step" else 1.0 + 0.001 * i, "pruned" if t.role == "step" else "completed", t.role == "step")
        for i, t in enumerate(waves.ask())
    ]
    waves.tell(told)
    assert waves.base == START  # a forecast of 0.2 draws nobody
