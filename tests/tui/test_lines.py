"""Rows of cells: every pane rests on them, so widths hold for any text and any number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tui.lines import Line, bar, changed_columns, crop, fit, safe, spark, wrap_words

any_text = st.text(alphabet=st.one_of(st.characters(), st.sampled_from("a ─宽字Ｗ\x1b\x07[]é️")), max_size=40)


@given(any_text, st.integers(0, 30))
def test_a_fitted_text_has_exactly_its_width(text: str, width: int) -> None:
    shown = safe(text)
    for align in ("left", "right", "centre"):
        assert cell_len(fit(shown, width, align)) == width
    assert cell_len(crop(shown, width)) <= width


@given(any_text)
def test_outside_text_is_one_row_without_controls(text: str) -> None:
    shown = safe(text)
    assert "\n" not in shown and "\x1b" not in shown and "\x07" not in shown
    assert all(ord(c) >= 32 and not 127 <= ord(c) < 160 for c in shown)


@given(st.lists(st.tuples(any_text, st.sampled_from(["", "good"])), max_size=5), st.integers(1, 40))
def test_a_fitted_line_has_exactly_its_width(spans: list[tuple[str, str]], width: int) -> None:
    line = Line(*[(safe(t), s) for t, s in spans]).fitted(width)
    assert line.width == width


def test_only_the_columns_that_differ_are_dirty() -> None:
    old = Line(("GPU 0 ", ""), ("12%", "good"), (" done", "")).fitted(20)
    assert changed_columns(old, Line(("GPU 0 ", ""), ("12%", "good"), (" done", "")).fitted(20), 20) is None
    start, end = changed_columns(old, Line(("GPU 0 ", ""), ("13%", "good"), (" done", "")).fitted(20), 20) or (0, 0)
    assert (start, end) == (7, 8)
    assert changed_columns(None, old, 20) == (0, 20)
    cursor = Line(*old.spans, style="cursor")
    assert changed_columns(old, cursor, 20) == (0, 20)


@given(st.lists(st.tuples(any_text, st.sampled_from(["", "good"])), max_size=4), st.lists(st.tuples(any_text, st.just("")), max_size=4))
def test_dirty_columns_cover_every_difference(a: list[tuple[str, str]], b: list[tuple[str, str]]) -> None:
    old, new = (Line(*[(safe(t), s) for t, s in spans]).fitted(24) for spans in (a, b))
    found = changed_columns(old, new, 24)
    before, after = _cells(old), _cells(new)
    differing = [i for i in range(24) if before[i] != after[i]]
    if differing:
        assert found is not None and found[0] <= differing[0] and found[1] > differing[-1]


def _cells(line: Line) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for text, style in line.spans:
        for c in text:
            wide = cell_len(c)
            out += [(c, style)] + [("", style)] * (wide - 1) if wide else []
    return (out + [("", "")] * 24)[:24]


def test_bars_and_sparklines_take_any_number() -> None:
    for share in (None, float("nan"), -1.0, 0.0, 0.5, 1.0, 7.0):
        assert sum(cell_len(t) for t, _ in bar(share, 8)) == 8
    for values in ([], [None], [float("nan")], [float("inf"), 1.0], [0.0, 0.0], [1e300, -1e300], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]):
        assert len(spark(values, 6)) == 6
    assert spark([0.0, 1.0], 2, 0, 1) == "▁█"
    assert spark([None, 1.0], 2, 0, 1) == " █"


@given(any_text, st.integers(1, 30))
def test_wrapped_words_lose_nothing_and_fit(text: str, width: int) -> None:
    shown = safe(text)
    rows = wrap_words(shown, max(2, width))
    assert all(cell_len(row) <= max(2, width) for row in rows)
    assert "".join("".join(rows).split()) == "".join(shown.split())
    assert len(wrap_words(shown, max(2, width), 2)) <= 2


def test_words_stay_whole_where_they_fit() -> None:
    assert wrap_words("TOTAL must be a multiple", 14) == ["TOTAL must be", "a multiple"]
