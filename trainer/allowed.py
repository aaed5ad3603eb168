"""What the constants of train.py may be, as far as it can be told without a device, data or torch. Fixed: an experiment does not edit it.

A run asks before it builds anything, and the control room before it queues a run: one owner, one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

CHOICES = {
    "OPTIMIZER": ("muon", "adamw"),
    "COMPILE": ("none", "optimizer", "model", "both"),
    "ATTENTION": ("default", "cudnn", "flash", "efficient", "math", "flex", "fa4", "fa3", "fa2"),  # see attention.py
    "LOSS": ("torch", "fused"),
}
COUNTS = ("DEPTH", "ASPECT_RATIO", "HEAD_DIM", "SEQ_LEN", "TOTAL_BATCH_SIZE", "DEVICE_BATCH_SIZE")
MOST = 2**32  # of a count: tokens per step of the largest models are a hundredth of it
ABOVE_0 = ("SOFTCAP", "CHECKPOINT_EVERY_S")
RATES = ("MATRIX_LR", "ADAMW_MATRIX_LR", "EMBEDDING_LR", "UNEMBEDDING_LR", "SCALAR_LR")
NUMBERS = (*RATES, "WEIGHT_DECAY", "WARMUP_RATIO", "WARMDOWN_RATIO", "FINAL_LR_FRAC")
LARGEST = 1e30  # of a number: float32 ends at 3e38
# None leaves these to the device or the data
OPEN = frozenset({"DEPTH", "HEAD_DIM", "SEQ_LEN", "TOTAL_BATCH_SIZE", "DEVICE_BATCH_SIZE", "COMPILE", "ATTENTION", "LOSS"})


def mistake(constants: Mapping[str, Any]) -> str | None:
    """What is wrong with `constants` and what would be right; None if nothing is. What is missing, or open and None, is not judged."""
    known = {name: value for name, value in constants.items() if not (value is None and name in OPEN)}
    return _kinds(known) or _sizes(known)


def _kinds(known: Mapping[str, Any]) -> str | None:
    """The constants one by one."""
    for name, choices in CHOICES.items():
        if name in known and known[name] not in choices:
            return f"{name} is {known[name]!r:.80}; it must be one of: {', '.join(choices)}"
    for name in COUNTS:
        value = known.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return f"{name} is {value!r:.80}; it must be a whole number above 0"
        if value >= MOST:
            return f"{name} is too large; it must be below {MOST:,}"
    for name in (*ABOVE_0, *NUMBERS):
        value, above_0 = known.get(name, 1), name in ABOVE_0
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value > 0 if above_0 else -LARGEST < value < LARGEST):
            return f"{name} is {value!r:.80}; it must be a number{' above 0' if above_0 else ''}"
    seed, betas = known.get("SEED", 0), known.get("ADAM_BETAS", (0, 0))
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        return f"SEED is {seed!r:.80}; it must be a whole number from 0 to 2**63 - 1"
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(isinstance(b, (int, float)) and 0 <= b < 1 for b in betas):
        return f"ADAM_BETAS is {betas!r:.80}; it must be two numbers from 0 up to and without 1"
    return None


def _sizes(known: Mapping[str, Any]) -> str | None:
    """The constants against each other, as far as they are known."""
    head_dim, seq_len, total, rows = (known.get(name) for name in ("HEAD_DIM", "SEQ_LEN", "TOTAL_BATCH_SIZE", "DEVICE_BATCH_SIZE"))
    if head_dim and head_dim % 2:
        return f"HEAD_DIM {head_dim} is odd; rotary positions turn pairs, so it must be even"
    if not total or not seq_len:
        return None
    if total % seq_len:
        nearest = max(1, round(total / seq_len)) * seq_len
        return f"TOTAL_BATCH_SIZE {total} is not a multiple of the row length {seq_len}; the nearest that is: {nearest}"
    a_step = total // seq_len
    if rows and (fits := rows_that_divide(a_step, rows)) != rows:
        steps = f"TOTAL_BATCH_SIZE {total} is {a_step} rows of {seq_len}"
        return f"{steps}, which DEVICE_BATCH_SIZE {rows} does not divide; take {fits}, or None"
    return None


def rows_that_divide(a_step: int, most: int) -> int:
    """As many rows per pass as divide a step's rows, up to `most`."""
    small = [n for n in range(1, math.isqrt(a_step) + 1) if a_step % n == 0]
    return max(n for n in (*small, *(a_step // n for n in small)) if n <= most)


def width_of(depth: int, ratio: int, head_dim: int) -> int:
    """Width of the model: depth x ratio, rounded up to whole heads."""
    return -(-depth * ratio // head_dim) * head_dim


def least_ratio(depth: int, ratio: int, head_dim: int) -> int:
    """The smallest ratio that gives the same width: 90 and 96 are one model at 8 layers and heads of 128."""
    return (width_of(depth, ratio, head_dim) - head_dim) // depth + 1
