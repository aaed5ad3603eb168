"""Who is stopped early and why; replayed against curves whose truth is known."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.records import Point
from runner.research.pruning import GRID, Curve, judge, replay, sampled


def curve(i: int, final: float, rng: random.Random, *, blur: float = 0.01) -> Curve:
    """A loss that falls to 2.9 nats a bit; how much the middle says of the end is up to `blur`."""
    losses = tuple(2.9 * final + 2.0 * (1 - s) + rng.gauss(0, blur * (1.2 - s)) for s in GRID)
    return Curve(f"r{i:04d}", losses, final, 300.0)


def many(n: int, seed: int = 1, blur: float = 0.01) -> list[Curve]:
    rng = random.Random(seed)
    return [curve(i, 1.0 + abs(rng.gauss(0, 0.03)), rng, blur=blur) for i in range(n)]


def test_a_hopeless_run_is_stopped_and_says_why() -> None:
    found = judge("cautious", 0.41, curve(99, 1.2, random.Random(5)).losses, many(20))
    assert found is not None
    assert found.share == 0.4
    assert abs(found.predicted - 1.2) < 0.15
    assert "40 % of its budget" in found.evidence
    assert "20 finished runs" in found.evidence


def test_what_is_never_stopped() -> None:
    finished = many(20)
    good = curve(99, 0.99, random.Random(5)).losses
    bad = curve(99, 1.2, random.Random(5)).losses
    for mode in ("cautious", "eager"):
        assert all(judge(mode, s, good, finished) is None for s in GRID)
    assert judge("off", 0.9, bad, finished) is None
    assert judge("cautious", 0.2, bad, finished) is None  # too early
    assert judge("cautious", 0.5, bad, finished[:9]) is None  # too few to say
    assert judge("cautious", None, bad, finished) is None
    assert judge("cautious", 0.5, (None,) * len(GRID), finished) is None
    assert judge("eager", 0.2, bad, finished) is not None


def test_where_the_middle_says_nothing_nobody_is_stopped() -> None:
    rng = random.Random(3)
    finals = [1.0 + abs(rng.gauss(0, 0.03)) for _ in range(60)]
    blind = [Curve(f"r{i}", tuple(rng.gauss(5, 0.1) for _ in GRID), f, 300.0) for i, f in enumerate(finals)]
    assert replay("cautious", blind).pruned <= 1  # nineteen looks at each of sixty runs
    assert replay("eager", blind).pruned <= 3


def test_equal_curves_prove_nothing() -> None:
    same = [Curve(f"r{i}", (3.0,) * len(GRID), 1.0, 300.0) for i in range(20)]
    assert judge("eager", 0.9, (3.0,) * len(GRID), same) is None


def test_a_replay_counts_what_was_saved_and_lost() -> None:
    found = replay("cautious", many(200))
    assert found.runs == 200
    assert found.total_s == 200 * 300
    assert found.pruned == len(found.stops) > 20
    assert 0.05 < found.saved_s / found.total_s < 0.6
    assert found.wrong == 0
    assert found.lost_good == 0
    assert replay("eager", many(200)).saved_s > found.saved_s
    assert replay("off", many(200)).pruned == 0


@pytest.mark.parametrize("loss", [1e160, 1.7e308])
def test_an_absurd_loss_is_no_overflow(loss: float) -> None:
    judge("eager", 0.9, [loss] * len(GRID), many(12))


@given(st.lists(st.tuples(st.one_of(st.none(), st.floats(0, 1)), st.one_of(st.none(), st.floats(allow_nan=True))), max_size=40))
def test_any_points_give_a_curve(rows: list[tuple[float | None, float | None]]) -> None:
    losses = sampled(Point(i, None, s, v, None, None, None) for i, (s, v) in enumerate(rows))
    assert len(losses) == len(GRID)
    judge("eager", 0.9, losses, many(12))


def test_sampling_takes_the_last_point_and_no_stale_one() -> None:
    points = [Point(i, None, s, v, None, None, None) for i, (s, v) in enumerate([(0.04, 9.0), (0.05, 8.0), (0.11, 7.0), (0.5, 3.0)])]
    losses = dict(zip(GRID, sampled(points), strict=True))
    assert losses[0.05] == 8.0
    assert losses[0.1] == 8.0
    assert losses[0.15] == 7.0
    assert losses[0.2] is None
    assert losses[0.5] == losses[0.55] == 3.0
