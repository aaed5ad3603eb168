"""A surface with kinks instead of valleys, little noise, a deeper optimum, and momenta that depend on the batch.

The best weight decay depends on the GPU type, and the best length of the warm-down shrinks with the budget. See shape.py.
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
    "UNEMBEDDING_LR": 0.004,
    "WEIGHT_DECAY": 0.2,
    "ADAM_BETA1": 0.8,
    "MUON_MOMENTUM": 0.95,
    "WARMUP_RATIO": 0.0,
    "WARMDOWN_RATIO": 0.5,
    "SEED": 42,
}
NOISE_SD = 0.0005
FLAKY = 0.04
SHAPE = Shape(
    floor=0.978,
    terms={
        "ASPECT_RATIO": Term(80.0, 0.008, drift=0.2),
        "DEPTH": Term(10.0, 0.0014, scale="2"),
        "TOTAL_BATCH_SIZE": Term(2**18.3, 0.0036, power=1.3, drift=0.45),
        "MATRIX_LR": Term(0.065, 0.0042, power=1.5),
        "EMBEDDING_LR": Term(0.35, 0.0011, power=1.0),
        "UNEMBEDDING_LR": Term(0.008, 0.0013, power=1.5),
        "WEIGHT_DECAY": Term(0.11, 0.0026, flip=-0.4),
        "ADAM_BETA1": Term(0.87, 0.0024, scale="beta"),
        "MUON_MOMENTUM": Term(0.935, 0.0016, scale="beta", power=1.0),
        "WARMUP_RATIO": Term(0.02, 0.0009, scale="0.05", power=1.0),
        "WARMDOWN_RATIO": Term(0.66, 0.0013, scale="0.2", drift=-0.3),
    },
    pairs={("TOTAL_BATCH_SIZE", "MUON_MOMENTUM"): 0.0007, ("DEPTH", "ASPECT_RATIO"): 0.0009, ("MATRIX_LR", "ADAM_BETA1"): -0.0006},
)


def score(constants: Mapping[str, float], gpu: str = "H100", budget_s: float = 300.0, seed: int = 0) -> Result:
    """What a run would give. Raises KeyError for a constant the surface does not have."""
    unknown = sorted(set(constants) - set(DEFAULTS))
    if unknown:
        raise KeyError(f"the surface has no constants {unknown}; it has {sorted(DEFAULTS)}")
    return run(SHAPE, {k: v for k, v in {**DEFAULTS, **constants}.items() if k != "SEED"}, gpu, budget_s, seed, NOISE_SD, FLAKY)
