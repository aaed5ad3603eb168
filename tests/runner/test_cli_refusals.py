"""Bad input on the command line: one sentence, the right exit code, no traceback, nothing lost."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runner import cli_io, verbs
from runner.errors import PolicyError
from runner.lab import Lab
from runner.policy import load_policy
from runner.records import Submission, WaveRequest
from tests.runner.commands import overnight, program
from tests.runner.labs import SCRIPT, finish, make_lab


@pytest.fixture
def lab(tmp_path: Path):
    opened = make_lab(tmp_path)
    yield opened
    opened.close()


def test_the_time_budget_is_no_constant_to_vary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = make_lab(tmp_path, script=SCRIPT.replace("DEPTH = 8", "DEPTH = 8\nTIME_BUDGET = 300"))
    lab.accept(lab.hosts_file.read_text().replace('folder = "trainer"', 'folder = "trainer"\nbudget = "train.py:TIME_BUDGET"'))
    for words in (["run", "--set", "TIME_BUDGET=1"], ["wave", "--grid", "TIME_BUDGET=1,2"], ["wave", "--cell", "DEPTH=2,TIME_BUDGET=9"]):
        said = overnight(capsys, "--lab", lab.path, *words)
        assert said.code == 2 and "TIME_BUDGET is the time budget" in said.err and "--budget" in said.err
    assert lab.store.count_runs() == 0
    lab.close()


def test_pausing_an_agent_that_never_called_names_those_that_did(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    verbs.submit(lab, Submission(), who="mcp:claude-code")
    said = overnight(capsys, "--lab", lab.path, "agents", "pause", "claude").out
    assert "Nothing was submitted by mcp:claude yet; so far: mcp:claude-code." in said
    assert "yet" not in overnight(capsys, "--lab", lab.path, "agents", "pause", "claude-code").out


def test_one_proposal_waits_and_a_wave_is_approved_by_its_id(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    verbs.set_approval(lab, "ask", who="tui")
    verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [4, 5]}), who="mcp:bot")
    verbs.submit(lab, Submission(overrides={"DEPTH": 6}), who="mcp:bot")
    at = ("--lab", lab.path)
    assert "3 runs wait for" in overnight(capsys, *at, "approval").out
    for command in ("approve", "decline", "cancel"):
        assert "or waves, e.g. w3" in " ".join(overnight(capsys, command, "--help").out.split())
    assert overnight(capsys, *at, "approve", "w1").code == 0
    assert "1 run waits for" in overnight(capsys, *at, "approval").out
    assert "2 runs wait." in overnight(capsys, *at, "daemon", "status").out


def test_a_night_that_is_over_names_the_command_that_begins_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = make_lab(tmp_path, policy="max_wall_hours = 1")
    lab.store.set_setting("night_started_at", time.time() - 7200)
    said = overnight(capsys, "--lab", lab.path, "run", "--set", "DEPTH=3")
    assert said.code == 2 and "`overnight policy new-night`" in said.err
    again = overnight(capsys, "--lab", lab.path, "policy", "new-night")
    assert again.code == 0 and "1 h" in again.out
    assert verbs.submit(lab, Submission(overrides={"DEPTH": 3}), who="cli").run_ids == ["r0001"]
    lab.close()


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
    [
        ("[trainer\n", "hosts.toml"),
        ('[trainer]\ncomand = ["x"]\n', "command"),
        ("[policy]\nbudget_s = 'long'\n", "budget_s"),
        ('[[host]]\nname = "a"\nkind = "slurm"\n', "slurm"),
        ("[policy]\nmax_budget_s = -1\n", "max_budget_s"),
    ],
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


def test_a_closed_stdout_is_no_fault_of_ours(lab: Lab, tmp_path: Path) -> None:
    for stream in (">&-", "2>&-", "<&-"):
        words = f"exec {sys.executable} -I -m runner.cli --lab {lab.path} runs {stream}"
        done = subprocess.run(["sh", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "wrong" not in done.stderr, (stream, done)
    assert lab.store.count_runs() == 0, "the database took no output for its own"


def test_a_plot_makes_no_folders_outside_the_lab(lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, out in (("plot", tmp_path / "nowhere" / "x.svg"), ("report", tmp_path / "nowhere" / "report")):
        said = overnight(capsys, "--lab", lab.path, command, "--out", out)
        assert said.is_one_sentence() and said.code in (1, 2)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["", " ", "a b", "x\ty", "-"])
def test_no_name_is_no_agent(lab: Lab, capsys: pytest.CaptureFixture[str], name: str) -> None:
    said = overnight(capsys, "--lab", lab.path, "agents", "pause", "--", name)
    assert said.code == 2 and said.is_one_sentence() and lab.store.setting("paused_agents", []) == []


def test_an_agent_is_paused_by_its_short_name_too(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    verbs.submit(lab, Submission(), who="mcp:claude")
    assert overnight(capsys, "--lab", lab.path, "agents", "pause", "claude").code == 0
    assert lab.store.setting("paused_agents") == ["mcp:claude"]


@pytest.mark.parametrize("types", ["{}", "{H100 = 1000000}", "{H100 = 0}", "{H100 = 40, H200 = 25}", "{H100 = 2.5}", "{H100 = true}"])
def test_simulated_cards_are_1_to_64(tmp_path: Path, types: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(f'[[host]]\nname = "sim"\nkind = "fake"\ntypes = {types}\n')
    with pytest.raises(PolicyError, match=r"line 4: .*types") as refused:
        load_policy(path)
    assert "1 to 64" in refused.value.next_step


def test_an_unknown_run_without_neighbours_has_a_next_step(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    said = overnight(capsys, "--lab", lab.path, "show", "r9999")
    assert said.code == 2 and "`overnight runs` lists them" in said.err


def test_numbers_for_a_person_are_short(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    (run_id,) = verbs.submit(lab, Submission(), who="cli").run_ids
    finish(lab, run_id, 1.25, wall_s=20.123456789012345, tok_s=1680000.75)
    shown = overnight(capsys, "--lab", lab.path, "show", run_id).out
    assert "20.1235\n" in shown and "1,680,001\n" in shown


def test_a_run_that_cannot_start_says_what_it_waits_for(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    verbs.submit(lab, Submission(), who="cli")
    lab.store.upsert_host("local", kind="local", state="up", since=0.0)
    lab.store.upsert_gpu("CPU:local", host="local", name="CPU", state="foreign", since=0.0, reason="another control room has it locked")
    said = overnight(capsys, "--lab", lab.path, "runs").out
    assert "waiting: local:cpu is foreign: another control room has it locked" in said
    lab.store.upsert_gpu("CPU:local", state="free", reason=None)
    assert "waiting:" not in overnight(capsys, "--lab", lab.path, "runs").out


def test_a_piece_of_a_log_keeps_its_lines_and_nothing_else_does(capsys: pytest.CaptureFixture[str]) -> None:
    error = {"code": "host", "message": "a\nb", "next": "Mend c\nd. The last lines:\nfirst\novernight: second\x1b[2J"}
    cli_io.print_error(error, as_json=False)
    assert capsys.readouterr().err == "overnight: a b Mend c d. The last lines:\n  first\n  overnight: second\n"
