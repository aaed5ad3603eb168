"""Curves: nothing that a diverged run prints may break a chart, and a spike is never lost."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tui.chart import Series, draw, frame_of, tick

numbers = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, -0.0, 1e9, float("nan"), float("inf")]))


@given(st.lists(st.tuples(st.floats(0, 1e6), numbers), max_size=60), st.booleans(), st.booleans())
def test_any_points_give_rows_of_the_asked_size(points: list[tuple[float, float | None]], log: bool, marks: bool) -> None:
    lines = draw([Series("a", points, "own", marks)], 50, 12, log=log)
    assert len(lines) in (1, 12)
    assert all(line.width <= 50 for line in lines[:-1])


def test_a_curve_without_points_says_so() -> None:
    assert draw([Series("a", [])], 50, 12)[0].text == "no points yet"
    assert draw([Series("a", [(0, float("nan"))])], 50, 12)[0].text == "no points yet"
    assert draw([Series("a", [(0, 1.0)])], 10, 2)[0].text == "too small for a chart"


def test_a_spike_of_one_step_survives_a_narrow_chart() -> None:
    points = [(float(i), 1.0) for i in range(5000)]
    points[3333] = (3333.0, 9.0)
    lines = draw([Series("a", points)], 40, 12, clip=False)
    assert any(0x2800 < ord(c) <= 0x28FF for c in lines[0].text)


def test_the_first_fall_of_the_loss_does_not_flatten_the_rest() -> None:
    points = [(i / 200, 3.0 + 7.0 * math.exp(-i / 4)) for i in range(1, 201)]
    clipped, whole = frame_of([Series("a", points)], clip=True), frame_of([Series("a", points)], clip=False)
    assert clipped is not None and whole is not None
    assert whole.y1 > 8 and clipped.y1 < 3.5
    assert clipped.y0 == whole.y0


def test_a_step_is_drawn_as_a_step() -> None:
    lines = draw([Series("best", [(0.0, 2.0), (5.0, 2.0), (5.0, 1.0), (10.0, 1.0)])], 46, 12, clip=False)
    top, bottom, middle = lines[0].text[6:], lines[9].text[6:], lines[5].text[6:]
    assert len(top.strip()) > 15 and len(bottom.strip()) > 15
    assert len(middle.strip()) == 1


def test_ticks_have_as_many_digits_as_the_range_needs() -> None:
    assert tick(0.981234, 0.01) == "0.9812"
    assert tick(3.3, 2.0) == "3.30"
    assert tick(0, 5) == "0"
    assert tick(2e7, 1e7) == "2.0e+07"
    assert tick(5e-7, 1e-6) == "5.0e-07"
