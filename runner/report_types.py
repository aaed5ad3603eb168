"""The report's section on GPU types: what ran on two of them, by rank and by relative gain over one baseline, and where they disagree.

Values of two types are never set beside each other: a faster card makes more steps in the same time.
"""

from __future__ import annotations

import itertools

from runner import board
from runner.lab import Lab
from runner.research import promotion
from runner.research.classes import differs_in, gpu_of
from runner.research.results import IMPORTED_CLASS
from runner.text import markdown_cell, signed

MOST_PAIRS, MOST_ROWS, MOST_FLIPS = 4, 8, 5


def section(lab: Lab) -> str:
    """Markdown; empty where no two classes of different GPU types share a source at one budget."""
    parts = []
    scopes = board.scopes(lab)
    for budget_s in dict.fromkeys(s["budget_s"] for s in scopes):
        classes = [s["class"] for s in scopes if s["budget_s"] == budget_s and s["class"] not in (None, IMPORTED_CLASS)]
        pairs = [(a, b) for a, b in itertools.combinations(classes, 2) if gpu_of(a) != gpu_of(b)]
        parts += [told for a, b in pairs[:MOST_PAIRS] if (told := _pair(lab, a, b, budget_s))]
    return "\n\n".join(("## GPU types", *parts)) if parts else ""


def _pair(lab: Lab, a: str, b: str, budget_s: float) -> str:
    rows, flips = promotion.across(lab, a, b, budget_s), promotion.flips(lab, a, b, budget_s)
    if not rows and not flips:
        return ""
    name_a, name_b = markdown_cell(gpu_of(a)), markdown_cell(gpu_of(b))
    other = [d for d in differs_in(a, b) if not d.startswith(gpu_of(a))]
    words = f"**{name_a} and {name_b}** at {budget_s:g} s" + (f" (also other: {markdown_cell(', '.join(other))})" if other else "") + ": "
    clear = sum(f.clear for f in flips)
    pairs = f"{len(flips)} {'pair' if len(flips) == 1 else 'pairs'} of sources in another order, {clear} beyond the noise of both"
    words += f"{pairs}." if flips else "no rank flips."
    lines = [words]
    if rows:
        lines += ["", f"| {name_a} | rank | against its baseline | {name_b} | rank | against its baseline |", "|---|---|---|---|---|---|"]
        best = sorted(rows, key=lambda r: r.rank_b)[:MOST_ROWS]
        lines += [f"| {r.run_a} | {r.rank_a} | {r.percent_a:+.3f} % | {r.run_b} | {r.rank_b} | {r.percent_b:+.3f} % |" for r in best]
    if flips:
        lines += ["", *(_flip(f, name_a, name_b) for f in flips[:MOST_FLIPS])]
    return "\n".join(lines)


def _flip(flip: promotion.Flip, name_a: str, name_b: str) -> str:
    kind = "clear" if flip.clear else "within noise"
    return f"- {flip.first} against {flip.second}: {signed(flip.gain_a)} on {name_a}, {signed(flip.gain_b)} on {name_b} ({kind})."
