"""A long randomised fault test of the ssh engine with the real daemon on real sshd hosts: `make soak ARGS='--runs 200 --seed 1'`
(root).

Every few seconds something breaks: sshd killed, link cut, supervisor, leader or daemon killed -9, a host rebooted or frozen, a GPU
lost, a run cancelled. At the end three sentences must be true: every run is accounted for exactly once, no GPU was double-booked, and
each log equals what its run printed, byte for byte. The seed decides what breaks when; the machine's own timing is not repeatable.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.runner.engines import sshrig  # noqa: E402
from tests.runner.far import FarLab  # noqa: E402
from tests.runner.onhost import rig  # noqa: E402

FAULTS = {
    "sshd": 4, "cut_short": 3, "cut_long": 1, "kill_supervisor": 3, "kill_leader": 3, "kill_daemon": 3, "reboot": 1, "freeze": 2,
    "lose_gpu": 2, "hang_driver": 1, "kill_link": 2, "freeze_supervisor": 1, "cancel": 3,
}  # fmt: skip


def command_line(pid: int) -> bytes:
    """What a process was started with; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Soak:
    """A lab under fire."""

    def __init__(self, net: sshrig.Net, folder: Path, args: argparse.Namespace) -> None:
        self.net, self.args = net, args
        self.rng = random.Random(args.seed)
        self.far = FarLab(net, folder, policy="retry_lost = 1\n")
        self.counts: Counter[str] = Counter()
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        """A line with the time since the start."""
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def live(self) -> list[str]:
        """Runs on a slot."""
        return [run.id for run in self.far.runs() if run.live]

    async def fault(self) -> None:
        """Break one thing, and mend it."""
        rng, far = self.rng, self.far
        kind = rng.choices(list(FAULTS), weights=list(FAULTS.values()))[0]
        host = rng.choice(self.net.hosts)
        pause = rng.uniform(0.2, 3.0)
        self.counts[kind] += 1
        self.say(f"{kind} {host.name}")
        if kind == "sshd":
            host.kill_sshd()
            await asyncio.sleep(pause)
            await asyncio.to_thread(host.start_sshd)
        elif kind in ("cut_short", "cut_long"):
            host.cut()
            await asyncio.sleep(pause if kind == "cut_short" else 24.0)
            host.cut(False)
        elif kind in ("kill_supervisor", "kill_leader"):
            pid = far.random_supervisor(rng, kind == "kill_leader")
            if pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    self.counts["too late"] += 1
        elif kind == "kill_daemon":
            far.kill_daemon()
            await asyncio.sleep(pause)
            await asyncio.to_thread(far.daemon)
        elif kind == "reboot":
            await asyncio.to_thread(host.reboot)
        elif kind == "freeze":
            host.freeze()
            await asyncio.sleep(pause)
            host.thaw()
        elif kind in ("lose_gpu", "hang_driver"):
            card, word = rng.choice(list(host.nvml.cards)), "lost" if kind == "lose_gpu" else "hang"
            host.nvml.card(card, **{word: 1})
            await asyncio.sleep(pause if kind == "lose_gpu" else 8.0)
            host.nvml.card(card, **{word: None})
        elif kind == "kill_link":
            for pid in host.pids():
                if b"b64decode" in command_line(pid):
                    os.kill(pid, signal.SIGKILL)
        elif kind == "freeze_supervisor":
            pid = far.random_supervisor(rng, leader=False)
            if pid:
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(pause)
                os.kill(pid, signal.SIGCONT)
        elif live := self.live():
            far.cancel(rng.choice(live))

    async def run(self) -> int:
        """Submit, break, wait, verify; the exit code."""
        rng, far = self.rng, self.far
        far.daemon()
        for n in range(self.args.runs):
            far.submit(LINES=rng.randint(5, 60), LINE_S=round(rng.uniform(0.01, 0.06), 3), CHILD=n % 7 == 0)
        while sum(not run.ended for run in far.runs()) > 4:
            await asyncio.sleep(rng.uniform(0.5, 2.0) * self.args.every_s)
            await self.fault()
        self.say("no more faults; the rest runs out")
        runs = await far.all_ended(180)
        outcomes = far.verify()
        took = time.monotonic() - self.began
        self.say(f"{len(runs)} runs ({self.args.runs} asked for, the others are retries) in {took:.0f} s, seed {self.args.seed}")
        print("faults:  ", ", ".join(f"{n} × {kind}" for kind, n in sorted(self.counts.items())))
        print("outcomes:", ", ".join(f"{n} × {kind}" for kind, n in sorted(outcomes.items())))
        print("every run is accounted for exactly once · no GPU was double-booked · every log equals what its run printed")
        return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every-s", type=float, default=3.0, help="mean time between faults")
    parser.add_argument("--keep", action="store_true", help="leave the folder for a look")
    args = parser.parse_args()
    why = sshrig.missing() or (None if shutil.which("gcc") else "the NVML stand-in needs gcc (make test-deps)")
    if why:
        print(f"skipped: {why}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    net = sshrig.Net(folder, rig.build_stub(folder))
    soak = None
    try:
        for _ in range(2):
            host = net.add()
            for letter in "ab":
                host.nvml.card(f"GPU-{host.number}{letter}", used=500)
        soak = Soak(net, folder / "lab", args)
        return asyncio.run(soak.run())
    finally:
        if soak:
            soak.far.close()
        net.close()
        if args.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
