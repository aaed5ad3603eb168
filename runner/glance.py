"""A look at this machine's own GPUs without a daemon: for the first picture of a lab that no daemon has served yet.

The local engine is asked once and closed again. Nothing is written; other machines are left to the daemon.
"""

from __future__ import annotations

import asyncio
import time

from runner import daemonlock, machines
from runner.engines import make_engine
from runner.engines.base import HostReport
from runner.errors import OvernightError
from runner.lab import Lab
from runner.policy import HostPolicy
from runner.records import Gpu, Json

UNWATCHED = "unwatched"
NOTE = "seen just now; no daemon runs"


def gpus(lab: Lab) -> list[Json]:
    """GPU objects of this machine in the state `unwatched`; none once a daemon runs or GPUs are known, or where nothing answers."""
    if daemonlock.daemon_pid(lab.path) is not None or lab.store.gpus():
        return []
    reports: list[HostReport] = []
    for host in lab.policy().hosts:
        if host.kind == "local":
            try:
                reports += asyncio.run(_ask(lab, host))
            except (OvernightError, OSError):
                continue
    return [row for report in reports for row in _rows(lab, report)]


async def _ask(lab: Lab, host: HostPolicy) -> list[HostReport]:
    engine = make_engine(lab, host)
    await engine.start()
    try:
        return await engine.capacity()
    finally:
        await engine.close()


def _rows(lab: Lab, report: HostReport) -> list[Json]:
    samples = {str(line.get("uuid")): line for line in report.samples}
    seen = [
        Gpu(s.uuid, s.host, s.index, s.name, s.mem_total_mib, UNWATCHED, NOTE, time.time(), None, None, None, samples.get(s.uuid))
        for s in report.slots
    ]
    return [machines.gpu_object(lab, gpu, None, time.time()) for gpu in seen]
