"""A variant of a script is what reading the overridden text would tell, for any constants; and it is told without reading."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import sources
from runner.errors import BadValue, UnknownName
from runner.policy import TrainerPolicy
from runner.research.statics import one_model
from runner.script import Script, read_script

TRAINER = TrainerPolicy(folder=Path(__file__).parents[2] / "trainer")
SHIPPED = (TRAINER.folder / "train.py").read_text()
ODD = '''"""Constants in unusual places."""
from __future__ import annotations

SEED = 7; DEPTH = (8)
ASPECT_RATIO = 2**5 + 1
HEAD_DIM = 16
NAME = ("ä" "b")  # joined
BETAS: tuple = (0.8, -0.95)
NOTHING = None
FLAG = True
WIDTH = -(-DEPTH * ASPECT_RATIO // HEAD_DIM) * HEAD_DIM
BATCHES = [1, 2]


def main():
    return WIDTH, manual_seed(3)
'''
CALLED = "RATE = 0.5\ntorch.manual_seed(42)\nprint(RATE)\n"
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "SEED": st.integers(0, 2**40),
    "DEPTH": st.integers(1, 40),
    "ASPECT_RATIO": st.integers(1, 200),
    "NAME": st.text(max_size=12) | st.just("+ HEAD_DIM - 1) // HEAD_DIM * HEAD_DIM"),
    "BETAS": st.tuples(st.floats(0, 1), st.floats(-1, 1)),
    "NOTHING": st.none() | st.integers() | st.text(max_size=5) | st.just({"a": [1]}),
    "FLAG": st.booleans(),
    "BATCHES": st.lists(st.integers(), max_size=3),
}
OVERRIDES = st.fixed_dictionaries({}, optional=VALUES)
TYPED = st.fixed_dictionaries({}, optional={name: given for name, given in VALUES.items() if name != "NOTHING"})


def same_as_read(script: Script, text: str) -> None:
    """Everything a script tells, against the functions that read the text."""
    assert script.text == text and script.sha == sources.sha(text)
    assert list(script.constants.items()) == list(sources.constants(text).items())
    assert [type(v) for v in script.constants.values()] == [type(v) for v in sources.constants(text).values()]
    assert script.effective_sha == sources.effective_sha(text)
    assert script.seed == sources.seed_of(text)
    assert one_model(script, TRAINER).effective_sha == sources.effective_sha(one_model(read_script(text, "x"), TRAINER).text)


@settings(max_examples=60, deadline=None)
@given(OVERRIDES)
def test_a_variant_is_what_reading_it_would_tell(values: dict[str, Any]) -> None:
    same_as_read(read_script(ODD, "x").override(values), sources.override(ODD, values))


@settings(max_examples=60, deadline=None)
@given(OVERRIDES, TYPED)
def test_a_variant_of_a_variant_does_the_same_as_its_text(first: dict[str, Any], second: dict[str, Any]) -> None:
    twice = read_script(ODD, "x").override(first).override(second)
    read = read_script(sources.override(sources.override(ODD, first), second), "x")
    assert twice.constants == read.constants and twice.effective_sha == read.effective_sha
    assert read_script(twice.text, "x").effective_sha == read.effective_sha


@settings(max_examples=4, deadline=None)
@given(st.fixed_dictionaries({}, optional={"DEPTH": st.integers(1, 30), "MATRIX_LR": st.floats(1e-4, 1), "SEED": st.integers(0, 99)}))
def test_the_shipped_script_too(values: dict[str, Any]) -> None:
    same_as_read(read_script(SHIPPED, "train.py").override(values), sources.override(SHIPPED, values))


def test_a_variant_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    root = read_script(SHIPPED, "train.py")
    one_model(root, TRAINER)
    parsed: list[str] = []
    monkeypatch.setattr(sources, "parse", lambda text, name="source": parsed.append(text) or ast.parse(text))
    for depth in range(2, 14):
        variant = one_model(read_script(SHIPPED, "train.py").override({"DEPTH": depth}), TRAINER).reseeded(depth)
        assert variant.effective_sha and variant.seed == depth and variant.text
    assert not parsed


def test_a_script_without_a_seed_constant_is_reseeded_in_its_call() -> None:
    again = read_script(CALLED, "x").reseeded(5)
    assert again.seed == 5 and "manual_seed(5)" in again.text
    assert again.effective_sha == read_script(CALLED, "x").effective_sha and again.sha != read_script(CALLED, "x").sha


def test_refusals_are_those_of_the_text() -> None:
    script = read_script("DEPTH = 1\nDEPTH = 2\nRATE = 0.5\nfor RATE in []: pass\n", "x")
    assert script.override({"DEPTH": 3}).text == "DEPTH = 3\nDEPTH = 3\nRATE = 0.5\nfor RATE in []: pass\n"
    with pytest.raises(UnknownName, match="DEPHT"):
        script.override({"DEPHT": 3})
    with pytest.raises(BadValue, match="also assigned at line 4"):
        script.override({"RATE": 0.1})
    with pytest.raises(BadValue, match="whole number"):
        script.override({"DEPTH": 1.5})
    with pytest.raises(BadValue, match=r"train\.py, line 1"):
        read_script("def f(:\n", "train.py")
