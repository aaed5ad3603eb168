"""results.tsv both ways: upstream's column order and SkyPilot's; read by header, never by position.

Numbers are exact. A crash is written as upstream does (0.000000 and 0.0) and read as no result, so it is never ranked. Imported rows are
history: they keep their verdicts, and stand in a class of their own.
"""

from __future__ import annotations

import math
import time

from runner import sources
from runner.errors import BadValue
from runner.lab import Lab
from runner.records import Outcome, Phase, Purpose, Run, Submitted, Trust, Verdict
from runner.research import lineage
from runner.text import clean, tsv_cell

STYLES = {
    "upstream": ("commit", "val_bpb", "memory_gb", "status", "description"),
    "skypilot": ("experiment_id", "status", "val_bpb", "memory_gb", "description"),
}
IMPORTED_CLASS = "imported"
NAMES = "imported_names"  # setting: run id -> the names it came with
OWN = ("commit", "experiment_id")
MAX_ROWS = 20_000
CRASHED = ("crash", "crashed", "oom")
KNOWN = (*CRASHED, "keep", "discard", "undecided")


def export_results(lab: Lab, style: str = "upstream") -> str:
    """All ended experiments as a results.tsv. `undecided` stands where nobody decided yet."""
    if style not in STYLES:
        raise BadValue(f"There is no results.tsv style {style!r}.", next_step=f"Allowed: {', '.join(STYLES)}.")
    commits, names = lab.store.setting(lineage.COMMITTED, {}), lab.store.setting(NAMES, {})
    runs = lab.store.runs("phase = 'ended' AND outcome NOT IN ('cancelled', 'declined', 'lost') AND purpose NOT IN ('verify', 'preflight')")
    lines = ["\t".join(STYLES[style])]
    for run in runs:
        cells = _cells(run, str(commits.get(run.id, run.source_sha))[:7]) | names.get(run.id, {})
        lines.append("\t".join(cells[name] for name in STYLES[style]))
    return "\n".join(lines) + "\n"


def _cells(run: Run, commit: str) -> dict[str, str]:
    crashed = run.outcome != Outcome.COMPLETED or run.val_bpb is None
    changed = ", ".join(f"{k} = {v}" for k, v in run.overrides.items())  # the runs of a wave share one hypothesis
    return {
        "commit": commit,
        "experiment_id": run.id,
        "val_bpb": "0.000000" if crashed else _exact(float(run.val_bpb or 0), 6),
        "memory_gb": "0.0" if crashed else _memory(run),
        "status": "crash" if crashed else run.verdict or "undecided",
        "description": tsv_cell("; ".join(filter(None, (changed, run.hypothesis))) or run.purpose),
    }


def _memory(run: Run) -> str:
    """GiB as upstream rounds them, but of imported rows as they came; empty where nobody knows."""
    if run.peak_vram_mb is None:
        return ""
    gib = run.peak_vram_mb / 1024
    return _exact(gib, 1) if run.class_key == IMPORTED_CLASS else f"{gib:.1f}"


def _exact(value: float, digits: int) -> str:
    """The usual number of decimals where that is the value, more where it is not."""
    text = f"{value:.{digits}f}"
    return text if float(text) == value else repr(value)


def import_results(lab: Lab, text: str, *, who: str, budget_s: float | None = None) -> Submitted:
    """Take the rows of a results.tsv in as ended runs, once. Raised: BadValue naming the line; nothing is kept then."""
    if budget_s is not None and not 0 < budget_s < math.inf:
        raise BadValue(f"The budget of the imported runs is {budget_s:g}.", next_step="Give it in seconds, for example 300.")
    rows = _rows(text)
    request_id = f"import:{sources.sha(text)}"
    with lab.store.transaction():
        before = lab.store.replay(request_id)
        if before is not None:
            return Submitted(list(before[1]), None, ["These rows were imported before; nothing was added."], replay=True)
        place = lineage.place_of(lab)
        ids = [_insert(lab, row, who, budget_s or lab.policy().limits.budget_s, place) for row in rows]
        came = {i: {name: tsv_cell(row[name])[:64] for name in OWN if row.get(name)} for i, row in zip(ids, rows, strict=True)}
        lab.store.set_setting(NAMES, lab.store.setting(NAMES, {}) | came)
        lab.store.remember(request_id, "import", ids)
        lab.store.event(who, "import", None, None, {"runs": len(ids)})
    note = f"{len(ids)} rows imported, in the class {IMPORTED_CLASS!r}: they are not compared with runs of this lab."
    return Submitted(ids, None, [note, *_odd(rows)])


