"""Simulated GPUs on a scaled clock: real run directories, real logs, real status files, and no process behind them.

For tests, benchmarks, pictures and `demo --simulate`. `[[host]] kind = "fake"` names the GPU types; `speed` is how many simulated
seconds pass in one. A run's course is a function of its directory (simrun.py), so the daemon may die and come back. Faults are files in
`lab/fake/HOST/`: `down` puts the host out of reach, another text in `boot_id` reboots it, `lost` lists UUIDs that fell off the bus.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from runner.engines import simrun, surface
from runner.engines.base import HostReport, Slot, Spec, State
from runner.errors import EngineError, HostError, PolicyError
from runner.onhost import rundirs

if TYPE_CHECKING:
    from runner.lab import Lab
    from runner.policy import HostPolicy

FULL_NAMES = {
    "H100": "NVIDIA H100 80GB HBM3",
    "H200": "NVIDIA H200",
    "A100": "NVIDIA A100-SXM4-80GB",
    "L40S": "NVIDIA L40S",
    "B200": "NVIDIA B200",
    "RTX 5090": "NVIDIA GeForce RTX 5090",
    "RTX 4090": "NVIDIA GeForce RTX 4090",
}
HANDOVER_S = 0.15  # simulated seconds between two runs on a GPU
MAX_GPUS = 64
IDLE = {"util_pct": 0, "mem_used_mib": 4, "sm_mhz": 345, "temp_c": 31}


@dataclass
class _Sim:
    """A simulated run in memory; `started` is the wall time of its start, None while it waits for its slot."""

    run_id: str
    folder: Path
    slot: Slot
    script: simrun.Script
    queued: float
    started: float | None = None
    warm_s: float = 0.0  # simulated seconds of imports a standby had done before its turn
    written: int = 0
    events_written: int = 0
    ended: float | None = None
    stop: dict[str, Any] | None = None  # what its stop file says
    status: dict[str, Any] | None = None


class FakeEngine:
    """Implements engines.base.Engine for one `[[host]]` of kind fake."""

    kind = "fake"

    def __init__(self, lab: Lab, host: HostPolicy) -> None:
        self.lab, self.host = lab, host
        self.speed = float(host.speed or 1.0)
        self.crash_share = float(host.crash_share or 0.0)
        self.surface: Any = _load_surface(host.surface)
        self.slots = _slots(host)
        self.folder = lab.path / "fake" / host.name
        self.sims: dict[str, _Sim] = {}

    async def start(self) -> None:
        """Give the simulated host a boot id, if it has none."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (self.folder / "boot_id").exists():
            (self.folder / "boot_id").write_text(str(uuid.uuid4()))

    async def close(self) -> None:
        """Nothing is open; simulated runs go on, as they are a function of the clock."""

    async def capacity(self) -> list[HostReport]:
        """One report; simulated telemetry follows the stage of the run on each GPU."""
        boot = self._boot_id()
        if self._down():
            return [HostReport(self.host.name, False, "simulated: the host does not answer", boot, [], [], None)]
        now = time.time()
        self._advance(now)
        lost = self._lost()
        on = {s.slot.uuid: s for s in self.sims.values() if s.started is not None and s.ended is None}
        alive = [s for s in self.slots if s.uuid not in lost]
        samples = [self._sample(s, on.get(s.uuid), now) for s in alive]
        free = shutil.disk_usage(self.lab.path).free >> 20
        return [HostReport(self.host.name, True, None, boot, alive, samples, free, self.info())]

    def info(self) -> dict[str, Any]:
        """The same facts a real host gives; nothing is ever executed with them."""
        return {
            "simulated": True,
            "speed": self.speed,
            "python": self.host.python or sys.executable,
            "data_dir": str(self.lab.data_dir),
            "cache_dir": str(self.lab.path / "cache"),
            "lock_dir": None,
            "environment": {},
        }

    async def submit(self, spec: Spec) -> None:
        """Start (or queue behind the present run, when a standby) one simulated run."""
        if self._down():
            raise HostError(f"host {self.host.name} does not answer (simulated)")
        if spec.run_id in self.sims or (spec.stage / "status.json").exists():
            return
        now = time.time()
        self._advance(now)
        busy = [s for s in self.sims.values() if s.slot.uuid == spec.slot.uuid and s.ended is None]
        sim = self._open(spec.run_id, spec.stage, now)
        sim.stop = _read_json(spec.stage / "stop")
        if busy and not spec.standby:
            self._refuse(sim, "gpu-locked", busy[0].run_id)
            return
        if busy:
            self._publish(sim, phase="waiting", queued_at=now)
        else:
            self._begin(sim, now)
        self.sims[spec.run_id] = sim

    async def poll(self, run_ids: list[str], hosts: dict[str, str]) -> dict[str, State]:
        """States at this moment of the simulated clock."""
        if self._down():
            return {r: State("unknown") for r in run_ids}
        for run_id in run_ids:
            if run_id not in self.sims:
                self._take_up(run_id)
        self._advance(time.time())
        boot = self._boot_id()
        states: dict[str, State] = {}
        for run_id in run_ids:
            sim = self.sims.get(run_id)
            status = sim.status if sim else _read_json(self.lab.run_dir(run_id) / "status.json")
            if status is None:
                states[run_id] = State("absent")
            elif status.get("boot_id") != boot and status["phase"] not in ("ended", "refused"):
                states[run_id] = State("lost", status)
            else:
                states[run_id] = State(status["phase"], status, 0.0, sim.written if sim else None, sim.events_written if sim else None)
        for run_id in [r for r, s in self.sims.items() if r not in run_ids and s.ended is not None]:
            del self.sims[run_id]
        return states

    async def read(self, run_id: str, host: str, name: str, offset: int, limit: int = 1 << 20) -> bytes:
        """Bytes of a file of the run directory."""
        if self._down():
            raise HostError(f"host {self.host.name} does not answer (simulated)")
        try:
            with open(self.lab.run_dir(run_id) / name, "rb") as f:
                f.seek(offset)
                return f.read(limit)
        except FileNotFoundError:
            return b""

    async def stop(self, run_id: str, host: str, reason: str, force: bool = False) -> None:
        """Leave a stop file, as for a real supervisor; it is obeyed at the next tick."""
        if self._down():
            raise HostError(f"host {self.host.name} does not answer (simulated)")
        path = self.lab.run_dir(run_id) / "stop"
        if path.parent.is_dir():
            path.write_text(json.dumps({"reason": reason, "force": force}))
        if run_id not in self.sims:
            self._take_up(run_id)
        if run_id in self.sims:
            self.sims[run_id].stop = {"reason": reason}
        self._advance(time.time())

    async def fetch(self, run_id: str, host: str, names: list[str], into: Path) -> list[str]:
        """The files are here already."""
        return [n for n in names if (self.lab.run_dir(run_id) / n).exists()]

    async def forget(self, run_id: str, host: str) -> None:
        """Drop the bulk of a run, as on this machine."""
        self.sims.pop(run_id, None)
        rundirs.forget_work(str(self.lab.run_dir(run_id)))

    # the simulated clock

    def _advance(self, now: float) -> None:
        """Bring every run to the present: output, ends, and standbys that take over a slot."""
        boot = self._boot_id()
        for sim in list(self.sims.values()):
            if sim.ended is None and sim.status and sim.status["boot_id"] == boot:
                self._step(sim, now)
            elif sim.ended is None:
                sim.ended = now  # it died with the boot before; poll says lost
        waiting = sorted((s for s in self.sims.values() if s.started is None and s.ended is None), key=lambda s: s.queued)
        for sim in waiting:
            others = [s for s in self.sims.values() if s.slot.uuid == sim.slot.uuid and s is not sim and s.started is not None]
            if any(s.ended is None for s in others):
                continue
            freed = max([s.ended or 0.0 for s in others] + [sim.queued])
            self._begin(sim, freed + HANDOVER_S / self.speed if others else freed)
            self._step(sim, now)

    def _step(self, sim: _Sim, now: float) -> None:
        if sim.stop is not None and sim.started is not None and sim.stop.get("reason") == "withdrawn":
            (sim.folder / "stop").unlink(missing_ok=True)  # too late: only a standby can be taken back
            sim.stop = None
        if sim.stop is not None:
            how: dict[str, Any] = {"reason": "stopped", "stop_reason": sim.stop.get("reason")}
            if sim.started is None:
                sim.ended = now
                self._publish(sim, phase="ended", ended_at=now, **how)
                return
            self._write(sim, now)
            self._end(sim, now, exit_signal=15, **how)
            return
        if sim.started is None:
            return
        self._write(sim, now)
        ends = sim.started + (sim.script.ends_s - sim.warm_s) / self.speed
        if now >= ends:
            self._end(sim, ends, reason="exit", exit_code=sim.script.exit_code)

    def _begin(self, sim: _Sim, at: float) -> None:
        sim.started = at
        sim.warm_s = self._warm_s(sim)
        self._publish(sim, phase="running", started_at=at)

    def _warm_s(self, sim: _Sim) -> float:
        """How much of its imports a run did while it waited; follows from its directory alone."""
        waited_s = ((sim.started or sim.queued) - sim.queued) * self.speed
        return min(waited_s, simrun.IMPORT_S)

    def _write(self, sim: _Sim, now: float) -> None:
        """Append what the run would have printed by now."""
        at_s = (now - (sim.started or now)) * self.speed + sim.warm_s
        sim.written = _grow(sim.folder / "out.log", sim.script.log, sim.written, at_s)
        sim.events_written = _grow(sim.folder / "work" / "events.jsonl", sim.script.events, sim.events_written, at_s)

    def _end(self, sim: _Sim, at: float, **fields: Any) -> None:
        sim.ended = at
        elapsed = (at - (sim.started or at)) * self.speed
        self._publish(
            sim,
            phase="ended",
            ended_at=at,
            elapsed_s=round(elapsed, 3),
            log_bytes=sim.written,
            log_dropped=0,
            orphans_killed=0,
            unkillable=[],
            **fields,
        )

    def _refuse(self, sim: _Sim, reason: str, holder: str) -> None:
        sim.ended = sim.queued
        self._publish(sim, phase="refused", reason=reason, holder={"run_id": holder})

    def _publish(self, sim: _Sim, **fields: Any) -> None:
        """Write status.json whole, as the supervisor does (without fsync: nothing here must outlive a power cut)."""
        status = dict(sim.status or {"v": 1, "run_id": sim.run_id, "seq": 0, "boot_id": self._boot_id(), "queued_at": sim.queued})
        status.update(fields)
        status["seq"] += 1
        sim.status = status
        tmp = sim.folder / "status.json.tmp"
        tmp.write_text(json.dumps(status))
        tmp.rename(sim.folder / "status.json")

    # from the run directory

    def _open(self, run_id: str, folder: Path, queued: float) -> _Sim:
        spec = _read_json(folder / "spec.json")
        if spec is None:
            raise EngineError(f"{folder}/spec.json is missing or unreadable")
        slot = next((s for s in self.slots if s.uuid in spec["gpus"]), None)
        if slot is None:
            raise EngineError(f"host {self.host.name} has no GPU {spec['gpus']}")
        text = (folder / "work" / self.lab.policy().trainer.source).read_text()
        budget_s = float(spec["env"]["OVERNIGHT_BUDGET_S"])
        script = simrun.write_script(run_id, text, slot.name, budget_s, self.crash_share, self.surface)
        return _Sim(run_id, folder, slot, script, queued)

    def _take_up(self, run_id: str) -> None:
        """Go on with a run that an earlier process of ours was simulating."""
        folder = self.lab.run_dir(run_id)
        status = _read_json(folder / "status.json")
        if status is None or status["phase"] in ("ended", "refused"):
            return
        sim = self._open(run_id, folder, status["queued_at"])
        sim.status, sim.started = status, status.get("started_at")
        sim.warm_s = self._warm_s(sim)
        sim.stop = _read_json(folder / "stop")
        sim.written = _size(folder / "out.log")
        sim.events_written = _size(folder / "work" / "events.jsonl")
        self.sims[run_id] = sim

    def _boot_id(self) -> str | None:
        with contextlib.suppress(OSError):
            return (self.folder / "boot_id").read_text().strip()
        return None

    def _down(self) -> bool:
        return (self.folder / "down").exists()

    def _lost(self) -> set[str]:
        with contextlib.suppress(OSError):
            return set((self.folder / "lost").read_text().split())
        return set()

    def _sample(self, slot: Slot, sim: _Sim | None, now: float) -> dict[str, Any]:
        """A sampler line (FORMAT.md section 4): what a card would show in the run's stage."""
        watts = surface.card(slot.name)[3]
        sample: dict[str, Any] = {
            "at": now,
            "uuid": slot.uuid,
            "index": slot.index,
            "name": slot.name,
            "mem_total_mib": slot.mem_total_mib,
            "power_limit_w": watts,
            "power_w": round(watts * 0.1, 1),
            "sm_max_mhz": 1980,
            "throttle": 0,
            "processes": [],
            "driver": "simulated",
            "source": "fake",
            **IDLE,
        }
        if sim is None or sim.started is None:
            return sample
        at_s = (now - sim.started) * self.speed + sim.warm_s
        sway = ((at_s * 7.3 + (slot.index or 0) * 3.1) % 5) - 2.5
        training = simrun.START_S <= at_s <= sim.script.ends_s - simrun.EVAL_S
        sample.update(
            util_pct=round(97 + sway) if training else (12 if at_s < simrun.START_S else 88),
            mem_used_mib=sim.script.mem_mib + 900,
            power_w=round(watts * ((0.86 if training else 0.35) + sway / 100), 1),
            sm_mhz=1755 if training else 1980,
            temp_c=round(63 + sway) if training else 44,
            processes=[{"pid": None, "used_mib": sim.script.mem_mib, "name": "train.py", "user": None, "run": sim.run_id}],
        )
        return sample


