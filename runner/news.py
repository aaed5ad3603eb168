"""What is new in a lab: the reads behind waiting for results and behind change notifications. Facts only; nothing here writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.board import CREDIBLE
from runner.lab import Lab
from runner.records import Event, Run
from runner.store import IN_QUEUE

SPANS = 400  # SQLite's expressions may be 1000 deep
LAST = 2**62  # no run has a higher number
NEWEST = 200  # names offered as nearest ones, and for completion


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a queued run waits for."""

    id: str
    agent: str
    gpu_type: str | None
    want_host: str | None
    budget_s: float


def wave_runs(lab: Lab, wave_id: str) -> list[Run]:
    """The runs of a wave, in order of submission."""
    return lab.store.runs("wave_id = ?", (wave_id,))


@dataclass(frozen=True, slots=True)
class Pending:
    """A run that has not ended, as far as whoever waits for it needs to know."""

    id: str
    seq: int
    phase: str
    remaining_s: float | None


def pending(lab: Lab, column: str, values: Sequence[str]) -> list[Pending]:
    """Runs by id, wave or agent that have not ended, in order of submission. A wait asks at every change, so no whole rows are read."""
    assert column in ("id", "wave_id", "agent")
    where = f"phase != 'ended' AND +{column} IN ({', '.join('?' * len(values))}) ORDER BY +seq"
    return [Pending(*row) for row in lab.store.tally("id, seq, phase, remaining_s", where, values)]


def untold(lab: Lab, column: str, value: str, told: Sequence[tuple[int, int]]) -> list[Run]:
    """Ended runs of a wave or agent whose number is in none of the `told` ranges, in order of submission.

    Asked for by the gaps between the ranges: an agent has thousands of runs, and nearly all of them are told. (`+` keeps SQLite from the
    indexes that would look at all of those.)
    """
    assert column in ("wave_id", "agent")
    found: list[Run] = []
    gaps = gaps_between(told)
    for at in range(0, len(gaps), SPANS):
        part = gaps[at : at + SPANS]
        spans = " OR ".join("seq BETWEEN ? AND ?" for _ in part)
        numbers = [n for gap in part for n in gap]
        found += lab.store.runs(f"+{column} = ? AND +phase = 'ended' AND ({spans})", (value, *numbers), order="+seq")
    return found


def gaps_between(told: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges of run numbers that lie outside of some ranges."""
    gaps, after = [], 0
    for first, last in sorted(told):
        if first > after:
            gaps.append((after, first - 1))
        after = max(after, last + 1)
    return [*gaps, (after, LAST)]


def recent_of(lab: Lab, agent: str, since: float) -> list[int]:
    """Numbers of an agent's runs that have not ended, or ended since a time."""
    # two conditions, so that each is answered by an index of its own instead of all runs of the agent
    live = lab.store.tally("seq", "+agent = ? AND phase != 'ended'", (agent,))
    ended = lab.store.tally("seq", "+agent = ? AND ended_at >= ?", (agent, since))
    return sorted({int(n) for (n,) in [*live, *ended]})


def newest_number(lab: Lab) -> int:
    """The number of the newest run; 0 when there is none."""
    return int(lab.store.tally("max(seq)")[0][0] or 0)


def queued(lab: Lab) -> list[Waiting]:
    """The queued runs, in the order in which they start."""
    rows = lab.store.tally("id, agent, gpu_type, want_host, budget_s", f"{IN_QUEUE} ORDER BY priority DESC, seq")
    return [Waiting(*row) for row in rows]


def baseline_bpb(lab: Lab, class_key: str | None, budget_s: float) -> float | None:
    """Mean val_bpb of the first baseline source of a class at a budget, over its completed runs; None when it has none. Claims that are
    held or refuted do not count."""
    scope = f"class_key IS ? AND budget_s = ? AND outcome = 'completed' AND val_bpb IS NOT NULL AND {CREDIBLE}"
    first = lab.store.tally("effective_sha", f"{scope} AND purpose = 'baseline' ORDER BY seq LIMIT 1", (class_key, budget_s))
    if not first:
        return None
    mean = lab.store.tally("avg(val_bpb)", f"{scope} AND effective_sha = ?", (class_key, budget_s, first[0][0]))[0][0]
    return float(mean)


def cancelled_by(lab: Lab, run_id: str) -> Event | None:
    """The newest event that asked for a run's end."""
    return next((event for event in lab.store.events(subject=run_id) if event.verb == "cancel"), None)


def run_ids(lab: Lab, prefix: str = "", limit: int = NEWEST) -> list[str]:
    """Run ids that begin with a prefix, newest first."""
    return [str(i) for (i,) in lab.store.tally("id", "substr(id, 1, ?) = ? ORDER BY seq DESC LIMIT ?", (len(prefix), prefix, limit))]


def wave_ids(lab: Lab, prefix: str = "", limit: int = NEWEST) -> list[str]:
    """Wave ids that begin with a prefix, newest first."""
    where = "substr(id, 1, ?) = ? ORDER BY seq DESC LIMIT ?"
    return [str(i) for (i,) in lab.store.tally("id", where, (len(prefix), prefix, limit), table="waves")]


def marks(lab: Lab, known: Iterable[str]) -> dict[str, object]:
    """What each changing resource is made of, by address; equal marks mean an unchanged resource.

    Runs that have not ended, and those in `known` addresses (so that the change to ended is seen once more), their waves, and the
    leaderboard.
    """
    store = lab.store
    before = {uri.split("/")[3] for uri in known if uri.startswith("lab://runs/")}
    live = {run.id: run for run in store.active_runs()}
    for run_id in before - live.keys():
        if (run := store.run(run_id)) is not None:
            live[run_id] = run
    found: dict[str, object] = {}
    for run in live.values():
        if run.ended and (run.id not in before or f"lab://runs/{run.id}/over" in known):
            continue
        found[f"lab://runs/{run.id}"] = (run.phase, run.stage, run.outcome, run.verdict, run.step)
        found[f"lab://runs/{run.id}/log"] = run.log_offset
        if run.ended:
            found[f"lab://runs/{run.id}/over"] = True
    for wave, ended, best in store.tally("wave_id, sum(phase = 'ended'), min(val_bpb)", "wave_id IS NOT NULL GROUP BY wave_id"):
        found[f"lab://waves/{wave}"] = (ended, best)
    found["lab://leaderboard"] = store.tally("count(val_bpb), min(val_bpb), max(verdict_at), sum(trust = 'refuted')")[0]
    return found
