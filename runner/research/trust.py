"""How far a printed val_bpb is believed before anybody recomputes it.

A claim made in an impossible time, that does not go with the run's own training loss, or that beats the best by an implausible margin is
held where a verification can settle it: shown, and not ranked. Where nothing can verify, a claim that our own clock shows to be false is
held for a human, and any other is ranked as unverifiable with the doubt beside it. The daemon asks at a run's end.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from runner import board
from runner.lab import Lab
from runner.policy import TrainerPolicy
from runner.records import Outcome, Purpose, Run, Trust
from runner.research.noise import pooled

MARGIN_SD = 6.0  # beyond the best by so many standard deviations of the noise
MARGIN_SHARE = 0.20  # or, while no noise is known, by this share of the best
LEAST_SHARE = 0.05  # a real step may be many standard deviations where noise is small: report 1's halved batch gained 4 % at once
OVER_SHARE, OVER_S = 1.25, 2.0  # of the budget, besides its last steps, which are not cut short
EVALUATION_S = 10.0  # more than its class may a run take beyond its training
SHORT_SHARE = 0.5  # of the budget, as wall time
RATIO_OFF = 0.25  # training loss over val_bpb is nearly one number in a class: bytes per token × ln 2
ENOUGH = 3


def verifier_of(trainer: TrainerPolicy) -> Path | None:
    """The trainer's own program that recomputes a result; None for upstream, which keeps no checkpoint."""
    path = trainer.folder / "verify.py"
    return path if path.is_file() else None


def settled(lab: Lab, run: Run) -> dict[str, Any]:
    """`trust` and `trust_why` of a run that has just ended; empty when it has no result or was judged before."""
    if run.val_bpb is None or run.trust not in (None, Trust.CLAIMED):
        return {}
    if run.outcome is not None and run.outcome != Outcome.COMPLETED:
        return {}
    verifiable = verifier_of(lab.policy().trainer) is not None and run.engine != "fake"
    if run.val_bpb <= 0:
        return {"trust": Trust.REFUTED, "trust_why": f"no text takes {run.val_bpb:g} bits per byte"}
    false = impossible(lab, run) or overtime(lab, run)
    doubt = false or _loss_disagrees(lab, run) or _too_good(lab, run)
    held = f"{board.HELD}{doubt}" if doubt else None
    if not verifiable:
        return {"trust": Trust.UNVERIFIABLE, "trust_why": held if false else doubt}
    return {"trust": Trust.CLAIMED, "trust_why": held}


def impossible(lab: Lab, run: Run) -> str | None:
    """Why the claim cannot be true by its own numbers and our clock; None when it can."""
    if run.wall_s is None:
        return None
    if run.training_s is not None and run.training_s > run.wall_s * 1.05 + 2:
        return f"it claims {run.training_s:.1f} s of training and ran for {run.wall_s:.1f} s{_slept(run)}"
    if lab.policy().trainer.budget is not None and run.wall_s < SHORT_SHARE * run.budget_s:
        return f"it ran for {run.wall_s:.1f} s of a budget of {run.budget_s:g} s"
    return None


def _slept(run: Run) -> str:
    """Words where the host's own clock agrees with the run: a script's clock goes on while the machine is suspended, ours does not."""
    if run.started_at is None or run.ended_at is None or run.wall_s is None or run.training_s is None:
        return ""
    clock_s = run.ended_at - run.started_at
    if run.training_s > clock_s * 1.05 + 2:
        return ""
    return f": its machine slept, or its clock was set, for {clock_s - run.wall_s:.0f} s meanwhile; run it again"


