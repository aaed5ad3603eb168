"""analyze_wave: what a factorial wave says, in tables an agent can act on. The statistics are runner.research's; here they are only put
into words."""

from __future__ import annotations

import statistics
from typing import Annotated, Any

from pydantic import Field

from mcp_server.answers import Answer, Table
from mcp_server.calls import Call
from runner import news, queries
from runner.records import Outcome, Run, Wave


def analyze_wave(
    call: Call,
    wave: Annotated[str, Field(description="Wave id, e.g. 'w3'.", min_length=1, max_length=20)],
) -> Answer:
    """What a wave tells: the mean of each value of each factor, the best cells, failed and missing cells. Use it when a wave has
    ended, before planning the next one. It works on an unfinished wave too and says how much is missing."""
    lab = call.lab
    found = queries.known_wave(lab, wave)
    runs = news.wave_runs(lab, wave)
    good = [run for run in runs if run.outcome == Outcome.COMPLETED and run.val_bpb is not None]
    obj = queries.wave_object(lab, found)
    facts: dict[str, Any] = {
        k: obj.get(k) for k in ("id", "kind", "title", "hypothesis", "total", "completed", "running", "queued", "best")
    }
    answer = Answer(facts=facts)
    classes = {run.class_key for run in good}
    if len(classes) > 1:
        answer.notes.append(
            f"The runs fell into {len(classes)} classes (GPU types or software); means mix them. Submit with gpu_type to avoid that."
        )
    answer.tables["cells"] = cells_table(found, runs)
    answer.tables["means"] = Table(["factor", "value", "mean_val_bpb", "runs"], means(found, good))
    return answer


def cells_table(wave: Wave, runs: list[Run]) -> Table:
    """One row a cell, best first: its values, mean val_bpb over its runs, their spread, and the runs with what became of them."""
    names = list(wave.factors) or sorted({k for run in runs for k in (run.cell or {})})
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(repr(sorted((run.cell or {}).items())), []).append(run)
    rows = []
    for members in groups.values():
        scores = [run.val_bpb for run in members if run.outcome == Outcome.COMPLETED and run.val_bpb is not None]
        mean = statistics.fmean(scores) if scores else None
        spread = statistics.stdev(scores) if len(scores) > 1 else None
        cell = members[0].cell or {}
        rows.append([*(cell.get(n) for n in names), mean, spread, " ".join(f"{run.id}:{run.outcome or run.phase}" for run in members)])
    rows.sort(key=lambda row: (row[-3] is None, row[-3]))
    return Table([*names, "mean_val_bpb", "sd", "runs"], rows)


def means(wave: Wave, good: list[Run]) -> list[list[Any]]:
    """The mean of the completed runs at each value of each factor."""
    rows = []
    for name, values in wave.factors.items():
        for value in values:
            scores = [run.val_bpb for run in good if (run.cell or {}).get(name) == value and run.val_bpb is not None]
            rows.append([name, value, statistics.fmean(scores) if scores else None, len(scores)])
    return rows
