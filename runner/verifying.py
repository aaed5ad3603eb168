"""Recomputing a result: a run of purpose `verify` on the host that holds the checkpoint, in a slot of its own like any other run.

It executes the trainer folder's own verify.py against the work folder of the run in question; the code of that run only ever answers
with logits. What it prints becomes `trust` of the run it is about. A run asked for by a person goes first, one asked for by us when
nothing waits.
"""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any

from runner import board, upkeep
from runner.engines import dirs
from runner.errors import PolicyError, Refused
from runner.records import Outcome, Phase, Purpose, Trust
from runner.research import trust
from runner.text import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from runner.engines.base import Slot
    from runner.lab import Lab
    from runner.policy import TrainerPolicy
    from runner.records import Request, Run
    from runner.roster import Roster

FIRST, LAST = 1e6, -1e6  # priorities: before everything, or when nothing else waits
QUIET_S, PATIENCE_S = 20.0, 600.0
PROGRAM, HOLDOUT = "verify.py", "holdout.txt"
VERDICTS = (Trust.VERIFIED, Trust.REFUTED, Trust.UNVERIFIABLE)


def queue_check(lab: Lab, run: Run, request: Request) -> str:
    """The run that will verify `run`; the same one when this request was taken up before. Raised: Refused when nothing can verify it."""
    if run.outcome != Outcome.COMPLETED or run.val_bpb is None:
        raise Refused(f"{run.id} has no result to recompute ({run.outcome or run.phase}).")
    store = lab.store
    found = store.runs("purpose = 'verify' AND base_run = ? AND created_at >= ?", (run.id, request.created_at))
    if found:
        return found[-1].id
    waiting = store.runs("purpose = 'verify' AND base_run = ? AND wanted = 'run' AND phase != 'ended'", (run.id,))
    if waiting:
        if request.who != "daemon":  # a person need not wait for the moment at which nothing else does
            store.update_run(waiting[-1].id, priority=FIRST, agent=request.who)
        return waiting[-1].id
    if run.id not in store.setting(upkeep.SETTING, []) and run.engine != "fake":
        raise Refused(
            f"{run.id} cannot be verified: its checkpoint was removed (keep_checkpoints = {lab.policy().limits.keep_checkpoints}).",
            next_step="Repeat it, and verify the repeat.",
        )
    if lab.policy().host(run.host or "") is None:
        raise Refused(
            f"{run.id} cannot be verified: its host {run.host} is not in hosts.toml.", next_step="Put the host back, or repeat the run."
        )
    why_not = _cannot(lab, run)
    if why_not:
        doubt = run.trust_why
        if board.is_held(doubt) and not (trust.impossible(lab, run) or trust.overtime(lab, run)):
            doubt = str(doubt).removeprefix(board.HELD)  # it waited for a verification that cannot come
        store.update_run(run.id, trust=Trust.UNVERIFIABLE, trust_why=doubt)  # to have asked is no doubt, and settles none
        raise Refused(f"{run.id} cannot be verified: {why_not}.", next_step="Repeat it at other seeds to learn how far it can be believed.")
    with store.transaction():
        check = store.insert_run(
            created_at=time.time(),
            purpose=Purpose.VERIFY,
            source_sha=run.source_sha,
            effective_sha=run.effective_sha,
            base_run=run.id,
            parent=run.id,
            hypothesis=f"recompute the result of {run.id}",
            budget_s=run.budget_s,
            priority=LAST if request.who == "daemon" else FIRST,
            want_host=run.host,
            agent=request.who,
            phase=Phase.QUEUED,
        )
        store.event(request.who, "verify", run.id, one_line(str(request.args.get("why") or ""), 500) or None, {"by": check})
    return check


