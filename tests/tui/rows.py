"""Rows as verbs and the daemon write them, at one fixed moment: what the scenes of the screen's tests are made of."""

from __future__ import annotations

import math
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

from runner.daemon import hold_lock
from runner.daemonlock import write_pid
from runner.lab import Lab, open_lab
from runner.records import Point

NOW = 1_790_000_000.0
H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
CLASS_H100 = "H100 80GB HBM3 · torch 2.13.0+cu130 · driver 580.95 · eval 3f9a1c2b7d · data 91be02aa4c"
CLASS_H200 = "H200 · torch 2.13.0+cu130 · driver 580.95 · eval 3f9a1c2b7d · data 91be02aa4c"
CONSTANTS = {"DEPTH": 8, "TOTAL_BATCH_SIZE": 2**19, "MATRIX_LR": 0.04, "WEIGHT_DECAY": 0.2, "WARMDOWN_RATIO": 0.5, "SEED": 42}
SCRIPT = '"""A script."""\nDEPTH = 8\nTOTAL_BATCH_SIZE = 2**19\nMATRIX_LR = 0.04\nWEIGHT_DECAY = 0.2\nWARMDOWN_RATIO = 0.5\nSEED = 42\n'

_daemons: dict[Path, int] = {}


def empty_lab(folder: Path, *hosts: str) -> Lab:
    """A lab nothing was done in, with these ssh hosts."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer = folder / "trainer"
    trainer.mkdir(exist_ok=True)
    (trainer / "train.py").write_text(SCRIPT)
    (trainer / "prepare.py").write_text("TIME_BUDGET = 300\n")
    machines = "".join(f'[[host]]\nname = "{name}"\nkind = "ssh"\n' for name in hosts)
    (folder / "hosts.toml").write_text(f'[trainer]\nfolder = "trainer"\n[policy]\nbudget_s = 300\n{machines}')
    return open_lab(folder / "lab", create=True)


def beat(lab: Lab, age_s: float = 0.5) -> None:
    """A daemon that holds the lab's lock and gave a sign of life `age_s` before NOW."""
    if lab.path not in _daemons:
        _daemons[lab.path] = hold_lock(lab.path)  # until the tests end: whoever reads this lab asks the lock
        write_pid(_daemons[lab.path], 4711)
    with mock.patch("time.time", lambda: NOW - age_s):
        lab.store.beat(pid=4711, boot_id="boot", started_at=NOW - 7200, version="0.1.0", note=None)


def kill_daemon(lab: Lab) -> None:
    """What the kernel does to the lock of a daemon that dies; its row stays as young as it was."""
    os.close(_daemons.pop(lab.path))


def add_run(lab: Lab, **columns: Any) -> str:
    """A run as verbs insert it; observed columns may be given as well."""
    source = lab.keep_source(columns.pop("text", SCRIPT))
    wanted: dict[str, Any] = {
        "created_at": NOW - 3000,
        "purpose": "experiment",
        "source_sha": source,
        "effective_sha": columns.pop("effective", f"e{random.random()}"),
        "overrides": {},
        "constants": dict(CONSTANTS),
        "budget_s": 300.0,
        "seed": 42,
        "priority": 0.0,
        "agent": "mcp:claude",
        "wanted": "run",
        "approval": "none",
        "phase": "queued",
        "log_offset": 0,
        "events_offset": 0,
    }
    return lab.store.insert_run(**{**wanted, **columns})


def ended(lab: Lab, val_bpb: float | None, *, at: float, gpu: str = H100, **columns: Any) -> str:
    """A run that ended `at` seconds before NOW."""
    good = (
        {"outcome": "completed", "trust": "claimed", "val_bpb": val_bpb, "exit_code": 0}
        if val_bpb is not None
        else {"outcome": "crashed", "cause": "oom", "exit_code": 1}
    )
    observed = {
        "phase": "ended",
        "started_at": NOW - at - 340,
        "ended_at": NOW - at,
        "wall_s": 340.0,
        "training_s": 300.0,
        "total_s": 331.0,
        "gpu_name": gpu,
        "host": "alpha",
        "engine": "ssh",
        "class_key": CLASS_H100 if gpu == H100 else CLASS_H200,
        "peak_vram_mb": 45060.0,
        "flops_per_token": 3.03e8,
        "tokens_m": 499.6,
        "num_steps": 953,
        "params_m": 50.3,
        "depth": 8,
        "mfu_reported": 39.8,
        "share": 1.0,
        "step": 953,
        **good,
    }
    return add_run(lab, **{**observed, **columns})


def curve(lab: Lab, run_id: str, end: float, share: float = 1.0, steps: int = 200, nan_at: float | None = None) -> None:
    """Points of a loss that falls like a power of the step."""
    rng = random.Random(run_id)
    points = []
    for i in range(1, int(steps * share) + 1):
        s = i / steps
        loss = end + 6.5 * math.exp(-s * 14) + 0.5 * (1 - s) ** 2 + rng.gauss(0, 0.008)
        points.append(
            Point(
                i * 5,
                s * 300,
                s,
                None if nan_at is not None and s > nan_at else loss,
                1.62e6 + rng.gauss(0, 9e3),
                323.0,
                40.2 + rng.gauss(0, 0.4),
            )
        )
    lab.store.add_points(run_id, points)


def add_gpu(lab: Lab, host: str, index: int, name: str, **columns: Any) -> str:
    """A GPU with a sample one second old."""
    rng = random.Random(f"{host}{index}")
    uuid = f"GPU-{host}-{index:02d}"
    busy = columns.get("run_id") is not None
    total = 81559 if name == H100 else 143771
    sample = {
        "at": NOW - 1,
        "uuid": uuid,
        "index": index,
        "name": name,
        "util_pct": rng.choice([98, 99, 100]) if busy else 0,
        "mem_used_mib": 46210 + index * 37 if busy else 4,
        "mem_total_mib": total,
        "power_w": 640 + rng.randint(-20, 40) if busy else 71,
        "power_limit_w": 700,
        "temp_c": 58 + rng.randint(0, 8) if busy else 31,
        "sm_mhz": 1755,
        "sm_max_mhz": 1980,
        "throttle": 0x4 if busy and index % 5 == 1 else 0,
        "source": "nvml",
    }
    sample.update(columns.pop("sample", {}))
    state = columns.pop("state", "busy" if busy else "free")
    values = {"host": host, "idx": index, "name": name, "mem_total_mib": total, "since": NOW - 130, "telemetry": sample, **columns}
    lab.store.upsert_gpu(uuid, state=state, **values)
    return uuid
