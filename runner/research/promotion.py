"""The two-stage rule: screen on one GPU type or at a short budget, confirm the few best on another type or at a longer budget.

`promote` in the policy says from where, to where, how many, with how many seeds. A wave is considered when its last run has ended, a single
run when it has. Only what beats its reference beyond doubt is promoted. `flips` shows where two types disagree about the order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from runner import board
from runner.lab import Lab
from runner.records import Purpose, Run
from runner.research.classes import gpu_of
from runner.research.noise import CLEAR, WITHIN, Noise, gain, pooled
from runner.research.rules import Rule, rule_of
from runner.scheduler import matches_type

CONSIDERED = "promotions_considered"  # setting: wave ids and run ids that were looked at
KEPT = 4000  # more than the runs that are looked at again
Ranked = dict[tuple[str | None, float], "Scope"]
SCREENED = (Purpose.EXPERIMENT, Purpose.TUNE)


@dataclass(frozen=True, slots=True)
class Due:
    """A run to promote now, and why."""

    run_id: str
    gpu_type: str | None
    budget_s: float | None
    seeds: int
    why: str


@dataclass(frozen=True, slots=True)
class Flip:
    """Two sources whose order differs between two classes; gains are of the first over the second, positive is better."""

    first: str
    second: str
    gain_a: float
    gain_b: float
    clear: bool


@dataclass(frozen=True, slots=True)
class Scope:
    """The ranking of one class and budget, read once for many runs."""

    by_id: dict[str, board.Group]
    baseline: board.Group | None
    floor: Noise

    @classmethod
    def of(cls, lab: Lab, class_key: str | None, budget_s: float) -> Scope:
        """Read it from the lab."""
        groups, _ = board.collect(lab, class_key, budget_s)
        return cls({i: g for g in groups for i in g.ids}, board.baseline_of(groups), pooled(g.values for g in groups))


def due(lab: Lab) -> list[Due]:
    """What the rule promotes now; what was looked at is remembered."""
    rule = rule_of(lab.policy().limits.promote)
    if rule is None:
        return []
    seen = set(lab.store.setting(CONSIDERED, []))
    found: list[Due] = []
    ranked: Ranked = {}
    looked: list[str] = []
    for name, runs in _ready(lab, rule, seen):
        chosen = best_of(lab, runs, rule.top, ranked)
        found += [Due(r.id, rule.target, rule.budget_s, rule.seeds, why) for r, why in chosen if not _promoted(lab, r, rule)]
        looked.append(name)
    if looked:
        lab.store.set_setting(CONSIDERED, [*lab.store.setting(CONSIDERED, []), *looked][-KEPT:])
    return found


def _ready(lab: Lab, rule: Rule, seen: set[str]) -> list[tuple[str, list[Run]]]:
    """Waves whose last run has ended, and single runs that have, which the rule has not looked at."""
    screened = ", ".join(f"'{p}'" for p in SCREENED)
    runs = lab.store.runs(f"phase = 'ended' AND outcome = 'completed' AND purpose IN ({screened})", order="seq DESC", limit=1000)
    open_waves = {w for (w,) in lab.store.tally("DISTINCT wave_id", "phase != 'ended' AND wave_id IS NOT NULL")}
    groups: dict[str, list[Run]] = {}
    for run in reversed(runs):
        if run.wave_id in open_waves or (rule.source and not matches_type(rule.source, run.gpu_name or "")):
            continue
        if rule.target is not None and rule.budget_s in (None, run.budget_s) and matches_type(rule.target, run.gpu_name or ""):
            continue  # it ran there
        if rule.budget_s is not None and (rule.budget_s < run.budget_s or (rule.target is None and rule.budget_s == run.budget_s)):
            continue  # a promotion never goes to less
        groups.setdefault(run.wave_id or run.id, []).append(run)
    return [(name, members) for name, members in groups.items() if name not in seen]


def best_of(lab: Lab, runs: Sequence[Run], top: int, ranked: Ranked | None = None) -> list[tuple[Run, str]]:
    """The best `top` sources of the runs that beat their reference, best first, each with the reason; `ranked` is kept between calls."""
    found: list[tuple[float, int, Run, str]] = []
    ranked = {} if ranked is None else ranked
    for scope in {(r.class_key, r.budget_s) for r in runs} - ranked.keys():
        ranked[scope] = Scope.of(lab, *scope)
    wanted = {r.id for r in runs}
    for run in runs:
        scope_now = ranked[run.class_key, run.budget_s]
        group = scope_now.by_id.get(run.id)
        if group is None or run.id != next((i for i in group.ids if i in wanted), None):
            continue  # one run stands for all repeats of its source
        parent = scope_now.by_id.get(run.parent or "")
        reference = parent if parent is not None and parent is not group else scope_now.baseline
        if reference is None or reference is group:
            continue
        gained = gain(group.values, reference.values, scope_now.floor)
        if gained.value > 0 and gained.badge != WITHIN:
            error = f" ± {gained.se:.6f}" if gained.se is not None else ", noise unknown"
            found.append((group.mean, run.seq, run, f"{gained.value:+.6f}{error} over {reference.ids[0]}"))
    found.sort(key=lambda f: (f[0], f[1]))
    return [(run, why) for _, _, run, why in found[:top]]


def unmeasured(lab: Lab, run: Run, gpu_type: str | None, budget_s: float) -> list[str]:
    """A note where a promotion will have nothing to be measured by: no baseline ran, or is to run, on that GPU at that budget."""
    key = run.class_key if gpu_type is None else class_of_type(lab, gpu_type)
    if key is not None and board.baseline_of(board.collect(lab, key, budget_s)[0]) is not None:
        return []
    if lab.store.count_runs("purpose = 'baseline' AND budget_s = ? AND phase != 'ended'", (budget_s,)):
        return []
    where = gpu_type or gpu_of(key or "its GPU")
    return [f"No baseline ran on {where} at {budget_s:g} s, so its gain cannot be told: run the script as a baseline there, too."]


def _promoted(lab: Lab, run: Run, rule: Rule) -> bool:
    budget = rule.budget_s if rule.budget_s is not None else run.budget_s
    types = (rule.target, rule.target) if rule.target is not None else (run.gpu_type, run.gpu_name)
    there = "effective_sha = ? AND purpose = 'promotion' AND budget_s = ? AND (gpu_type IS ? OR gpu_type IS ?)"
    return bool(lab.store.count_runs(there, (run.effective_sha, budget, *types)))


def flips(lab: Lab, class_a: str, class_b: str, budget_s: float) -> list[Flip]:
    """Pairs of sources that ran in both classes and rank the other way round; clear ones, where both orders are beyond noise, first."""
    (groups_a, _), (groups_b, _) = board.collect(lab, class_a, budget_s), board.collect(lab, class_b, budget_s)
    source = {g.ids[0]: _source(lab, g.ids[0]) for g in (*groups_a, *groups_b)}
    in_b = {source[g.ids[0]]: g for g in groups_b}
    both = [(g, in_b[source[g.ids[0]]]) for g in groups_a if source[g.ids[0]] in in_b]
    noise_a, noise_b = pooled(g.values for g in groups_a), pooled(g.values for g in groups_b)
    found = []
    for (a1, b1), (a2, b2) in itertools.combinations(both, 2):
        ga, gb = gain(a1.values, a2.values, noise_a), gain(b1.values, b2.values, noise_b)
        if ga.value * gb.value < 0:
            found.append(Flip(a1.ids[0], a2.ids[0], ga.value, gb.value, ga.badge == CLEAR and gb.badge == CLEAR))
    return sorted(found, key=lambda f: (not f.clear, -min(abs(f.gain_a), abs(f.gain_b))))


def _source(lab: Lab, run_id: str) -> str:
    return str(lab.store.tally("effective_sha", "id = ?", (run_id,))[0][0])


@dataclass(frozen=True, slots=True)
class Across:
    """A source in two classes: relative gain over one baseline source in each, in percent, and ranks."""

    run_a: str
    run_b: str
    percent_a: float
    percent_b: float
    rank_a: int
    rank_b: int


def across(lab: Lab, class_a: str, class_b: str, budget_s: float) -> list[Across]:
    """Sources seen in both classes, compared only by rank and by relative gain over the same baseline source."""
    (groups_a, _), (groups_b, _) = board.collect(lab, class_a, budget_s), board.collect(lab, class_b, budget_s)
    at_b = {_source(lab, g.ids[0]): (rank, g) for rank, g in enumerate(groups_b, 1)}
    shared = [(rank, g, *at_b[s]) for rank, g in enumerate(groups_a, 1) if (s := _source(lab, g.ids[0])) in at_b]
    base = next(((a, b) for _, a, _, b in shared if a.baseline or b.baseline), None)
    if base is None:
        return []
    return [
        Across(a.ids[0], b.ids[0], 100 * (base[0].mean - a.mean) / base[0].mean, 100 * (base[1].mean - b.mean) / base[1].mean, ra, rb)
        for ra, a, rb, b in shared
    ]


def class_of_type(lab: Lab, gpu_type: str) -> str | None:
    """The class with most results whose GPU model contains the words; None when nothing ran there."""
    return next((s["class"] for s in board.scopes(lab) if s["class"] and matches_type(gpu_type, gpu_of(s["class"]))), None)
