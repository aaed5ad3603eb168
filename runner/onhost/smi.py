"""GPUs read through `nvidia-smi`, for machines where NVML's library cannot be loaded by this Python.

Slower (a process a time), same lines.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from typing import Any, Dict, List, Optional

from .nvml import FIELDS, NoGpus, Unreadable, between
from .procs import describe

# (our field, nvidia-smi's names from new to old, lowest, highest)
COLUMNS = (
    ("util_pct", ("utilization.gpu",), 0, 100),
    ("mem_util_pct", ("utilization.memory",), 0, 100),
    ("mem_used_mib", ("memory.used",), 0, 1 << 30),
    ("mem_total_mib", ("memory.total",), 1, 1 << 30),
    ("power_w", ("power.draw",), 0, 5000),
    ("power_limit_w", ("enforced.power.limit", "power.limit"), 1, 5000),
    ("power_default_w", ("power.default_limit",), 1, 5000),
    ("temp_c", ("temperature.gpu",), -50, 200),
    ("sm_mhz", ("clocks.sm",), 0, 10_000),
    ("sm_max_mhz", ("clocks.max.sm",), 1, 10_000),
    ("mem_mhz", ("clocks.mem",), 0, 50_000),
    ("throttle", ("clocks_event_reasons.active", "clocks_throttle_reasons.active"), 0, 1 << 32),
    ("ecc_uncorrected", ("ecc.errors.uncorrected.volatile.total",), 0, 1 << 62),
    ("pcie_gen", ("pcie.link.gen.current",), 1, 20),
    ("pcie_gen_max", ("pcie.link.gen.max",), 1, 20),
    ("pcie_width", ("pcie.link.width.current",), 1, 64),
    ("pcie_width_max", ("pcie.link.width.max",), 1, 64),
)
IDENTITY = ("uuid", "index", "name", "driver_version", "pstate")


def available() -> bool:
    """Whether nvidia-smi can be called."""
    return shutil.which("nvidia-smi") is not None


def number(text: str) -> Optional[float]:
    """The number in a cell; None for "[N/A]", "[Not Supported]", "[Unknown Error]" and their kin."""
    text = text.strip()
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None


class Smi:
    """The reader the sampler uses when NVML is out of reach."""

    source = "nvidia-smi"
    min_interval_s = 2.0

    def __init__(self, limit_s: float = 10.0) -> None:
        self.limit_s = limit_s
        self.columns = [(field, names[0], low, high) for field, names, low, high in COLUMNS]
        self.settled = False

    def query(self, what: str, columns: List[str]) -> "subprocess.CompletedProcess[str]":
        """Run one query."""
        command = ["nvidia-smi", "--query-%s=%s" % (what, ",".join(columns)), "--format=csv,noheader,nounits"]
        try:
            return subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=self.limit_s, check=False
            )
        except subprocess.TimeoutExpired as problem:
            raise Unreadable("nvidia-smi did not answer within %g s" % self.limit_s) from problem
        except OSError as problem:
            raise Unreadable("nvidia-smi: %s" % problem) from problem

    def settle_columns(self) -> None:
        """Find out, once, which columns this driver knows, and under which name."""
        if self.settled:
            return
        known = []
        for field, names, low, high in COLUMNS:
            for name in names:
                if self.query("gpu", ["uuid", name]).returncode == 0:
                    known.append((field, name, low, high))
                    break
        self.columns, self.settled = known, True

    def sample(self) -> List[Dict[str, Any]]:
        """One line per GPU."""
        answer = self.query("gpu", [*IDENTITY, *(name for _, name, _, _ in self.columns)])
        if answer.returncode != 0 and "not a valid field" in answer.stdout + answer.stderr:
            self.settle_columns()
            answer = self.query("gpu", [*IDENTITY, *(name for _, name, _, _ in self.columns)])
        if answer.returncode != 0 and "No devices were found" in answer.stdout + answer.stderr:
            raise NoGpus("nvidia-smi finds no GPU")
        if answer.returncode != 0:
            said = (answer.stderr or answer.stdout).strip().split("\n")[-1][:200]
            raise Unreadable("nvidia-smi ended with %d: %s" % (answer.returncode, said))
        processes = self.processes()
        return [line for row in answer.stdout.splitlines() if row.strip() for line in self.line(row, processes)]

    def line(self, row: str, processes: Optional[Dict[str, List[Dict[str, Any]]]]) -> List[Dict[str, Any]]:
        """The sampler line of one row, in a list; an empty list for a row that is none."""
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) != len(IDENTITY) + len(self.columns):
            return []
        uuid, index, name, driver, pstate = cells[: len(IDENTITY)]
        whole: Dict[str, Any] = dict.fromkeys(FIELDS)
        whole.update(
            at=round(time.time(), 3), uuid=uuid, index=int(index) if index.isdigit() else None, name=name, driver=driver, source=self.source
        )
        whole["pstate"] = int(pstate[1:]) if pstate[:1] == "P" and pstate[1:].isdigit() else None
        for (field, _, low, high), cell in zip(self.columns, cells[len(IDENTITY) :]):  # noqa: B905 - lengths checked above; Python 3.8
            value = between(number(cell), low, high)
            whole[field] = value if value is None or field.startswith("power") else int(value)
        if processes is not None:
            whole["processes"] = processes.get(uuid, [])
        return [whole]

    def processes(self) -> Optional[Dict[str, List[Dict[str, Any]]]]:
        """Compute processes by GPU UUID; None when nvidia-smi does not tell."""
        answer = self.query("compute-apps", ["gpu_uuid", "pid", "used_memory"])
        if answer.returncode != 0:
            return None
        found: Dict[str, List[Dict[str, Any]]] = {}
        for row in answer.stdout.splitlines():
            cells = [cell.strip() for cell in row.split(",")]
            if len(cells) == 3 and cells[1].isdigit():
                used = number(cells[2])
                found.setdefault(cells[0], []).append(dict(describe(int(cells[1])), used_mib=None if used is None else int(used)))
        return found
