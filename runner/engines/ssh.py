"""A machine reached over ssh: the same supervisor, sampler and run directories as here, asked over one connection.

One round trip per poll answers for all runs of the host, and brings what is new of their logs and events along; `read` then answers
from what came. A host out of contact makes states `unknown`, never failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.engines import dirs, staging
from runner.engines.base import HostReport, Slot, Spec, State
from runner.engines.sshlink import SshLink
from runner.errors import EngineError, HostError
from runner.policy import HostPolicy, TrainerPolicy

if TYPE_CHECKING:
    from runner.lab import Lab

POLL_PIECE = 1 << 18  # bytes of new log a poll brings for one file; the rest is read when asked for
CALL_PIECE = 1 << 20
HELD_MOST = 1 << 20
BLOB_PIECE = 4 << 20
SKEW_TOLERATED_S = 1.0
FIRST_TRY_S = 5.0
FOLLOWED = {"out.log": 0, "work/events.jsonl": 1}


class Ahead:
    """Bytes of one file that came with polls, from `start` on."""

    def __init__(self) -> None:
        self.start = 0
        self.data = b""

    @property
    def end(self) -> int:
        """The offset behind the last byte held."""
        return self.start + len(self.data)

    def take(self, offset: int, limit: int) -> bytes:
        """Bytes from an offset, forgetting what lies before it; empty when they are not held."""
        if not self.start <= offset < self.end:
            if offset != self.end:
                self.start, self.data = offset, b""
            return b""
        self.data = self.data[offset - self.start :]
        self.start = offset
        return self.data[:limit]

    def set(self, offset: int, data: bytes) -> None:
        """Hold just these bytes."""
        self.start, self.data = offset, data


class SshEngine:
    """Runs on one host over ssh."""

    kind = "ssh"

    def __init__(self, lab: Lab, host: HostPolicy, *, config: list[Path] | None = None) -> None:
        self.host, self.lab = host, lab
        self.lab_id = str(lab.store.meta("lab_id"))
        self.telemetry = dirs.Telemetry(host)
        if config is None and os.environ.get("OVERNIGHT_SSH_CONFIG"):
            config = [Path(os.environ["OVERNIGHT_SSH_CONFIG"])]
        self.link = SshLink(host, self.lab_id, self._sample, self.telemetry.resumed, config)
        self.hashes = staging.Hashes()
        self.ahead: dict[str, tuple[Ahead, Ahead]] = {}
        self.sizes: dict[str, tuple[int | None, int | None]] = {}
        self.disk_free_mib: int | None = None
        self.venv_python: str | None = None
        self.preflights: list[dict[str, Any]] = []
        self.asked_at = 0.0

    async def start(self) -> None:
        """Begin to connect; `capacity` tells when the host is there."""
        self.link.start()

    async def close(self) -> None:
        """Close the connection; runs go on."""
        await self.link.close()

    def _sample(self, line: dict[str, Any]) -> None:
        """A sampler line from the host, stamped with our clock (theirs may be off)."""
        self.telemetry.take(json.dumps({**line, "at": round(time.time(), 3)}).encode())

    # -- the host -------------------------------------------------------------------------------------------------------------------------

    async def capacity(self) -> list[HostReport]:
        """The host as last heard of."""
        link = self.link
        if link.up and time.monotonic() - self.asked_at > 10:
            with contextlib.suppress(HostError):
                await self._ask_states({}, limit_s=3.0)
        # after the asking, in which the link may be lost: a host that is down always says why
        error = self.telemetry.trouble() if link.up else str(link.error or "not connected")
        if link.up and not self.telemetry.heard and self.host.gpus != []:
            error = "Its GPU sampler has not answered yet."
        return [
            HostReport(
                host=self.host.name,
                up=link.up,
                error=error,
                boot_id=link.hello.get("boot_id"),
                slots=self.slots(),
                samples=self.telemetry.samples(),
                disk_free_mib=self.disk_free_mib,
                info=self.info(),
                locks=self.telemetry.locks(),
            )
        ]

    def slots(self) -> list[Slot]:
        """The host's slots as far as its sampler has spoken."""
        heard = self.telemetry.heard or (self.host.gpus == [] and bool(self.link.hello))
        return self.telemetry.slots(int(self.link.hello.get("cpu_cores") or 1)) if heard else []

    def info(self) -> dict[str, Any]:
        """What `dirs.build_spec` and people need to know of the host."""
        hello = self.link.hello
        if not hello:
            return {}
        workdir = str(hello["workdir"])
        return {
            **{
                key: hello.get(key)
                for key in ("hostname", "user", "home", "kernel", "cpu_cores", "python_version", "environment", "workdir")
            },
            "python": self.run_python(),
            "runs_dir": f"{workdir}/labs/{self.lab_id}/runs",
            "data_dir": f"{workdir}/data",
            "cache_dir": f"{workdir}/cache",
            "lock_dir": hello["lock_dir"],
            "preflights": self.preflights,
            "clock_skew_s": round(self.link.skew_s, 3),
            "connects": self.link.connects,
            "round_trips": self.link.calls,
        }

    def run_python(self) -> str:
        """The interpreter runs use: hosts.toml's, else the venv `hosts setup` made, else the one we found."""
        return str(self.host.python or self.venv_python or self.link.hello.get("venv_python") or self.link.hello.get("python"))

    @property
    def trainer(self) -> TrainerPolicy:
        """The trainer contract in force."""
        return self.lab.policy().trainer

    @property
    def budget_s(self) -> float:
        """The default budget of a run."""
        return self.lab.policy().limits.budget_s

    @property
    def floor_mib(self) -> int:
        """The free disk below which nothing starts, where the host has no floor of its own."""
        return self.lab.policy().limits.min_free_disk_mib

    async def refresh(self) -> None:
        """Ask the host about itself now."""
        await self._ask_states({})

    # -- runs -----------------------------------------------------------------------------------------------------------------------------

    async def submit(self, spec: Spec) -> None:
        """Place the run's files on the host and start its supervisor there, in one request (large files go ahead, once per host)."""
        parcel = await asyncio.to_thread(staging.pack, spec.stage, self.hashes)
        self.ahead.pop(spec.run_id, None)
        await self.place(self.lab_id, spec.run_id, parcel)

    async def place(self, lab_id: str, run_id: str, parcel: staging.Parcel) -> None:
        """Lay out a run directory on the host and start what is in it; nothing happens when that was done before."""
        for _ in range(3):
            answer, _body = await self.link.call("place", parcel.body, lab=lab_id, run=run_id, files=parcel.entries, limit_s=60.0)
            if "missing" not in answer:
                return
            for sha in answer["missing"]:
                await self._send_blob(sha, parcel.large[sha])
        raise EngineError(
            f"The files of run {run_id} do not stay on {self.host.name}.", next_step="Look at its disk and its shared/ folder."
        )

    async def _send_blob(self, sha: str, path: Path) -> None:
        """Send one large file, from where an earlier attempt stopped."""
        total, have = path.stat().st_size, 0
        with path.open("rb") as file:
            while have < total:
                file.seek(have)
                answer, _ = await self.link.call("blob", file.read(BLOB_PIECE), sha=sha, offset=have, total=total, limit_s=60.0)
                have = int(answer["have"])

    async def _run_call(self, op: str, run_id: str, body: bytes = b"", **args: Any) -> tuple[Any, bytes]:
        return await self.link.call(op, body, lab=self.lab_id, run=run_id, **args)

    async def poll(self, run_ids: list[str], hosts: dict[str, str]) -> dict[str, State]:
        """States of the given runs, in one round trip; `unknown` while the host is out of contact."""
        await self.link.first_try(FIRST_TRY_S)  # a daemon that has just started knows nothing of the host, which is not the host's fault
        for ended in self.ahead.keys() - set(run_ids):  # nobody follows it any more
            self.ahead.pop(ended)
            self.sizes.pop(ended, None)
        wanted = {}
        for run_id in run_ids:
            log, events = self.ahead.setdefault(run_id, (Ahead(), Ahead()))
            wanted[run_id] = [held.end if len(held.data) < HELD_MOST else -1 for held in (log, events)]
        try:
            return await self._ask_states(wanted)
        except HostError:
            return {run_id: State("unknown") for run_id in run_ids}

    async def _ask_states(self, wanted: dict[str, list[int]], limit_s: float = 15.0) -> dict[str, State]:
        answer, body = await self.link.call("poll", lab=self.lab_id, runs=wanted, limit=POLL_PIECE, limit_s=limit_s)
        self.asked_at = time.monotonic()
        self.disk_free_mib, self.venv_python, self.preflights = answer["disk_free_mib"], answer["venv_python"], answer["preflights"]
        states, at = {}, 0
        for run_id, found in answer["runs"].items():
            self.sizes[run_id] = (found.get("log_bytes"), found.get("events_bytes"))
            for held, offset, length in zip(self.ahead[run_id], wanted[run_id], found["pieces"], strict=True):
                if held.end == offset:  # nobody moved it meanwhile
                    held.data += body[at : at + length]
                at += length
            states[run_id] = dirs.state_from({**found, "status": self._our_clock(found.get("status"))})
        return states

    def _our_clock(self, status: dict[str, Any] | None) -> dict[str, Any] | None:
        """A status with its wall times as our clock would have shown them."""
        if status is None or abs(self.link.skew_s) < SKEW_TOLERATED_S:
            return status
        times = ("queued_at", "started_at", "ended_at")
        return {key: value - self.link.skew_s if key in times and value is not None else value for key, value in status.items()}

    async def read(self, run_id: str, host: str, name: str, offset: int, limit: int = 1 << 20) -> bytes:
        """Bytes of a file of the run directory: from what the polls brought, else asked for."""
        if name in FOLLOWED and run_id in self.ahead:
            which = FOLLOWED[name]
            held, size = self.ahead[run_id][which], self.sizes.get(run_id, (None, None))[which]
            data = held.take(offset, limit)
            if data and (len(data) == limit or held.end == size):
                return data
            if run_id in self.sizes and (size is None or offset >= size):
                return b""  # absent, or nothing new, as of the last poll
        found = b""
        while len(found) < limit:
            _, piece = await self._run_call(
                "read", run_id, name=name, offset=offset + len(found), limit=min(CALL_PIECE, limit - len(found))
            )
            found += piece
            if len(piece) < CALL_PIECE:
                break
        if name in FOLLOWED and run_id in self.ahead:
            self.ahead[run_id][FOLLOWED[name]].set(offset, found)
        return found

    async def stop(self, run_id: str, host: str, reason: str, force: bool = False) -> None:
        """Ask the run's supervisor to end it."""
        await self._run_call("stop", run_id, reason=reason, force=force)

    async def fetch(self, run_id: str, host: str, names: list[str], into: Path) -> list[str]:
        """Copy files of the run directory here, each whole or not at all; the names that existed."""
        found = []
        for name in names:
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part = target.with_name(f".{target.name}.part")
            size = 0
            with part.open("wb") as file:
                while piece := (await self._run_call("read", run_id, name=name, offset=size, limit=CALL_PIECE))[1]:
                    file.write(piece)
                    size += len(piece)
            if size:
                part.replace(target)
                found.append(name)
            else:
                part.unlink()
        return found

    async def forget(self, run_id: str, host: str) -> None:
        """Remove the run directory on the host."""
        await self._run_call("forget", run_id)
        self.ahead.pop(run_id, None)
        self.sizes.pop(run_id, None)

    async def list_runs(self) -> list[dict[str, Any]]:
        """This lab's run directories on the host: id, phase, modified, size_mib."""
        value, _ = await self.link.call("list", lab=self.lab_id, limit_s=60.0)
        return list(value)

    async def inspect(self, **args: Any) -> dict[str, Any]:
        """What `hosts check` asks of the machine itself."""
        value, _ = await self.link.call("inspect", limit_s=float(args.get("probe_limit_s") or 60) + 10, **args)
        return dict(value)
