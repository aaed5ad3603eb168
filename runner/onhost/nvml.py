"""GPUs read through NVML: every field optional, one lost card never hides the others, absurd numbers are None.

NVML calls can block for ever (a hung driver), so this is only used in a child process with a time limit: see sampler.py.
"""

from __future__ import annotations

import os
import time
import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple

from .procs import describe

MAX_PROCESSES = 64
SLOW_EVERY_S = 10.0  # energy alone costs 2.5 ms; link width, ECC and limits move slowly
FIELDS = (
    "at", "uuid", "index", "name", "util_pct", "mem_util_pct", "mem_used_mib", "mem_total_mib", "power_w", "power_limit_w",
    "power_default_w", "temp_c", "sm_mhz", "sm_max_mhz", "mem_mhz", "throttle", "pstate", "ecc_uncorrected", "pcie_gen",
    "pcie_gen_max", "pcie_width", "pcie_width_max", "energy_j", "mig", "driver", "processes", "lock", "error", "source",
)  # fmt: skip


class NoGpus(Exception):
    """Raised when this machine has no NVIDIA GPU at all (as against one that cannot be read)."""


class Unreadable(Exception):
    """Raised when GPUs should be here but nothing can read them; the text says why."""


def between(value: Any, low: float, high: float) -> Any:
    """The value when it is a number a card can have, else None (drivers wrap, and say 2**32 - 1 for "not available")."""
    return value if isinstance(value, (int, float)) and low <= value <= high else None


