"""Constants read and rewritten, hashes that see only what matters, and diffs that apply exactly or not at all."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner import patching, sources
from runner.errors import BadValue, UnknownName

SCRIPT = '''"""A training script."""
import torch

# Model
ASPECT_RATIO = 64       # width = depth × this
HEAD_DIM = 128
WINDOW_PATTERN = "SSSL"
TOTAL_BATCH_SIZE = 2**19 # tokens
MATRIX_LR = 0.04
ADAM_BETAS = (0.8, 0.95)
COMPILE = True
FILTER = None
PEAK: float = 989.5e12

torch.manual_seed(42)
step = 0
width = ASPECT_RATIO * 8
'''


def test_constants_are_module_level_literals() -> None:
    assert sources.constants(SCRIPT) == {
        "ASPECT_RATIO": 64,
        "HEAD_DIM": 128,
        "WINDOW_PATTERN": "SSSL",
        "TOTAL_BATCH_SIZE": 524288,
        "MATRIX_LR": 0.04,
        "ADAM_BETAS": (0.8, 0.95),
        "COMPILE": True,
        "FILTER": None,
        "PEAK": 989.5e12,
    }
    assert type(sources.constants(SCRIPT)["TOTAL_BATCH_SIZE"]) is int


@pytest.mark.parametrize(
    "text", ["A = 10**10**10", "A = 1 << 10**9", "A = 'x' * 10**9", "A = 1 / 0", "A = (-8) ** 0.5", "A = f()", "A = B = 1", "A = [*x]"]
)
def test_what_is_no_plain_literal_is_left_out(text: str) -> None:
    assert "A" not in sources.constants(text)


def test_override_keeps_comments_and_touches_nothing_else() -> None:
    new = sources.override(SCRIPT, {"TOTAL_BATCH_SIZE": 2**17, "ADAM_BETAS": [0.9, 0.95], "MATRIX_LR": 1})
    assert "TOTAL_BATCH_SIZE = 131072 # tokens" in new
    assert "ADAM_BETAS = (0.9, 0.95)" in new
    assert "MATRIX_LR = 1.0\n" in new
    assert sources.constants(new)["ADAM_BETAS"] == (0.9, 0.95)
    changed = [(a, b) for a, b in zip(SCRIPT.splitlines(), new.splitlines(), strict=True) if a != b]
    assert len(changed) == 3


@pytest.mark.parametrize(("given_value", "kept"), [(131072.0, 131072), ("2**17", 131072), ("131072", 131072)])
def test_an_int_stays_an_int(given_value: object, kept: int) -> None:
    value = sources.constants(sources.override(SCRIPT, {"TOTAL_BATCH_SIZE": given_value}))["TOTAL_BATCH_SIZE"]
    assert value == kept
    assert type(value) is int


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOTAL_BATCH_SIZE", 1.5),
        ("TOTAL_BATCH_SIZE", True),
        ("TOTAL_BATCH_SIZE", "many"),
        ("TOTAL_BATCH_SIZE", "__import__('os')"),
        ("MATRIX_LR", "fast"),
        ("MATRIX_LR", float("nan")),
        ("MATRIX_LR", float("inf")),
        ("MATRIX_LR", None),
        ("WINDOW_PATTERN", 3),
        ("ADAM_BETAS", 0.9),
        ("ADAM_BETAS", [0.9]),
        ("ADAM_BETAS", [0.9, "x"]),
        ("COMPILE", 1),
        ("TOTAL_BATCH_SIZE", "9" * 5000),
        ("FILTER", float("nan")),
    ],
)
def test_a_wrong_type_is_one_sentence_naming_the_constant(name: str, value: object) -> None:
    with pytest.raises(BadValue, match=name):
        sources.override(SCRIPT, {name: value})


def test_an_unknown_constant_names_the_nearest() -> None:
    with pytest.raises(UnknownName) as caught:
        sources.override(SCRIPT, {"TOTAL_BATCHSIZE": 1})
    assert "TOTAL_BATCH_SIZE" in str(caught.value)
    with pytest.raises(UnknownName) as caught:
        sources.override(SCRIPT, {"matrix_lr": 1.0})
    assert "MATRIX_LR" in str(caught.value)


@pytest.mark.parametrize(
    "again",
    [
        "if True:\n    DEPTH = 2\n",
        "DEPTH += 1\n",
        "for DEPTH in (1, 2):\n    pass\n",
        "def f():\n    global DEPTH\n    DEPTH = 3\n",
        "DEPTH = max(DEPTH, 4)\n",
    ],
)
def test_a_constant_an_override_cannot_reach_is_refused_with_its_line(again: str) -> None:
    text = "DEPTH = 8\n" + again
    assert "DEPTH" not in sources.constants(text)
    with pytest.raises(BadValue, match=r"line [23]"):
        sources.override(text, {"DEPTH": 4})


def test_override_counts_bytes_not_characters() -> None:
    text = "A = 1; B = 'größer'; C = 2  # naïve\r\nD = (\n  3 +\n  4)\n"
    new = sources.override(text, {"C": 5, "D": 9})
    assert new == "A = 1; B = 'größer'; C = 5  # naïve\r\nD = (\n  9)\n"


def test_a_constant_that_is_none_takes_any_literal() -> None:
    for given_value, kept in ((4, 4), ("2**10", 1024), ("cudnn", "cudnn"), (0.5, 0.5), (True, True)):
        assert sources.constants(sources.override(SCRIPT, {"FILTER": given_value}))["FILTER"] == kept


def test_an_equal_value_changes_nothing() -> None:
    assert sources.override(SCRIPT, {"TOTAL_BATCH_SIZE": 524288, "ADAM_BETAS": [0.8, 0.95]}) == SCRIPT


names = st.from_regex(r"[A-Z][A-Z0-9_]{0,8}", fullmatch=True).filter(lambda n: not keyword.iskeyword(n))
scalars = st.one_of(st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.text(max_size=20))
trees = st.one_of(scalars, st.tuples(scalars, scalars), st.lists(scalars, max_size=3))


@given(st.dictionaries(names, trees, min_size=1, max_size=6), st.data())
def test_override_reads_back_and_leaves_the_others(values: dict[str, object], data: st.DataObject) -> None:
    text = "".join(f"{n} = {v!r}  # é {n}\n" for n, v in values.items())
    assert sources.constants(text) == values
    name = data.draw(st.sampled_from(sorted(values)))
    old = values[name]
    new: object = old
    if isinstance(old, bool):
        new = not old
    elif isinstance(old, int):
        new = data.draw(st.integers(-(2**60), 2**60))
    elif isinstance(old, float):
        new = data.draw(st.floats(allow_nan=False, allow_infinity=False, max_value=1e299, min_value=-1e299))
    elif isinstance(old, str):
        new = data.draw(st.text(max_size=20))
    assert sources.constants(sources.override(text, {name: new})) == {**values, name: new}


@given(st.text(max_size=200))
def test_no_text_makes_the_reader_fall(text: str) -> None:
    try:
        sources.constants(text)
        sources.check(text, "x.py")
    except BadValue:
        pass
    assert len(sources.effective_sha(text)) == 64


def test_a_syntax_error_names_file_and_line() -> None:
    with pytest.raises(BadValue, match=r"train\.py, line 2"):
        sources.check("x = 1\nif x\n    y = 2\n", "train.py")
    with pytest.raises(BadValue, match=r"train\.py, line 2"):
        sources.check("x = 1\nreturn x\n", "train.py")
    sources.check("import re\nre.compile('\\d')\n", "train.py")  # only a warning


def test_effective_sha_sees_through_comments_layout_order_and_seed() -> None:
    head = "# Model\nASPECT_RATIO = 64       # width = depth × this\nHEAD_DIM = 128\n"
    same = SCRIPT.replace(head, "HEAD_DIM=128\nASPECT_RATIO = (64)\n")
    same = same.replace("2**19", "524_288").replace('"""A training script."""', "")
    assert sources.sha(same) != sources.sha(SCRIPT)
    assert sources.effective_sha(same) == sources.effective_sha(SCRIPT)
    assert sources.effective_sha(SCRIPT.replace("manual_seed(42)", "manual_seed(137)")) == sources.effective_sha(SCRIPT)
    for old, new in (("64", "65"), ("0.8, 0.95", "0.95, 0.8"), ("* 8", "* 9"), ("True", "1")):
        other = SCRIPT.replace(old, new)
        assert sources.effective_sha(other) != sources.effective_sha(SCRIPT)


def test_order_matters_where_it_matters() -> None:
    assert sources.effective_sha("A = 1\nprint(A)\n") != sources.effective_sha("print(A)\nA = 1\n")
    assert sources.effective_sha("A = 1\nA = 2\n") != sources.effective_sha("A = 2\nA = 1\n")


def test_a_change_of_the_seed_alone_is_recognised() -> None:
    assert sources.seed_only(SCRIPT, SCRIPT.replace("manual_seed(42)", "manual_seed(137)  # luck"))
    assert sources.seed_only("SEED = 1\nA = 2\n", "A = 2\nSEED = 7\n")
    assert not sources.seed_only(SCRIPT, SCRIPT + "# note\n")
    assert not sources.seed_only(SCRIPT, SCRIPT.replace("manual_seed(42)", "manual_seed(137)").replace("0.04", "0.05"))
    assert sources.seed_of(SCRIPT) == 42
    assert sources.seed_of("SEED = 3\n") == 3
    assert sources.seed_of("x = 1\n") is None


def test_changed_constants_names_both_values() -> None:
    new = sources.override(SCRIPT, {"MATRIX_LR": 0.05}).replace("HEAD_DIM = 128\n", "NEW = 1\n")
    assert sources.changed_constants(SCRIPT, new) == {"MATRIX_LR": (0.04, 0.05), "HEAD_DIM": (128, None), "NEW": (None, 1)}


lines = st.lists(st.sampled_from(["a", "b", "c", "", "  d", "-- e", "++ f", "\f", "@@"]), max_size=14)


@given(lines, lines, st.booleans(), st.booleans())
def test_diffs_apply_to_what_they_were_made_of(a: list[str], b: list[str], a_open: bool, b_open: bool) -> None:
    old = "\n".join(a) + ("" if a_open or not a else "\n")
    new = "\n".join(b) + ("" if b_open or not b else "\n")
    patch = patching.diff(old, new, "a/train.py", "b/train.py")
    assert (patch == "") == (old == new)
    if patch and old:
        assert patching.apply_diff(old, patch) == new


def test_a_diff_from_an_agent_with_wrong_counts_still_applies() -> None:
    patch = (
        "diff --git a/train.py b/train.py\n--- a/train.py\n+++ b/train.py\n@@ -1,99 +1,99 @@\n"
        ' HEAD_DIM = 128\n-WINDOW_PATTERN = "SSSL"\n+WINDOW_PATTERN = "L"\n'
    )
    assert patching.apply_diff(SCRIPT, patch) == SCRIPT.replace("SSSL", "L")
    crlf = SCRIPT.replace("\n", "\r\n")
    assert patching.apply_diff(crlf, patch) == crlf.replace("SSSL", "L")


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ("", "no hunk"),
        ("please change the rate", "no hunk"),
        ("--- a\n+++ b\n@@ -6 +6 @@\n-HEAD_DIM = 64\n+HEAD_DIM = 32\n", "HEAD_DIM = 64"),
        ("--- a\n+++ b\n@@ -1 +1 @@\n-x\n+y\n--- c\n+++ d\n@@ -1 +1 @@\n-x\n+y\n", "2 files"),
        ("@@ nonsense @@\n", "hunk header"),
        ("@@ -1 +1 @@\n*x\n", "starts with"),
    ],
)
def test_a_diff_that_does_not_fit_says_where(patch: str, says: str) -> None:
    with pytest.raises(BadValue, match=says):
        patching.apply_diff(SCRIPT, patch)


def test_a_script_is_reseeded_where_it_keeps_its_seed() -> None:
    other = sources.reseed(SCRIPT, 7)
    assert other == SCRIPT.replace("manual_seed(42)", "manual_seed(7)")
    assert sources.seed_only(SCRIPT, other)
    assert sources.reseed("SEED = 1  # luck\ntorch.manual_seed(SEED)\n", 9) == "SEED = 9  # luck\ntorch.manual_seed(SEED)\n"
    both = "torch.manual_seed(42); torch.cuda.manual_seed(42)  # größer\n"
    assert sources.reseed(both, 8) == both.replace("42", "8")
    assert sources.reseed("x = 1\n", 3) == "x = 1\n"
