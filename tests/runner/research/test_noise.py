"""The noise floor and badges, against tables and by simulation."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.research.noise import CLEAR, UNKNOWN, WITHIN, Noise, gain, pooled, smallest_clear_gain, t_cdf, t_quantile

# Student's t, as printed in statistical tables (Abramowitz and Stegun 26.10).
TABLE = {
    (0.975, 1): 12.706,
    (0.975, 2): 4.303,
    (0.975, 5): 2.571,
    (0.975, 10): 2.228,
    (0.975, 30): 2.042,
    (0.975, 120): 1.980,
    (0.95, 1): 6.314,
    (0.95, 3): 2.353,
    (0.95, 10): 1.812,
    (0.995, 4): 4.604,
    (0.995, 60): 2.660,
}


@pytest.mark.parametrize(("p", "dof"), TABLE)
def test_t_quantiles_are_those_of_the_tables(p: float, dof: int) -> None:
    assert t_quantile(p, dof) == pytest.approx(TABLE[p, dof], abs=6e-4)


@given(st.floats(-50, 50), st.integers(1, 300))
def test_t_is_symmetric_and_grows(t: float, dof: int) -> None:
    assert t_cdf(t, dof) + t_cdf(-t, dof) == pytest.approx(1, abs=1e-12)
    assert t_cdf(t, dof) <= t_cdf(t + 0.5, dof)


def test_a_pooled_deviation_is_that_of_the_textbook() -> None:
    assert pooled([[1.0, 3.0]]) == Noise(pytest.approx(statistics.stdev([1.0, 3.0])), 1)
    both = pooled([[1.0, 2.0, 3.0], [10.0, 14.0], [7.0]])
    assert both == Noise(pytest.approx(((2 * 1.0 + 1 * 8.0) / 3) ** 0.5), 3)
    assert pooled([[1.0], [2.0], []]) == Noise(None, 0)
    assert pooled([[1.0, float("nan"), 2.0]]).dof == 1


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5), max_size=6), st.randoms())
def test_order_of_arrival_changes_nothing(groups: list[list[float]], rng: random.Random) -> None:
    shuffled = [rng.sample(g, len(g)) for g in rng.sample(groups, len(groups))]
    a, b = pooled(groups), pooled(shuffled)
    assert a.dof == b.dof
    assert a.sd == (None if b.sd is None else pytest.approx(b.sd, rel=1e-9, abs=1e-12))


def test_without_repeats_nobody_knows() -> None:
    found = gain([0.90], [0.99], Noise(None, 0))
    assert (found.badge, found.se) == (UNKNOWN, None)
    assert found.value == pytest.approx(0.09)


def test_two_equal_runs_and_a_candidate_within_them() -> None:
    floor = pooled([[0.9979, 0.9983]])
    assert gain([0.9977], [0.9979, 0.9983], floor).badge == WITHIN
    assert gain([0.9900], [0.9979, 0.9983], floor).badge == CLEAR
    assert gain([1.0100], [0.9979, 0.9983], floor).value < 0


def test_few_repeats_raise_the_bar() -> None:
    assert gain([0.990], [0.998, 0.998], Noise(0.001, 1)).badge == WITHIN
    assert gain([0.990], [0.998, 0.998], Noise(0.001, 6)).badge == CLEAR
    bar = smallest_clear_gain(Noise(0.001, 6))
    assert bar == pytest.approx(2.4469 * 0.001 * 2**0.5, rel=1e-3)
    assert smallest_clear_gain(Noise(None, 0)) is None


def test_one_in_twenty_of_equal_sources_looks_clear() -> None:
    rng = random.Random(7)
    wrong = 0
    for _ in range(2000):
        base, new, other = ([rng.gauss(1, 0.01) for _ in range(3)] for _ in range(3))
        wrong += gain(new, base, pooled([base, new, other])).badge == CLEAR
    assert 60 <= wrong <= 140


def test_repeats_that_agree_to_the_last_digit_make_no_gain_clear() -> None:
    assert smallest_clear_gain(Noise(0.0, 2)) is None
    assert gain([0.9], [1.0], Noise(0.0, 2)).badge == "unknown"