def _grow(path: Path, tape: simrun.Tape, written: int, at_s: float) -> int:
    """Append the part of a tape that is due and not written yet; how much is written then."""
    due = tape.due(at_s)
    if due > written:
        with open(path, "ab") as f:
            f.write(tape.bytes[written:due])
    return max(due, written)


def _slots(host: HostPolicy) -> list[Slot]:
    types = host.types or {"H100": 1}
    if not 1 <= sum(types.values()) <= MAX_GPUS:
        raise PolicyError(f"hosts.toml: host {host.name!r}: types gives {sum(types.values())} GPUs; a simulated host has 1 to {MAX_GPUS}")
    names = [FULL_NAMES.get(kind, kind) for kind, count in types.items() for _ in range(count)]
    return [
        Slot(host.name, f"FAKE-{host.name}-{i:02d}", name, i, int(surface.card(name)[1] * 1024), dict(host.labels or {}), 4)
        for i, name in enumerate(names)
    ]


def _load_surface(spec: str | None) -> ModuleType:
    """The built-in surface, or a Python file with `score` and `DEFAULTS`."""
    if not spec or spec == "builtin":
        return surface
    path = Path(spec)
    loaded = importlib.util.spec_from_file_location("overnight_surface", path)
    if loaded is None or loaded.loader is None or not path.is_file():
        raise PolicyError(
            f"hosts.toml: surface = {spec!r}: there is no such Python file",
            next_step='Give "builtin" or a file with score() and DEFAULTS; a path counts from beside hosts.toml.',
        )
    module = importlib.util.module_from_spec(loaded)
    sys.modules[loaded.name] = module
    loaded.loader.exec_module(module)
    return module


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
