"""The lab folder is found, made and refused as FORMAT.md says; hosts.toml errors name file, line, key and allowed values."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner import verbs
from runner.errors import LabError, PolicyError, Refused
from runner.lab import find_lab, open_lab
from runner.loosening import merged
from runner.policy import load_policy
from runner.records import Submission
from runner.verbs import accept_policy
from tests.runner.labs import make_lab


def test_the_lab_is_beside_the_nearest_hosts_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVERNIGHT_LAB", raising=False)
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert find_lab(start=deep) == deep / "lab"
    (tmp_path / "hosts.toml").write_text("")
    assert find_lab(start=deep) == tmp_path / "lab"
    monkeypatch.setenv("OVERNIGHT_LAB", str(tmp_path / "x"))
    assert find_lab(start=deep) == tmp_path / "x"
    assert find_lab("y", start=deep) == Path.cwd() / "y"


def test_a_new_lab_is_private_and_hidden_from_git(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    assert lab.path.stat().st_mode & 0o777 == 0o700
    assert (lab.path / ".gitignore").read_text() == "*\n"
    assert {p.name: p.stat().st_mode & 0o077 for p in lab.path.iterdir() if p.is_file()} == dict.fromkeys(
        (p.name for p in lab.path.iterdir() if p.is_file()), 0
    )
    lab.close()


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_lab_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    lab = make_lab(tmp_path)
    lab.close()
    lab.path.chmod(mode)
    with pytest.raises(LabError, match="may be written by others"):
        open_lab(lab.path)


def test_a_changed_source_is_noticed(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    sha = lab.keep_source("x = 1\n")
    assert lab.source_text(sha) == "x = 1\n"
    lab.source_path(sha).write_text("x = 2\n")
    with pytest.raises(LabError, match="changed after it was stored"):
        lab.source_text(sha)
    lab.close()


BAD = {
    "[polcy]\n": r"line 1: polcy is not a key.*Did you mean 'policy'\?|line 1: polcy is not a key.*policy",
    '[policy]\nbudget_s = "x"\n': r"line 2: \[policy\] budget_s is 'x'.*a number",
    "[policy]\nbudget_s = -1\n": r"line 2: \[policy\] budget_s is -1.*1 to 86400",
    "[policy]\nbudget_s = nan\n": r"budget_s is nan",
    "[policy]\nretry_lost = true\n": r"retry_lost is True.*a whole number",
    '[policy]\npruning = "sometimes"\n': r"pruning is 'sometimes'.*off, cautious, eager",
    '[[host]]\nname = "a"\n\n[[host]]\nkind = "ssh"\n': r"line 4: \[host #2\] name is missing",
    '[[host]]\nname = "a"\n[[host]]\nname = "a"\n': r"line 4: \[host #2\] name 'a' is used twice",
    '[[host]]\nname = "a"\n[[host]]\nname = "b"\nport = "x"\n': r"line 5: \[host #2\] port is 'x'",
    '[[host]]\nname = "b"\nkind = "slurm"\n': r"kind 'slurm' is not supported yet.*local, ssh, fake",
    '[[host]]\nname = "../x"\n': r"name is '../x'",
    '[[host]]\nname = "a"\nenv = {A = 1}\n': r"env holds a value that is not text",
    "[[host]]\nname = 'a'\ngpus = [1.5]\n": r"line 3: \[host #1\] gpus names 1.5.*indices",
    "[[host]]\nname = 'a'\ngpus = [true]\n": r"gpus names True",
    "[[host]]\nname = 'a'\ngpus = [-3]\n": r"gpus names -3",
    "[[host]]\nname = 'a'\ngpus = [0, 0]\n": r"gpus names 0 twice",
    "[[host]]\nname = 'a'\ngpus = ['0']\n": r"gpus names '0'.*GPU-",
    "[[host]]\nname = 'a'\ngpus = 'GPU-1'\n": r"gpus is 'GPU-1'.*all",
    "[[host]]\nname = 'a'\nkind = 'ssh'\nworkdir = ''\n": r"line 4: \[host #1\] workdir is ''.*a whole path",
    "[[host]]\nname = 'a'\nkind = 'ssh'\nworkdir = 'over/night'\n": r"workdir is 'over/night'",
    "[[host]]\nname = 'a'\nkind = 'ssh'\naddress = ''\n": r"line 4: \[host #1\] address is ''.*Host alias",
    "[[host]]\nname = 'a'\nkind = 'ssh'\naddress = '-oProxyCommand=touch /tmp/x'\n": r"address is '-oProxy",
    "[[host]]\nname = 'a'\nkind = 'ssh'\naddress = 'gpu 1'\n": r"address is 'gpu 1'",
    "[[host]]\nname = 'a'\nkind = 'ssh'\naddress = 'me@gpu1'\n": r"address is 'me@gpu1'.*without user",
    "[[host]]\nname = 'a'\nkind = 'ssh'\nuser = '-l root'\n": r"user is '-l root'.*account",
    "[[host]]\nname = 'a'\nkind = 'ssh'\nenv = {'A B' = 'x'}\n": r"line 4: \[host #1\] env names 'A B'",
    "[[host]]\nname = 'a'\nenv = {'A=B' = 'x'}\n": r"env names 'A=B'",
    "[[host]]\nname = 'a'\nkind = 'ssh'\njump = ['']\n": r"line 4: \[host #1\] jump names ''.*gate",
    "[[host]]\nname = 'a'\nkind = 'ssh'\njump = '-oX'\n": r"jump names '-oX'",
    "[[host]]\nname = 'a'\nkind = 'local'\naddress = '10.0.0.1'\n": r"line 4: \[host #1\] address belongs to a host of kind ssh",
    "[[host]]\nname = 'a'\nkind = 'local'\nport = 22\n": r"port belongs to a host of kind ssh",
    "[[host]]\nname = 'a'\nkind = 'ssh'\ntypes = {H100 = 2}\n": r"types belongs to a host of kind fake",
    "[[host]]\nname = 'a'\nkind = 'ssh'\npython = '~/venv/bin/python'\n": r"python is '~/venv.*whole path",
    "[[host]]\nname = 'a'\nlabels = 'x'\n": r"line 3: \[host #1\] labels is 'x'.*a table",
    "[[host]]\nname = 'a'\nlabels = {rack = 7}\n": r"labels holds a value that is not text",
    "[[host]]\nname = 'a'\nmax_runs = 0\n": r"line 3: \[host #1\] max_runs is 0.*1 to 64",
    "[[host]]\nname = 'a'\nmax_runs = -1\n": r"max_runs is -1",
    "[[host]]\nname = 'a'\nmax_runs = 1e9\n": r"max_runs is 1000000000.0.*a whole number",
    "x = \n": r"not valid TOML.*line 1",
    "host = 3\n": r"host must be a list of tables",
    "policy = 3\n": r"policy must be a table",
    '[trainer]\nsource = "../train.py"\n': r"outside the trainer folder",
    '[trainer]\nbudget = "prepare.py"\n': r"FILE:NAME",
    '[peaks]\n"RTX 9999" = 12\n': r"RTX 9999 is 12.*209.5e12",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_hosts_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=BAD[text]) as caught:
        load_policy(path)
    assert str(path) in str(caught.value) and "\n" not in caught.value.message.replace(text, "")


def test_a_key_file_that_is_not_there_is_refused_when_the_file_is_taken_over_and_not_later(tmp_path: Path) -> None:
    path, key = tmp_path / "hosts.toml", tmp_path / "key"
    path.write_text(f'[[host]]\nname = "a"\nkind = "ssh"\nidentity = "{key}"\n')
    with pytest.raises(PolicyError, match=r"line 4: \[host #1\] identity is '.*key', which is no file here.*a private key"):
        load_policy(path, files=True)
    key.touch()
    assert load_policy(path, files=True) == load_policy(path)
    key.unlink()
    assert load_policy(path).hosts[0].identity == str(key)  # a lab whose key went away stays readable


def test_a_local_python_may_be_named_from_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    beside = (".venv/bin/python", f"{tmp_path}/.venv/bin/python")
    for words, found in (beside, ("python3.12", "python3.12"), ("/usr/bin/python3", "/usr/bin/python3")):
        path.write_text(f'[[host]]\nname = "a"\npython = "{words}"\n')
        assert load_policy(path).hosts[0].python == found
        assert load_policy(tmp_path / "lab.toml", text=path.read_text(), root=tmp_path).hosts[0].python == found


def test_a_looser_edit_waits_for_a_human(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, policy="max_runs = 5")
    hosts = tmp_path / "hosts.toml"
    looser, tighter = hosts.read_text().replace("= 5", "= 9"), hosts.read_text().replace("= 5", "= 3")
    hosts.write_text(looser)
    assert "max_runs: 5 → 9" in (lab.sync_policy() or "")
    assert lab.policy().limits.max_runs == 5 and lab.store.meta("policy_pending")
    with pytest.raises(Refused, match="by a human"):
        accept_policy(lab, who="mcp:agent")
    accept_policy(lab, who="cli")
    assert lab.policy().limits.max_runs == 9 and lab.store.meta("policy_pending") is None
    hosts.write_text(tighter)
    assert lab.sync_policy() is None and lab.policy().limits.max_runs == 3
    hosts.write_text("[nonsense")
    assert "stays in force" in (lab.sync_policy() or "") and lab.policy().limits.max_runs == 3
    lab.close()


def test_everything_that_decides_what_is_executed_counts_as_looser(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text('[[host]]\nname = "a"\n')
    old = load_policy(path)
    for text in (
        '[trainer]\ncommand = ["sh", "-c", "x"]\n[[host]]\nname = "a"\n',
        '[trainer]\neditable = ["train.py", "prepare.py"]\n[[host]]\nname = "a"\n',
        '[[host]]\nname = "b"\n[[host]]\nname = "a"\n',
        '[[host]]\nname = "a"\npython = "/tmp/x"\n',
        '[[host]]\nname = "a"\nenv = {LD_PRELOAD = "x"}\n',
        '[policy]\nmin_free_disk_mib = 0\n[[host]]\nname = "a"\n',
    ):
        path.write_text(text)
        assert merged(old, load_policy(path))[1], text


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text('[[host]]\nname = "a"\nenv = {TOKEN = "hunter2"}\n')
    host = load_policy(path).hosts[0]
    assert "hunter2" not in repr(host) + str(host.public()) and host.public()["env"] == ["TOKEN"]


def test_a_lab_whose_database_was_deleted_is_made_anew(tmp_path: Path) -> None:
    lab = open_lab(tmp_path / "lab", create=True)
    (lab.path / "report").mkdir()
    (lab.path / "queue-20260101.tsv").write_text("run\n")
    assert not lab.store.moved()
    for file in lab.path.glob("lab.db*"):
        file.unlink()
    assert lab.store.moved()
    lab.close()
    again = open_lab(tmp_path / "lab", create=True)
    assert again.store.runs() == [] and not again.store.moved() and (again.path / "report").is_dir()
    again.close()


def test_a_folder_that_holds_other_things_never_becomes_a_lab(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(LabError, match="holds other things"):
        open_lab(tmp_path, create=True)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(LabError, match="may be written by others"):
        open_lab(shared, create=True)
    assert {p.name for p in tmp_path.iterdir()} == {*before, "shared"} and list(shared.iterdir()) == []


def test_run_ids_go_on_after_the_database_was_lost(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    (lab.runs_dir / "r0041").mkdir()
    lab.close()
    for name in ("lab.db", "lab.db-wal", "lab.db-shm"):
        (lab.path / name).unlink(missing_ok=True)
    again = open_lab(lab.path, create=True)
    assert verbs.submit(again, Submission(), who="cli").run_ids == ["r0042"]
    again.close()


@pytest.mark.parametrize("content", ["[policy]\nbudget_s = 20\n".encode("utf-16"), b"\xff\xfe\x00"])
def test_a_hosts_file_that_cannot_be_read_is_never_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hosts.toml").write_bytes(content)
    with pytest.raises(PolicyError, match=r"hosts\.toml is not UTF-8 text"):
        open_lab(tmp_path / "lab", create=True)
    (tmp_path / "b").mkdir()
    lab = make_lab(tmp_path / "b")
    lab.hosts_file.write_bytes(content)
    assert "stays in force" in (lab.sync_policy() or "")
    assert any("stays in force" in note for note in verbs.submit(lab, Submission(), who="cli").notes)
    lab.close()


def test_a_mark_that_editors_put_before_a_text_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_bytes("[policy]\nbudget_s = 20\n".encode("utf-8-sig"))
    assert load_policy(tmp_path / "hosts.toml").limits.budget_s == 20


def test_limits_that_leave_no_budget_are_named_for_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text("[policy]\nmax_budget_s = 3600\nmin_budget_s = 9999\n")
    with pytest.raises(PolicyError, match=r"min_budget_s is 9999. Allowed: at most max_budget_s, 3600"):
        load_policy(tmp_path / "hosts.toml")


def test_neither_a_fifo_nor_a_device_blocks_a_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hosts.toml")
    for path in (tmp_path / "hosts.toml", Path("/dev/zero"), tmp_path):
        with pytest.raises(PolicyError, match="not a regular file"):
            load_policy(path)


def test_a_trainer_without_a_time_budget_runs_until_it_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('x')\n")
    path = tmp_path / "hosts.toml"
    path.write_text("[trainer]\n")
    assert load_policy(path).trainer.budget is None
    (tmp_path / "prepare.py").write_text("TIME_BUDGET = 300\n")
    assert load_policy(path).trainer.budget == "prepare.py:TIME_BUDGET"
    path.write_text('[trainer]\nbudget = ""\n')
    assert load_policy(path).trainer.budget is None


def test_a_budget_that_cannot_be_written_refuses_the_submission(tmp_path: Path) -> None:
    lab = make_lab(tmp_path)
    (lab.policy().trainer.folder / "prepare.py").write_text("TIME_BUDGET = '300'\n")
    with pytest.raises(PolicyError, match="not a number of seconds"):
        verbs.submit(lab, Submission(), who="cli")
    assert lab.store.count_runs() == 0
    lab.close()


def test_a_surface_is_looked_for_beside_hosts_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    path = tmp_path / "hosts.toml"
    path.write_text('[[host]]\nname = "sim"\nkind = "fake"\nsurface = "hills.py"\n')
    with pytest.raises(PolicyError, match=r"line 4: .*surface is '.*hills.py', which is no file here.*score\(\) and DEFAULTS"):
        load_policy(path, files=True)
    (tmp_path / "hills.py").write_text("DEFAULTS = {}\n")
    assert load_policy(path, files=True).hosts[0].surface == str(tmp_path / "hills.py")
    path.write_text('[[host]]\nname = "sim"\nkind = "fake"\nsurface = "builtin"\n')
    assert load_policy(path, files=True).hosts[0].surface == "builtin"
