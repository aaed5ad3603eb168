"""wait_for_results: a long poll under every client's time limit, which tells only what is new.

The cursor is the set of runs already told, as ranges of their numbers. A run's end is never untold by a late clock or a host that comes
back.
"""

from __future__ import annotations

import bisect
import itertools
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import anyio
from pydantic import Field

from mcp_server.answers import Answer, Table, rounded
from mcp_server.calls import Caller
from mcp_server.reads import cause_words, what
from runner import board, compare, news, queries
from runner.errors import BadValue
from runner.lab import Lab
from runner.records import Outcome, Phase, Purpose, Run, Trust
from runner.submitting import known_run

POLL_S = 0.1  # looks at SQLite's data_version, a few microseconds
PROGRESS_S = 5.0
SETTLE_S = 0.5  # runs of a wave end together: a moment more saves a call each
RECENT_S = 3600.0
COLUMNS = ["id", "outcome", "val_bpb", "change", "training_s", "steps", "mfu_%", "what", "note"]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Which runs of a scope were told: the scope's name and the ranges of their numbers."""

    scope: str
    ranges: tuple[tuple[int, int], ...]

    def covers(self, number: int) -> bool:
        """Whether a run's result was told."""
        return any(a <= number <= b for a, b in self.ranges)

    def with_ranges(self, ranges: Iterable[tuple[int, int]]) -> Cursor:
        """The cursor with these ranges too, in order and without overlaps."""
        merged: list[list[int]] = []
        for a, b in sorted([*self.ranges, *ranges]):
            if merged and a <= merged[-1][1] + 1:
                merged[-1][1] = max(merged[-1][1], b)
            else:
                merged.append([a, b])
        return Cursor(self.scope, tuple((a, b) for a, b in merged))

    def with_told(self, told: Iterable[int], untold: Iterable[int]) -> Cursor:
        """The cursor after `told` too. Gaps are closed unless an `untold` number lies in them: what is of another scope does not matter
        to this one."""
        barriers = sorted(untold)
        merged: list[list[int]] = []
        for a, b in sorted([*self.ranges, *((n, n) for n in told)]):
            blocked = bisect.bisect_left(barriers, a) != bisect.bisect_right(barriers, merged[-1][1]) if merged else True
            if blocked:
                merged.append([a, b])
            else:
                merged[-1][1] = max(merged[-1][1], b)
        return Cursor(self.scope, tuple((a, b) for a, b in merged))

    def __str__(self) -> str:
        return f"{self.scope}:" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in self.ranges)


def parse_cursor(text: str, scope: str) -> Cursor:
    """The cursor an earlier answer gave.

    Raises BadValue when it is not one, or belongs to a wait for something else.
    """
    name, _, body = text.partition(":")
    ranges = []
    for part in filter(None, body.split(",")):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        if match is None:
            raise BadValue(
                f"{part!r} is not part of a cursor of wait_for_results.", next_step="Pass the cursor of the last answer as it was, or none."
            )
        ranges.append((int(match[1]), int(match[2] or match[1])))
    if name != scope:
        raise BadValue(
            f"This cursor belongs to a wait for {name!r}, not for {scope!r}.", next_step="Leave the cursor out when ids or wave change."
        )
    return Cursor(scope, ()).with_ranges(ranges)


@dataclass(frozen=True, slots=True)
class Look:
    """How a scope stands: what ended and is news, and what has not ended."""

    fresh: list[Run]
    pending: list[news.Pending]


@dataclass(frozen=True, slots=True)
class Scope:
    """Which runs a wait is about: named ones, a wave, or all of the caller's."""

    name: str
    ids: tuple[str, ...]
    wave: str | None
    agent: str

    def look(self, lab: Lab, told: Cursor) -> Look:
        """The runs of the scope that have ended and were not told yet, and those that have not ended."""
        if self.ids:
            pending = news.pending(lab, "id", self.ids)
            going = {run.id for run in pending}
            found = [run for i in self.ids if i not in going and (run := lab.store.run(i)) is not None]
            fresh = sorted((run for run in found if run.ended and not told.covers(run.seq)), key=lambda run: run.seq)
            return Look(fresh, pending)
        column, value = ("wave_id", self.wave) if self.wave is not None else ("agent", self.agent)
        # those that go on first: one that ends in between is then told, and not passed over
        pending = news.pending(lab, column, (value,))
        fresh = news.untold(lab, column, value, told.ranges)
        ended = {run.id for run in fresh}
        return Look(fresh, [run for run in pending if run.id not in ended])


