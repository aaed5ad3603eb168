"""GPU memory before and after a run: is it back to what an idle card holds? A slot is free only then.

Asked of NVML (or nvidia-smi) in a forked child with a time limit, once at a run's start and once at its release.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any, Dict, Optional

from .nvml import NoGpus, Unreadable
from .sampler import open_reader

MEMORY_WAIT_S = 5.0  # drivers give memory back within a second as a rule
SLACK_MIB = 256
IDLE_MIB = 1024  # what an idle card may hold when its baseline is unknown (driver, display)


def limit_mib(baseline_mib: Optional[float]) -> float:
    """How much memory a GPU may hold and still count as free."""
    return (IDLE_MIB if baseline_mib is None else baseline_mib) + SLACK_MIB


def settle(limits: Dict[str, Optional[float]], within_s: float) -> Dict[str, Dict[str, Any]]:
    """Memory of the GPUs, read until each is at or under its limit (MiB; None: just read) or time is up: {uuid: {used_mib, holders,
    clean}}.
    """
    reader = open_reader()
    until = time.monotonic() + within_s
    while True:
        seen = {line["uuid"]: line for line in reader.sample()}
        answer: Dict[str, Dict[str, Any]] = {}
        for uuid, limit_mib in limits.items():
            line = seen.get(uuid, {})
            used = line.get("mem_used_mib")
            clean = None if used is None or limit_mib is None else used <= limit_mib
            answer[uuid] = {"used_mib": used, "holders": line.get("processes") or [], "clean": clean, "error": line.get("error")}
        if all(state["clean"] is not False for state in answer.values()) or time.monotonic() >= until:
            return answer
        time.sleep(0.05)


def ask(limits: Dict[str, Optional[float]], within_s: float = MEMORY_WAIT_S) -> Optional[Dict[str, Dict[str, Any]]]:
    """`settle` in a child with a time limit, since a driver call may never return; None when there is no answer."""
    out, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(theirs, json.dumps(settle(limits, within_s)).encode())
        except (NoGpus, Unreadable):
            pass  # no answer is the answer
        finally:
            os._exit(0)
    os.close(theirs)
    text, deadline = b"", time.monotonic() + within_s + 5
    while select.select([out], [], [], max(0.0, deadline - time.monotonic()))[0]:
        data = os.read(out, 65536)
        if not data:
            break
        text += data
    os.close(out)
    os.kill(pid, signal.SIGKILL)
    for _ in range(50):
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        time.sleep(0.01)
    try:
        return dict(json.loads(text.decode()))
    except ValueError:
        return None