def _odd(rows: list[dict[str, str]]) -> list[str]:
    """Rows that were not taken as they say, in words."""
    notes = []
    others = [row for row in rows if row["status"].lower() not in KNOWN]
    if others:
        first = f"{others[0]['status'][:20]!r} in line {others[0]['#']}"
        notes.append(f"Another status than keep, discard or crash ({len(others)}, first: {first}) counts as undecided.")
    empty = [row["#"] for row in rows if row["status"].lower() not in CRASHED and not (_number(row, "val_bpb") or 0) > 0]
    if empty:
        notes.append(f"No val_bpb in line {', '.join(empty[:8])}: taken as crashes, whatever their status says.")
    return notes


def _rows(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.lstrip("\ufeff").replace("\r\n", "\n").split("\n") if line.strip()]
    if not lines:
        raise BadValue("The results.tsv is empty.", next_step="Give a file with a header line.")
    header = [name.strip() for name in lines[0].split("\t")]
    missing = [name for name in ("val_bpb", "status") if name not in header]
    if missing:
        raise BadValue(
            f"Line 1 has no column {' and no '.join(missing)}; it has: {', '.join(header)[:200]}.",
            next_step=f"Expected tabs and {' '.join(STYLES['upstream'])}, in any order.",
        )
    if len(lines) > MAX_ROWS:
        raise BadValue(f"The results.tsv has {len(lines):,} lines.", next_step=f"At most {MAX_ROWS:,} are read; split it.")
    found = []
    for number, line in enumerate(lines[1:], 2):
        cells = dict(zip(header, (c.strip() for c in line.split("\t")), strict=False))
        if len(cells) < len(header) and not {"status", "val_bpb"} <= cells.keys():
            raise BadValue(f"Line {number} has {len(cells)} of {len(header)} cells.", next_step="Mend that line; nothing was imported.")
        cells["#"] = str(number)
        found.append(cells)
    return found


def _number(cells: dict[str, str], name: str) -> float | None:
    raw = cells.get(name, "").replace(",", "")
    try:
        value = float(raw) if raw not in ("", "-") else None
    except ValueError:
        raise BadValue(
            f"Line {cells['#']}: {name} is {raw[:40]!r}, not a number.", next_step="Mend that line; nothing was imported."
        ) from None
    return value if value is not None and math.isfinite(value) else None


def _insert(lab: Lab, cells: dict[str, str], who: str, budget_s: float, place: lineage.Place | None) -> str:
    status = cells.get("status", "").lower()
    value, memory = _number(cells, "val_bpb"), _number(cells, "memory_gb")
    crashed = status in CRASHED or value is None or value <= 0
    source = _source(cells, place)
    now = time.time()
    sha = lab.keep_source(source)
    verdict = status if status in (Verdict.KEEP, Verdict.DISCARD) and not crashed else None
    return lab.store.insert_run(
        created_at=now,
        purpose=str(Purpose.EXPERIMENT),
        source_sha=sha,
        effective_sha=sources.effective_sha(source),
        overrides={},
        constants=_constants(source),
        hypothesis=clean(cells.get("description", ""), keep_newlines=False)[:2000] or None,
        budget_s=budget_s,
        agent=who,
        approval="none",
        phase=Phase.ENDED,
        outcome=str(Outcome.CRASHED if crashed else Outcome.COMPLETED),
        ended_at=now,
        class_key=IMPORTED_CLASS,
        val_bpb=None if crashed else value,
        peak_vram_mb=memory * 1024 if memory else None,
        verdict=verdict,
        verdict_by="import" if verdict else None,
        verdict_at=now if verdict else None,
        trust=None if crashed else str(Trust.UNVERIFIABLE),
        cause_text=None if not crashed else "a crash in the imported results.tsv",
    )


def _source(cells: dict[str, str], place: lineage.Place | None) -> str:
    """The script of that commit where the repository has it, else a line that says which row it stands for."""
    commit = cells.get("commit", "")
    if place is not None and 4 <= len(commit) <= 40 and all(c in "0123456789abcdef" for c in commit.lower()):
        text = lineage.show(place, commit)
        if text is not None:
            return text
    row = " ".join(clean(v, keep_newlines=False)[:80] for k, v in cells.items() if k != "#")
    return f"IMPORTED_ROW = {cells['#'] + ': ' + row!r}\n"


def _constants(text: str) -> dict[str, object]:
    try:
        return sources.constants(text)
    except BadValue:
        return {}