def turn(created_at: float, still_s: float) -> tuple[float, str | None]:
    """(priority, hold) of a check that nobody asked for.

    It waits until nothing has started or ended for a while, so that it does not take the slot an agent is about to ask for; once it has
    waited ten minutes it goes before everything, for a held claim must not stay held all night.
    """
    if time.time() - created_at > PATIENCE_S:
        return FIRST, None
    return LAST, None if still_s >= QUIET_S else "it waits for a quiet moment"


def _cannot(lab: Lab, run: Run) -> str | None:
    if run.engine == "fake":
        return "it was simulated, and a simulation keeps no checkpoint"
    if trust.verifier_of(lab.policy().trainer) is None:
        return "its trainer has no verify.py and keeps no checkpoint"
    return None


def command_of(lab: Lab, check: Run, slot: Slot, info: Mapping[str, Any]) -> list[str]:
    """What a verify run executes, standing in its own copy of the trainer folder."""
    claim = lab.store.run(check.base_run or "")
    words = ["{python}", PROGRAM, f"{info['runs_dir']}/{check.base_run}/work", "--device", "cpu" if dirs.is_cpu(slot.uuid) else "cuda"]
    if claim is not None and claim.val_bpb is not None:
        words += ["--claim", repr(claim.val_bpb)]
    if claim is not None and claim.data_hash:
        words += ["--data", claim.data_hash]
    return words + (["--holdout", HOLDOUT] if lab.policy().trainer.holdout is not None else [])


def deliver(trainer: TrainerPolicy, work: Path) -> None:
    """Put the holdout into the work folder of a verification: it reaches a host only so, and verify.py removes it before the model's code
    runs. Raised: PolicyError when it cannot be read."""
    if trainer.holdout is None:
        return
    try:
        (work / HOLDOUT).write_bytes(trainer.holdout.read_bytes())
    except OSError as error:
        raise PolicyError(
            f"hosts.toml: [trainer] holdout = {str(trainer.holdout)!r} cannot be read: {error.strerror}.",
            next_step="Name a text file outside the trainer folder, or leave holdout out.",
        ) from error


def conclude(roster: Roster, check: Run, tail: str) -> dict[str, Any]:
    """Observed columns of an ended verify run, and the trust of the run it was about; inside the caller's transaction."""
    found = verdict_in(tail)
    if found is None:
        return {}
    why, bpb = one_line(str(found.get("why") or ""), 500), found.get("recomputed")
    columns: dict[str, Any] = {"trust": found["verdict"], "trust_why": why}
    claim = roster.store.run(check.base_run or "")
    cheated = claim and found["verdict"] == Trust.VERIFIED and (trust.impossible(roster.lab, claim) or trust.overtime(roster.lab, claim))
    if cheated:  # the number is true, and it took more training than the budget allows
        columns["trust_why"] = f"{board.HELD}{cheated}"
    if isinstance(bpb, (int, float)) and math.isfinite(bpb):
        columns["verified_bpb"] = float(bpb)
    roster.store.update_run(check.base_run or "", **columns)
    if found["verdict"] != Trust.REFUTED and not cheated:
        roster.store.clear_flag(check.base_run or "", "held")
    roster.store.event("daemon", str(found["verdict"]), check.base_run, why, {"by": check.id})
    return {"outcome": Outcome.COMPLETED, "cause": None, "cause_text": f"{check.base_run} is {found['verdict']}: {why}"}


def verdict_in(tail: str) -> dict[str, Any] | None:
    """The verdict that verify.py printed last, or None."""
    for line in reversed(tail.splitlines()):
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict) and value.get("verdict") in VERDICTS:
                return value
    return None


def answer_of(lab: Lab, run_id: str, check_id: str) -> dict[str, Any]:
    """The result of a verify request."""
    run, check = lab.store.run(run_id), lab.store.run(check_id)
    return {
        "run": run_id,
        "by": check_id,
        "outcome": check.outcome if check else None,
        "verdict": run.trust if run else None,
        "verified_bpb": run.verified_bpb if run else None,
        "why": run.trust_why if run and check and check.outcome == Outcome.COMPLETED else (check.cause_text if check else None),
    }
