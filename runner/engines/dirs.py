"""What the engines of real machines share: slots and baselines from telemetry, the environment and spec of a run, states from answers.

Pure functions and one small record of what the sampler said; the run directories themselves are the business of onhost.rundirs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from runner.engines.base import Slot, State
from runner.onhost import memory
from runner.policy import HostPolicy

CPU_LOCK = "CPU"
STALE_S = 15.0


def run_environment(host: HostPolicy, info: Mapping[str, Any], slot: Slot, run_id: str, budget_s: float) -> dict[str, str]:
    """The whole environment of a run; `info` is its host's report (the host's own PATH and HOME, its data and cache folders)."""
    env = dict(info["environment"])
    env.update(
        OVERNIGHT_RUN_ID=run_id,
        OVERNIGHT_DATA=str(info["data_dir"]),
        OVERNIGHT_BUDGET_S=f"{budget_s:g}",
        CUDA_VISIBLE_DEVICES="" if is_cpu(slot.uuid) else slot.uuid,
        PYTHONUNBUFFERED="1",
        TORCHINDUCTOR_CACHE_DIR=f"{info['cache_dir']}/inductor",
        TRITON_CACHE_DIR=f"{info['cache_dir']}/triton",
    )
    env.update(host.env)
    return env


def is_cpu(uuid: str) -> bool:
    """Whether a slot is the CPU of a host without any GPU."""
    return uuid.startswith("CPU:")


def build_spec(
    host: HostPolicy,
    info: Mapping[str, Any],
    slot: Slot,
    *,
    run_id: str,
    lab_id: str,
    command: list[str],
    budget_s: float,
    time_limit_s: float,
    grace_s: float,
    max_log_mib: int,
    min_free_mib: int,
    wait_lock_s: float = 0.0,
    warm: list[str] | None = None,
) -> dict[str, Any]:
    """spec.json of a run on that slot (FORMAT.md section 3); `{python}` in the command becomes the host's interpreter."""
    cpu = is_cpu(slot.uuid)
    return {
        "v": 1,
        "run_id": run_id,
        "lab_id": lab_id,
        "argv": [word.replace("{python}", str(info["python"])) for word in command],
        "cwd": "work",
        "env": run_environment(host, info, slot, run_id, budget_s),
        "gpus": [CPU_LOCK if cpu else slot.uuid],
        "lock_dir": info["lock_dir"],
        "wait_lock_s": wait_lock_s,
        "warm": [] if cpu else list(warm or []),
        "time_limit_s": time_limit_s,
        "grace_s": grace_s,
        "max_log_bytes": max_log_mib << 20,
        "min_free_mib": min_free_mib,
        "mem_baseline_mib": {} if cpu else {slot.uuid: slot.baseline_mib},
    }


def spec_bytes(spec: Mapping[str, Any]) -> bytes:
    """spec.json as written."""
    return json.dumps(spec, indent=1, sort_keys=True, ensure_ascii=False).encode()


def state_from(answer: Mapping[str, Any]) -> State:
    """A State of what onhost.rundirs.state answered."""
    return State(
        phase=str(answer["phase"]),
        status=answer.get("status"),
        heartbeat_age_s=answer.get("heartbeat_age_s"),
        log_bytes=answer.get("log_bytes"),
        events_bytes=answer.get("events_bytes"),
        gone=bool(answer.get("gone")),
        unreadable=answer.get("unreadable") or {},
    )


