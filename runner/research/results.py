"""results.tsv both ways: upstream's columns and SkyPilot's, read by their header and never by position; numbers stay as they are written.

Imported rows become ended runs of a class of their own (nothing is known of the machine), so they are never ranked beside measured ones.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import BadValue
from runner.lab import Lab
from runner.records import Outcome, Phase, Purpose, Run, Trust, Verdict
from runner.text import bpb, one_line, tsv_cell

UPSTREAM = ("commit", "val_bpb", "memory_gb", "status", "description")
SKYPILOT = ("experiment_id", "status", "val_bpb", "memory_gb", "description")
LAYOUTS = {"upstream": UPSTREAM, "skypilot": SKYPILOT}
NAMES = {"commit", "experiment_id"}
NEEDED = ("val_bpb", "status")
STATUSES = ("keep", "discard", "crash", "undecided")
IMPORTED = "imported"
MAX_ROWS = 100_000


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a results file, checked."""

    name: str
    val_bpb: float | None
    val_text: str
    memory_gb: str | None
    status: str
    description: str | None


def read_rows(text: str, where: str) -> list[Row]:
    """The rows of a results file. Raised: BadValue naming the line and what is wrong with it."""
    lines = csv.reader(io.StringIO(text.lstrip("\ufeff")), delimiter="\t", quoting=csv.QUOTE_NONE)
    header = [h.strip().lower() for h in next(lines, [])]
    missing = [c for c in NEEDED if c not in header]
    if missing or not NAMES & set(header):
        need = ", ".join(missing) or "commit or experiment_id"
        raise BadValue(
            f"{where} has no column {need} in its first line.",
            next_step=f"Known layouts: {' / '.join(' '.join(c) for c in LAYOUTS.values())}.",
        )
    rows: list[Row] = []
    for number, cells in enumerate(lines, 2):
        if not any(c.strip() for c in cells):
            continue
        if len(rows) >= MAX_ROWS:
            raise BadValue(f"{where} has more than {MAX_ROWS:,} rows.", next_step="Import it in parts.")
        rows.append(_row(dict(zip(header, (c.strip() for c in cells), strict=False)), f"{where}, line {number}"))
    return rows


def _row(cells: dict[str, str], where: str) -> Row:
    status = cells.get("status", "").lower()
    if status not in STATUSES:
        raise BadValue(f"{where}: status is {one_line(status, 40)!r}.", next_step=f"Allowed: {', '.join(STATUSES)}.")
    value = _number(cells.get("val_bpb", ""), "val_bpb", where)
    if status == "crash" or value == 0:  # upstream writes a crash as 0.000000
        value = None
    memory = cells.get("memory_gb") or None
    if memory is not None:
        _number(memory, "memory_gb", where)
    name = next((cells[n] for n in ("commit", "experiment_id") if cells.get(n)), "")
    return Row(
        one_line(name, 80),
        value,
        cells.get("val_bpb", ""),
        memory,
        status,
        one_line(cells.get("description"), 1000) if cells.get("description") else None,
    )


def _number(text: str, column: str, where: str) -> float | None:
    if not text or text == "-":
        return None
    try:
        value = float(text)
    except ValueError:
        raise BadValue(
            f"{where}: {column} is {one_line(text, 40)!r}, not a number.", next_step="Mend that line; nothing was imported."
        ) from None
    return value if math.isfinite(value) else None


