"""What a tune stands on: the whole preflight of the GPU models it will use, asked for once, waited for, and shown.

Preflight chooses attention, compile mode and device batch; the tune does not search what was measured. What cannot be measured (a CPU,
simulated GPUs, another trainer) is said, and a preflight that fails holds nothing up.
"""

from __future__ import annotations

import time
from typing import Any

from runner import measuring, verbs
from runner.engines import dirs
from runner.errors import Refused
from runner.lab import Lab
from runner.records import HostState, Outcome, Run
from runner.scheduler import matches_type

LOOK_S = 30.0  # a host that has not answered by then is left to the quick preflight before its first run
Kept = dict[str, Any]  # runs: ids, notes: in words where nothing is measured and why


class Ground:
    """The preflights of one tune; `kept` is what was asked, None before that."""

    def __init__(self, lab: Lab, gpu_type: str | None, kept: Kept | None) -> None:
        self.lab, self.gpu_type, self.kept = lab, gpu_type, kept
        self.began = time.monotonic()

    def ready(self) -> bool:
        """Whether the daemon has seen every host that could be measured, or has had the time for it."""
        if not measuring.measurable(self.lab.policy().trainer) or time.monotonic() - self.began > LOOK_S:
            return True
        up = {h.name for h in self.lab.store.hosts() if h.state in (HostState.UP, HostState.UNFIT)}
        seen = {g.host for g in self.lab.store.gpus()} & up
        return all(h.name in seen for h in self.lab.policy().hosts if h.kind != "fake")

    def measure(self, who: str, request_id: str) -> None:
        """Ask for what is not known. A limit in the way is a note: the tune itself may still fit."""
        try:
            done = verbs.measure(self.lab, who=who, gpu_type=self.gpu_type, request_id=request_id)
            self.kept = {"runs": done.run_ids, "notes": done.notes}
        except Refused as refused:
            self.kept = {"runs": [], "notes": [f"The GPUs are not measured first: {refused.message}"]}

    def runs(self) -> list[Run]:
        """The preflights this tune asked for."""
        return [r for i in (self.kept or {}).get("runs", []) if (r := self.lab.store.run(i)) is not None]

    def lines(self) -> list[str]:
        """In words, what was found, what failed, and what is not measured."""
        told = [
            f"{r.id} {'measured ' if r.outcome == Outcome.COMPLETED else ''}{r.cause_text or r.outcome}"
            if r.ended
            else f"{r.id} measures {r.gpu_type} of {r.want_host}"
            for r in self.runs()
        ]
        return [*(self.kept or {}).get("notes", []), *told]

    def rows(self) -> list[dict[str, Any]]:
        """What is chosen on each GPU model of each host that the tune may use."""
        models = {(g.host, g.name) for g in self.lab.store.gpus() if not dirs.is_cpu(g.uuid)}
        wanted = sorted(m for m in models if self.gpu_type is None or matches_type(self.gpu_type, m[1]))
        info = {h.name: h.info for h in self.lab.store.hosts()}
        found = [(host, measuring.found_on(info.get(host), gpu)) for host, gpu in wanted]
        return [_row(host, one) for host, one in found if one is not None]


def _row(host: str, one: dict[str, Any]) -> dict[str, Any]:
    choices = one.get("choices") or {}
    return {
        "host": host,
        "gpu_name": one.get("gpu_name"),
        "matmul_flops": one.get("matmul_flops"),
        "peak_flops": one.get("peak_flops"),
        "attention": choices.get("ATTENTION"),
        "compile": choices.get("COMPILE"),
        "device_tokens": choices.get("DEVICE_TOKENS"),
        "quick": bool(one.get("quick")),
    }
