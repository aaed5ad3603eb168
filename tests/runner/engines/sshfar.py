"""An ssh engine on one host of the rig, used the way the daemon uses it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from runner.engines import dirs
from runner.engines.base import Spec
from runner.engines.ssh import SshEngine
from runner.errors import HostError
from runner.lab import Lab
from tests.runner.engines.sshrig import SshHost

FIRST_AND_LAST = "import time\nfor i in range({n}):\n    print('line', i, flush=True)\n    time.sleep({pause})\n"


async def until(condition: Callable[[], Any], limit_s: float = 30.0, what: str = "") -> Any:
    """Wait for an awaited state with a deadline."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        value = await condition()
        if value:
            return value
        await asyncio.sleep(0.05)
    raise AssertionError(f"not reached within {limit_s} s: {what}")


class Far:
    """An engine on one host, with runs staged as the daemon stages them and logs followed as it follows them."""

    def __init__(self, lab: Lab, host: SshHost, engine: SshEngine) -> None:
        self.lab, self.host, self.engine = lab, host, engine
        self.logs: dict[str, bytes] = {}

    async def up(self, slots: int = 1) -> Any:
        """Its report, once it has so many slots: a sampler's first look comes one card at a time."""

        async def there() -> Any:
            report = (await self.engine.capacity())[0]
            return report if report.up and len(report.slots) >= slots else None

        return await until(there, what=f"{self.host.name} is up: {self.engine.link.error}")

    async def submit(self, run_id: str, script: str, *, gpu: int = 0, **words: Any) -> Spec:
        """Stage and submit a python script."""
        report = await self.up()
        slot = report.slots[gpu]
        stage = self.lab.runs_dir / run_id
        if not stage.exists():
            (stage / "work").mkdir(parents=True)
            (stage / "work" / "train.py").write_text(script)
            spec = dirs.build_spec(
                self.engine.host, report.info, slot, run_id=run_id, lab_id=self.engine.lab_id, command=["{python}", "train.py"], budget_s=20,  # noqa: E501
                time_limit_s=words.pop("time_limit_s", 120), grace_s=1, max_log_mib=8, min_free_mib=0, **words,
            )  # fmt: skip
            (stage / "spec.json").write_bytes(dirs.spec_bytes(spec))
        made = Spec(run_id, slot, stage)
        await self.engine.submit(made)
        return made

    async def look(self, run_id: str) -> Any:
        """One tick: poll, and read what is new."""
        state = (await self.engine.poll([run_id], {run_id: self.host.name}))[run_id]
        if state.phase not in ("unknown", "absent", "waiting"):
            held = self.logs.setdefault(run_id, b"")
            try:
                self.logs[run_id] = held + await self.engine.read(run_id, self.host.name, "out.log", len(held))
            except HostError:
                return state
        return state

    async def wait(self, run_id: str, *phases: str, limit_s: float = 40.0) -> Any:
        async def there() -> Any:
            state = await self.look(run_id)
            return state if state.phase in (phases or ("ended", "refused", "lost")) else None

        return await until(there, limit_s, f"{run_id} in {phases}")

    def printed(self, run_id: str) -> bytes:
        """What the run printed, as the host has it."""
        return (self.host.run_dir(self.engine.lab_id, run_id) / "out.log").read_bytes()


def told(condition: Callable[[], Any]) -> Callable[[], Any]:
    """A condition that needs no waiting, for `until`."""

    async def look() -> Any:
        return condition()

    return look