def load_pynvml() -> Any:
    """The NVML binding (on far hosts a copy lies beside this package); None when there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old `pynvml` package warns at import; its module serves as well
            import pynvml
    except ImportError:
        return None
    return pynvml


def driver_present() -> bool:
    """Whether the kernel knows an NVIDIA driver."""
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl")


class Nvml:
    """GPUs read through NVML. One instance lives in the sampling child; each call may fail for itself."""

    source = "nvml"

    def __init__(self) -> None:
        self.lib = load_pynvml()
        if self.lib is None:
            raise Unreadable("the nvidia-ml-py module is not installed")
        try:
            self.lib.nvmlInit()
        except self.lib.NVMLError as problem:
            raise Unreadable("NVML: %s" % problem) from problem
        self.driver = self.ask(self.lib.nvmlSystemGetDriverVersion)
        self.fixed: Dict[str, Dict[str, Any]] = {}
        self.slow: Dict[str, Tuple[float, Dict[str, Any]]] = {}
        self.uuid_of_index: Dict[int, str] = {}

    def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """A call's answer, None when this card, driver or container does not give it; GpuIsLost passes through."""
        try:
            answer = call(*args)
        except self.lib.NVMLError as problem:
            if problem.value == self.lib.NVML_ERROR_GPU_IS_LOST:
                raise
            return None
        return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer

    def sample(self) -> List[Dict[str, Any]]:
        """One line per GPU; a MIG card gives one line per instance."""
        try:
            count = self.lib.nvmlDeviceGetCount()
        except self.lib.NVMLError as problem:
            raise Unreadable("NVML: %s" % problem) from problem
        if not count:
            raise NoGpus("NVML finds no GPU")
        lines: List[Dict[str, Any]] = []
        for index in range(count):
            try:
                handle = self.lib.nvmlDeviceGetHandleByIndex(index)
                lines += self.device(handle, index)
            except self.lib.NVMLError as problem:
                lines.append(self.line(self.uuid_of_index.get(index, "index-%d" % index), index=index, error=str(problem)))
        return lines

    def line(self, uuid: str, **known: Any) -> Dict[str, Any]:
        """A whole sampler line: what is not known is None."""
        whole: Dict[str, Any] = dict.fromkeys(FIELDS)
        whole.update(at=round(time.time(), 3), uuid=uuid, driver=self.driver, source=self.source)
        whole.update(known)
        return whole

    def device(self, handle: Any, index: int) -> List[Dict[str, Any]]:
        """The line of one GPU, or the lines of its MIG instances."""
        lib = self.lib
        uuid = lib.nvmlDeviceGetUUID(handle)
        uuid = uuid.decode() if isinstance(uuid, bytes) else uuid
        self.uuid_of_index[index] = uuid
        line = self.line(uuid, index=index)
        line.update(self.fixed_facts(handle, uuid))
        line.update(self.slow_facts(handle, uuid))
        util = self.ask(lib.nvmlDeviceGetUtilizationRates, handle)
        line.update(
            util_pct=between(getattr(util, "gpu", None), 0, 100),
            mem_util_pct=between(getattr(util, "memory", None), 0, 100),
            temp_c=between(self.ask(lib.nvmlDeviceGetTemperature, handle, lib.NVML_TEMPERATURE_GPU), -50, 200),
            sm_mhz=between(self.ask(lib.nvmlDeviceGetClockInfo, handle, lib.NVML_CLOCK_SM), 0, 10_000),
            mem_mhz=between(self.ask(lib.nvmlDeviceGetClockInfo, handle, lib.NVML_CLOCK_MEM), 0, 50_000),
            throttle=between(self.throttle(handle), 0, 1 << 32),
            pstate=between(self.ask(lib.nvmlDeviceGetPerformanceState, handle), 0, 15),
            power_w=watts(self.ask(lib.nvmlDeviceGetPowerUsage, handle)),
            # an idle link lowers its generation, so an old figure beside a new load would look like a fault
            pcie_gen=between(self.ask(lib.nvmlDeviceGetCurrPcieLinkGeneration, handle), 1, 20),
            pcie_width=between(self.ask(lib.nvmlDeviceGetCurrPcieLinkWidth, handle), 1, 64),
        )
        line.update(self.memory(handle))
        line["processes"] = self.processes(handle)
        mig = self.ask(lib.nvmlDeviceGetMigMode, handle)
        if mig and mig[0] == 1:
            return self.mig_lines(handle, line)
        return [line]

    def fixed_facts(self, handle: Any, uuid: str) -> Dict[str, Any]:
        """What a card never changes, asked once."""
        if uuid not in self.fixed:
            lib = self.lib
            self.fixed[uuid] = {
                "name": self.ask(lib.nvmlDeviceGetName, handle),
                "sm_max_mhz": between(self.ask(lib.nvmlDeviceGetMaxClockInfo, handle, lib.NVML_CLOCK_SM), 1, 10_000),
                "power_default_w": watts(self.ask(lib.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
                "pcie_gen_max": between(self.ask(lib.nvmlDeviceGetMaxPcieLinkGeneration, handle), 1, 20),
                "pcie_width_max": between(self.ask(lib.nvmlDeviceGetMaxPcieLinkWidth, handle), 1, 64),
            }
        return self.fixed[uuid]

    def slow_facts(self, handle: Any, uuid: str) -> Dict[str, Any]:
        """What moves slowly or costs milliseconds, asked every ten seconds."""
        asked_at, facts = self.slow.get(uuid, (-SLOW_EVERY_S, {}))
        if time.monotonic() - asked_at >= SLOW_EVERY_S or not facts:
            lib = self.lib
            energy_mj = between(self.ask(lib.nvmlDeviceGetTotalEnergyConsumption, handle), 0, 1e18)
            facts = {
                "power_limit_w": watts(self.ask(lib.nvmlDeviceGetEnforcedPowerLimit, handle)),
                "ecc_uncorrected": between(
                    self.ask(lib.nvmlDeviceGetTotalEccErrors, handle, lib.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, lib.NVML_VOLATILE_ECC),
                    0,
                    1 << 62,
                ),
                "energy_j": None if energy_mj is None else round(energy_mj / 1000, 1),
            }
            self.slow[uuid] = (time.monotonic(), facts)
        return facts

    def throttle(self, handle: Any) -> Any:
        """The bit mask of reasons for a lowered clock, under its new name or its old one."""
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            call = getattr(self.lib, name, None)
            mask = self.ask(call, handle) if call else None
            if mask is not None:
                return mask
        return None

    def memory(self, handle: Any) -> Dict[str, Any]:
        """Used and total memory as nvidia-smi shows them; integrated GPUs (GB10) have none of their own to tell.

        The second version of the call leaves out what the driver reserves (615 MiB on an idle H200); older drivers know only the first.
        """
        second = getattr(self.lib, "nvmlMemory_v2", None)
        info = self.ask(self.lib.nvmlDeviceGetMemoryInfo, handle, second) if second else None
        info = info or self.ask(self.lib.nvmlDeviceGetMemoryInfo, handle)
        total = between(getattr(info, "total", None), 1, 1 << 50)
        used = between(getattr(info, "used", None), 0, total) if total else None
        return {"mem_total_mib": None if total is None else total >> 20, "mem_used_mib": None if used is None else used >> 20}

    def processes(self, handle: Any) -> Optional[List[Dict[str, Any]]]:
        """Compute processes on the card; None when the driver does not tell."""
        found = None
        for version in ("_v3", "_v2"):  # drivers before 510 know only the older call
            call = getattr(self.lib, "nvmlDeviceGetComputeRunningProcesses" + version, None)
            found = self.ask(call, handle) if call and found is None else found
        if found is None:
            return None
        listed = []
        for process in found[:MAX_PROCESSES]:
            used = between(process.usedGpuMemory, 0, 1 << 50)
            listed.append(dict(describe(process.pid), used_mib=None if used is None else used >> 20))
        return listed

    def mig_lines(self, handle: Any, parent: Dict[str, Any]) -> List[Dict[str, Any]]:
        """One line per MIG instance: its own memory and processes, the card's power and temperature, and no utilisation (NVML gives
        none).
        """
        lib, lines = self.lib, []
        for i in range(self.ask(lib.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            part = self.ask(lib.nvmlDeviceGetMigDeviceHandleByIndex, handle, i)
            uuid = part and self.ask(lib.nvmlDeviceGetUUID, part)
            if not uuid:
                continue  # an empty place
            line = dict(parent, uuid=uuid, mig=parent["uuid"], util_pct=None, mem_util_pct=None)
            line["name"] = self.ask(lib.nvmlDeviceGetName, part) or "%s MIG" % parent["name"]
            line.update(self.memory(part))
            line["processes"] = self.processes(part)
            lines.append(line)
        return lines or [dict(parent, mig=parent["uuid"], error="MIG is on and has no instances")]


def watts(milliwatts: Any) -> Optional[float]:
    """Watts of a driver's milliwatts; None for the impossible."""
    known = between(milliwatts, 0, 5_000_000)
    return None if known is None else round(known / 1000, 1)
