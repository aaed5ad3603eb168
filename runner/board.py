"""Ranking: one class, one budget, repeats of a source taken together.

A rank is a property of the runs alone: order of arrival, ties, crashes and non-finite values change nothing. What is not ranked is listed
with its reason.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar

from runner.errors import BadValue, UnknownName
from runner.lab import Lab
from runner.records import Json, Purpose, Run, Trust
from runner.research.noise import WITHIN, Noise, gain, pooled
from runner.text import finite, one_line

Value = TypeVar("Value")
RANKED = "outcome = 'completed' AND purpose != 'verify'"  # the condition of the index runs_rank, which holds all that ranking reads
HELD = "held: "  # begins the reason (trust_why) of a claim that is not ranked until somebody settles it
# NULL trust is credible: `IS` keeps such a row where `=` would drop it
CREDIBLE = f"trust IS NOT 'refuted' AND NOT coalesce(trust_why LIKE '{HELD}%', 0)"
DETAILS = ("verdict", "trust", "hypothesis", "params_m", "num_steps", "wave_id", "promoted_from", "trust_why", "coalesce(cell, overrides)")


@dataclass(slots=True)
class Group:
    """All ranked runs of one effective source in a scope, oldest first; `values` are val_bpb, verified where there is one."""

    effective_sha: str = ""
    ids: list[str] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    baseline: bool = False
    mean: float = math.nan


def scopes(lab: Lab) -> list[Json]:
    """Every (class, budget) with a result: {class, budget_s, runs, best}, most ranked runs first; held claims count for nothing."""
    return derived(lab, "scopes", lambda: _scopes(lab))


def _scopes(lab: Lab) -> list[Json]:
    counted = f"CASE WHEN {CREDIBLE} THEN val_bpb END"
    rows = lab.store.tally(
        f"class_key, budget_s, count({counted}), min({counted}), max(seq)",
        f"{RANKED} GROUP BY class_key, budget_s HAVING count(val_bpb) ORDER BY 3 DESC, 5 DESC",
    )
    return [{"class": c, "budget_s": b, "runs": n, "best": best} for c, b, n, best, _ in rows]


def scope_of(known: list[Json], class_key: str | None, budget_s: float | None) -> tuple[str | None, float | None]:
    """The scope asked for, its gaps filled with the class and budget that hold most results."""
    for scope in known:
        if class_key in (None, scope["class"]) and budget_s in (None, scope["budget_s"]):
            return scope["class"], scope["budget_s"]
    return class_key, budget_s


def whole_class(lab: Lab, asked: str | None) -> str | None:
    """The class somebody means by its name or by a part of it, such as the GPU.

    Raises UnknownName when no class with results has it, BadValue when several have.
    """
    known = [str(c["class"]) for c in scopes(lab) if c["class"]]
    if asked is None or asked in known or not known:
        return asked
    meant = [name for name in dict.fromkeys(known) if asked.lower() in name.lower()]
    if len(meant) > 1:
        raise BadValue(f"{one_line(repr(asked), 60)} is part of {len(meant)} classes.", next_step=f"They are: {', '.join(meant)}.")
    if not meant:
        raise UnknownName("class with results", asked, list(dict.fromkeys(known)), where="this lab")
    return meant[0]


def is_held(trust_why: str | None) -> bool:
    """Whether a claim is held: shown with its doubt, and not ranked until somebody settles it."""
    return trust_why is not None and trust_why.startswith(HELD)


def trust_word(row: Json) -> str:
    """How far a ranked result is believed, in a word: its trust, or `doubtful` where something speaks against it."""
    return "doubtful" if row["doubt"] else str(row["trust"] or "-")


def unranked_reason(val_bpb: Any, trust: str | None, trust_why: str | None) -> str | None:
    """Why a completed run is not ranked; None when it is."""
    if finite(val_bpb) is None:
        return "no finite val_bpb"
    if trust == Trust.REFUTED:
        return trust_why or "its claim was refuted"
    return trust_why if is_held(trust_why) else None


def derived(lab: Lab, key: str, make: Callable[[], Value], *scope: object) -> Value:
    """What was made of the ranked runs, kept with the lab until one of them changes: a face asks every second, an agent with every call."""
    return lab.memo.get((key, *scope), lab.store.changes("ranking"), make, keep=not lab.store.writing)


def collect(lab: Lab, class_key: str | None, budget_s: float | None) -> tuple[list[Group], list[Json]]:
    """Groups of one scope, best first, and the completed runs that are not ranked. Callers do not change what they get."""
    return derived(lab, "ranking", lambda: _grouped(lab, class_key, budget_s), class_key, budget_s)


def _grouped(lab: Lab, class_key: str | None, budget_s: float | None) -> tuple[list[Group], list[Json]]:
    """`collect` without the memory."""
    rows = lab.store.tally(
        "id, seq, effective_sha, val_bpb, purpose, trust, verified_bpb, trust_why",
        f"{RANKED} AND class_key IS ? AND budget_s IS ?",
        (class_key, budget_s),
    )
    groups: dict[str, Group] = defaultdict(Group)
    unranked: list[Json] = []
    for run_id, seq, effective_sha, val_bpb, purpose, trust, verified_bpb, trust_why in sorted(rows, key=itemgetter(1)):
        reason = unranked_reason(val_bpb, trust, trust_why)
        if reason is not None:
            unranked.append({"id": run_id, "reason": reason})
            continue
        group = groups[effective_sha]
        group.effective_sha = effective_sha
        group.ids.append(run_id)
        group.seqs.append(seq)
        group.values.append(verified_bpb if trust == Trust.VERIFIED and verified_bpb is not None else val_bpb)
        group.baseline = group.baseline or purpose == Purpose.BASELINE
    for group in groups.values():
        group.mean = math.fsum(group.values) / len(group.values)
    return sorted(groups.values(), key=lambda g: (g.mean, g.seqs[0])), unranked


def noise_of(lab: Lab, class_key: str | None, budget_s: float | None) -> Noise:
    """The noise floor of a scope, pooled over the repeats of every source in it."""
    return derived(lab, "noise", lambda: pooled(g.values for g in collect(lab, class_key, budget_s)[0]), class_key, budget_s)


def gain_of(group: Group, baseline: Group | None, noise: Noise) -> tuple[float | None, float | None, str]:
    """(gain over the baseline, its standard error, badge): positive is better; badge is clear, within noise, unknown or baseline."""
    if baseline is None:
        return None, None, "unknown"
    if group is baseline:
        return 0.0, None, "baseline"
    found = gain(group.values, baseline.values, noise)
    return found.value, found.se, found.badge


def baseline_of(groups: list[Group]) -> Group | None:
    """The group that holds a baseline run; the oldest when there are several."""
    return min((g for g in groups if g.baseline), key=lambda g: g.seqs[0], default=None)


def leaderboard(lab: Lab, *, class_key: str | None = None, budget_s: float | None = None, limit: int = 20, offset: int = 0) -> Json:
    """The leaderboard object of FORMAT.md section 5, without `v` and `lab`."""
    known = scopes(lab)
    class_key, budget_s = scope_of(known, class_key, budget_s)
    groups, unranked = collect(lab, class_key, budget_s)
    noise = noise_of(lab, class_key, budget_s)
    baseline = baseline_of(groups)
    page = groups[offset : offset + limit]
    faces = _faces(lab, page)
    shown = [_row(rank, group, face, baseline, noise) for rank, (group, face) in enumerate(zip(page, faces, strict=True), offset + 1)]
    budgets = [s["budget_s"] for s in known if s["class"] == class_key and s["runs"]]
    firsts = {b: best[0] for b in budgets if (best := collect(lab, class_key, b)[0])}
    ladder = [{"budget_s": b, "id": first.ids[0], "val_bpb": first.mean} for b, first in firsts.items()]
    return {
        "class": class_key,
        "budget_s": budget_s,
        "classes": known,
        "noise_sd": noise.sd,
        "noise_n": noise.dof,
        "total": len(groups),
        "rows": shown,
        "unranked": unranked[:50],
        "ladder": sorted(ladder, key=lambda s: s["budget_s"]),
    }


def _row(rank: int, group: Group, first: Json, baseline: Group | None, noise: Noise) -> Json:
    """A line of the leaderboard."""
    gain, error, badge = gain_of(group, baseline, noise)
    return {
        "rank": rank,
        "id": first["id"],
        "val_bpb": group.mean,
        "gain": gain,
        "gain_se": error,
        "badge": badge,
        "verdict": first["verdict"],
        "trust": first["trust"],
        "doubt": first["trust_why"] if first["trust"] != Trust.VERIFIED else None,
        "hypothesis": first["hypothesis"],
        "changes": json.loads(first["coalesce(cell, overrides)"]),
        "promoted_from": first["promoted_from"],
        "seed_n": len(group.ids),
        "params_m": first["params_m"],
        "num_steps": first["num_steps"],
        "wave": first["wave_id"],
    }


def _faces(lab: Lab, groups: list[Group]) -> list[Json]:
    """The run that stands for each group: the kept one, else the first."""
    ids = [run_id for group in groups for run_id in group.ids]
    rows: dict[str, Json] = {}
    for at in range(0, len(ids), 500):
        part = ids[at : at + 500]
        found = lab.store.tally(f"id, {', '.join(DETAILS)}", f"id IN ({', '.join('?' * len(part))})", part)
        rows |= {row[0]: dict(zip(("id", *DETAILS), row, strict=True)) for row in found}
    return [rows[next((i for i in group.ids if rows[i]["verdict"] == "keep"), group.ids[0])] for group in groups]


def leader(lab: Lab) -> Json:
    """The best result of the scope with most results that nobody has discarded: {class, budget_s, id, val_bpb}; id None without one."""

    def found() -> Json:
        class_key, budget_s = scope_of(scopes(lab), None, None)
        verdicts = lab.store.tally("effective_sha, min(verdict = 'discard')", "verdict IS NOT NULL GROUP BY effective_sha")
        discarded = {sha for sha, every_one in verdicts if every_one}
        best = next((g for g in collect(lab, class_key, budget_s)[0] if g.effective_sha not in discarded), None)
        shown = None if best is None else _faces(lab, [best])[0]["id"]
        return {"class": class_key, "budget_s": budget_s, "id": shown, "val_bpb": None if best is None else best.mean}

    return derived(lab, "leader", found)


def standing(lab: Lab, run: Run) -> str | None:
    """Why the evidence does not carry keeping a run, in a sentence; None when it does."""
    if run.trust == Trust.REFUTED:
        return f"its claim was recomputed and is wrong ({run.trust_why or 'no reason recorded'})."
    groups, unranked = collect(lab, run.class_key, run.budget_s)
    held = next((u["reason"] for u in unranked if u["id"] == run.id), None)
    if held:
        return f"it is not ranked: {held}."
    group = next((g for g in groups if run.id in g.ids), None)
    if group is None:
        return "it has no ranked result."
    if run.trust == Trust.UNVERIFIABLE and len(group.ids) == 1 and not group.baseline:
        return "nothing can verify its claim and it ran once; a repeat must agree first."
    if run.trust == Trust.UNVERIFIABLE and run.trust_why:
        return f"nothing can verify its claim, and it is doubtful: {run.trust_why}."
    reference = reference_of(groups, group, run)
    if reference is None:
        return None
    found = gain(group.values, reference.values, noise_of(lab, run.class_key, run.budget_s))
    if found.badge == WITHIN and found.se is not None:
        return f"its gain of {found.value:+.6f} over {reference.ids[0]} is within noise (standard error {found.se:.6f})."
    if found.value < 0:
        return f"it is worse than {reference.ids[0]} by {-found.value:.6f}."
    return None


def reference_of(groups: list[Group], group: Group, run: Run) -> Group | None:
    """What a run is judged against: its parent's source where that is ranked in the same scope, else the baseline; None for itself."""
    parent = next((g for g in groups if run.parent in g.ids), None)
    found = parent if parent is not None and parent is not group else baseline_of(groups)
    return None if found is group else found
