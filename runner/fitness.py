"""Whether a host (or the trainer folder) can start runs at all: a broken one must not eat the whole queue in a night.

Three different runs in a row that could not be started, or died before their first step of something a script cannot cause, make a host
unfit: it takes no run for a while, then one is tried. One that starts well clears it, and so does a check that finds nothing; a check
that finds an interpreter no run can use makes it unfit at once. Nothing of this is kept on disk.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from runner.records import Outcome, Run

TRAINER = "the trainer folder"  # stands for it among the hosts
CHECK = "check"  # stands for a check among the runs
ROW = 3
FIRST_HOLD_S, LONGEST_HOLD_S = 60.0, 1800.0
# Causes of an end that no edit of a script explains; a missing module only when it is torch.
HOST_CAUSES = ("not_started", "exec_failed", "no_gpu", "no_data", "disk_full")
NO_TORCH = re.compile(r"No module named '?torch\b|libcud|libtorch|GLIBC")


@dataclass(slots=True)
class _Record:
    runs: dict[str, str] = field(default_factory=dict)  # run id → why, of the present row of failures
    hold_s: float = 0.0
    until: float = 0.0


@dataclass(slots=True)
class Fitness:
    """The row of failures of each host."""

    hosts: dict[str, _Record] = field(default_factory=dict)

    def failed(self, host: str, run_id: str, why: str) -> bool:
        """A run could not get going on a host; True when this made the host unfit (or kept it so)."""
        record = self.hosts.setdefault(host, _Record())
        record.runs[run_id] = why
        if len(record.runs) < ROW and not record.hold_s:
            return False
        record.hold_s = min(max(record.hold_s * 2, FIRST_HOLD_S), LONGEST_HOLD_S)
        record.until = time.monotonic() + record.hold_s
        return True

    def checked(self, host: str, why: str | None) -> bool:
        """What a check found: no run could get going here (`why`), or all is well; True when the host's fitness changed."""
        if why is None:
            return self.went_well(host)
        record = self.hosts.setdefault(host, _Record())
        fresh = not record.hold_s
        record.runs = {CHECK: why} if fresh else record.runs
        record.hold_s, record.until = max(record.hold_s, FIRST_HOLD_S), time.monotonic() + max(record.hold_s, FIRST_HOLD_S)
        return fresh

    def went_well(self, host: str) -> bool:
        """A run took its first step on a host; True when the host was unfit until now."""
        record = self.hosts.pop(host, None)
        return record is not None and record.hold_s > 0

    def why(self, host: str) -> str | None:
        """Why a host is unfit, in a sentence; None when it is not."""
        record = self.hosts.get(host)
        if record is None or not record.hold_s:
            return None
        last = list(record.runs.values())[-1]
        if CHECK in record.runs and len(record.runs) == 1:
            return f"`hosts check` found: {last}"
        return f"the last {len(record.runs)} runs could not get going here: {last}"

    def hold(self, host: str) -> str | None:
        """Why a host takes no run now; while its time is up, one may be tried."""
        record = self.hosts.get(host)
        return self.why(host) if record is not None and time.monotonic() < record.until else None

    def probing(self, host: str) -> bool:
        """Whether a host is unfit and due for a try: then it takes one run, not one for each slot."""
        return self.why(host) is not None and self.hold(host) is None


def host_at_fault(run: Run) -> bool:
    """Whether an ended run tells of its host rather than of its script."""
    if run.outcome != Outcome.CRASHED or run.first_step_at is not None:
        return False
    return run.cause in HOST_CAUSES or (run.cause == "import" and bool(NO_TORCH.search(run.cause_text or "")))