def scope_of(lab: Lab, who: str, ids: list[str] | None, wave: str | None) -> Scope:
    """The scope of a call.

    Raises UnknownName when a run or wave does not exist, BadValue when both are given.
    """
    if ids and wave:
        raise BadValue("ids and wave exclude each other.", next_step="Give one of them, or neither for all your runs.")
    for i in ids or []:
        known_run(lab, i)
    if wave is not None:
        queries.known_wave(lab, wave)
    return Scope(name=wave or ("ids" if ids else "mine"), ids=tuple(dict.fromkeys(ids or [])), wave=wave, agent=who)


def first_cursor(lab: Lab, scope: Scope) -> Cursor:
    """Where a wait without a cursor begins: at nothing told; for all of the caller's runs, what ended more than an hour ago counts as
    told."""
    if scope.name != "mine":
        return Cursor(scope.name, ())
    edges = [0, *sorted(news.recent_of(lab, scope.agent, time.time() - RECENT_S)), news.newest_number(lab) + 1]
    between = tuple((a + 1, b - 1) for a, b in itertools.pairwise(edges) if b - a > 1)
    return Cursor(scope.name, between)


async def wait_for_results(
    call: Caller,
    ids: Annotated[list[str] | None, Field(description="Run ids.", max_length=256)] = None,
    wave: Annotated[str | None, Field(description="Or all runs of this wave, e.g. 'w3'.", max_length=20)] = None,
    until: Annotated[Literal["any", "all"], Field(description="Return at the first new result, or when all have ended.")] = "any",
    timeout_s: Annotated[float, Field(description="Longest wait; then what is known is returned, which is no error.", ge=0, le=50)] = 25,
    cursor: Annotated[str | None, Field(description="From the last answer: only what is new since then.", max_length=20_000)] = None,
) -> Callable[[Lab], Answer]:
    """Wait for runs to end (a long poll of at most 50 s) and return only new results: outcome, val_bpb and its change against the parent
    (or the baseline), failures with their cause. Call it again with the cursor while `pending` is not 0; use the time between calls to
    prepare the next wave. Without ids and wave it covers your own runs that are queued, going, or ended within the last hour. Safe to
    cancel or repeat: results stay in the lab."""
    desk = call.desk

    def begin(lab: Lab) -> tuple[Scope, Cursor, Look]:
        desk.heard_from(call.who)
        scope = scope_of(lab, call.who, ids, wave)
        told = parse_cursor(cursor, scope.name) if cursor else first_cursor(lab, scope)
        return scope, told, scope.look(lab, told)

    started = time.monotonic()
    version = desk.version()
    scope, told, seen = await desk.with_lab(begin)
    progress_at, settle_until = started, None
    while True:
        now = time.monotonic()
        desk.wake_daemon(desk.watch, asked=False)  # a wait must not outlive the daemon it waits for
        if (newest := desk.version()) != version:
            version, seen = newest, await desk.with_lab(lambda lab: scope.look(lab, told))
        fresh = len(seen.fresh)
        if not seen.pending or now - started >= timeout_s:
            break
        if until == "any" and fresh:
            settle_until = settle_until or now + SETTLE_S
            if now >= settle_until:
                break
        if now >= progress_at:
            progress_at = now + PROGRESS_S
            await call.progress(now - started, timeout_s, f"{fresh} new, {going(seen.pending)}")
        await anyio.sleep(min(POLL_S, max(0.0, timeout_s - (now - started))))
    return lambda lab: report(lab, scope, seen, told)


def going(pending: list[news.Pending]) -> str:
    """How the unfinished runs stand, in words: `5 running, 3 queued`."""
    counts: dict[str, int] = {}
    for run in pending:
        counts[run.phase] = counts.get(run.phase, 0) + 1
    return ", ".join(f"{n} {phase}" for phase, n in counts.items()) or "none left"


