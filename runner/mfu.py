"""Model FLOP/s utilisation, derived on reading: stored facts over the GPU's own peak, so that a mended table mends history.

MFU = FLOPs per token × tokens per second ÷ dense BF16 peak with FP32 accumulation (trainer/peaks.py). An unknown card has no MFU; above
100 % is suspect.
"""

from __future__ import annotations

from functools import lru_cache

from runner.policy import Policy
from runner.records import Run
from runner.text import finite
from trainer.peaks import peak_flops

UPSTREAM_PEAK = 989.5e12  # what upstream's script divides by on every card (karpathy/autoresearch, train.py)


def peak_of(gpu_name: str | None, policy: Policy | None = None) -> float | None:
    """Peak FLOP/s of a GPU by name; `[peaks]` of hosts.toml comes first; None for an unknown card."""
    if not gpu_name:
        return None
    if policy is not None:
        for name, value in policy.peaks.items():
            if name.lower() in gpu_name.lower():
                return value
    return _table_peak(gpu_name)


@lru_cache(maxsize=256)
def _table_peak(gpu_name: str) -> float | None:
    peak: float | None = peak_flops(gpu_name)
    return peak


def mfu_percent(run: Run, policy: Policy | None = None) -> float | None:
    """MFU of a run in percent: over its whole training when that is known, else at its present speed; None when it cannot be told."""
    peak, flops = peak_of(run.gpu_name, policy), finite(run.flops_per_token)
    if peak is None:
        return None
    speed = run.tok_s
    if run.tokens_m and run.training_s:
        speed = run.tokens_m * 1e6 / run.training_s
    if flops is not None and speed is not None:
        return 100.0 * flops * speed / peak
    if run.mfu_reported is not None:  # upstream's figure carries its own FLOP count; only the denominator is wrong
        return run.mfu_reported * UPSTREAM_PEAK / peak if run.flops_per_token is None else None
    return None
