"""From the constants of train.py to what a run really does: presets of the device and preflight's choices filled in, checked, announced.

Fixed: an experiment does not edit it. What does not fit together is one sentence that names the constant and a value that would fit.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from allowed import CHOICES, mistake, rows_that_divide, width_of
from attention import usable, why_not
from device import facts, preflight_choices
from prepare import EVALUATOR, TIME_BUDGET, Dataset


class BadSetting(Exception):
    """Raised when the constants do not fit together; its text says which and how to change them."""


@dataclass(frozen=True)
class Plan:
    """What a run really does."""

    device: torch.device
    depth: int
    width: int
    n_head: int
    seq_len: int
    total_batch: int  # tokens per optimizer step
    device_rows: int  # rows per forward pass
    compile: str
    attention: str
    loss: str
    defaults: str = "preset"  # where attention, compile mode and device batch come from when the script leaves them open

    @property
    def micro_steps(self) -> int:
        return self.total_batch // (self.device_rows * self.seq_len)


def make_plan(constants: Mapping[str, Any], presets: Mapping[str, Any], seq_len: int, data_folder: Path, device: torch.device) -> Plan:
    """The plan of `constants` (None: not chosen), after preflight's choices, the presets and the data's row length. Raised: BadSetting."""
    if not isinstance(TIME_BUDGET, (int, float)) or not 0 < TIME_BUDGET < math.inf:
        raise BadSetting(f"TIME_BUDGET in prepare.py is {TIME_BUDGET!r:.80}; it must be a number of seconds above 0")
    given = {name: value for name, value in constants.items() if name.isupper() and value is not None}
    measured = {n: v for n, v in preflight_choices(data_folder, device).items() if n not in CHOICES or v in CHOICES[n]}
    chosen = {"SEQ_LEN": seq_len, **presets, **measured, **given}
    fused_runs = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    if chosen["LOSS"] == "fused" and not fused_runs:
        if given.get("LOSS") == "fused":
            raise BadSetting('LOSS = "fused" needs a GPU and triton; take "torch"')
        chosen["LOSS"] = "torch"  # a preset asked for it; the attribute says what ran
    if wrong := mistake({**constants, **chosen}):
        raise BadSetting(wrong)
    chosen["ATTENTION"] = _attention(chosen["ATTENTION"], given.get("ATTENTION"), chosen["HEAD_DIM"], device)
    depth, head_dim, seq_len, total = (chosen[name] for name in ("DEPTH", "HEAD_DIM", "SEQ_LEN", "TOTAL_BATCH_SIZE"))
    width = width_of(depth, chosen["ASPECT_RATIO"], head_dim)
    rows = rows_that_divide(total // seq_len, chosen.get("DEVICE_BATCH_SIZE") or max(1, chosen["DEVICE_TOKENS"] // seq_len))
    origin = "preflight" if measured.keys() - given.keys() else "preset"
    how = (chosen["COMPILE"], chosen["ATTENTION"], chosen["LOSS"], origin)
    return Plan(device, depth, width, width // head_dim, seq_len, total, rows, *how)


def _attention(chosen: str, given: str | None, head_dim: int, device: torch.device) -> str:
    """What was asked for is had or refused; what preflight found with other heads gives way to the default, and the attribute says so."""
    if chosen == "default" or (why := why_not(chosen, head_dim, device)) is None:
        return chosen
    if chosen != given:
        return "default"
    raise BadSetting(f"ATTENTION is {chosen!r}, but {why}; these work here: {', '.join(usable(head_dim, device))}")


NOT_SETTINGS = frozenset({"EVALUATOR", "TIME_BUDGET", "UNCOUNTED_STEPS", "POLAR_EXPRESS"})


def announcement(constants: Mapping[str, Any], plan: Plan, model: Any, data: Dataset) -> dict[str, Any]:
    """What the `start` event says about a run: its constants, attributes, device, model, data and budget."""
    named = {name: value for name, value in constants.items() if name.isupper() and name not in NOT_SETTINGS}
    attributes = {
        "device": plan.device.type, "attention": plan.attention, "compile": plan.compile, "loss": plan.loss,
        "optimizer": constants["OPTIMIZER"], "device_batch": plan.device_rows, "total_batch": plan.total_batch, "seq_len": plan.seq_len,
        "defaults": plan.defaults, "threads": torch.get_num_threads() if plan.device.type == "cpu" else None,
        "dtype": str(model.dtype).removeprefix("torch."),
    }  # fmt: skip
    return {
        "v": 1, "constants": {name: value for name, value in named.items() if isinstance(value, (int, float, str, tuple, type(None)))},
        "attributes": attributes, **facts(plan.device), "flops_per_token": model.flops_per_token(),
        "num_params": sum(p.numel() for p in model.parameters()), "model_config": asdict(model.config), "data": data.data_id,
        "evaluator": EVALUATOR, "vocab_size": data.vocab_size, "budget_s": TIME_BUDGET, "seed": constants["SEED"],
    }  # fmt: skip
