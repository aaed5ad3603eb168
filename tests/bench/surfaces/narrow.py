"""A surface that wants a smaller batch, a narrower model and higher betas; noisy, noisier still at short budgets.

The best soft cap and embedding rate depend on the GPU type; width and learning rate on each other. See shape.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.bench.surfaces.shape import Result, Shape, Term, run

DEFAULTS: dict[str, float] = {
    "ASPECT_RATIO": 64,
    "DEPTH": 8,
    "TOTAL_BATCH_SIZE": 2**19,
    "DEVICE_BATCH_SIZE": 128,
    "MATRIX_LR": 0.04,
    "EMBEDDING_LR": 0.6,
    "WEIGHT_DECAY": 0.2,
    "ADAM_BETA1": 0.8,
    "MUON_BETA2": 0.95,
    "WARMDOWN_RATIO": 0.5,
    "FINAL_LR_FRAC": 0.0,
    "SOFTCAP": 15,
    "SEED": 42,
}
NOISE_SD = 0.0013
FLAKY = 0.10
SHAPE = Shape(
    floor=0.969,
    terms={
        "ASPECT_RATIO": Term(44.0, 0.006, drift=0.1),
        "DEPTH": Term(9.0, 0.0011, scale="2"),
        "TOTAL_BATCH_SIZE": Term(2**17.2, 0.0033, power=1.6, drift=0.2),
        "MATRIX_LR": Term(0.026, 0.0045, drift=-0.15),
        "EMBEDDING_LR": Term(0.9, 0.0012, flip=-0.5),
        "WEIGHT_DECAY": Term(0.32, 0.0022),
        "ADAM_BETA1": Term(0.92, 0.0027, scale="beta"),
        "MUON_BETA2": Term(0.97, 0.0008, scale="beta"),
        "WARMDOWN_RATIO": Term(0.72, 0.0016, scale="0.2", drift=0.2),
        "FINAL_LR_FRAC": Term(0.03, 0.0007, scale="0.05"),
        "SOFTCAP": Term(20.0, 0.0006, scale="4", power=1.0, flip=-1.0),
    },
    pairs={("ASPECT_RATIO", "MATRIX_LR"): 0.0011, ("WEIGHT_DECAY", "WARMDOWN_RATIO"): -0.0006},
)


def score(constants: Mapping[str, float], gpu: str = "H100", budget_s: float = 300.0, seed: int = 0) -> Result:
    """What a run would give. Raises KeyError for a constant the surface does not have."""
    unknown = sorted(set(constants) - set(DEFAULTS))
    if unknown:
        raise KeyError(f"the surface has no constants {unknown}; it has {sorted(DEFAULTS)}")
    return run(SHAPE, {k: v for k, v in {**DEFAULTS, **constants}.items() if k != "SEED"}, gpu, budget_s, seed, NOISE_SD, FLAKY, 0.3)
