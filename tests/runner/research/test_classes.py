"""What makes two results comparable, and what must not keep them apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.research.classes import class_key, differs_in, evaluator_id, gpu_of

FACTS = {
    "gpu_name": "NVIDIA H100 80GB HBM3",
    "torch": "2.11.0+cu128",
    "driver": "570.86",
    "evaluator": "v1 " + "ab" * 32,
    "data_hash": "0f" * 20,
}


def test_the_class_is_what_the_agent_cannot_change() -> None:
    key = class_key(FACTS)
    assert key == "H100 80GB HBM3 · torch 2.11.0+cu128 · driver 570.86 · eval v1 ababababab · data 0f0f0f0f0f"
    assert gpu_of(key) == "H100 80GB HBM3"
    assert class_key({**FACTS, "attributes": {"attention": "sdpa"}, "constants": {"TOTAL_BATCH_SIZE": 1}}) == key
    for column in FACTS:
        other = class_key({**FACTS, column: "something else"})
        assert other != key
        assert other is not None
        assert len(differs_in(key, other)) == 1


def test_no_gpu_no_class_and_unknown_parts_are_left_out() -> None:
    assert class_key({**FACTS, "gpu_name": None}) is None
    assert class_key({"gpu_name": "H200", "torch": None}) == "H200"
    assert differs_in("H200", "H200 · torch 2.9") == ["- / torch 2.9"]


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    (tmp_path / "train.py").write_text("from prepare import evaluate_bpb\n")
    prepare = "from corpora import text\nTIME_BUDGET = 300   # 5 minutes\ndef evaluate_bpb(m):\n    return text(m)\n"
    (tmp_path / "prepare.py").write_text(prepare)
    (tmp_path / "corpora.py").write_text("def text(m):\n    return m\n")
    (tmp_path / "report.py").write_text("def say(x):\n    print(x)\n")
    return SimpleNamespace(folder=tmp_path, editable=["train.py"], source="train.py", budget="prepare.py:TIME_BUDGET")


@pytest.mark.parametrize(
    ("name", "old", "new", "same"),
    [
        ("prepare.py", "300   # 5 minutes", "1200", True),
        ("prepare.py", "return text(m)", "return 0.5 * text(m)", False),
        ("corpora.py", "return m", "return m[:10]", False),
        ("report.py", "print(x)", "print(x, x)", True),
        ("train.py", "from", "import os\nfrom", True),
    ],
)
def test_the_evaluator_is_the_fixed_code_that_scores(trainer: Any, name: str, old: str, new: str, same: bool) -> None:
    before = evaluator_id(trainer)
    path = trainer.folder / name
    path.write_text(path.read_text().replace(old, new))
    assert (evaluator_id(trainer) == before) == same


def test_without_a_named_evaluator_every_fixed_file_counts(trainer: Any) -> None:
    prepare = trainer.folder / "prepare.py"
    prepare.write_text(prepare.read_text().replace("evaluate_bpb", "score"))
    before = evaluator_id(trainer)
    (trainer.folder / "report.py").write_text("x = 1\n")
    assert evaluator_id(trainer) != before
    for path in trainer.folder.glob("*.py"):
        path.unlink()
    assert evaluator_id(trainer) is None
