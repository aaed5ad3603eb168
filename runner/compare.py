"""Runs against each other: what a run changed, and how fast GPU types are on the same source. Reads only."""

from __future__ import annotations

import statistics
from typing import Any

from runner import patching
from runner.board import RANKED
from runner.errors import BadValue, Refused
from runner.lab import Lab
from runner.records import Purpose, Run
from runner.submitting import trainer_text


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
    if other is None:
        return {}
    names = [*other.constants, *(n for n in run.constants if n not in other.constants)]
    pairs = {n: (other.constants.get(n), run.constants.get(n)) for n in names}
    return {n: (a, b) for n, (a, b) in pairs.items() if a != b or type(a) is not type(b)}


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


def relative_speeds(lab: Lab) -> dict[str, float]:
    """Tokens per second of the baseline source by GPU name, as a share of the fastest; only GPU types it has been trained on."""
    # in the words of the ranking's index, which then answers this without reading any row
    baselines = f"SELECT effective_sha FROM runs WHERE {RANKED} AND purpose = 'baseline'"  # noqa: S608  constants of ours
    rows = lab.store.tally(
        "gpu_name, tok_s",
        f"tok_s IS NOT NULL AND gpu_name IS NOT NULL AND outcome = 'completed' AND effective_sha IN ({baselines})",
    )
    speeds: dict[str, list[float]] = {}
    for name, tok_s in rows:
        speeds.setdefault(str(name), []).append(float(tok_s))
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    fastest = max(medians.values(), default=0.0)
    return {name: value / fastest for name, value in medians.items()} if fastest > 0 else {}