def import_results(lab: Lab, path: Path, *, who: str) -> tuple[int, int]:
    """Add the rows of a results file as ended runs; how many were added, and how many were there already. Raised: BadValue."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(f"{path} cannot be read: {error}.", next_step="Name a results.tsv.") from None
    rows = read_rows(text, str(path))
    added = 0
    with lab.store.transaction():
        known = {str(k) for (k,) in lab.store.tally("effective_sha", f"class_key = '{IMPORTED}'")}
        sha = lab.keep_source(f'"""The script of a run imported from {path.name} is not known here."""\n')
        for row in rows:
            key = hashlib.sha256(repr(row).encode()).hexdigest()
            if key in known:
                continue
            known.add(key)
            lab.store.insert_run(**_columns(lab, row, sha, key, who, path))
            added += 1
        if added:
            lab.store.event(who, "import", "lab", f"{added} rows of {path.name}", {"file": str(path), "rows": added})
    return added, len(rows) - added


def _columns(lab: Lab, row: Row, sha: str, key: str, who: str, path: Path) -> dict[str, Any]:
    now = time.time()
    crashed = row.status == "crash" or row.val_bpb is None
    decided = row.status if row.status in (Verdict.KEEP, Verdict.DISCARD) else None
    return {
        "created_at": now,
        "ended_at": now,
        "purpose": str(Purpose.EXPERIMENT),
        "source_sha": sha,
        "effective_sha": key,
        "hypothesis": row.description,
        "budget_s": lab.policy().limits.budget_s,
        "agent": who,
        "phase": Phase.ENDED,
        "outcome": Outcome.CRASHED if crashed else Outcome.COMPLETED,
        "val_bpb": row.val_bpb,
        "class_key": IMPORTED,
        "trust": None if crashed else str(Trust.UNVERIFIABLE),
        "trust_why": None if crashed else "imported, not measured here",
        "cause_text": "crashed, says the imported file" if crashed else None,
        "verdict": decided,
        "verdict_by": who if decided else None,
        "verdict_why": f"imported from {path.name}" if decided else None,
        "verdict_at": now if decided else None,
        "attributes": {"name": row.name, "val_bpb": row.val_text, "memory_gb": row.memory_gb, "file": path.name},
    }


def export_results(lab: Lab, layout: str, *, where: str = "1", args: Iterable[Any] = ()) -> str:
    """Ended runs as a results file in one of LAYOUTS, oldest first; a run nobody decided about is `undecided`. Raised: BadValue."""
    if layout not in LAYOUTS:
        raise BadValue(f"There is no layout {one_line(layout, 40)!r}.", next_step=f"Allowed: {', '.join(LAYOUTS)}.")
    commits = {subject: detail for subject, detail in _commits(lab)}
    lines = ["\t".join(LAYOUTS[layout])]
    for run in lab.store.runs(
        f"phase = 'ended' AND purpose != 'verify' AND outcome NOT IN ('cancelled', 'declined') AND ({where})", tuple(args)
    ):
        cells = _cells(run, commits)
        lines.append("\t".join(cells[column] for column in LAYOUTS[layout]))
    return "\n".join(lines) + "\n"


def _commits(lab: Lab) -> list[tuple[str, str]]:
    """The commit each kept run became."""
    return [(e.subject or "", str((e.detail or {}).get("commit", ""))[:7]) for e in lab.store.events(limit=1_000_000) if e.verb == "commit"]


def _cells(run: Run, commits: dict[str, str]) -> dict[str, str]:
    facts = run.attributes or {}
    failed = run.outcome != Outcome.COMPLETED or run.val_bpb is None
    memory = facts.get("memory_gb") if run.class_key == IMPORTED else None if run.peak_vram_mb is None else f"{run.peak_vram_mb / 1024:.1f}"
    imported = str(facts.get("name") or "") if run.class_key == IMPORTED else ""
    imported_text = str(facts.get("val_bpb") or "") if run.class_key == IMPORTED else ""
    changed = " ".join(f"{k}={v}" for k, v in (run.cell or run.overrides).items())
    return {
        "commit": imported or commits.get(run.id) or run.source_sha[:7],
        "experiment_id": imported or run.id,
        "val_bpb": "0.000000" if failed else imported_text or bpb(run.val_bpb),
        "memory_gb": "0.0" if failed else memory or "0.0",
        "status": "crash" if failed else str(run.verdict or "undecided"),
        "description": tsv_cell(
            run.hypothesis
            if run.class_key == IMPORTED
            else "; ".join(t for t in (changed, run.hypothesis, run.cause_text if failed else None) if t)
        ),
    }
