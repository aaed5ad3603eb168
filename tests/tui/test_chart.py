"""Curves: nothing that a diverged run prints may break a chart, and a spike is never lost."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tui.chart import Series, draw, frame_of, ticks

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
    assert ticks([0.98, 0.985, 0.99]) == ["0.9800", "0.9850", "0.9900"]
    assert ticks([0.0, 465.0, 930.0]) == ["0", "465", "930"]
    assert ticks([1.50e6, 1.63e6, 1.76e6]) == ["1.500M", "1.630M", "1.760M"]
    assert ticks([0.0, 0.25, 0.5]) == ["0", "0.250", "0.500"]
    assert ticks([5e-7, 6e-7]) == ["5.0e-07", "6.0e-07"]
    assert ticks([0.0, 0.0]) == ["0", "0"]


@given(st.lists(st.floats(-1e12, 1e12).filter(lambda v: v == 0 or abs(v) > 1e-9), min_size=2, max_size=6, unique=True))
def test_labels_of_ticks_that_differ_differ(values: list[float]) -> None:
    size = max(abs(v) for v in values)
    apart = sorted(values)
    if min(b - a for a, b in itertools.pairwise(apart)) > size * 1e-9:
        assert len(set(ticks(values))) == len(values)


def test_the_x_axis_is_labelled_where_its_values_lie() -> None:
    lines = draw([Series("a", [(i / 10, 3.0 - i / 10) for i in range(11)])], 80, 14, x_name="share of the budget", margin=9)
    axis = lines[-2].text
    places = [axis.index(t) + (0 if t == "0.00" else len(t) / 2) for t in ("0.25", "0.50", "0.75")]
    assert [(p - 10) / 69 for p in places] == pytest.approx([0.25, 0.5, 0.75], abs=0.03) and axis.rstrip().endswith("1.00")
    assert lines[-1].text.endswith("share of the budget")


def test_a_narrow_chart_still_names_its_unit() -> None:
    lines = draw([Series("a curve with a name", [(0.0, 1.0), (1.0, 2.0)])], 44, 12, x_name="minutes since the first result")
    assert lines[-1].text.endswith("minutes") and lines[-1].width <= 44
