"""Scores the model of any trainer on the same rows, so that two trainers with evaluations of their own can be compared. Fixed.

`overnight bench trainer` appends `evaluate_bpb = common_score.wrap(evaluate_bpb)` to the copy of each side's prepare.py. After a side's
own evaluation two sets of rows are scored with the same code: `common_bpb` on windows all over the validation text (our evaluation's), and
`packed_bpb` on rows packed from the beginnings of documents (upstream's).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


def wrap(evaluate: Callable[..., float]) -> Callable[..., float]:
    """`evaluate(model, tokenizer or dataset, batch rows, …)`, followed by the common scoring."""

    def both(model: Any, data: Any, batch_rows: int, *rest: Any, **named: Any) -> float:
        own = evaluate(model, data, batch_rows, *rest, **named)
        started = time.perf_counter()
        for name in ("common", "packed"):
            print(f"{name}_bpb:       {score(model, batch_rows, name):.6f}")
        print(f"common_seconds:   {time.perf_counter() - started:.2f}", flush=True)
        return own

    return both


def token_nats(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Loss per token: an upstream model is a module called with a reduction, ours hands its loss function over."""
    if isinstance(model, torch.nn.Module):
        with torch.no_grad():
            return model(inputs, targets, reduction="none")
    return model(inputs, targets)


def score(model: Any, batch_rows: int, name: str) -> float:
    """Bits per byte on one set of rows in the folder OVERNIGHT_COMMON."""
    folder = Path(os.environ["OVERNIGHT_COMMON"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = torch.from_numpy(np.load(folder / f"{name}.npy").astype(np.int32)).to(device)
    token_bytes = torch.from_numpy(np.load(folder / "token_bytes.npy")).to(device)
    nats, scored = 0.0, 0
    for start in range(0, len(rows) - len(rows) % batch_rows, batch_rows):  # whole batches only: a compiled model has one shape
        batch = rows[start : start + batch_rows].long()
        sizes = token_bytes[batch[:, 1:]]
        inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()  # upstream's loss takes views of them
        losses = token_nats(model, inputs, targets).view_as(sizes).float()
        nats += torch.where(sizes > 0, losses, 0.0).sum(dtype=torch.float64).item()
        scored += int(sizes.sum())
    return nats / (math.log(2) * scored)
