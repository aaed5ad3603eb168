"""CPU and memory of another process while something runs, from /proc (shared by the benchmarks; prints nothing itself)."""

from __future__ import annotations

import os
import time
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Usage:
    """From construction to `stop`: share of a core, and peak resident memory of one process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.began, self.cpu_began = time.monotonic(), _cpu_s(pid)
        self.wall_s = self.cpu_share = self.peak_mib = 0.0

    def stop(self) -> None:
        """Take the second reading."""
        self.wall_s = time.monotonic() - self.began
        self.cpu_share = (_cpu_s(self.pid) - self.cpu_began) / self.wall_s
        status = Path(f"/proc/{self.pid}/status").read_text()
        self.peak_mib = next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def descendants(pid: int) -> list[int]:
    """The processes a process started, and theirs."""
    own = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return own + [below for child in own for below in descendants(child)]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S
