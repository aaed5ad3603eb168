"""No control character, escape sequence or invisible mark of a run ever reaches a terminal, a table or a tool result."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner import text

HOSTILE = {
    "\x1b[31mred\x1b[0m": "red",
    "\x1b[?1049h\x1b]0;title\x07\x1b[2Jx": "x",
    "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\": "link",
    "\x1bPq#0;2\x1b\\after": "after",
    "\x9b31mx": "x",
    "a\x07b\x08c\x00d": "abcd",
    "one\rtwo\r\nthree": "one\ntwo\nthree",
    "\u202eevil\u2066\u200b": "evil",
    "[/bold] [red": "[/bold] [red",
}


@pytest.mark.parametrize("given_text", HOSTILE)
def test_escapes_are_gone_and_words_stay(given_text: str) -> None:
    assert text.clean(given_text) == HOSTILE[given_text]


@given(st.text(alphabet=st.characters()))
def test_no_control_character_survives(raw: str) -> None:
    assert not [c for c in text.clean(raw) if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    assert "\n" not in text.one_line(raw) and "\t" not in text.tsv_cell(raw) and len(text.one_line(raw, 20)) <= 20


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0, "0.000"),
        (5e-4, "0.0005000"),
        (0.99791, "0.9979"),
        (1680000.0, "1.680e+06"),
        (123.456, "123.5"),
        (-0.00002, "-2.000e-05"),
    ],
)
def test_small_numbers_do_not_become_zero(value: float | None, shown: str) -> None:
    assert text.significant(value) == shown


def test_a_difference_of_nothing_has_no_sign() -> None:
    assert text.signed(-1e-9) == "0" and text.signed(-0.0012) == "-0.001200" and text.signed(None) == "-"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "-"), (8.4, "8 s"), (200, "3 min 20 s"), (18120, "5 h 02 min"), (183600, "2 d 3 h"), (-5, "0 s")]
)
def test_ages(seconds: float | None, shown: str) -> None:
    assert text.ago(seconds) == shown


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1", None])
def test_only_finite_numbers_are_numbers(value: object) -> None:
    assert text.finite(value) is None
