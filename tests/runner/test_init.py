"""`overnight init`: recognises trainer folders, writes one file, and touches nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.lab import open_lab
from runner.policy import load_policy
from tests.runner.commands import overnight

UPSTREAM = {
    "train.py": 'from prepare import TIME_BUDGET\nTOTAL_BATCH_SIZE = 2**19\nprint("---")\n',
    "prepare.py": "MAX_SEQ_LEN = 2048\nTIME_BUDGET = 300        # training time budget in seconds\n",
    "program.md": "# autoresearch\n",
    "pyproject.toml": '[project]\nname = "autoresearch"\n',
    "README.md": "hello\n",
}


def checkout(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def picture(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its content and time of change."""
    return {str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_an_unmodified_checkout_gets_one_file_and_nothing_else_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkout(tmp_path / "autoresearch", UPSTREAM)
    before = picture(folder)
    said = overnight(capsys, "init", folder)
    assert said.code == 0 and "prepare.py:TIME_BUDGET = 300 s" in said.out and "program.md is used as it is" in said.out
    after = picture(folder)
    assert set(after) - set(before) == {"hosts.toml"} and all(after[name] == before[name] for name in before)
    policy = load_policy(folder / "hosts.toml")
    assert (policy.trainer.folder, policy.trainer.budget, policy.limits.budget_s) == (folder, "prepare.py:TIME_BUDGET", 300)
    assert [h.kind for h in policy.hosts] == ["local"]


def test_a_second_init_changes_nothing_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkout(tmp_path / "autoresearch", UPSTREAM)
    overnight(capsys, "init", folder)
    before = picture(folder)
    said = overnight(capsys, "init", folder, "--json")
    assert said.code == 0 and said.object["written"] is False and picture(folder) == before


def test_a_hosts_file_of_ones_own_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkout(tmp_path, {**UPSTREAM, "hosts.toml": "[policy]\nbudget_s = 60\n"})
    said = overnight(capsys, "init", folder)
    assert (said.code, said.is_one_sentence()) == (2, True) and (folder / "hosts.toml").read_text() == "[policy]\nbudget_s = 60\n"


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkout(tmp_path / "autoresearch", UPSTREAM)
    os.symlink(tmp_path / "elsewhere", folder / "hosts.toml")
    assert overnight(capsys, "init", folder).code != 0 and not (tmp_path / "elsewhere").exists()


def test_a_fork_with_its_budget_in_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkout(tmp_path, {"train.py": "TIME_BUDGET = 60 * 10\n"})
    assert overnight(capsys, "init", folder).code == 0
    policy = load_policy(folder / "hosts.toml")
    assert (policy.trainer.budget, policy.limits.budget_s, policy.trainer.data_command) == ("train.py:TIME_BUDGET", 600, None)


def test_its_own_environment_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkout(tmp_path, {**UPSTREAM, ".venv/bin/python": "#!/bin/sh\n"})
    assert overnight(capsys, "init", folder).code == 0
    assert load_policy(folder / "hosts.toml").hosts[0].python == str(folder / ".venv" / "bin" / "python")


@pytest.mark.parametrize(("files", "hint"), [({"notes.txt": ""}, "train.py"), ({"nano/train.py": ""}, "nano")], ids=["none", "deeper"])
def test_a_folder_without_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], files: dict[str, str], hint: str) -> None:
    said = overnight(capsys, "init", checkout(tmp_path, files))
    assert (said.code, said.is_one_sentence()) == (2, True) and hint in said.err and not (tmp_path / "hosts.toml").exists()


def test_a_path_that_is_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert overnight(capsys, "init", tmp_path / "nowhere").code == 2


def test_the_lab_of_a_checkout_stays_out_of_git(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkout(tmp_path, UPSTREAM)
    overnight(capsys, "init", folder)
    monkeypatch.chdir(folder)
    lab = open_lab(create=True)
    assert lab.path == folder / "lab" and (lab.path / ".gitignore").read_text() == "*\n"
    lab.close()


def test_the_shipped_hosts_file_is_valid_and_fits_the_shipped_trainer() -> None:
    root = Path(__file__).parents[2]
    policy = load_policy(root / "hosts.toml")
    assert policy.trainer.folder == root / "trainer" and policy.trainer.budget is not None
    file, name = policy.trainer.budget.split(":")
    assert f"\n{name} = " in (policy.trainer.folder / file).read_text()
    assert all((policy.trainer.folder / n).is_file() for n in policy.trainer.editable)
