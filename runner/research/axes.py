"""What a tuning moves: total batch, one multiplier of all learning rates, the model's size, and whatever constants were named.

A point gives every axis a value; what is stored and submitted is only what it changes of the script. Constants that the script leaves to
its presets (None) are read from the baseline's run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.errors import BadValue, Refused
from runner.records import Run
from runner.research.knobs import knob_of, mended_batch

BATCH, RATE, ROWS, DEPTH = "TOTAL_BATCH_SIZE", "LR_MULTIPLIER", "DEVICE_BATCH_SIZE", "DEPTH"
USUAL = (BATCH, RATE, DEPTH, "ASPECT_RATIO")
Point = dict[str, Any]


def axes_of(constants: Mapping[str, Any], named: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The axes of a script: those named, else the usual ones that it has. Raised: BadValue for a name that cannot be moved."""
    rates = any(k.endswith("_LR") and isinstance(v, float) for k, v in constants.items())
    for name in named:
        given = constants.get(name)
        observed = name in (BATCH, DEPTH) and name in constants and given is None
        if not (name == RATE and rates) and not observed and knob_of(name, given) is None:
            movable = sorted(k for k, v in constants.items() if knob_of(k, v) is not None)
            raise BadValue(f"{name} cannot be tuned in this script.", next_step=f"Allowed: {', '.join(dict.fromkeys((*USUAL, *movable)))}.")
    found = named or tuple(n for n in USUAL if (rates if n == RATE else n in constants))
    if not found:
        raise Refused("The script has nothing to tune.", next_step=f"Tune moves {', '.join(USUAL)}; name others with --knob.")
    return tuple(dict.fromkeys(found))


@dataclass(slots=True)
class Axes:
    """The axes of one script, and the bounds of its total batch."""

    constants: dict[str, Any]
    names: tuple[str, ...]
    seq_len: int | None
    smallest_batch: int
    largest_batch: int
    own: Point = field(default_factory=dict)  # the script's own values, known once the baseline ran

    def begin(self, first: Run | None) -> Point:
        """The script's own point, from its constants or as the baseline ran it. Raised: Refused when the baseline does not say."""
        self.own = {name: 1.0 if name == RATE else self._own(name, first) for name in self.names}
        batch = self.own.get(BATCH)
        if isinstance(batch, int) and batch < self.smallest_batch:  # a CPU's batches are far below a GPU's
            self.smallest_batch, self.largest_batch = max(batch // 8, 1), batch * 2
        return dict(self.own)

    def _own(self, name: str, first: Run | None) -> Any:
        value = self.constants.get(name)
        if value is None and first is None:
            raise Refused("The baseline has no result, so there is nothing to tune from.", next_step="Look at its log first.")
        if value is None and first is not None:
            value = first.depth if name == DEPTH else (first.attributes or {}).get("total_batch")
            if name == BATCH and not value and first.tokens_m and first.num_steps:
                value = 2 ** round(math.log2(first.tokens_m * 1e6 / first.num_steps))
        if knob_of(name, value) is None:
            raise Refused(f"The baseline does not say its {name}.", next_step="Set it in the script.")
        return value

    def within(self, point: Point) -> Point:
        """A point whose total batch lies within the bounds."""
        if BATCH not in point:
            return dict(point)
        return {**point, BATCH: min(max(int(point[BATCH]), self.smallest_batch), self.largest_batch)}

    def changes(self, point: Point) -> Point:
        """What a point changes of the script."""
        return {name: value for name, value in point.items() if value != self.own[name]}

    def overrides(self, changes: Point) -> dict[str, Any]:
        """Constants of the script for some changes: batches that fit together, every learning rate times the multiplier."""
        found = {name: value for name, value in changes.items() if name != RATE}
        rows = self.constants.get(ROWS)
        if BATCH in found and ROWS not in found:
            fitting = mended_batch({BATCH: found[BATCH], ROWS: rows}, self.seq_len)[ROWS]
            if fitting != rows:
                found[ROWS] = fitting
        rate = changes.get(RATE, 1.0)
        if rate != 1.0:
            rates = {k: v for k, v in self.constants.items() if k.endswith("_LR") and isinstance(v, float)}
            found |= {k: float(f"{found.get(k, v) * rate:.6g}") for k, v in rates.items()}
        return found


def said(changes: Point) -> str:
    """Changes in words: `batch 131072, rate x 0.5, DEPTH 1`; the script's own when there are none."""
    words = {BATCH: "batch {}", RATE: "rate x {:g}"}
    return ", ".join(words.get(name, f"{name} {{}}").format(value) for name, value in changes.items()) or "the script's own"