def overtime(lab: Lab, run: Run) -> str | None:
    """Why a result took more training than its budget: by its own word, or by our clock, whatever its own was made to show.

    By our clock: from its first step to its end it took far more than it counts, and than the runs of its class leave uncounted.
    """
    if lab.policy().trainer.budget is None:
        return None  # the script has no budget: it ends when it does
    last_steps_s = min(2 * (run.dt_ms or 0) / 1000, run.budget_s)  # the run's own word, too
    if run.training_s is not None and run.training_s > OVER_SHARE * run.budget_s + last_steps_s + OVER_S:
        return f"it trained for {run.training_s:.1f} s, of a budget of {run.budget_s:g} s"
    own = _uncounted_s(run.first_step_at, run.ended_at, run.training_s)
    if own is None or run.class_key is None:
        return None
    rows = lab.store.tally(
        "first_step_at, ended_at, training_s",
        "class_key = ? AND budget_s = ? AND outcome = 'completed' AND id != ? AND trust IS NOT 'refuted' LIMIT 500",
        (run.class_key, run.budget_s, run.id),
    )
    others = [seconds for row in rows if (seconds := _uncounted_s(*row)) is not None]
    if len(others) < ENOUGH:
        return None
    usual = statistics.median(others)
    if own <= 2 * usual + EVALUATION_S + (OVER_SHARE - 1) * run.budget_s:
        return None
    told = f"it took {own:.0f} s beyond the training it counts; the runs of its class take {usual:.0f} s"
    return f"{told}: its clock may have been slowed, or others had the machine; run it again"


def _uncounted_s(first_step_at: float | None, ended_at: float | None, training_s: float | None) -> float | None:
    """Seconds from a run's first step to its end that it does not count as training (evaluation, writing)."""
    if first_step_at is None or ended_at is None or training_s is None:
        return None
    return max(ended_at - first_step_at - training_s, 0.0)


def _loss_disagrees(lab: Lab, run: Run) -> str | None:
    """A val_bpb far from what runs of its class with such a training loss had."""
    if run.loss is None or not run.val_bpb or run.class_key is None:
        return None
    rows = lab.store.tally(
        "loss, val_bpb",
        "class_key = ? AND budget_s = ? AND outcome = 'completed' AND id != ? AND loss > 0 AND val_bpb > 0 LIMIT 500",
        (run.class_key, run.budget_s, run.id),
    )
    if len(rows) < ENOUGH:
        return None
    usual, own = statistics.median(loss / bpb for loss, bpb in rows), run.loss / run.val_bpb
    if abs(own / usual - 1) <= RATIO_OFF:
        return None
    return (
        f"its training loss of {run.loss:.3f} nats does not go with a val_bpb of {run.val_bpb:.6f} "
        f"({own:.2f} nats a bit; {usual:.2f} in its class)"
    )


def _too_good(lab: Lab, run: Run) -> str | None:
    """A claim implausibly better than the best of its class; the first results of a class have nothing to be measured by."""
    groups, _ = board.collect(lab, run.class_key, run.budget_s)
    doubts = "class_key IS ? AND budget_s = ? AND trust_why IS NOT NULL AND trust IS NOT 'verified' AND verdict IS NOT 'keep'"
    doubted = [[i] for (i,) in lab.store.tally("id", doubts, (run.class_key, run.budget_s))]
    # A doubtful claim that nobody repeated or kept is no measure: else one absurd number would let every later one pass.
    others = [g for g in groups if run.id not in g.ids and g.ids not in doubted]
    if not others or run.val_bpb is None:
        return None
    best, noise = others[0].mean, pooled(g.values for g in others)
    margin = max(MARGIN_SD * noise.sd, LEAST_SHARE * best) if noise.sd and noise.dof >= 2 else MARGIN_SHARE * best
    if run.val_bpb >= best - margin:
        return None
    return f"it beats the best ({best:.6f}, {others[0].ids[0]}) by {best - run.val_bpb:.6f}, more than {margin:.6f}; verify it"


def wants_verification(lab: Lab, run: Run) -> str | None:
    """Why a result should be recomputed without anybody asking; None when it need not be."""
    if run.outcome != Outcome.COMPLETED or run.trust != Trust.CLAIMED or run.purpose == Purpose.VERIFY:
        return None
    if run.trust_why:
        return "its claim is held"
    if run.purpose == Purpose.PROMOTION:
        return "it was promoted"
    groups, _ = board.collect(lab, run.class_key, run.budget_s)
    if groups and run.id in groups[0].ids and (len(groups) > 1 or not groups[0].baseline):  # a lone baseline is a beginning, no best
        return "it is the new best"
    return None
