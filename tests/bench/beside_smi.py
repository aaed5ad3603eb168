"""Our figures of a real NVIDIA GPU beside nvidia-smi's, taken in the same second, while something runs on it (or not).

    python -m tests.bench.beside_smi [--seconds 30]      (skipped with the reason on a machine without a GPU)

Start a run first (`overnight run trainer/train.py --budget 60`) to compare under load. Also times the reading itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from runner.onhost.nvml import NoGpus, Nvml, Unreadable
from runner.onhost.smi import Smi, available

FIELDS = (
    "util_pct", "mem_util_pct", "mem_used_mib", "mem_total_mib", "power_w", "power_limit_w", "power_default_w", "temp_c",
    "sm_mhz", "sm_max_mhz",
    "mem_mhz", "throttle", "pstate", "ecc_uncorrected", "pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max",
)  # fmt: skip


def shown(value: Any) -> str:
    """A figure, or "-"."""
    return "-" if value is None else f"{value:g}"


def table(uuid: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Medians side by side, and the largest difference within a second."""
    first = pairs[0][0]
    print(f"\n{first['name']} {uuid}, driver {first['driver']}, {len(pairs)} seconds")
    print(f"{'field':<18}{'NVML':>12}{'nvidia-smi':>12}{'largest difference':>20}")
    for field in FIELDS:
        ours = [a[field] for a, _ in pairs if a[field] is not None]
        theirs = [b[field] for _, b in pairs if b[field] is not None]
        both = [abs(a[field] - b[field]) for a, b in pairs if a[field] is not None and b[field] is not None]
        cells = (statistics.median(ours) if ours else None, statistics.median(theirs) if theirs else None, max(both) if both else None)
        print(f"{field:<18}{shown(cells[0]):>12}{shown(cells[1]):>12}{shown(cells[2]):>20}")
    said = [[(p["pid"], p["used_mib"], p["run"]) for p in line.get("processes") or []] for line in pairs[-1]]
    print(f"processes (pid, MiB, run): NVML {said[0]}, nvidia-smi {[p[:2] for p in said[1]]}")


def main() -> None:
    """Sample both, print a table for each GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=30)
    args = parser.parse_args()
    try:
        if not available():
            raise NoGpus("nvidia-smi is not on the PATH")
        began = time.monotonic()
        ours, theirs = Nvml(), Smi()
        opened_s = time.monotonic() - began
        theirs.sample()
    except (NoGpus, Unreadable) as problem:
        print(f"skipped: {problem}")
        return
    pairs: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    cost_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(args.seconds):
        began = time.monotonic()
        lines = {line["uuid"]: line for line in ours.sample()}
        between = time.monotonic()
        others = {line["uuid"]: line for line in theirs.sample()}
        cost_s[0].append(between - began)
        cost_s[1].append(time.monotonic() - between)
        for uuid in lines.keys() & others.keys():
            pairs.setdefault(uuid, []).append((lines[uuid], others[uuid]))
        time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))
    for uuid, found in sorted(pairs.items()):
        table(uuid, found)
    medians = [1000 * statistics.median(cost) for cost in cost_s]
    print(f"\nopening NVML {1000 * opened_s:.0f} ms; one reading of all GPUs: NVML {medians[0]:.1f} ms, nvidia-smi {medians[1]:.0f} ms")


if __name__ == "__main__":
    main()
