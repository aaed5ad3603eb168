"""What the demo's agent does: the edits it tries, the folder they are tried in, and how long that takes.

On a CPU the edits of the real demo are far apart (measured, docs/benchmarks.md), so that the order on the leaderboard is the true one and
not luck. On a GPU the same kinds of edits are tried; nobody promises their order there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.records import Outcome

BUDGET_S = 20
SIMULATED_BUDGET_S = 300
SIMULATED_SPEED = 150


@dataclass(frozen=True, slots=True)
class Plan:
    """One demo: its files, the requests of its agent, and the words around them."""

    name: str
    story: str
    takes: str
    trainer: Path
    agent: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    good_ends: Sequence[str] = (Outcome.COMPLETED,)


EDITS: list[tuple[str, dict[str, Any]]] = [
    ("one layer instead of two: more steps in the same time", {"DEPTH": 1, "ASPECT_RATIO": 128}),
    ("one layer, and narrower too", {"DEPTH": 1, "ASPECT_RATIO": 96}),
    ("twice the layers at the same width", {"DEPTH": 4, "ASPECT_RATIO": 32}),
    ("twice the width", {"ASPECT_RATIO": 128}),
]
GPU_EDITS: list[tuple[str, dict[str, Any]]] = [
    ("four times the batch: a quarter of the steps", {"TOTAL_BATCH_SIZE": 2**19}),
    ("half the layers at the same width", {"DEPTH": 4, "ASPECT_RATIO": 128}),
    ("half the width", {"ASPECT_RATIO": 32}),
    ("AdamW for the matrices instead of Muon", {"OPTIMIZER": "adamw"}),
]


def real_plan(trainer: Path, *, gpu: bool) -> Plan:
    """A baseline and four edits of the shipped trainer, for this machine's GPU or its CPU."""
    edits = GPU_EDITS if gpu else EDITS
    key = f"demo-{int(time.time())}"
    agent = {
        "baseline": {
            "purpose": "baseline",
            "hypothesis": "the trainer as it is shipped",
            "budget_s": BUDGET_S,
            "request_id": f"{key}-baseline",
        },
        "waves": [
            {
                "cells": [edit for _, edit in edits],
                "title": "four edits",
                "hypothesis": "; ".join(why for why, _ in edits),
                "budget_s": BUDGET_S,
                "request_id": f"{key}-wave",
            }
        ],
    }
    hosts = "\n".join(
        (
            "[trainer]",
            f"folder = {json.dumps(str(trainer))}",
            'budget = "prepare.py:TIME_BUDGET"',
            'data_command = ["{python}", "prepare.py"]',
            "",
            "[policy]",
            f"budget_s = {BUDGET_S}",
            # A run that is started ahead imports torch: on a CPU that would take time from the run before it.
            f"handed_ahead = {int(gpu)}",
            "",
            "[[host]]",
            'name = "here"',
            'kind = "local"',
            "",
        )
    )
    return Plan(
        name="demo",
        story="an agent tries a baseline and four edits of trainer/train.py on this machine, over MCP.",
        takes="6 minutes, most of it compiling" if gpu else "4 minutes on two cores",
        trainer=trainer,
        agent=agent,
        files={"hosts.toml": hosts},
    )


def simulated_plan() -> Plan:
    """A baseline, a factorial wave on 16 simulated GPUs, and the best promoted to the faster type."""
    from runner.engines import surface

    key = f"demo-{int(time.time())}"
    agent = {
        "baseline": {
            "purpose": "baseline",
            "hypothesis": "upstream's defaults",
            "gpu_type": "H100",
            "seeds": 3,
            "request_id": f"{key}-baseline",
        },
        "waves": [
            {
                "factors": {"TOTAL_BATCH_SIZE": [2**18, 2**19], "MATRIX_LR": [0.03, 0.05], "ASPECT_RATIO": [64, 80, 96]},
                "gpu_type": "H100",
                "title": "batch, learning rate, width",
                "hypothesis": "smaller batches with a higher learning rate; wider may pay",
                "request_id": f"{key}-wave",
            }
        ],
        "promote": [{"top": 2, "key": f"{key}-promote", "decide": {"action": "promote", "gpu_type": "H200"}}],
    }
    script = "# The constants of the simulated trainer; the surface that scores them is runner/engines/surface.py.\n"
    script += "".join(f"{name} = {value!r}\n" for name, value in surface.DEFAULTS.items())
    hosts = "\n".join(
        (
            "[trainer]",
            'folder = "trainer"',
            "",
            "[policy]",
            f"budget_s = {SIMULATED_BUDGET_S}",
            "",
            "[[host]]",
            'name = "simulated"',
            'kind = "fake"',
            f"speed = {SIMULATED_SPEED}",
            "types = { H100 = 13, H200 = 3 }",
            "",
        )
    )
    return Plan(
        name="demo-simulated",
        story="an agent runs a factorial wave on 13 simulated H100 and promotes the best to 3 simulated H200, over MCP.",
        takes="ten seconds",
        trainer=Path("build/demo-simulated/trainer"),
        agent=agent,
        files={"hosts.toml": hosts, "trainer/train.py": script, "trainer/prepare.py": f"TIME_BUDGET = {SIMULATED_BUDGET_S}\n"},
        good_ends=(Outcome.COMPLETED, Outcome.CRASHED, Outcome.DIVERGED),
    )
