"""The filter grammar, term by term."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import BadValue
from tui.filters import parse

ROW: dict[str, Any] = {
    "id": "r0042",
    "gpu": "NVIDIA H200",
    "host": "beta",
    "wave": "w3",
    "phase": "ended",
    "outcome": "completed",
    "val_bpb": 0.9812,
    "budget_s": 300.0,
    "age_s": 5400.0,
    "verdict": None,
    "flags": [{"kind": "idle", "evidence": "no output"}],
    "constants": {"DEPTH": 12, "MATRIX_LR": 0.03, "NAME": "wide"},
    "hypothesis": "Wider is better",
    "agent": "mcp:claude",
    "mfu_percent": None,
    "trust": "claimed",
}
STAYS = (
    "wider", "WIDER better", "gpu:h200", "wave:w3",
    "outcome:crashed,completed", "val<0.99", "val>=0.9812", "budget=300", "budget:300", "DEPTH=12",
    "MATRIX_LR<=0.03", "NAME=wide", "flag:any", "flag:idle", "verdict:none", "!wave:w4",
    "age<2h", "-mfu>0", "outcome=completed", "agent:claude val<1",
)  # fmt: skip
GOES = (
    "wider worse", "gpu:h100", "val<0.98", "val!=0.9812", "DEPTH>12", "NAME!=wide", "flag:none",
    "verdict:any", "-wave:w3", "age>90m", "mfu>0", "-5",
)  # fmt: skip


@pytest.mark.parametrize(("text", "stays"), [(t, True) for t in STAYS] + [(t, False) for t in GOES])
def test_terms(text: str, stays: bool) -> None:
    found = parse(text)
    assert found is not None
    assert found(ROW) is stays


def test_nothing_is_no_filter() -> None:
    assert parse("") is None
    assert parse("   ") is None


@pytest.mark.parametrize(("text", "hint"), [("wafe:w3", "wave"), ("vall<1", "val"), ("val<abc", "not a number"), ("zzz:1", "Fields:")])
def test_what_cannot_be_understood_says_so(text: str, hint: str) -> None:
    with pytest.raises(BadValue) as error:
        parse(text)
    assert hint in str(error.value)


@given(st.text(max_size=30))
def test_any_text_is_a_filter_or_a_sentence(text: str) -> None:
    try:
        found = parse(text)
    except BadValue as error:
        assert str(error)
        return
    if found is not None:
        assert found(ROW) in (True, False)
        assert found({}) in (True, False)
