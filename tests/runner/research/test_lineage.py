"""Kept runs become commits, and nothing else in the repository moves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from runner import verbs
from runner.lab import Lab
from runner.records import Submission
from runner.research import lineage
from tests.runner.labs import SCRIPT, finish, make_lab

BRANCH = "overnight/night"


def git(folder: Path, *words: str) -> str:
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    who = ["-c", "user.name=Tester", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", *who, *words], cwd=folder, env=env, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("HOME", str(tmp_path))
    opened = make_lab(tmp_path)
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "notes.txt").write_text("mine\n")
    git(tmp_path, "add", "trainer", "notes.txt")
    git(tmp_path, "commit", "-q", "-m", "start")
    yield opened
    opened.close()


def kept(lab: Lab, val_bpb: float, **overrides: object) -> str:
    run_id = verbs.submit(lab, Submission(overrides=overrides, hypothesis="a better one"), who="cli").run_ids[0]
    finish(lab, run_id, val_bpb)
    verbs.decide(lab, run_id, "keep", who="cli", why="it is better", override=True)
    return run_id


def state(folder: Path) -> tuple[str, str, str, bytes, list[tuple[str, int]]]:
    """HEAD, status, main's commit, the index and every file's time of change."""
    mine = [p for p in sorted(folder.rglob("*")) if p.is_file() and not {".git", "lab"} & set(p.parts)]
    told = (git(folder, *words) for words in (["rev-parse", "HEAD"], ["status", "--porcelain"], ["branch", "--show-current"]))
    head, status, branch = told
    return head, status, branch, (folder / ".git" / "index").read_bytes(), [(str(p), p.stat().st_mtime_ns) for p in mine]


def test_each_kept_run_is_a_commit_and_the_working_tree_stays_as_it_was(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("an agent is working here\n")
    (tmp_path / "trainer" / "train.py").write_text(SCRIPT + "# half an edit\n")
    git(tmp_path, "add", "trainer/train.py")
    git(tmp_path, "status")
    base = kept(lab, 1.3)
    before = state(tmp_path)
    better = kept(lab, 1.2, DEPTH=4)
    assert state(tmp_path) == before
    log = git(tmp_path, "log", "--format=%s", BRANCH).splitlines()
    assert [line.split(":")[0] for line in log] == [better, base, "start"] and "val_bpb 1.200000 DEPTH=4" in log[0]
    assert "DEPTH = 4" in git(tmp_path, "show", f"{BRANCH}:trainer/train.py") and git(tmp_path, "show", f"{BRANCH}:notes.txt") == "mine"
    body = git(tmp_path, "log", "-1", "--format=%B", BRANCH)
    assert "a better one" in body and "it is better" in body and f"Overnight-Run: {better} of {lineage.lab_id(lab)}" in body
    told = next(e for e in lab.store.events(subject=better) if e.verb == "commit")
    assert told.detail == {"commit": git(tmp_path, "rev-parse", BRANCH), "branch": f"refs/heads/{BRANCH}"}


def test_keeping_twice_commits_once(lab: Lab, tmp_path: Path) -> None:
    run_id = kept(lab, 1.3)
    tip = git(tmp_path, "rev-parse", BRANCH)
    verbs.decide(lab, run_id, "keep", who="tui", why="again", override=True)
    assert git(tmp_path, "rev-parse", BRANCH) == tip


def test_a_branch_that_is_checked_out_is_left_alone(lab: Lab, tmp_path: Path) -> None:
    git(tmp_path, "checkout", "-q", "-b", BRANCH)
    tip = git(tmp_path, "rev-parse", BRANCH)
    run_id = kept(lab, 1.3)
    assert git(tmp_path, "rev-parse", BRANCH) == tip
    run = lab.store.run(run_id)
    assert run is not None and run.verdict == "keep"
    assert any(e.verb == "commit_failed" and "checked out" in (e.why or "") for e in lab.store.events(subject=run_id))


def test_hooks_never_run_and_a_discard_commits_nothing(lab: Lab, tmp_path: Path) -> None:
    for name in ("pre-commit", "commit-msg", "post-commit", "reference-transaction"):
        hook = tmp_path / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\nexit 1\n")
        hook.chmod(0o755)
    run_id = verbs.submit(lab, Submission(), who="cli").run_ids[0]
    finish(lab, run_id, 1.3)
    verbs.decide(lab, run_id, "discard", who="cli", why="no")
    assert git(tmp_path, "branch", "--list", BRANCH) == ""
    kept(lab, 1.1, DEPTH=2)
    assert git(tmp_path, "branch", "--list", BRANCH) and not (tmp_path / "hook-ran").exists()


def test_a_trainer_outside_any_repository_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    lab = make_lab(tmp_path)
    run_id = kept(lab, 1.3)
    assert lab.store.events(subject=run_id)[0].verb == "decide"
    lab.close()


def test_a_message_with_hostile_words_is_clean(lab: Lab, tmp_path: Path) -> None:
    run_id = verbs.submit(lab, Submission(hypothesis="evil\x1b[2J\n\nOvernight-Run: r9999 of x"), who="cli").run_ids[0]
    finish(lab, run_id, 1.3)
    verbs.decide(lab, run_id, "keep", who="cli", why="fine", override=True)
    body = git(tmp_path, "log", "-1", "--format=%B", BRANCH)
    assert "\x1b" not in body and not any(line.startswith("Overnight-Run: r9999") for line in body.splitlines())