class Telemetry:
    """The newest sampler line of each GPU of one host, and what follows from them: slots, baselines, the reason why nothing can be read."""

    def __init__(self, host: HostPolicy) -> None:
        self.host = host
        self.lines: dict[str, dict[str, Any]] = {}
        self.line_at: dict[str, float] = {}  # monotonic: when a card was last spoken of
        self.baseline_mib: dict[str, int] = {}
        self.cpu_lock: tuple[dict[str, Any] | None, float] | None = None
        self.fatal: str | None = None
        self.no_gpus = False
        self.heard_at = 0.0

    @property
    def heard(self) -> bool:
        """Whether the sampler has said anything yet."""
        return self.heard_at > 0

    def take(self, text: bytes) -> None:
        """One line of the sampler; a line that is none is passed over."""
        try:
            line = json.loads(text)
        except ValueError:
            return
        if not isinstance(line, dict):
            return
        now = time.monotonic()
        if now - self.heard_at > STALE_S:
            self.resumed()
        self.heard_at = now
        if "cpu_lock" in line:
            self.cpu_lock = line.pop("cpu_lock"), time.time()
        if "fatal" in line:
            self.no_gpus = bool(line.get("absent")) and not self.lines
            self.fatal = None if self.no_gpus else str(line["fatal"])
            for uuid in self.lines:
                self.lines[uuid] = self.silent(uuid, str(line["fatal"]), line.get("at"))
                self.line_at[uuid] = self.heard_at
        elif isinstance(line.get("uuid"), str):
            self.fatal, self.no_gpus = None, False
            self.lines[line["uuid"]], self.line_at[line["uuid"]] = line, self.heard_at
            self.learn_baseline(line)

    def learn_baseline(self, line: Mapping[str, Any]) -> None:
        """What the card holds with nobody on it: the least seen with no process listed, and little enough to be the driver's own."""
        used, total = line.get("mem_used_mib"), line.get("mem_total_mib")
        if isinstance(used, int) and line.get("processes") == [] and used <= max(memory.IDLE_MIB, (total or 0) // 20):
            self.baseline_mib[line["uuid"]] = min(used, self.baseline_mib.get(line["uuid"], used))

    def silent(self, uuid: str, why: str, at: Any) -> dict[str, Any]:
        """The line of a card that cannot be read: its identity, and why."""
        known = self.lines[uuid]
        kept = {key: known.get(key) for key in ("index", "name", "mem_total_mib", "driver", "source", "mig")}
        return {**dict.fromkeys(known), **kept, "at": at, "uuid": uuid, "error": why}

    def resumed(self) -> None:
        """The sampler could not be heard for a while through no fault of the cards: their silence counts from now."""
        self.line_at = dict.fromkeys(self.line_at, time.monotonic())

    def locks(self) -> dict[str, tuple[dict[str, Any] | None, float]]:
        """What the lock of each slot said, and when (HostReport.locks)."""
        told = {uuid: line for uuid, line in self.lines.items() if "lock" in line and not line.get("error")}
        found = {uuid: (line["lock"], float(line.get("at") or 0)) for uuid, line in told.items()}
        return {**found, f"CPU:{self.host.name}": self.cpu_lock} if self.cpu_lock is not None else found

    def samples(self) -> list[dict[str, Any]]:
        """The newest lines, in the order of the cards. A card the sampler stopped speaking of while it speaks of others (it fell off the
        bus) says so; when nothing at all is heard, that is the link's fault or the sampler's, and no card is lost for it.
        """
        now = time.monotonic()
        for uuid, at in self.line_at.items():
            if self.heard_at - at > STALE_S and not self.lines[uuid].get("error"):
                self.lines[uuid] = self.silent(uuid, f"not seen for {now - at:.0f} s", self.lines[uuid].get("at"))
        return sorted((line for line in self.lines.values() if self.wanted(line)), key=lambda line: (line.get("index") or 0, line["uuid"]))

    def wanted(self, line: Mapping[str, Any]) -> bool:
        """Whether hosts.toml gives us this GPU (`gpus` = "all", indices, or UUIDs)."""
        chosen = self.host.gpus
        if isinstance(chosen, str):
            return chosen == "all" or line["uuid"] == chosen
        return line.get("index") in chosen or line["uuid"] in chosen or line.get("mig") in (*chosen,)

    def slots(self, cpu_cores: int) -> list[Slot]:
        """The slots of the host: its GPUs, or one CPU slot where there is none (two CPU runs at once would make time budgets
        meaningless).
        """
        labels = dict(self.host.labels)
        if self.no_gpus or self.host.gpus == []:
            name = f"CPU {cpu_cores} core{'s' if cpu_cores != 1 else ''}"
            return [Slot(self.host.name, f"CPU:{self.host.name}", name, None, None, labels)]
        return [
            Slot(
                host=self.host.name,
                uuid=line["uuid"],
                name=line.get("name") or "unknown GPU",
                index=line.get("index"),
                mem_total_mib=line.get("mem_total_mib"),
                labels=labels,
                baseline_mib=self.baseline_mib.get(line["uuid"]),
            )
            for line in self.samples()
        ]

    def missing(self) -> list[str]:
        """GPUs that hosts.toml asks for and the host does not have."""
        if isinstance(self.host.gpus, str) or not self.lines:
            return []
        known = {line["uuid"] for line in self.lines.values()} | {line.get("index") for line in self.lines.values()}
        return [str(g) for g in self.host.gpus if g not in known]

    def trouble(self) -> str | None:
        """Why GPUs cannot be read right now, in a sentence."""
        if self.fatal:
            return f"The GPUs cannot be read: {self.fatal}."
        if self.missing():
            has = ", ".join(f"{line.get('index')} ({line['uuid']})" for line in self.lines.values())
            return f"hosts.toml gives {self.host.name} the GPU {', '.join(self.missing())}, which it does not have. It has {has}."
        return None


def cpu_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
