"""Kept runs as commits: each becomes one commit on `overnight/TAG` in the trainer's repository, made by plumbing alone.

The index, the working tree and HEAD are never touched, no hook runs, and the branch moves by compare-and-swap, so an agent may work in the
same repository meanwhile. A branch that is checked out somewhere is left alone: its working tree would no longer match.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from runner.errors import LabError
from runner.lab import Lab
from runner.records import Run
from runner.text import bpb, one_line

GIT_LIMIT_S = 20.0
TRIES = 5
TRAILER = "Overnight-Run"


class GitError(Exception):
    """Raised when git refuses; the message is its last line."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Where a kept run was written; `made` is False when it had been written before."""

    sha: str
    branch: str
    made: bool


@dataclass(frozen=True, slots=True)
class Repository:
    """The repository a trainer folder lies in, and the path of its script inside."""

    top: Path
    path: str

    def git(self, *words: str, given: bytes | None = None, index: Path | None = None) -> str:
        """Output of one git command. Raised: GitError."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        env |= {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0"}
        if index is not None:
            env["GIT_INDEX_FILE"] = str(index)
        command = ["git", "-C", str(self.top), "-c", "gc.auto=0", "-c", "core.hooksPath=/dev/null", *words]
        try:
            done = subprocess.run(command, input=given or b"", capture_output=True, env=env, timeout=GIT_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise GitError(f"git {words[0]}: {error}") from error
        if done.returncode:
            last = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise GitError(f"git {words[0]}: {last[-1] if last else done.returncode}")
        return done.stdout.decode("utf-8", "replace").strip()

    def ref(self, name: str) -> str | None:
        """The commit a ref points to, or None."""
        try:
            return self.git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        except GitError:
            return None


def repository_of(lab: Lab) -> Repository | None:
    """The trainer's repository; None when its folder is in none, or has no commit yet."""
    trainer = lab.policy().trainer
    script = (trainer.folder / trainer.source).resolve()
    if not script.parent.is_dir():
        return None
    try:
        top = Path(Repository(script.parent, "").git("rev-parse", "--show-toplevel"))
    except GitError:
        return None
    found = Repository(top, str(script.relative_to(top.resolve())))
    return found if found.ref("HEAD") else None


def commit_kept(lab: Lab, run: Run) -> Commit | None:
    """Write a kept run onto the branch; None when the trainer is in no repository. Raised: GitError."""
    repo = repository_of(lab)
    if repo is None:
        return None
    branch = f"refs/heads/overnight/{lab.policy().limits.tag}"
    if f"branch {branch}" in repo.git("worktree", "list", "--porcelain").splitlines():
        raise GitError(f"{branch} is checked out; switch to another branch, then keep the run again")
    for attempt in range(TRIES):
        tip = repo.ref(branch)
        if tip is not None:
            known = repo.git("log", "-1", "--format=%H", "--fixed-strings", f"--grep={TRAILER}: {run.id} of {lab_id(lab)}", tip)
            if known:
                return Commit(known, branch, made=False)
        made = _commit(repo, lab, run, tip or repo.git("rev-parse", "HEAD"))
        try:
            repo.git("update-ref", "-m", f"overnight: keep {run.id}", branch, made, tip or "")
        except GitError:
            if attempt == TRIES - 1:
                raise
        else:
            return Commit(made, branch, made=True)
    return None


def record(lab: Lab, run: Run, who: str) -> Commit | None:
    """Commit a kept run and write down where; a git that refuses is written down too, and changes nothing about the verdict."""
    try:
        made = commit_kept(lab, run)
    except (GitError, LabError) as error:
        lab.store.event(who, "commit_failed", run.id, one_line(str(error), 400))
        return None
    if made is not None and made.made:
        lab.store.event(who, "commit", run.id, None, {"commit": made.sha, "branch": made.branch})
    return made


def _commit(repo: Repository, lab: Lab, run: Run, parent: str) -> str:
    """A commit object: the parent's tree with the run's script in it."""
    text = lab.source_text(run.source_sha).encode()
    blob = repo.git("hash-object", "-w", "--no-filters", "--stdin", given=text)
    entry = repo.git("ls-tree", parent, "--", repo.path).split()
    mode = entry[0] if entry and entry[1] == "blob" and entry[0] != "120000" else "100644"
    with tempfile.TemporaryDirectory(prefix="overnight-git-") as scratch:
        index = Path(scratch) / "index"
        repo.git("read-tree", parent, index=index)
        repo.git("update-index", "--add", "--cacheinfo", f"{mode},{blob},{repo.path}", index=index)
        tree = repo.git("write-tree", index=index)
    author: list[str] = []
    try:
        repo.git("var", "GIT_COMMITTER_IDENT")
    except GitError:
        author = ["-c", "user.name=Overnight", "-c", "user.email=overnight@localhost"]
    return repo.git(*author, "commit-tree", tree, "-p", parent, given=message(lab, run).encode())


def lab_id(lab: Lab) -> str:
    """The lab's own id: run ids are unique only inside one lab."""
    return lab.store.meta("lab_id") or "unknown"


def message(lab: Lab, run: Run) -> str:
    """The commit's message: what and how good in one line, why, and the facts as trailers."""
    changed = " ".join(f"{k}={v}" for k, v in (run.cell or run.overrides).items())
    head = one_line(f"{run.id}: val_bpb {bpb(run.val_bpb)} {changed or run.hypothesis or ''}".rstrip(), 100)
    body = [one_line(t, 1000) for t in (run.hypothesis, run.verdict_why) if t]
    trailers = [
        f"{TRAILER}: {run.id} of {lab_id(lab)}",
        f"Val-Bpb: {bpb(run.val_bpb)}",
        f"Trust: {run.trust or '-'}",
        f"Budget-S: {run.budget_s:g}",
        f"Class: {one_line(run.class_key, 300)}",
        f"Source: {run.source_sha}",
        f"Kept-By: {one_line(run.verdict_by, 80)}",
    ]
    return "\n\n".join([head, *body, "\n".join(trailers)]) + "\n"
