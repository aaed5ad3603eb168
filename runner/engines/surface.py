"""A response surface for simulated nights: what a training script with given constants would score, without a GPU.

`score(constants, gpu, budget_s, seed)` is deterministic in all its arguments; constants it does not know are ignored by the engine
before they get here. The shape follows what people saw on real cards (smaller batches better down to a point, a cliff when the device
batch no longer fits, optimizer terms of shrinking size, one knob whose best value depends on the GPU type, a share of crashes for no
reason of the script's), with numbers of its own. `SCRIPT` is a source whose constants are the surface's. Standard library only.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

DEFAULTS: dict[str, float] = {
    "DEPTH": 8,
    "ASPECT_RATIO": 64,
    "TOTAL_BATCH_SIZE": 2**19,
    "DEVICE_BATCH_SIZE": 128,
    "MATRIX_LR": 0.04,
    "EMBEDDING_LR": 0.6,
    "WEIGHT_DECAY": 0.2,
    "ADAM_BETA1": 0.8,
    "MUON_MOMENTUM": 0.95,
    "WARMUP_RATIO": 0.0,
    "WARMDOWN_RATIO": 0.5,
    "FINAL_LR_FRAC": 0.0,
    "SOFTCAP": 15,
    "SEED": 42,
}
# steps a second against an H100, GiB of memory, dense BF16 FLOP/s in 1e12, board power in watts
CARDS: dict[str, tuple[float, float, float, float]] = {
    "H200": (1.08, 140, 989.0, 700),
    "H100": (1.0, 80, 989.0, 700),
    "A100": (0.44, 80, 312.0, 400),
    "L40S": (0.38, 48, 362.0, 350),
    "RTX 5090": (0.35, 32, 209.5, 575),
    "RTX 4090": (0.26, 24, 165.2, 450),
    "B200": (2.1, 180, 2250.0, 1000),
}
POSITIVE = ("DEPTH", "ASPECT_RATIO", "TOTAL_BATCH_SIZE", "DEVICE_BATCH_SIZE", "MATRIX_LR", "EMBEDDING_LR")
NOISE_SD = 0.0008
NATS_PER_BPB = 2.95  # bytes a token x ln 2, for a vocabulary of 8192
HEAD_DIM = 128
SEQ_LEN = 2048

SCRIPT = '''"""A training script for simulated GPUs: only its constants matter to the response surface."""

DEPTH = 8
ASPECT_RATIO = 64
TOTAL_BATCH_SIZE = 2**19
DEVICE_BATCH_SIZE = 128
MATRIX_LR = 0.04
EMBEDDING_LR = 0.6
WEIGHT_DECAY = 0.2
ADAM_BETA1 = 0.8
MUON_MOMENTUM = 0.95
WARMUP_RATIO = 0.0
WARMDOWN_RATIO = 0.5
FINAL_LR_FRAC = 0.0
SOFTCAP = 15
SEED = 42

if __name__ == "__main__":
    raise SystemExit("This script is for simulated GPUs (kind = \\"fake\\" in hosts.toml): it has nothing to train.")
'''


@dataclass(frozen=True, slots=True)
class Result:
    """How one run would go; `curve` maps the share of the budget (0..1] to the smoothed training loss in nats."""

    outcome: str  # completed, crashed, diverged
    val_bpb: float | None
    training_s: float
    curve: Callable[[float], float]


def card(gpu: str) -> tuple[float, float, float, float]:
    """The figures of the card whose name is the longest one contained in `gpu`; an unknown card counts as an A100."""
    known = [name for name in CARDS if name in gpu]
    return CARDS[max(known, key=len)] if known else CARDS["A100"]


def width_of(constants: Mapping[str, float]) -> int:
    """Model width as upstream rounds it: a multiple of the head dimension."""
    return math.ceil(constants["DEPTH"] * constants["ASPECT_RATIO"] / HEAD_DIM) * HEAD_DIM


def steps_of(constants: Mapping[str, float], gpu: str, budget_s: float) -> int:
    """How many optimizer steps fit into the budget."""
    rate: float = 3.1 * card(gpu)[0] * (512 / width_of(constants)) ** 0.6 * (8 / constants["DEPTH"]) ** 0.95
    if constants["DEVICE_BATCH_SIZE"] > 128:
        rate *= 0.4  # runs, but slowly
    return max(int(budget_s * rate * 2**19 / constants["TOTAL_BATCH_SIZE"]), 1)


def score(constants: Mapping[str, float], gpu: str = "H100", budget_s: float = 300.0, seed: int = 0) -> Result:
    """What a run would give. Raises KeyError for a constant the surface does not have."""
    unknown = sorted(set(constants) - set(DEFAULTS))
    if unknown:
        raise KeyError(f"the surface has no constants {unknown}; it has {sorted(DEFAULTS)}")
    c = {**DEFAULTS, **constants}
    if min(c[k] for k in POSITIVE) <= 0 or c["WEIGHT_DECAY"] < 0:
        return Result("crashed", None, 0.0, lambda share: float("nan"))
    rng = _rng(width_of(c), *(c[k] for k in sorted(c) if k != "ASPECT_RATIO"), gpu, budget_s, seed)
    width = width_of(c)
    need_gib = 40 * (c["DEVICE_BATCH_SIZE"] / 128) * (width / 512) ** 0.8 * (c["DEPTH"] / 8)
    if c["TOTAL_BATCH_SIZE"] % (c["DEVICE_BATCH_SIZE"] * SEQ_LEN) or need_gib > card(gpu)[1]:
        return Result("crashed", None, 0.0, lambda share: float("nan"))
    if c["MATRIX_LR"] > 0.15 or c["ADAM_BETA1"] >= 0.99:
        stop = rng.uniform(0.03, 0.25)
        return Result("diverged", None, budget_s * stop, lambda share: float("nan") if share >= stop else 9.0 - 4.0 * share)
    final = _loss(c, gpu, budget_s) + rng.gauss(0, NOISE_SD)
    steps = steps_of(c, gpu, budget_s)
    wobble = rng.uniform(0, math.tau)

    def curve(share: float) -> float:
        x = min(max(share, 1e-4), 1.0)
        fall = 6.1 * math.exp(-x * steps / 55) + 0.4 * (1 - x) ** 1.2
        loss: float = NATS_PER_BPB * final + fall + 0.004 * math.sin(wobble + 61 * x)
        return loss

    return Result("completed", round(final, 6), budget_s, curve)


def _loss(c: Mapping[str, float], gpu: str, budget_s: float) -> float:
    """bits per byte without noise: a floor, and what each constant adds to it."""
    batch, compute = math.log2(c["TOTAL_BATCH_SIZE"]), budget_s / 300 * card(gpu)[0]
    best_batch = 17.4 + 0.5 * math.log2(max(compute, 0.05))
    best_lr = 0.048 * 2 ** (0.3 * (batch - 18))
    loss = 0.9735
    loss += 0.0039 * max(0.0, batch - best_batch) ** 1.5 + 0.007 * max(0.0, best_batch - batch) ** 2
    loss += 0.0105 * math.log2(width_of(c) / (760 * compute**0.25)) ** 2 + 0.0006 * (c["DEPTH"] - 8) ** 2
    loss += 0.0055 * math.log2(c["MATRIX_LR"] / best_lr) ** 2 + 0.0014 * math.log2(c["EMBEDDING_LR"] / 0.55) ** 2
    loss += 0.0040 * math.log((c["WEIGHT_DECAY"] + 0.02) / 0.11) ** 2 + 0.0042 * ((c["ADAM_BETA1"] - 0.89) / 0.1) ** 2
    loss += 0.0011 * abs(c["MUON_MOMENTUM"] - 0.97) / 0.03 + 0.0019 * ((c["WARMDOWN_RATIO"] - 0.62) / 0.2) ** 2
    loss += 0.0009 * abs(c["FINAL_LR_FRAC"] - (0.05 if "H200" in gpu else 0.02)) / 0.02 + 0.0005 * abs(c["SOFTCAP"] - 12) / 5
    loss += 0.03 * max(c["WARMUP_RATIO"] - 0.05, 0.0)
    return float(loss - 0.055 * math.log(max(compute, 1e-3)))


def _rng(*key: object) -> random.Random:
    return random.Random(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big"))
