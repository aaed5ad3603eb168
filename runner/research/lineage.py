"""Kept runs as commits on branch overnight/TAG of the trainer's repository, made by plumbing alone.

Index, working tree, HEAD and hooks are left alone; a temporary index and a compare-and-swap of the branch make it safe beside an agent who
commits in the same repository. Where the branch is checked out somewhere, overnight/TAG-kept is used, for moving it would dirty that tree.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from runner.errors import OvernightError
from runner.lab import Lab
from runner.records import Run, Verdict
from runner.text import bpb, clean, one_line

COMMITTED = "lineage"  # setting: run id -> commit
DEADLINE_S = 30.0
TRIES = 5


class GitError(OvernightError):
    """Raised when git cannot do what it was asked; carries git's own last line."""

    code = "git"


@dataclass(frozen=True, slots=True)
class Place:
    """A repository, and where the trainer's source lies in it."""

    root: Path
    path: str


def place_of(lab: Lab) -> Place | None:
    """The repository that holds the trainer folder; None when there is none, or no git."""
    trainer = lab.policy().trainer
    try:
        root = Path(_git(trainer.folder, "rev-parse", "--show-toplevel"))
        inside = (trainer.folder / trainer.source).resolve().relative_to(root.resolve())
    except (GitError, ValueError):
        return None
    return Place(root, inside.as_posix())


def commit_kept(lab: Lab) -> list[tuple[str, str]]:
    """Commit every kept run that is not committed yet, and take back every one that was discarded since, in the order of the decisions;
    (run id, commit) of each new commit. Raised: GitError; what was committed before it stays recorded.
    """
    done: dict[str, str] = dict(lab.store.setting(COMMITTED, {}))
    due = lab.store.runs("verdict IN ('keep', 'discard') AND verdict_by != 'import'", order="verdict_at")
    due = [r for r in due if (r.verdict == Verdict.KEEP) != (r.id in done)]
    place, tag = place_of(lab) if due else None, lab.policy().limits.tag
    made: list[tuple[str, str]] = []
    for run in due if place is not None else []:
        assert place is not None
        if run.verdict == Verdict.KEEP:
            commit = commit_run(place, tag, lab.source_text(run.source_sha), message(run))
            done[run.id] = commit
        else:
            commit = _take_back(lab, place, run, done)
        lab.store.set_setting(COMMITTED, done)
        lab.store.event("daemon", "commit", run.id, run.verdict_why, {"commit": commit, "verdict": run.verdict})
        made.append((run.id, commit))
    return made


def _take_back(lab: Lab, place: Place, run: Run, done: dict[str, str]) -> str:
    """A commit on top that says a run was discarded; where its source is still the newest there, the file of the kept run before it."""
    taken = done.pop(run.id)
    newest = next(reversed(done), None)
    before = lab.store.run(newest) if newest else None
    text = lab.source_text(before.source_sha) if before else show(place, f"{taken}^")
    body = [f"Commit {taken[:12]} stays in the history; where nothing came after it, {place.path} is again as it was before."]
    if run.verdict_why:
        body.append(f"Discarded because: {clean(run.verdict_why, keep_newlines=False)}")
    words = "\n".join(
        [f"Discard {run.id}", "", *body, "", f"Overnight-Run: {run.id}", f"Overnight-Discarded-By: {one_line(run.verdict_by, 60)}"]
    )
    return commit_run(place, lab.policy().limits.tag, text, f"{words}\n", over=lab.source_text(run.source_sha))


def pending(lab: Lab) -> bool:
    """Whether a kept run waits for its commit, or a commit to be taken back."""
    told = lab.store.tally("id, verdict", "verdict IN ('keep', 'discard') AND verdict_by != 'import'")
    done = lab.store.setting(COMMITTED, {})
    return any((verdict == Verdict.KEEP) != (run_id in done) for run_id, verdict in told)


def left(lab: Lab, run: Run) -> list[str]:
    """What a discard leaves in the repository, in words: nothing where the run was not committed."""
    commit = lab.store.setting(COMMITTED, {}).get(run.id)
    if commit is None or run.verdict == Verdict.KEEP:
        return []
    branch = f"overnight/{lab.policy().limits.tag}"
    return [f"{run.id} is commit {commit[:12]} of {branch}, whose history stays; a commit that takes it back follows there."]


def message(run: Run) -> str:
    """Subject, result and the run it came from."""
    subject = one_line(run.hypothesis, 72) if run.hypothesis else f"Keep {run.id}"
    changes = ", ".join(f"{k} = {v!r}" for k, v in run.overrides.items())
    body = [
        f"val_bpb {bpb(run.val_bpb)} at a budget of {run.budget_s:g} s ({run.class_key or 'class unknown'}; {run.trust or 'not judged'})."
    ]
    if changes:
        body.append(f"Changed: {clean(changes, keep_newlines=False)}")
    if run.verdict_why:
        body.append(f"Kept because: {clean(run.verdict_why, keep_newlines=False)}")
    return "\n".join([subject, "", *body, "", f"Overnight-Run: {run.id}", f"Overnight-Kept-By: {one_line(run.verdict_by, 60)}"]) + "\n"


