"""This machine as a host: its GPUs through the sampler, or one CPU slot; run directories are the lab's own.

The sampler and every supervisor are processes of their own, so a hung driver or a dead daemon takes nothing with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.engines import dirs
from runner.engines.base import HostReport, Spec, State
from runner.errors import EngineError, HostError
from runner.onhost import inspecting, locks, procs, rundirs
from runner.policy import HostPolicy

if TYPE_CHECKING:
    from runner.lab import Lab

FIRST_LINE_S = 3.0
CALL_LIMIT_S = 30.0
LINE_LIMIT = 4 << 20
log = logging.getLogger("overnight.local")
BACK_OFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)


class LocalEngine:
    """Runs on the machine the daemon runs on."""

    kind = "local"

    def __init__(self, lab: Lab, host: HostPolicy) -> None:
        self.runs_dir, self.lab_dir, self.data_dir = lab.runs_dir, lab.path, lab.data_dir
        self.host, self.lab = host, lab
        self.telemetry = dirs.Telemetry(host)
        self._sampler: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._first_line = asyncio.Event()

    async def start(self) -> None:
        """Start the sampler; its first lines are waited for by `capacity`."""
        self._watch = asyncio.create_task(self._watch_sampler(), name=f"sampler of {self.host.name}")

    async def _watch_sampler(self) -> None:
        """Keep a sampler running and take its lines."""
        failures = 0
        while True:
            try:
                if await self._one_sampler():
                    failures = 0
            except (OSError, ValueError) as problem:  # no process to be had just now; a line beyond all measure
                log.warning("the GPU sampler of %s: %s", self.host.name, problem)
            await asyncio.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
            failures += 1

    async def _one_sampler(self) -> bool:
        """One sampler from its start to its end; whether it said anything."""
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        command = rundirs.launch_command(sys.executable, "sampler")
        self._sampler = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=null, start_new_session=True, limit=LINE_LIMIT
        )
        assert self._sampler.stdout
        spoke = False
        try:
            async for line in self._sampler.stdout:
                self.telemetry.take(line)
                self._first_line.set()
                spoke = True
        finally:
            if self._sampler.returncode is None and self._sampler.stdin:
                self._sampler.stdin.close()
        await self._sampler.wait()
        self._let_go()
        return spoke

    def _let_go(self) -> None:
        """Close our ends of the sampler's pipes: a child of it that hangs in the driver may hold the others for ever."""
        transport = getattr(self._sampler, "_transport", None)  # asyncio has no public way to it
        if transport is not None:
            transport.close()

    async def capacity(self) -> list[HostReport]:
        """This machine's report; the very first call gives the sampler a moment to speak."""
        if not self.telemetry.heard and self._watch is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._first_line.wait(), FIRST_LINE_S)
        heard = self.telemetry.heard or self.host.gpus == []
        return [
            HostReport(
                host=self.host.name,
                up=heard,
                error=self.telemetry.trouble() if heard else "The GPU sampler has not answered yet.",
                boot_id=procs.boot_id(),
                slots=self.telemetry.slots(dirs.cpu_cores()) if heard else [],
                samples=self.telemetry.samples(),
                disk_free_mib=rundirs.disk_free_mib(str(self.lab_dir)),
                info=self.info(),
                locks=self.telemetry.locks(),
            )
        ]

    def info(self) -> dict[str, Any]:
        """What `dirs.build_spec` and people need to know of the machine."""
        return {
            "hostname": socket.gethostname(),
            "python": self.host.python or sys.executable,
            "python_version": platform.python_version(),
            "kernel": platform.release(),
            "cpu_cores": dirs.cpu_cores(),
            "runs_dir": str(self.runs_dir),
            "data_dir": str(self.data_dir),
            "cache_dir": str(self.lab_dir / "cache"),
            "lock_dir": locks.default_dir(),
            "preflights": inspecting.preflights(str(self.data_dir)),
            "environment": rundirs.inherited(os.environ),
        }

    @property
    def lab_id(self) -> str:
        """Which lab the runs belong to."""
        return str(self.lab.store.meta("lab_id"))

    @property
    def floor_mib(self) -> int:
        """The free disk below which nothing starts, where the host has no floor of its own."""
        return self.lab.policy().limits.min_free_disk_mib

    def run_dir(self, run_id: str) -> str:
        """Where a run lives."""
        return str(self.runs_dir / run_id)

    async def submit(self, spec: Spec) -> None:
        """Start the run's supervisor in the lab's run directory; nothing happens when it was started before."""
        run_dir = self.run_dir(spec.run_id)
        if Path(run_dir).resolve() != spec.stage.resolve():
            raise EngineError(
                f"Run {spec.run_id} was staged in {spec.stage}, not in {run_dir}.",
                next_step="This is a fault of Overnight; please report it.",
            )
        try:
            await asyncio.wait_for(asyncio.to_thread(rundirs.start, run_dir, sys.executable), CALL_LIMIT_S)
        except (rundirs.StartError, OSError, subprocess.SubprocessError, asyncio.TimeoutError) as problem:
            raise EngineError(
                f"Run {spec.run_id} could not be started on {self.host.name}: {problem}.", next_step=f"See {run_dir}."
            ) from problem

    async def poll(self, run_ids: list[str], hosts: dict[str, str]) -> dict[str, State]:
        """States of the given runs."""

        def look() -> dict[str, State]:
            return {run_id: dirs.state_from(rundirs.state(self.run_dir(run_id))) for run_id in run_ids}

        return await asyncio.wait_for(asyncio.to_thread(look), CALL_LIMIT_S)

    async def read(self, run_id: str, host: str, name: str, offset: int, limit: int = 1 << 20) -> bytes:
        """Bytes of a file of the run directory."""
        try:
            return rundirs.read(self.run_dir(run_id), name, offset, limit)
        except OSError as problem:
            raise EngineError(f"{name} of run {run_id} cannot be read: {problem}.") from problem

    async def stop(self, run_id: str, host: str, reason: str, force: bool = False) -> None:
        """Ask the run's supervisor to end it."""
        rundirs.stop(self.run_dir(run_id), reason, force)

    async def fetch(self, run_id: str, host: str, names: list[str], into: Path) -> list[str]:
        """Copy files of the run directory elsewhere; files that are in place already count as fetched."""
        found = []
        for name in names:
            source, target = Path(self.run_dir(run_id), name), into / name
            if source.is_symlink() or not source.is_file():
                continue
            if source.resolve() != target.resolve():
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                await asyncio.to_thread(shutil.copyfile, source, target)
            found.append(name)
        return found

    async def forget(self, run_id: str, host: str) -> None:
        """Remove the bulk of the run (its work folder but for events.jsonl): the rest is the lab's own record."""
        try:
            await asyncio.to_thread(rundirs.forget_work, self.run_dir(run_id))
        except OSError as problem:
            raise HostError(f"The files of run {run_id} cannot be removed: {problem}.") from problem

    async def close(self) -> None:
        """End the sampler; runs go on."""
        if self._watch:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        if self._sampler and self._sampler.returncode is None:
            if self._sampler.stdin:
                self._sampler.stdin.close()
            try:
                await asyncio.wait_for(self._sampler.wait(), 2.0)
            except asyncio.TimeoutError:
                self._sampler.kill()
                await self._sampler.wait()
        self._let_go()
