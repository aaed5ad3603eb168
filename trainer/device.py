"""The device of a run: which one, what it is called, what preflight found best on it, and how to read a loss without making it wait.

Fixed: an experiment does not edit it. One GPU per run (the first visible one), else the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from pathlib import Path
from typing import Any

import torch

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # mallopt(3)
CONTEXT_GIB = 1.0  # what our own CUDA context and libraries take
DRIVER_FILE = Path("/proc/driver/nvidia/version")


class NoBfloat16(Exception):
    """Raised when the GPU cannot compute in bfloat16; its text says which GPUs can."""


def choose_device() -> torch.device:
    """The first visible GPU, else the CPU. Raised: NoBfloat16."""
    if not torch.cuda.is_available():
        keep_freed_memory()
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) < (8, 0) and torch.version.hip is None:
        raise NoBfloat16(f"{torch.cuda.get_device_name(device)} has no bfloat16 arithmetic; Ampere (RTX 30, A100) and every later GPU has")
    return device


def keep_freed_memory() -> None:
    """Tell glibc to keep large blocks for reuse: giving 32 MB of logits back and faulting them in anew took a third of a CPU run's time."""
    with contextlib.suppress(OSError, AttributeError):  # another C library: slower, not wrong
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def facts(device: torch.device) -> dict[str, Any]:
    """Name, UUID and software of the device, as the `start` event reports them; None where there is no GPU."""
    cuda = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if cuda else None
    return {
        "gpu_name": properties.name if properties else None,
        "gpu_uuid": f"GPU-{properties.uuid}" if properties else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "driver": driver_version() if cuda else None,
    }


def driver_version() -> str | None:
    """The NVIDIA driver's version from /proc; None where that is not to be read."""
    try:
        words = DRIVER_FILE.read_text().split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)


def preflight_file(folder: Path, device: torch.device) -> Path:
    """Where preflight keeps what it measured on this GPU model under this driver and torch."""
    known = facts(device)
    parts = (str(known["gpu_name"] or "cpu"), str(known["driver"]), torch.__version__)
    return folder / ("preflight-" + "-".join("".join(c if c.isalnum() or c in ".+" else "_" for c in part) for part in parts) + ".json")


def preflight_choices(folder: Path, device: torch.device) -> dict[str, Any]:
    """What preflight found best here: any of attention, compile, device_tokens; empty when it never ran or its file cannot be read."""
    if device.type != "cuda":
        return {}
    try:
        choices = json.loads(preflight_file(folder, device).read_text(encoding="utf-8"))["choices"]
        named = {name: choices[name] for name in ("ATTENTION", "COMPILE") if isinstance(choices.get(name), str)}
        tokens = choices.get("DEVICE_TOKENS")
        return {**named, "DEVICE_TOKENS": tokens} if isinstance(tokens, int) and tokens > 0 else named
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # not there, or not ours: the presets hold


def first_line(error: BaseException) -> str:
    """The first line of an error that says anything, at most 200 characters of it."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def peak_memory_mib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None


def held_by_others_gib(device: torch.device) -> float:
    """Memory of the GPU in use before this process takes any; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return max(0.0, (total - free) / 2**30 - CONTEXT_GIB)


def empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class LossReader:
    """Brings losses to the host in order. On a GPU it reads one step late, with the next step already queued: waiting for each step
    left an H200 idle for about 2 ms of 77."""

    def __init__(self, device: torch.device) -> None:
        self.lag = 1 if device.type == "cuda" else 0
        self.pushed = self.popped = 0
        slots = range(self.lag + 1)
        self._values = [torch.zeros((), dtype=torch.float32, pin_memory=self.lag > 0) for _ in slots]
        self._events = [torch.cuda.Event() for _ in slots] if self.lag else []

    def push(self, loss: torch.Tensor) -> None:
        slot = self.pushed % len(self._values)
        self._values[slot].copy_(loss.detach(), non_blocking=self.lag > 0)
        if self.lag:
            self._events[slot].record()
        self.pushed += 1

    @property
    def ready(self) -> bool:
        """Whether the oldest loss should be read now; afterwards the device still has `lag` steps queued."""
        return self.pushed - self.popped > self.lag

    def pop(self) -> float:
        """The oldest loss not read yet; waits until the device has computed it."""
        slot = self.popped % len(self._values)
        if self.lag:
            self._events[slot].synchronize()
        self.popped += 1
        return float(self._values[slot])