def commit_run(place: Place, tag: str, text: str | None, words: str, *, over: str | None = None) -> str:
    """One commit of one file on the branch; the commit's hash. An equal tree at its tip still gets its commit: the decision is news.

    With `over` the file is changed only where the tip holds that text; without a text it stays as it is.
    """
    for _ in range(TRIES):
        ref = _free_ref(place.root, tag)
        tip = _git(place.root, "rev-parse", "--verify", "--quiet", ref, missing_ok=True)
        parent = _follows(place.root, ref, tag, tip)
        fits = text is not None and (over is None or _same(show(place, parent) if parent else None, over))
        commit = _write_commit(place, parent, text if fits else None, words)
        # The third argument makes it a compare-and-swap; zeros mean "must not exist yet".
        if _git(place.root, "update-ref", ref, commit, tip or "0" * 40, missing_ok=True) is not None:
            return commit
    raise GitError(
        f"Branch {ref} in {place.root} kept moving.", next_step="Something else writes it; name another [policy] tag in hosts.toml."
    )


def _follows(root: Path, ref: str, tag: str, tip: str | None) -> str | None:
    """The commit that the next one follows: the branch's tip, or that of its twin (TAG and TAG-kept) where the twin went on from it.

    While TAG is checked out what is kept goes to TAG-kept; after that it is one history again. A branch that is new starts at HEAD.
    """
    usual = f"refs/heads/overnight/{tag}"
    twin = f"{usual}-kept" if ref == usual else usual
    other = _git(root, "rev-parse", "--verify", "--quiet", twin, missing_ok=True)
    if other and (tip is None or _git(root, "merge-base", "--is-ancestor", tip, other, missing_ok=True) is not None):
        return other
    return tip or _git(root, "rev-parse", "--verify", "--quiet", "HEAD", missing_ok=True)


def show(place: Place, commit: str) -> str | None:
    """The trainer's source at a commit, None when the repository does not have it."""
    text = _git(place.root, "show", f"{commit}:{place.path}", missing_ok=True)
    return None if text is None else f"{text}\n"


def _same(one: str | None, other: str) -> bool:
    """Equal but for the newlines at the end, which reading a file from git does not keep."""
    return one is not None and one.rstrip("\n") == other.rstrip("\n")


def _write_commit(place: Place, parent: str | None, text: str | None, words: str) -> str:
    with tempfile.TemporaryDirectory(prefix="overnight-index-") as folder:
        env = {"GIT_INDEX_FILE": str(Path(folder) / "index")}
        if parent:
            _git(place.root, "read-tree", parent, env=env)
        if text is not None:
            blob = _git(place.root, "hash-object", "-w", "--no-filters", "--stdin", stdin=text)
            _git(place.root, "update-index", "--add", "--cacheinfo", f"100644,{blob},{place.path}", env=env)
        tree = _git(place.root, "write-tree", env=env)
        return str(
            _git(place.root, "commit-tree", tree, *(("-p", parent) if parent else ()), "-F", "-", stdin=words, env=_identity(place.root))
        )


def _identity(root: Path) -> dict[str, str]:
    """The user's own name where git knows one, else ours."""
    name = _git(root, "config", "user.name", missing_ok=True) or "Overnight"
    email = _git(root, "config", "user.email", missing_ok=True) or "overnight@localhost"
    return {"GIT_AUTHOR_NAME": name, "GIT_AUTHOR_EMAIL": email, "GIT_COMMITTER_NAME": name, "GIT_COMMITTER_EMAIL": email}


def _free_ref(root: Path, tag: str) -> str:
    ref = f"refs/heads/overnight/{tag}"
    trees = _git(root, "worktree", "list", "--porcelain")
    return f"{ref}-kept" if f"branch {ref}" in str(trees).splitlines() else ref


def _git(root: Path, *args: str, stdin: str | None = None, env: dict[str, str] | None = None, missing_ok: bool = False) -> str:
    """Output of a git command; with `missing_ok` a failure gives None (typed as text for its callers' sake)."""
    clean_env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    command = ["git", "-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false", "-C", str(root), *args]
    try:
        done = subprocess.run(
            command,
            input=(stdin or "").encode(),
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
            env={**clean_env, "LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", **(env or {})},
        )
    except FileNotFoundError:
        raise GitError("git is not installed.", next_step="Kept runs are in the lab all the same.") from None
    except subprocess.TimeoutExpired:
        raise GitError(f"git {args[0]} took longer than {DEADLINE_S:.0f} s in {root}.", next_step="Look for a stuck file system.") from None
    if done.returncode and missing_ok:
        return None  # type: ignore[return-value]
    if done.returncode:
        said = clean(done.stderr.decode("utf-8", "replace")).strip().splitlines() or ["no reason given"]
        raise GitError(f"git {args[0]} failed in {root}: {said[-1][:200]}", next_step="Kept runs are in the lab all the same.")
    return done.stdout.decode("utf-8", "replace").rstrip("\n")
