"""Room on disks: what of ended runs stays in their work folders, and for how long.

Checkpoints are the bulk (some hundred MB a run, a night is 900 runs). Kept are the best `keep_checkpoints` of each class and budget,
whatever is marked keep, and whatever a verification may still need; of the rest the work folder goes, a minute after the end. Logs,
events, status and source of every run stay in the lab for ever. A folder on a far host goes only after its files were mirrored here.
"""

from __future__ import annotations

import logging
import shutil
import time
from typing import TYPE_CHECKING

from runner.errors import OvernightError
from runner.records import Outcome, Trust, Verdict

if TYPE_CHECKING:
    from runner.records import Run
    from runner.roster import Roster

SETTING = "work_kept"  # ids of ended runs whose work folder is still whole
GRACE_S = 60.0
log = logging.getLogger("overnight.upkeep")


def remember(roster: Roster, run_id: str) -> None:
    """A run has just ended and its work folder is whole; inside the caller's transaction."""
    roster.store.set_setting(SETTING, [*roster.store.setting(SETTING, []), run_id])


async def tidy(roster: Roster) -> list[str]:
    """Remove the work folders that nobody needs any more; their run ids. A host out of reach is asked again later."""
    kept: list[str] = roster.store.setting(SETTING, [])
    if not kept:
        return []
    wanted = needed(roster, kept)
    gone = []
    for run_id in kept:
        run = roster.store.run(run_id)
        if run_id in wanted or (run is not None and time.time() - (run.ended_at or 0) < GRACE_S):
            continue
        engine = roster.engines.get((run.host if run else None) or "")
        try:
            if run is not None and engine is not None:
                await engine.forget(run_id, run.host or "")
            elif run is not None and run.host in roster.hosts:
                continue
        except OvernightError as error:
            log.info("%s: its work folder stays for now: %s", run_id, error)
            continue
        gone.append(run_id)
    if gone:
        with roster.store.transaction():
            now_kept = roster.store.setting(SETTING, [])
            roster.store.set_setting(SETTING, [r for r in now_kept if r not in gone])
    return gone


def needed(roster: Roster, kept: list[str]) -> set[str]:
    """Those of `kept` whose checkpoint somebody may still ask for."""
    store, limit = roster.store, roster.lab.policy().limits.keep_checkpoints
    wanted = {
        str(r.args.get("run") or r.args.get("id")) for state in ("asked", "working") for r in store.requests(state) if r.verb == "verify"
    }
    runs = [r for r in map(store.run, kept) if r is not None]
    wanted |= {r.id for r in runs if r.verdict == Verdict.KEEP or (r.trust == Trust.CLAIMED and r.trust_why)}
    groups: dict[tuple[str | None, float], list[Run]] = {}
    for run in runs:
        if run.outcome == Outcome.COMPLETED and run.val_bpb is not None and run.trust != Trust.REFUTED:
            groups.setdefault((run.class_key, run.budget_s), []).append(run)
    for group in groups.values():
        wanted |= {r.id for r in sorted(group, key=lambda r: r.val_bpb or 0.0)[:limit]}
    return wanted


def sweep_stages(roster: Roster) -> None:
    """Half-made run directories of a daemon that was killed while it made them."""
    for path in roster.lab.runs_dir.glob(".stage-*"):
        shutil.rmtree(path, ignore_errors=True)
