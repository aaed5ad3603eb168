"""Constants as coordinates in which one step is one sensible change: doubling a rate, halving 1 - beta, a fifth of the schedule.

Strategies that know nothing of the script move along these. Only numbers move; switches, texts and seeds stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NEVER = ("SEED", "HEAD_DIM", "VOCAB", "MAX_SEQ_LEN", "SEQ_LEN", "TIME_BUDGET", "EVAL_TOKENS")
_ONE_MINUS = ("BETA", "MOMENTUM")
_SHARES = ("RATIO", "FRAC")
_WEIGHS = ("DEPTH", "LAYER", "WIDTH", "DIM", "EMB", "HEAD", "ASPECT", "DEVICE_BATCH")


@dataclass(frozen=True, slots=True)
class Knob:
    """One constant and its coordinate; `kind` is pow2, whole, count, zero, one_minus, share or log, `unit` the step of a count."""

    name: str
    kind: str
    unit: float = 1.0

    @property
    def grows(self) -> bool:
        """Whether a longer budget wants more of it: the total batch and the width, not the rows of one pass."""
        return self.kind in ("pow2", "whole") and "DEVICE" not in self.name

    @property
    def weighs(self) -> bool:
        """Whether more of it needs more memory, as far as the name tells."""
        return self.kind in ("pow2", "whole", "count") and any(word in self.name for word in _WEIGHS)

    def to(self, value: float) -> float:
        """The coordinate of a value."""
        if self.kind == "pow2":
            return float(math.log2(value))
        if self.kind == "whole":
            return float(math.log(value) / math.log(1.5))
        if self.kind == "count":
            return value / self.unit
        if self.kind == "zero":
            return value / 0.05
        if self.kind == "one_minus":
            return -math.log2(max(1 - value, 1e-6))
        if self.kind == "share":
            return value / 0.2
        return float(math.log2(value))

    def of(self, at: float) -> float:
        """The value at a coordinate, rounded to what a person would write."""
        if self.kind == "pow2":
            return 1 << max(round(at), 0)
        if self.kind == "whole":
            return max(round(float(1.5 ** min(at, 60.0))), 1)
        if self.kind == "count":
            return max(round(at * self.unit), 1)
        if self.kind == "zero":
            return round(min(max(at * 0.05, 0.0), 1.0), 4)
        if self.kind == "one_minus":
            return round(1 - math.pow(2, -max(at, 0.05)), 4)
        if self.kind == "share":
            return round(min(max(at * 0.2, 0.0), 1.0), 3)
        return float(f"{2 ** max(min(at, 60.0), -60.0):.3g}")

    def moved(self, value: float, step: float) -> float:
        """The value `step` away; at least one notch for constants that come in notches."""
        new = self.of(self.to(value) + step)
        if new == value and self.kind in ("pow2", "whole", "count"):
            new = self.of(self.to(value) + math.copysign(1.0, step))
        return new


def knob_of(name: str, value: Any) -> Knob | None:
    """The knob of a constant; None for what is not a number to move."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or name in NEVER or name.endswith("_SEED"):
        return None
    if value < 0 or not math.isfinite(value):
        return None
    if isinstance(value, int) and value > 0:
        if value >= 16 and value & (value - 1) == 0 and any(w in name for w in ("BATCH", "TOKENS")):
            return Knob(name, "pow2")
        return Knob(name, "whole") if value >= 20 else Knob(name, "count", max(1.0, value * 0.25))
    if value == 0:
        return Knob(name, "zero") if any(w in name for w in _SHARES) else None
    if 0 < value < 1 and any(w in name for w in _ONE_MINUS):
        return Knob(name, "one_minus")
    if 0 < value <= 1 and any(w in name for w in _SHARES):
        return Knob(name, "share")
    return Knob(name, "log")


def knobs_of(constants: Mapping[str, Any], only: list[str] | None = None) -> dict[str, Knob]:
    """All knobs of a set of constants, or those named."""
    found = {name: knob_of(name, value) for name, value in constants.items() if only is None or name in only}
    return {name: knob for name, knob in found.items() if knob is not None}


def mended_batch(constants: Mapping[str, Any], seq_len: int | None) -> dict[str, Any]:
    """The constants with a device batch that divides the total batch, as the script's assert wants it: halved until it does."""
    total, rows = constants.get("TOTAL_BATCH_SIZE"), constants.get("DEVICE_BATCH_SIZE")
    out = dict(constants)
    if not (seq_len and isinstance(total, int) and isinstance(rows, int)) or isinstance(total, bool) or rows < 1:
        return out
    while rows > 1 and total % (rows * seq_len):
        rows //= 2
    if total % (rows * seq_len) == 0:
        out["DEVICE_BATCH_SIZE"] = rows
    return out
