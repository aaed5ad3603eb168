"""The one interface of everything that can place and start a run.

An engine takes a `Spec`, and is asked about runs by run id alone. It keeps nothing in memory that `poll` could not rebuild from the run
directories,
so the daemon may die at any moment. A state may be `unknown` (the host is out of reach); `unknown` is never turned into failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Slot:
    """The right to run one run on one device: a GPU, or the one CPU slot of a host without any (`uuid` "CPU:HOST")."""

    host: str
    uuid: str
    name: str
    index: int | None
    mem_total_mib: int | None
    labels: dict[str, str] = field(default_factory=dict)
    baseline_mib: int | None = None


@dataclass(frozen=True, slots=True)
class HostReport:
    """What an engine knows of one host right now; `error` says in a sentence why it is down."""

    host: str
    up: bool
    error: str | None
    boot_id: str | None
    slots: list[Slot]
    samples: list[dict[str, Any]]  # newest sampler line of each GPU (FORMAT.md section 4)
    disk_free_mib: int | None
    info: dict[str, Any] = field(default_factory=dict)
    # what the lock of each slot said and when we heard it: the holder's note ({} when it left none), None when the lock is free
    locks: dict[str, tuple[dict[str, Any] | None, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spec:
    """All an engine needs to start one run; `stage` is a finished local run directory (spec.json and work/) to place on the host."""

    run_id: str
    slot: Slot
    stage: Path
    standby: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a run: `phase` is unknown, absent, waiting, starting, running, stopping, ended, refused or lost.

    `status` is the supervisor's status.json as it is; `lost` means its lock is free although it never said ended (supervisor killed, or
    host rebooted).
    """

    phase: str
    status: dict[str, Any] | None = None
    heartbeat_age_s: float | None = None
    log_bytes: int | None = None
    events_bytes: int | None = None
    gone: bool = False  # absent, and so is the run directory itself
    unreadable: dict[str, str] = field(default_factory=dict)  # file → why, for files that are there and give no bytes


class Engine(Protocol):
    """Places and starts runs on the hosts of one kind. Every call has a deadline of its own and raises HostError or EngineError."""

    kind: str

    async def start(self) -> None:
        """Open what must be open (sampler, connection); returns at once, hosts come up later."""

    async def capacity(self) -> list[HostReport]:
        """The newest report of each host of this engine; never waits for a host that does not answer."""
        ...

    async def submit(self, spec: Spec) -> None:
        """Start a run, or do nothing when this run id was started before."""

    async def poll(self, run_ids: list[str], hosts: dict[str, str]) -> dict[str, State]:
        """States of the given runs; `hosts` maps run id to host name."""
        ...

    async def read(self, run_id: str, host: str, name: str, offset: int, limit: int = 1 << 20) -> bytes:
        """Bytes of a file of the run directory from an offset; empty at the end or when the file is absent."""
        ...

    async def stop(self, run_id: str, host: str, reason: str, force: bool = False) -> None:
        """Ask the supervisor to end the run (or withdraw a standby); `force` skips the grace."""

    async def fetch(self, run_id: str, host: str, names: list[str], into: Path) -> list[str]:
        """Copy files of the run directory into a local folder; the names that existed."""
        ...

    async def forget(self, run_id: str, host: str) -> None:
        """Remove the run directory on the host; only called when everything wanted was mirrored."""

    async def close(self) -> None:
        """Close connections and the sampler; runs go on."""
