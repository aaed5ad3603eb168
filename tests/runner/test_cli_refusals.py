"""Bad input on the command line: one sentence, the right exit code, no traceback, nothing lost."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from runner.lab import Lab
from tests.runner.commands import overnight, program
from tests.runner.labs import SCRIPT, make_lab


@pytest.fixture
def lab(tmp_path: Path):
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


REFUSED = [
    (["run", "--set", "MATRX_LR=0.1"], "MATRIX_LR"),
    (["run", "--set", "matrix_lr=0.1"], "MATRIX_LR"),
    (["run", "--set", "DEPTH=wide"], "DEPTH"),
    (["run", "--set", "DEPTH=2.5"], "DEPTH"),
    (["run", "--set", "DEPTH"], "NAME=VALUE"),
    (["run", "--set", "DEPTH=4", "--set", "DEPTH=5"], "twice"),
    (["run", "--budget", "0"], "budget"),
    (["run", "--budget", "-1"], "budget"),
    (["run", "--budget", "1e9"], "budget"),
    (["run", "--budget", "nan"], "budget"),
    (["run", "--budget", "soon"], "number"),
    (["run", "no/such/file.py"], "no/such/file.py"),
    (["run", "--base", "r0001"], "r0001"),
    (["run", "--host", "mars"], "mars"),
    (["run", "--seeds", "0"], "seeds"),
    (["run", "--no-such-option"], "--no-such-option"),
    (["wave"], "--grid"),
    (["wave", "--grid", "DEPTH"], "NAME=VALUE"),
    (["wave", "--grid", "DEPT=1,2"], "DEPTH"),
    (["show", "r9999"], "r9999"),
    (["show", "[/bold]"], "[/bold]"),
    (["log", "r9999"], "r9999"),
    (["cancel", "r9999"], "r9999"),
    (["decide", "r9999", "keep"], "r9999"),
    (["requeue", "r9999"], "r9999"),
    (["priority", "r9999", "--to", "1"], "r9999"),
    (["runs", "--phase", "runnning"], "running"),
    (["runs", "--cursor", "x"], "cursor"),
    (["hosts", "check", "mars"], "mars"),
    (["approval", "maybe"], "auto"),
    (["gpus", "release", "GPU-nope"], "GPU-nope"),
    (["rusn"], "runs"),
]


@pytest.mark.parametrize(("words", "named"), REFUSED, ids=lambda v: " ".join(v) if isinstance(v, list) else None)
def test_a_wrong_request_is_one_sentence(lab: Lab, capsys: pytest.CaptureFixture[str], words: list[str], named: str) -> None:
    said = overnight(capsys, "--lab", lab.path, *words)
    assert (said.code, said.is_one_sentence()) == (2, True), said
    assert named.lower() in said.err.lower()
    assert lab.store.runs() == []


@pytest.mark.parametrize("words", [["run", "--set", "MATRX_LR=0.1"], ["show", "r9999"], ["run", "--budget", "-1"], ["rusn"]], ids=" ".join)
def test_with_json_the_error_is_one_object_on_stdout(lab: Lab, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    said = overnight(capsys, "--lab", lab.path, *words, "--json")
    assert said.code == 2 and said.err == ""
    error = said.object["error"]
    assert said.object["v"] == 1 and set(error) == {"code", "message", "next"} and error["message"]


def test_a_script_with_a_syntax_error_is_refused_with_its_line(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trainer" / "train.py").write_text(SCRIPT + "\ndef broken(:\n")
    said = overnight(capsys, "--lab", lab.path, "run")
    assert (said.code, said.is_one_sentence()) == (2, True)
    assert f"line {len(SCRIPT.splitlines()) + 2}" in said.err and "train.py" in said.err


def test_a_file_that_may_not_be_edited_is_refused_by_name(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = overnight(capsys, "--lab", lab.path, "run", tmp_path / "trainer" / "prepare.py")
    assert said.code == 2 and "prepare.py" in said.err and "train.py" in said.err


@pytest.mark.parametrize(
    ("text", "named"),
    [("[trainer\n", "hosts.toml"), ('[trainer]\ncomand = ["x"]\n', "command"), ("[policy]\nbudget_s = 'long'\n", "budget_s"),
     ('[[host]]\nname = "a"\nkind = "slurm"\n', "slurm"), ("[policy]\nmax_budget_s = -1\n", "max_budget_s")],
)
def test_a_malformed_hosts_file_names_file_and_key(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, named: str) -> None:
    (tmp_path / "hosts.toml").write_text(text)
    said = overnight(capsys, "--lab", tmp_path / "lab", "run")
    assert (said.code, said.is_one_sentence()) == (2, True), said
    assert named in said.err and "hosts.toml" in said.err


def test_a_lab_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = overnight(capsys, "--lab", tmp_path / "nowhere", "runs")
    assert (said.code, said.is_one_sentence()) == (1, True) and str(tmp_path / "nowhere") in said.err
    assert not (tmp_path / "nowhere").exists()


def test_a_corrupt_database_is_named_and_left_alone(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.close()
    for extra in lab.path.glob("lab.db-*"):
        extra.unlink()
    garbage = b"this is not a database, " * 200
    lab.db_path.write_bytes(garbage)
    said = overnight(capsys, "--lab", lab.path, "runs")
    assert (said.code, said.is_one_sentence()) == (1, True) and "lab.db" in said.err
    assert lab.db_path.read_bytes() == garbage


def test_a_database_of_a_newer_version_is_left_alone(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.close()
    with sqlite3.connect(lab.db_path) as connection:
        connection.execute("PRAGMA user_version = 999")
    connection.close()
    said = overnight(capsys, "--lab", lab.path, "runs", "--json")
    assert said.code == 1 and said.object["error"]["code"] == "lab" and "999" in said.object["error"]["message"]


def test_a_lab_others_may_write_is_refused(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.path.chmod(0o770)
    said = overnight(capsys, "--lab", lab.path, "runs")
    assert said.code == 1 and "chmod 700" in said.err


def test_a_lab_where_nothing_can_be_written_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    said = overnight(capsys, "--lab", "/proc/overnight-lab", "run")
    assert (said.code, said.is_one_sentence()) == (1, True) and "/proc/overnight-lab" in said.err


def test_a_full_disk_behind_stdout_is_a_sentence(lab: Lab, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        said = program("--lab", lab.path, "runs", cwd=tmp_path, stdout=full, stderr=-1)
    assert said.code == 1 and said.err.startswith("overnight: No space left") and said.err.count("\n") == 1


def test_a_reader_that_has_seen_enough_is_no_error(lab: Lab, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    said = program("--lab", lab.path, "events", "--json", cwd=tmp_path, stdout=write, stderr=-1)
    os.close(write)
    assert (said.code, said.err) == (0, "")


def test_an_error_nobody_expected_is_a_sentence_that_says_where_the_details_are(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **more: object) -> None:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr("runner.queries.list_runs", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = overnight(capsys, "--lab", lab.path, "runs")
    assert (said.code, said.is_one_sentence()) == (1, True)
    (details,) = tmp_path.glob("overnight-error-*.log")
    assert str(details) in said.err and "ZeroDivisionError: inside" in details.read_text() and details.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("OVERNIGHT_DEBUG", "1")
    assert "Traceback" in overnight(capsys, "--lab", lab.path, "runs").err


def test_modules_in_the_working_folder_are_never_imported(lab: Lab, tmp_path: Path) -> None:
    for name in ("runner.py", "torch.py", "typer.py"):
        (tmp_path / name).write_text("raise SystemExit('a module of the working folder was imported')\n")
    assert program("--lab", lab.path, "runs", cwd=tmp_path).code == 0
