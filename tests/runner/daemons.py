"""Daemons for tests: in this process (fast, inspectable) or as the real detached process (to be killed)."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from runner import daemonctl
from runner.daemon import Daemon, hold_lock, sign_lock
from runner.lab import Lab, open_lab
from runner.records import Run
from tests.runner.labs import make_lab

TINY = (Path(__file__).parent / "scripts" / "tiny_train.py").read_text()
DEADLINE_S = 60.0  # generous: tests share a machine


def local_lab(folder: Path, policy: str = "") -> Lab:
    """A lab of this machine's one CPU slot and the tiny script."""
    hosts = '[[host]]\nname = "here"\nkind = "local"\ngpus = []\n'
    return make_lab(folder, policy=f"min_free_disk_mib = 1\nmin_budget_s = 0.1\ngrace_s = 0.5\n{policy}", hosts=hosts, script=TINY)


def name_the_budget(lab: Lab) -> None:
    """Say in hosts.toml where the time budget is, so that its absence is an error and not another kind of trainer."""
    text = lab.hosts_file.read_text().replace('folder = "trainer"\n', 'folder = "trainer"\nbudget = "prepare.py:TIME_BUDGET"\n')
    lab.accept(text)
    lab.hosts_file.write_text(text)


def fake_lab(folder: Path, policy: str = "", host: str = "types = {H100 = 2, H200 = 1}\nspeed = 300\n", script: str | None = None) -> Lab:
    """A lab of simulated GPUs."""
    from runner.engines import surface

    hosts = f'[[host]]\nname = "sim"\nkind = "fake"\n{host}'
    return make_lab(folder, policy=f"min_free_disk_mib = 1\n{policy}", hosts=hosts, script=script or surface.SCRIPT)


@asynccontextmanager
async def serving(lab: Lab) -> AsyncIterator[Daemon]:
    """A daemon in this process, with its lock held and, as in life, a database connection of its own."""
    fd = hold_lock(lab.path)
    sign_lock(fd)
    own = open_lab(lab.path)
    daemon = Daemon(own)
    task = asyncio.create_task(daemon.run())
    try:
        yield daemon
    finally:
        daemon.stop.set()
        await task
        own.close()
        os.close(fd)


async def until(what: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Wait for a state; its value. Fails with the state's last value after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < end, f"still {value!r} after {deadline_s} s"
        await asyncio.sleep(0.02)


async def ended(lab: Lab, *ids: str, deadline_s: float = DEADLINE_S) -> list[Run]:
    """Wait until the runs have ended; their rows."""

    def rows() -> list[Run] | None:
        found = [lab.store.run(i) for i in ids]
        return [r for r in found if r] if all(r and r.ended for r in found) else None

    try:
        runs: list[Run] = await until(rows, deadline_s)
    except AssertionError:
        raise AssertionError([(r.id, r.phase, r.stage, r.step, r.cause_text) for r in map(lab.store.run, ids) if r]) from None
    return runs


def kill_daemon(lab: Lab) -> None:
    """kill -9 of the lab's detached daemon; returns when its lock is free."""
    pid = daemonctl.daemon_pid(lab)
    assert pid
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + DEADLINE_S
    while daemonctl.daemon_pid(lab) is not None:
        assert time.monotonic() < end
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process lives (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b") ", 1)[1][:1] not in b"ZX"
    except OSError:
        return False
