"""Answers as words: both forms hold the same, nothing passes the budget, and nothing a run prints can look like ours."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_server.answers import BUDGET_CHARS, Answer, Output, Table, as_text, cell, fence, finish, number, rounded
from mcp_server.waiting import Cursor, parse_cursor

CELLS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=300), st.dictionaries(st.text(max_size=5), st.floats())
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(CELLS, min_size=3, max_size=3), max_size=120), st.text(max_size=20_000), st.text(max_size=600))
def test_no_answer_passes_its_budget_and_both_forms_agree(rows: list[list[object]], log: str, note: str) -> None:
    answer = Answer(
        facts={"id": "r0001", "note_of_somebody": note},
        tables={
            "first": Table(["a", "b", "c"], rows, cursor_at=lambda n: f"after:{n}" if n < len(rows) else None),
            "second": Table(["a", "b", "c"], rows),
        },
        output=Output("r0001", log),
        notes=[note] * 3,
        next_step="get_run",
    )
    text, structured = finish(answer, "lab: 1 of 2 GPUs idle")
    packed = json.dumps(structured, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    assert len(text) <= BUDGET_CHARS + 400 and len(packed) <= BUDGET_CHARS + 400
    assert text.split("\n")[-1] == structured["lab"] == "lab: 1 of 2 GPUs idle"
    shown = structured["first"]["rows"]
    assert len(shown) == len(rows) or structured["first"]["total"] == len(rows)
    assert structured.get("cursor") == (None if len(shown) == len(rows) else f"after:{len(shown)}")
    for row in shown:
        assert "\t".join(cell(value) for value in row) in text
    assert structured["output"] in text


@given(st.text(max_size=4000))
def test_no_line_of_an_output_escapes_its_margin(log: str) -> None:
    lines = fence(Output("r0001", log), 2000).split("\n")
    assert lines[0].startswith("[untrusted output of run r0001") and lines[-1] == "[end of the output of run r0001]"
    assert all(line.startswith("| ") for line in lines[1:-1])
    assert not any(c in "\x1b\x07\u202e" for line in lines for c in line)


def test_a_long_output_keeps_its_end_or_its_beginning() -> None:
    log = "\n".join(f"line {n}" for n in range(2000))
    assert "line 1999" in fence(Output("r1", log), 1000) and "(its end)" in fence(Output("r1", log), 1000)
    assert "| line 0\n" in fence(Output("r1", log, keep_end=False), 1000)


def test_figures_keep_what_they_mean() -> None:
    assert number(0.9979) == 0.9979 and number(1.2345678901) == 1.234568 and number(float("nan")) is None and number(131072.0) == 131072
    assert cell(rounded(-1e-9, 6)) == "0.0" and rounded(None, 2) is None and cell(None) == "-" and cell("") == "-"


@given(st.sets(st.integers(1, 400)), st.sets(st.integers(1, 400)))
def test_a_cursor_covers_what_was_told_and_never_what_was_not(told: set[int], untold: set[int]) -> None:
    untold -= told
    cursor = Cursor("mine", ()).with_told(told, untold)
    assert parse_cursor(str(cursor), "mine") == cursor
    assert all(cursor.covers(n) for n in told) and not any(cursor.covers(n) for n in untold)
    more = cursor.with_told(untold, ())
    assert all(more.covers(n) for n in told | untold) and len(more.ranges) <= 1


def test_text_shows_missing_as_a_dash() -> None:
    assert as_text({"b": 1}, {"t": {"columns": ["x"], "rows": [[None]]}}, "", {"lab": "lab: -"}) == "b: 1\nt (1):\nx\n-\nlab: -"
