"""A run's working directory: the trainer's files without what does not belong, the source replaced, the budget where the policy says."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from runner.errors import BadValue, PolicyError, Refused
from runner.materialise import materialise
from runner.sources import constants

PREPARE = "MAX_SEQ_LEN = 2048       # context\nTIME_BUDGET = 300        # seconds (5 minutes)\nEVAL_TOKENS = 40 * 524288\n"


@dataclass
class Trainer:
    """The part of the trainer policy that materialising reads."""

    folder: Path
    source: str = "train.py"
    budget: str | None = "prepare.py:TIME_BUDGET"
    shims: list[str] = field(default_factory=list)


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    folder = tmp_path / "autoresearch"
    for name in (".git", ".venv", "__pycache__", "lab", "env/bin", "pkg", "worktrees/a"):
        (folder / name).mkdir(parents=True)
    (folder / "env/pyvenv.cfg").write_text("")
    (folder / "worktrees/a/.git").write_text("gitdir: elsewhere")
    files = {"train.py": "DEPTH = 8\n", "prepare.py": PREPARE}
    strays = (
        "pkg/data.txt",
        ".env",
        ".git/config",
        ".venv/a.py",
        "__pycache__/a.pyc",
        "lab/lab.db",
        "env/bin/python",
        "worktrees/a/train.py",
    )
    files |= dict.fromkeys((*strays, "kernels.py"), "x")
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "corpus.xz").write_bytes(b"x" * (2 << 20))
    (tmp_path / "outside.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    return Trainer(folder)


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


def test_only_what_belongs_to_the_trainer_is_copied(trainer: Any, tmp_path: Path) -> None:
    work = tmp_path / "runs/r0001/work"
    materialise(trainer, "DEPTH = 4\n", 60, work)
    assert names(work) == {"train.py", "prepare.py", "pkg/data.txt", "corpus.xz", "kernels.py"}
    assert (work / "train.py").read_text() == "DEPTH = 4\n"
    assert (work / "corpus.xz").is_symlink()
    assert not (work / "prepare.py").is_symlink()


def test_the_budget_is_written_where_upstream_keeps_it(trainer: Any, tmp_path: Path) -> None:
    materialise(trainer, "DEPTH = 4\n", 60.0, tmp_path / "w")
    text = (tmp_path / "w/prepare.py").read_text()
    assert text == PREPARE.replace("300 ", "60 ")
    assert type(constants(text)["TIME_BUDGET"]) is int
    assert (trainer.folder / "prepare.py").read_text() == PREPARE


def test_doing_it_twice_gives_the_same_and_leaves_the_trainer_alone(trainer: Any, tmp_path: Path) -> None:
    big = trainer.folder / "train.py"
    big.write_text("DEPTH = 8\n" + "#" * (2 << 20))
    for _ in range(2):
        materialise(trainer, "DEPTH = 4\n", 60, tmp_path / "w")
    assert (tmp_path / "w/train.py").read_text() == "DEPTH = 4\n"
    assert big.read_text().startswith("DEPTH = 8\n")


def test_a_shim_stands_beside_the_script(trainer: Any, tmp_path: Path) -> None:
    (trainer.folder / "shims").mkdir()
    (trainer.folder / "shims/kernels.py").write_text("shim")
    trainer.shims = ["shims/kernels.py"]
    materialise(trainer, "", 60, tmp_path / "w")
    assert (tmp_path / "w/kernels.py").read_text() == "shim"
    trainer.shims = ["shims/nothing.py"]
    with pytest.raises(PolicyError, match="nothing"):
        materialise(trainer, "", 60, tmp_path / "w")


@pytest.mark.parametrize("budget", ["prepare.py:TIME_BUDGETS", "nothing.py:TIME_BUDGET", "prepare.py", "../../etc/passwd:X"])
def test_a_budget_that_is_not_there_names_the_key(trainer: Any, tmp_path: Path, budget: str) -> None:
    trainer.budget = budget
    with pytest.raises(PolicyError, match="budget"):
        materialise(trainer, "", 60, tmp_path / "w")


def test_half_seconds_do_not_fit_a_whole_number(trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(BadValue, match="whole number"):
        materialise(trainer, "", 7.5, tmp_path / "w")


def test_a_folder_of_everything_is_refused(trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.materialise.MAX_FILES", 3)
    with pytest.raises(Refused, match="more than 3 files"):
        materialise(trainer, "", 60, tmp_path / "w")


def test_the_policy_file_with_its_secrets_never_travels_with_the_trainer(trainer: Any, tmp_path: Path) -> None:
    (trainer.folder / "hosts.toml").write_text('[[host]]\nname = "a"\nenv = {TOKEN = "hunter2"}\n')
    (trainer.folder / "more").mkdir(exist_ok=True)
    (trainer.folder / "more" / "hosts.toml").write_text("x")
    materialise(trainer, "x = 1\n", 60, tmp_path / "w")
    assert (tmp_path / "w" / "train.py").exists() and not list((tmp_path / "w").rglob("hosts.toml"))
