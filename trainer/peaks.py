"""Peak FLOP/s of a GPU by its device name: dense bfloat16 matrix products with float32 accumulation. Fixed, standard library only.

These are the denominators of MFU, so a wrong one is worse than none: a card without a row is unknown (None), never a guess, and so are its
relatives (Laptop, D, Ti, SUPER, Max-Q, a MIG slice) without a row of their own. Every row says where its number comes from.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """One row. Where `units`, `boost_ghz` and `flop_per_clock` (per unit) are given, their product is the number again: a second source."""

    name: str
    tflops: float
    source: str
    units: int | None = None
    boost_ghz: float | None = None
    flop_per_clock: int | None = None


# GeForce cards accumulate in float32 at half the rate of float16 (512 a unit and clock, not 1024): the float16 figure would halve MFU.
_GEFORCE = "NVIDIA whitepaper of the {} architecture, FP16/BF16 tensor with FP32 accumulate, dense"
PEAKS = (
    Peak("B200", 2250.0, "NVIDIA HGX B200 datasheet: 36 PFLOPS of 8 GPUs with sparsity"),
    Peak("GB200", 2500.0, "NVIDIA GB200 NVL72 datasheet: 360 PFLOPS of 72 GPUs with sparsity"),
    Peak("H200", 989.5, "NVIDIA H200 datasheet: SXM, 1,979 with sparsity", 132, 1.83, 4096),
    Peak("H200 NVL", 835.5, "NVIDIA H200 datasheet: NVL, 1,671 with sparsity"),
    Peak("GH200", 989.5, "NVIDIA GH200 datasheet: 990 dense, the H100 SXM die", 132, 1.83, 4096),
    Peak("H100", 989.5, "NVIDIA H100 datasheet: SXM, 1,979 with sparsity", 132, 1.83, 4096),
    Peak("H100 PCIe", 756.5, "NVIDIA H100 datasheet: PCIe, 1,513 with sparsity", 114, 1.62, 4096),
    Peak("H100 NVL", 835.5, "NVIDIA H100 datasheet: NVL, 1,671 with sparsity"),
    Peak("A100", 312.0, "NVIDIA A100 datasheet", 108, 1.41, 2048),
    Peak("A800", 312.0, "NVIDIA A800 datasheet: the A100 with slower links"),
    Peak("A30", 165.0, "NVIDIA A30 datasheet", 56, 1.44, 2048),
    Peak("A40", 149.7, "NVIDIA A40 datasheet", 84, 1.74, 1024),
    Peak("A10", 125.0, "NVIDIA A10 datasheet", 72, 1.695, 1024),
    Peak("L4", 121.0, "NVIDIA L4 datasheet: 242 with sparsity", 58, 2.04, 1024),
    Peak("L40", 181.05, "NVIDIA L40 datasheet", 142, 2.49, 512),
    Peak("L40S", 362.05, "NVIDIA L40S datasheet"),
    Peak("RTX A6000", 154.8, "NVIDIA GA102 whitepaper: 309.7 with sparsity", 84, 1.80, 1024),
    Peak("RTX 6000 Ada", 364.2, "NVIDIA Ada professional whitepaper: 728.5 with sparsity", 142, 2.505, 1024),
    Peak("RTX PRO 6000 Blackwell", 503.8, "NVIDIA RTX Blackwell PRO whitepaper: 1,007.6 with sparsity", 188, 2.617, 1024),
    Peak("RTX PRO 6000 Blackwell Max-Q", 438.9, "NVIDIA RTX Blackwell PRO whitepaper: 877.9 with sparsity", 188, 2.28, 1024),
    Peak("RTX 5090", 209.5, _GEFORCE.format("RTX Blackwell"), 170, 2.407, 512),
    Peak("RTX 5080", 112.6, _GEFORCE.format("RTX Blackwell"), 84, 2.617, 512),
    Peak("RTX 5070 Ti", 87.9, _GEFORCE.format("RTX Blackwell"), 70, 2.452, 512),
    Peak("RTX 5070", 61.7, _GEFORCE.format("RTX Blackwell"), 48, 2.512, 512),
    Peak("RTX 4090", 165.2, _GEFORCE.format("Ada"), 128, 2.52, 512),
    Peak("RTX 4080", 97.5, _GEFORCE.format("Ada"), 76, 2.505, 512),
    Peak("RTX 3090 Ti", 80.0, _GEFORCE.format("Ada, in its comparison"), 84, 1.86, 512),
    Peak("RTX 3090", 71.0, _GEFORCE.format("GA102"), 82, 1.695, 512),
    Peak("RTX 3080", 59.5, _GEFORCE.format("GA102"), 68, 1.71, 512),
    Peak("MI300X", 1307.4, "AMD Instinct MI300X data sheet"),
    Peak("MI325X", 1307.4, "AMD Instinct MI325X data sheet"),
)

# A word that makes another card of the one before it (an A100 of 64 GB has 124 units); the rest of a name (80GB, SXM4, HBM3, GPU, …)
# does not.
_VARIANTS = frozenset(
    {"ti", "super", "d", "laptop", "mobile", "max", "pcie", "nvl", "mig", "server", "embedded", "blackwell", "ada", "v2", "64gb"}
)
_SLICE = re.compile(r"\d+[abcq]")  # 48Q, 10C: a vGPU profile, whose share of the card its name does not tell
_SAME_CARD = {"a100": {"pcie"}, "a800": {"pcie"}, "a30": {"pcie"}, "rtx pro 6000 blackwell": {"server"}}  # one figure for both forms


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def peak_row(name: str) -> Peak | None:
    """The row that fits a device name, the longest match first; None when the card is unknown."""
    words = _words(name)
    best: tuple[int, Peak, list[str]] | None = None
    for row in PEAKS:
        key = _words(row.name)
        for at in range(len(words) - len(key) + 1):
            if words[at : at + len(key)] == key and (best is None or len(key) > best[0]):
                best = (len(key), row, words[at + len(key) :])
    if best is None:
        return None
    _, row, rest = best
    others = _VARIANTS.intersection(rest) - _SAME_CARD.get(row.name.lower(), set())
    return None if others or any(map(_SLICE.fullmatch, rest)) else row


def peak_flops(name: str) -> float | None:
    """Peak FLOP/s of the GPU called `name` by its driver ("NVIDIA GeForce RTX 4090"); None when unknown."""
    row = peak_row(name)
    return None if row is None else row.tflops * 1e12


def peak_flops_at(name: str, sm_mhz: float) -> float | None:
    """Peak FLOP/s at the clock the card has now, under its power cap say; None where the row does not say what a clock is worth.

    The figures of the table belong to the boost clock of the datasheet (1,830 MHz of an H200), not to the highest clock the driver names.
    """
    row = peak_row(name)
    if row is None or row.units is None or row.flop_per_clock is None or sm_mhz <= 0:
        return None
    return row.units * row.flop_per_clock * sm_mhz * 1e6
