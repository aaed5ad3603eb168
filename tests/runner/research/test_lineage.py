"""Commits of kept runs in a real repository: dirty, busy, checked out, hooked; and what is never touched."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from runner import verbs
from runner.lab import Lab
from runner.records import Submission
from runner.research import lineage
from tests.runner.labs import finish, make_lab


def git(folder: Path, *args: str) -> str:
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@b", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    opened = make_lab(tmp_path)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", "trainer", "hosts.toml")
    git(tmp_path, "commit", "-q", "-m", "start")
    yield opened
    opened.close()


def keep(lab: Lab, depth: int, val: float, hypothesis: str = "deeper\nis better") -> str:
    run_id = verbs.submit(lab, Submission(overrides={"DEPTH": depth}, hypothesis=hypothesis), who="mcp:agent").run_ids[0]
    finish(lab, run_id, val)
    verbs.decide(lab, run_id, "keep", who="tui", why="clear gain")
    return run_id


def test_a_keep_becomes_a_commit_and_nothing_else_moves(lab: Lab, tmp_path: Path) -> None:
    first, second = keep(lab, 9, 0.99), keep(lab, 10, 0.98)
    (tmp_path / "trainer/train.py").write_text("half an edit of the agent\n")
    (tmp_path / "staged.txt").write_text("x")
    git(tmp_path, "add", "staged.txt")
    hook = tmp_path / ".git/hooks/reference-transaction"
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    before = git(tmp_path, "status", "--porcelain"), git(tmp_path, "rev-parse", "HEAD"), (tmp_path / ".git/index").read_bytes()
    assert lineage.pending(lab)
    made = lineage.commit_kept(lab)
    assert [run for run, _ in made] == [first, second]
    assert not lineage.pending(lab)
    assert lineage.commit_kept(lab) == []
    after = git(tmp_path, "status", "--porcelain"), git(tmp_path, "rev-parse", "HEAD"), (tmp_path / ".git/index").read_bytes()
    assert after == before
    assert git(tmp_path, "show", "overnight/night:trainer/train.py") + "\n" == lab.source_text(lab.store.run(second).source_sha)  # type: ignore[union-attr]
    assert git(tmp_path, "show", "--stat", "--format=", "overnight/night").startswith("trainer/train.py")
    assert git(tmp_path, "rev-list", "--count", "overnight/night") == "3"
    words = git(tmp_path, "log", "-1", "--format=%B", "overnight/night")
    assert words.startswith("deeper is better\n\nval_bpb 0.980000 at a budget of 20 s (cpu;")
    assert f"Overnight-Run: {second}" in words
    assert "DEPTH = 10" in words


def test_a_discard_after_the_commit_is_said_and_taken_back_on_top(lab: Lab, tmp_path: Path) -> None:
    first, second = keep(lab, 9, 0.99), keep(lab, 10, 0.98)
    (_, old), (_, new) = lineage.commit_kept(lab)
    start = git(tmp_path, "show", "main:trainer/train.py")
    gone = verbs.decide(lab, second, "discard", who="cli", why="it was luck")
    (said,) = lineage.left(lab, gone)
    assert new[:12] in said and "overnight/night" in said
    assert lineage.pending(lab) and [i for i, _ in lineage.commit_kept(lab)] == [second]
    assert not lineage.pending(lab) and lineage.left(lab, gone) == []
    assert git(tmp_path, "rev-parse", "overnight/night^") == new  # nothing was rewritten
    assert git(tmp_path, "show", "overnight/night:trainer/train.py") == git(tmp_path, "show", f"{old}:trainer/train.py")
    words = git(tmp_path, "log", "-1", "--format=%B", "overnight/night")
    assert words.startswith(f"Discard {second}\n") and new[:12] in words and "it was luck" in words
    verbs.decide(lab, first, "discard", who="cli", why="that too")
    lineage.commit_kept(lab)
    assert git(tmp_path, "show", "overnight/night:trainer/train.py") == start
    verbs.decide(lab, second, "keep", who="tui", why="after all")
    assert [i for i, _ in lineage.commit_kept(lab)] == [second]
    verbs.decide(lab, second, "discard", who="cli", why="no")
    lineage.commit_kept(lab)
    assert git(tmp_path, "rev-list", "--count", "overnight/night") == "7"


def test_taking_back_leaves_what_others_committed_since(lab: Lab, tmp_path: Path) -> None:
    run_id = keep(lab, 9, 0.99)
    ((_, commit),) = lineage.commit_kept(lab)
    git(tmp_path, "worktree", "add", "-q", str(tmp_path / "elsewhere"), "overnight/night")
    (tmp_path / "elsewhere/trainer/train.py").write_text("DEPTH = 99\n")
    git(tmp_path / "elsewhere", "commit", "-qam", "by hand")
    git(tmp_path, "worktree", "remove", "--force", str(tmp_path / "elsewhere"))
    verbs.decide(lab, run_id, "discard", who="cli", why="no")
    lineage.commit_kept(lab)
    assert git(tmp_path, "show", "overnight/night:trainer/train.py") == "DEPTH = 99"
    assert commit in git(tmp_path, "rev-list", "overnight/night")


def test_it_is_safe_beside_somebody_who_commits_at_the_same_time(lab: Lab, tmp_path: Path) -> None:
    stop, failed = threading.Event(), []

    def agent() -> None:
        while not stop.is_set():
            try:
                git(tmp_path, "commit", "-q", "--allow-empty", "-m", "agent")
            except subprocess.CalledProcessError as e:
                failed.append(e.stderr)

    thread = threading.Thread(target=agent)
    thread.start()
    try:
        for depth in range(20, 24):
            keep(lab, depth, 1.5 - depth / 100)
            lineage.commit_kept(lab)
    finally:
        stop.set()
        thread.join()
    assert failed == []
    assert git(tmp_path, "fsck", "--strict") == ""
    assert git(tmp_path, "log", "--format=%s", "overnight/night").count("deeper is better") == 4


def test_a_branch_that_is_checked_out_is_not_moved(lab: Lab, tmp_path: Path) -> None:
    git(tmp_path, "checkout", "-q", "-b", "overnight/night")
    keep(lab, 9, 0.99)
    lineage.commit_kept(lab)
    assert git(tmp_path, "status", "--porcelain") == "?? lab/" or git(tmp_path, "status", "--porcelain") == ""
    assert git(tmp_path, "log", "--format=%s", "overnight/night") == "start"
    assert git(tmp_path, "log", "-1", "--format=%s", "overnight/night-kept") == "deeper is better"


def test_what_was_kept_while_the_branch_was_checked_out_is_no_other_history(lab: Lab, tmp_path: Path) -> None:
    keep(lab, 9, 0.99, "first")
    lineage.commit_kept(lab)
    git(tmp_path, "worktree", "add", "-q", str(tmp_path / "elsewhere"), "overnight/night")
    keep(lab, 10, 0.98, "second")
    lineage.commit_kept(lab)
    assert git(tmp_path, "log", "--format=%s", "overnight/night-kept") == "second\nfirst\nstart"
    git(tmp_path, "worktree", "remove", "--force", str(tmp_path / "elsewhere"))
    keep(lab, 11, 0.97, "third")
    lineage.commit_kept(lab)
    assert git(tmp_path, "log", "--format=%s", "overnight/night") == "third\nsecond\nfirst\nstart"
    git(tmp_path, "checkout", "-q", "overnight/night")
    keep(lab, 12, 0.96, "fourth")
    lineage.commit_kept(lab)
    assert git(tmp_path, "log", "--format=%s", "overnight/night-kept") == "fourth\nthird\nsecond\nfirst\nstart"
    assert git(tmp_path, "status", "--porcelain") in ("", "?? lab/")


def test_an_empty_repository_and_none_at_all(tmp_path: Path) -> None:
    lab = make_lab(tmp_path / "a")
    keep(lab, 9, 0.99)
    assert lineage.commit_kept(lab) == []  # no repository: the lab keeps it all the same
    git(tmp_path / "a", "init", "-q")
    assert len(lineage.commit_kept(lab)) == 1
    assert git(tmp_path / "a", "ls-tree", "-r", "--name-only", "overnight/night") == "trainer/train.py"
    lab.close()


def test_markup_and_control_characters_stay_out_of_the_message(lab: Lab, tmp_path: Path) -> None:
    keep(lab, 9, 0.99, hypothesis="\x1b[31mred\x1b[0m\x00 -m --amend")
    lineage.commit_kept(lab)
    assert git(tmp_path, "log", "-1", "--format=%s", "overnight/night") == "red -m --amend"


def test_a_keep_after_a_change_of_mind_is_committed_too(lab: Lab, tmp_path: Path) -> None:
    first = keep(lab, 9, 0.99)
    lineage.commit_kept(lab)
    verbs.decide(lab, first, "discard", who="tui", why="changed my mind")
    assert lineage.pending(lab)
    second = keep(lab, 10, 0.98)
    assert [run for run, _ in lineage.commit_kept(lab)] == [first, second]  # in the order of the decisions
    assert not lineage.pending(lab)
