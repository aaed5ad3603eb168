"""Model FLOP/s utilisation, derived on reading: stored facts over the GPU's own peak, so that a mended table mends history.

MFU = FLOPs per token × tokens per second ÷ dense BF16 peak with FP32 accumulation (trainer/peaks.py). An unknown card has no MFU; above
100 % is suspect. The nominal peak belongs to the datasheet's boost clock; `under_load` says what the clock the card really had makes of it.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import TYPE_CHECKING

from runner.policy import Policy
from runner.records import Json, Run
from runner.text import finite
from trainer.peaks import peak_flops, peak_flops_at

if TYPE_CHECKING:
    from runner.lab import Lab

UPSTREAM_PEAK = 989.5e12  # what upstream's script divides by on every card (karpathy/autoresearch, train.py)
WARM_UP_STEPS = 10  # of a GPU run: their tokens are counted and their seconds are not, by upstream's script and by ours
LIVE_S = 30  # a live run's clock and power are those of so many seconds
BUSY_PCT = 50  # seconds below this utilisation are compilation, evaluation or a gap


def peak_of(gpu_name: str | None, policy: Policy | None = None) -> float | None:
    """Peak FLOP/s of a GPU by name; `[peaks]` of hosts.toml comes first; None for an unknown card."""
    if not gpu_name:
        return None
    named = _named_peak(gpu_name, policy)
    return named if named is not None else _table_peak(gpu_name)


def _named_peak(gpu_name: str, policy: Policy | None) -> float | None:
    peaks = policy.peaks if policy is not None else {}
    return next((value for name, value in peaks.items() if name.lower() in gpu_name.lower()), None)


@lru_cache(maxsize=256)
def _table_peak(gpu_name: str) -> float | None:
    peak: float | None = peak_flops(gpu_name)
    return peak


def counted_speed(run: Run) -> float | None:
    """Tokens a second: over the whole counted training when that is known (warm-up left out), else over the last seconds."""
    if run.tokens_m and run.training_s and run.num_steps != 0:
        steps = run.num_steps
        counted = 1.0 if steps is None else (steps - WARM_UP_STEPS) / steps
        if counted > 0:
            return run.tokens_m * 1e6 * counted / run.training_s
    return run.tok_s


def mfu_percent(run: Run, policy: Policy | None = None) -> float | None:
    """MFU of a run in percent of the nominal peak: over its whole training when that is known, else at its present speed."""
    peak, flops = peak_of(run.gpu_name, policy), finite(run.flops_per_token)
    if peak is None:
        return None
    speed = finite(counted_speed(run))
    if flops is not None and speed is not None:
        return 100.0 * flops * speed / peak
    if run.mfu_reported is not None:  # upstream's figure carries its own FLOP count; only the denominator is wrong
        return run.mfu_reported * UPSTREAM_PEAK / peak if run.flops_per_token is None else None
    return None


def under_load(lab: Lab, run: Run, *, now: float | None = None) -> Json | None:
    """Mean SM clock and power of a run's busy seconds, and its MFU against the peak at that clock; None when nothing was sampled.

    A live run answers for its last 30 s. {sm_mhz, power_w, power_limit_w, seconds, mfu_at_clock_percent}; the last is None where the
    table does not say what a clock of the card is worth, or hosts.toml names a peak of its own.
    """
    if run.gpu_uuid is None or run.started_at is None:
        return None
    since = run.started_at if run.ended else (now or time.time()) - LIVE_S
    clock, power, limit, seconds = lab.store.tally(
        "avg(sm_mhz), avg(power_w), max(power_limit_w), count(*)",
        "gpu_uuid = ? AND at >= ? AND run_id = ? AND util_pct >= ? AND sm_mhz > 0",
        (run.gpu_uuid, since, run.id, BUSY_PCT),
        table="samples",
    )[0]
    if not seconds:
        return None
    nominal, peak = mfu_percent(run, lab.policy()), peak_of(run.gpu_name, lab.policy())
    named = _named_peak(run.gpu_name or "", lab.policy()) is not None
    at_clock = None if named or not run.gpu_name else peak_flops_at(run.gpu_name, clock)
    mfu = nominal * peak / at_clock if nominal is not None and peak and at_clock else None
    return {"sm_mhz": clock, "power_w": power, "power_limit_w": limit, "seconds": seconds, "mfu_at_clock_percent": mfu}
