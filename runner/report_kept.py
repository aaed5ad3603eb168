"""The report's section on what was kept: each run with its reason, and the commit of it on the branch of kept runs.

Every kept run is listed, in whatever class and at whatever budget: the leaderboard above shows one of them.
"""

from __future__ import annotations

from runner.lab import Lab
from runner.records import Verdict
from runner.research import lineage
from runner.text import bpb, markdown_cell, one_line

MOST = 20


def section(lab: Lab) -> str:
    """Markdown; empty where nothing was kept."""
    runs = lab.store.runs("verdict = ? AND verdict_by != 'import'", (str(Verdict.KEEP),), order="verdict_at DESC")
    if not runs:
        return ""
    commits = lab.store.setting(lineage.COMMITTED, {})
    lines = ["## Kept", "", _where(lab, any(run.id in commits for run in runs)), "", "| run | val_bpb | budget | why | by | commit |"]
    lines.append("|" + "---|" * 6)
    for run in runs[:MOST]:
        cells = (run.verdict_why or "", run.verdict_by or "")
        why, who = (markdown_cell(one_line(cell, 160)) for cell in cells)
        lines.append(f"| {run.id} | {bpb(run.val_bpb)} | {run.budget_s:g} s | {why} | {who} | {commits.get(run.id, '-')[:12]} |")
    if len(runs) > MOST:
        lines.append(f"\nand {len(runs) - MOST} more.")
    return "\n".join(lines)


def _where(lab: Lab, committed: bool) -> str:
    if not committed:
        return "None is a commit: the trainer lies in no git repository, or the daemon has not come to it yet."
    branch = f"overnight/{lab.policy().limits.tag}"
    return f"Their scripts are commits of branch `{branch}` (`{branch}-kept` while that is checked out); your own branches are untouched."
