"""Labs for tests: a real folder, a real store, a small training script, and runs brought to their end without a daemon."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from runner.lab import Lab, open_lab
from runner.records import Outcome, Phase

SCRIPT = '''"""A training script for tests."""
SEED = 42
MATRIX_LR = 0.04
TOTAL_BATCH_SIZE = 2**17
DEPTH = 8
NAME = "base"
ADAM_BETAS = (0.8, 0.95)


def main():
    print(SEED, MATRIX_LR, TOTAL_BATCH_SIZE, DEPTH, NAME, ADAM_BETAS)


if __name__ == "__main__":
    main()
'''


def make_lab(folder: Path, *, policy: str = "", hosts: str = "", script: str = SCRIPT) -> Lab:
    """A lab below `folder` with a trainer of one script; `policy` and `hosts` are TOML text."""
    trainer = folder / "trainer"
    trainer.mkdir(parents=True, exist_ok=True)
    (trainer / "train.py").write_text(script)
    (trainer / "prepare.py").write_text("TIME_BUDGET = 300\n")
    (folder / "hosts.toml").write_text(f'[trainer]\nfolder = "trainer"\n[policy]\nbudget_s = 20\n{policy}\n{hosts}\n')
    return open_lab(folder / "lab", create=True)


def finish(lab: Lab, run_id: str, val_bpb: float | None = None, **observed: Any) -> None:
    """Bring a run to its end as the daemon would: completed in class "cpu" unless said otherwise."""
    now = time.time()
    outcome = Outcome.COMPLETED if val_bpb is not None else Outcome.CRASHED
    columns = {"phase": Phase.ENDED, "outcome": outcome, "class_key": "cpu", "val_bpb": val_bpb}
    lab.store.update_run(run_id, **{**columns, "started_at": now - 20, "ended_at": now, "wall_s": 20.0, "trust": "claimed", **observed})
    lab.store.event("daemon", "ended", run_id, str(columns["outcome"]))