def report(lab: Lab, scope: Scope, seen: Look, told: Cursor) -> Answer:
    """The answer of a wait: new results in order of their end, who is still going, and the cursor that leaves them out next time."""
    fresh = sorted(seen.fresh, key=lambda run: (run.ended_at or 0.0, run.seq))
    pending = seen.pending
    objects = queries.run_objects(lab, fresh)
    against = changes(lab, fresh)

    def cursor_at(shown: int) -> str:
        numbers = [run.seq for run in fresh[:shown]]
        if scope.ids:  # another wait may ask for the ids between these
            return str(told.with_ranges((n, n) for n in numbers))
        return str(told.with_told(numbers, [*(run.seq for run in fresh[shown:]), *(run.seq for run in pending)]))

    facts: dict[str, Any] = {"new": len(fresh), "pending": len(pending)}
    if pending:
        facts["going"] = going(pending)
        facts["next_end_in_s"] = min((run.remaining_s for run in pending if run.remaining_s is not None), default=None)
    answer = Answer(facts=facts)
    tried = compare.tried(lab, fresh)
    rows = [row(lab, o, r, against.get(r.id), tried[r.id]) for o, r in zip(objects, fresh, strict=True)]
    answer.tables["results"] = Table(COLUMNS, rows, cursor_at=cursor_at)
    if not fresh and not pending:
        answer.next_step = "Nothing here is queued or running and all was told: submit_wave or run_experiment."
    elif any(run.phase == Phase.PROPOSED for run in pending):
        answer.next_step = "Some runs wait for a human's approval. Call again with the cursor; prepare the next wave meanwhile."
    elif pending:
        answer.next_step = "Call again with the same arguments and this cursor."
    return answer


def row(lab: Lab, obj: dict[str, Any], run: Run, change: float | None, tried: dict[str, Any]) -> list[Any]:
    """One ended run in one line."""
    mfu, steps = rounded(obj.get("mfu_percent"), 1), run.num_steps or run.step
    return [run.id, run.outcome, run.val_bpb, rounded(change, 6), run.training_s, steps, mfu, what(run, tried), remark(lab, obj, run)]


def changes(lab: Lab, runs: list[Run]) -> dict[str, float]:
    """val_bpb against the parent's, or against the class's baseline where there is no parent in the same class and budget; negative is
    better. A claim that is not ranked is compared with nothing, and nothing with it."""
    found: dict[str, float] = {}
    baselines: dict[tuple[str | None, float], float | None] = {}
    for run in runs:
        if board.unranked_reason(run.val_bpb, run.trust, run.trust_why):
            continue
        scope = (run.class_key, run.budget_s)
        parent = lab.store.run(run.parent) if run.parent else None
        if parent is not None and (parent.class_key, parent.budget_s) == scope and parent.outcome == Outcome.COMPLETED:
            if not board.unranked_reason(parent.val_bpb, parent.trust, parent.trust_why):
                found[run.id] = (run.val_bpb or 0.0) - (parent.val_bpb or 0.0)
                continue
        if scope not in baselines:
            baselines[scope] = news.baseline_bpb(lab, *scope)
        if (base := baselines[scope]) is not None and run.purpose != Purpose.BASELINE:
            found[run.id] = (run.val_bpb or 0.0) - base
    return found


def remark(lab: Lab, obj: dict[str, Any], run: Run) -> str | None:
    """Why a run failed, or what speaks against the result of one that did not: the doubt of its end, then its loudest flags."""
    if run.outcome == Outcome.DECLINED:
        return f"declined: {run.approval_why or 'no reason given'}"
    if run.outcome == Outcome.CANCELLED and (asked := news.cancelled_by(lab, run.id)) is not None:
        return f"cancelled by {asked.who}: {asked.why or 'no reason given'}"
    if run.outcome != Outcome.COMPLETED or run.purpose == Purpose.PREFLIGHT:  # what a preflight found stands there
        return cause_words(run) or run.cause
    said = [doubt(run)]  # each result is told once, and the flags come a moment after the end: the doubt is the run's own
    said += [
        f"{flag['kind']}: {flag['evidence']}"
        for flag in obj.get("flags") or []
        if flag["severity"] != "info" and flag["kind"] not in ("held", "doubtful")
    ]
    return "; ".join(part for part in said if part) or None


def doubt(run: Run) -> str | None:
    """What speaks against a completed run's claim, in words; None where nothing does."""
    if run.trust == Trust.REFUTED:
        return f"refuted: {run.trust_why or 'its claim was recomputed'}"
    if run.trust_why is None or run.trust == Trust.VERIFIED:
        return None
    return f"{run.trust_why} (not ranked)" if board.is_held(run.trust_why) else f"doubtful: {run.trust_why}"
