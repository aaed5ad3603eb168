"""Runs against each other: what a run changed, and how fast GPU types are on the same source. Reads only."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

from runner import patching
from runner.board import RANKED, derived
from runner.errors import BadValue, LabError, Refused
from runner.lab import Lab
from runner.records import Json, Purpose, Run
from runner.submitting import trainer_text

TIMED = "tok_s > 0 AND gpu_name IS NOT NULL"
MOST_CHANGES = 8  # constants named in one line of a table


def relative(lab: Lab, run: Run) -> Run | None:
    """The run another is compared with: its parent, else its base; None for one that started from the trainer's own script."""
    for run_id in (run.parent, run.base_run):
        if run_id is not None and run_id != run.id and (found := lab.store.run(run_id)) is not None:
            return found
    return None


def changed_constants(lab: Lab, run: Run) -> dict[str, tuple[Any, Any]]:
    """Constants that differ from the parent's (or base's): name to (theirs, this run's); None where one side has no such constant.

    A run without a parent is compared with the first baseline of the lab.
    """
    other = relative(lab, run)
    if other is None and run.purpose != Purpose.BASELINE:
        first = lab.store.runs("purpose = 'baseline' AND id != ?", (run.id,), limit=1)
        other = first[0] if first else None
    return {} if other is None else changes_between(other, run)


def changes_between(other: Run, run: Run) -> dict[str, tuple[Any, Any]]:
    """Constants that differ: name to (the other's, this run's); None where one side has no such constant."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, theirs in other.constants.items():
        now = run.constants.get(name)
        if theirs != now or type(theirs) is not type(now):
            found[name] = (theirs, now)
    found.update((name, (None, now)) for name, now in run.constants.items() if name not in other.constants)
    return found


def diff_of(lab: Lab, run: Run) -> tuple[str, str]:
    """(unified diff of a run's script against its parent's, base's or the trainer's own; what it was compared with)."""
    other = relative(lab, run)
    if other is not None:
        theirs, name = lab.source_text(other.source_sha), other.id
    else:
        try:
            theirs, name = trainer_text(lab.policy().trainer), "the trainer's own script"
        except (BadValue, Refused) as error:
            return f"({error.message} There is nothing to compare with.)\n", "nothing"
    return patching.diff(theirs, lab.source_text(run.source_sha), name, run.id), name


def tried(lab: Lab, runs: Iterable[Run]) -> dict[str, Json]:
    """What each run tried, by its id: its cell, else the constants that differ from what it is compared with, where it has them.

    `source` says how many other lines are new and gone ("+12 −3"), `more` how many further constants differ. Empty for a baseline, and for
    a repeat of what it is compared with.
    """
    runs = list(runs)
    first = next(iter(lab.store.runs("purpose = 'baseline'", limit=1)), None) if any(not run.cell for run in runs) else None
    known: dict[str, Run | None] = {}

    def other_of(run: Run) -> Run | None:
        for run_id in (run.parent, run.base_run):
            if run_id is not None and run_id != run.id:
                if run_id not in known:
                    known[run_id] = lab.store.run(run_id)
                if (found := known[run_id]) is not None:
                    return found
        return first if run.purpose != Purpose.BASELINE and first is not None and first.id != run.id else None

    return {run.id: run.cell or _tried(lab, run, other_of(run)) for run in runs}


def _tried(lab: Lab, run: Run, other: Run | None) -> Json:
    if other is None:
        return dict(run.overrides)
    changed = {name: now for name, (_, now) in changes_between(other, run).items() if name in run.constants}
    lines = other_lines(lab, other.source_sha, run.source_sha, frozenset(changed))
    shown = dict(list(changed.items())[:MOST_CHANGES])
    more = {"more": len(changed) - len(shown)} if len(changed) > len(shown) else {}
    return {**shown, **more, **({"source": lines} if lines else {})}


def other_lines(lab: Lab, before: str, after: str, constants: frozenset[str]) -> str:
    """How many lines of a source are new and how many of another are gone, lines that only assign these constants left out.

    Empty when there are none, or when a source cannot be read. Lines that moved count as the same.
    """
    if before == after:
        return ""

    def count() -> str:
        try:
            old, new = (Counter(lab.source_text(sha).splitlines()) for sha in (before, after))
        except LabError:
            return ""
        assigned = re.compile(rf"(?:{'|'.join(map(re.escape, sorted(constants)))})\s*(?::[^=]*)?=[^=]") if constants else None

        def counted(lines: Counter[str]) -> int:
            return sum(n for line, n in lines.items() if line.strip() and not (assigned and assigned.match(line)))

        added, gone = counted(new - old), counted(old - new)
        return f"+{added} −{gone}" if added or gone else ""

    return lab.memo.get(("lines", before, after, constants), None, count)


def relative_speeds(lab: Lab) -> tuple[dict[str, float], set[str]]:
    """(tokens per second of the lab's GPU types as a share of the fastest, the types where that is an estimate).

    Of the baseline where it ran; of a type it did not run on, by the sources that ran there and on a type whose speed is known.
    """
    types = frozenset(gpu.name for gpu in lab.store.gpus())
    return derived(lab, "speeds", lambda: _relative_speeds(lab, types), types)


def _relative_speeds(lab: Lab, types: frozenset[str]) -> tuple[dict[str, float], set[str]]:
    # in the words of the ranking's index, which then answers the inner question without reading any row
    baselines = f"SELECT effective_sha FROM runs WHERE {RANKED} AND purpose = 'baseline'"  # noqa: S608  constants of ours
    values: dict[str, list[float]] = {}
    for name, tok_s in lab.store.tally("gpu_name, tok_s", f"{RANKED} AND {TIMED} AND effective_sha IN ({baselines})"):
        values.setdefault(str(name), []).append(float(tok_s))
    speeds = {name: statistics.median(found) for name, found in values.items()}
    measured = set(speeds)
    if not speeds:  # no baseline yet: begin with the type on which most has run
        most = lab.store.tally("gpu_name", f"{RANKED} AND {TIMED} GROUP BY gpu_name ORDER BY count(*) DESC LIMIT 1")
        speeds = {str(name): 1.0 for (name,) in most}
    while True:
        ratios = {name: [r * speed for known, speed in speeds.items() for r in _ratios(lab, name, known)] for name in types - speeds.keys()}
        found_now = {name: statistics.median(found) for name, found in ratios.items() if found}
        if not found_now:
            break
        speeds |= found_now
    if not measured and len(speeds) == 1:  # one type, and nothing to compare it with
        return {}, set()
    fastest = max((speed for name, speed in speeds.items() if name in types), default=0.0)
    return {name: speed / fastest for name, speed in speeds.items() if name in types}, set(types & speeds.keys()) - measured


def _ratios(lab: Lab, name: str, known: str) -> list[float]:
    """How much faster one GPU type is than another, by each source that completed on both."""
    timed = ("outcome = 'completed'", "purpose != 'verify'", "tok_s > 0")
    both = " AND ".join(f"{run}.{condition}" for run in ("a", "b") for condition in timed)
    where = f"a.gpu_name = ? AND b.gpu_name = ? AND b.effective_sha = a.effective_sha AND {both} GROUP BY a.effective_sha"
    rows = lab.store.tally("avg(a.tok_s) / avg(b.tok_s)", where, (name, known), table="runs a JOIN runs b")
    return [float(ratio) for (ratio,) in rows]
