"""What many ssh hosts cost the control room: connections, channels, round trips per second, bytes, the daemon's CPU and memory.

    python -m tests.bench.links [--hosts 16] [--seconds 30]      (root, needs sshd; skipped with the reason otherwise)

Real sshd hosts in namespaces with two fake GPUs each, one run on every GPU that prints 10 lines a second. All hosts share this machine's
cores with the daemon, so CPU of the hosts' side is in the wall clock, not in the daemon's figure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from runner import daemonctl, verbs
from runner.lab import Lab
from runner.records import WaveRequest
from tests.bench.usage import Usage
from tests.runner.daemons import TINY
from tests.runner.engines import sshrig
from tests.runner.labs import make_lab
from tests.runner.onhost import rig


def sockets(pid: int, port: int = 22) -> int:
    """Established connections of a process to a port."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = (line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
    return sum(row[3] == "01" and int(row[2].split(":")[1], 16) == port and row[9] in inodes for row in rows)


def trips(lab: Lab) -> dict[str, int]:
    """Round trips so far, by host."""
    return {host.name: int((host.info or {}).get("round_trips") or 0) for host in lab.store.hosts()}


def wire_bytes(bridge: str) -> int:
    """Bytes that crossed the bridge to and from us."""
    folder = Path(f"/sys/class/net/{bridge}/statistics")
    return sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


def sessions(net: sshrig.Net) -> int:
    """The most channels any host has open for us: children of its session's sshd."""
    most = 0
    for host in net.hosts:
        inside = host.pids()
        shells = 0
        for pid in inside:
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            shells += b"b64decode" in command
        most = max(most, shells)
    return most


def measure(net: sshrig.Net, lab: Lab, seconds: float, gpus: int) -> None:
    """Start a run on every GPU, measure, print the table."""
    daemonctl.ensure_daemon(lab)
    wave = WaveRequest(factors={"TAG": [f"t{n}" for n in range(gpus)]}, overrides={"STEPS": 100_000, "STEP_S": 0.1}, budget_s=3600)
    began = time.monotonic()
    ids = verbs.submit_wave(lab, wave, who="cli").run_ids
    while lab.store.count_runs("step > 0") < gpus:
        if time.monotonic() - began > 120:
            row = lab.store.daemon()
            raise SystemExit(f"only {lab.store.count_runs('step > 0')} of {gpus} runs came up; {row.note if row else ''}")
        time.sleep(0.1)
    up_s = time.monotonic() - began
    pid = daemonctl.daemon_pid(lab)
    assert pid
    before, bytes_before, usage = trips(lab), wire_bytes(net.bridge), Usage(pid)
    time.sleep(seconds)
    usage.stop()
    after = trips(lab)
    rate = [(after[name] - before[name]) / usage.wall_s for name in after]
    rows = [
        (f"hosts, GPUs, live runs at {1 / 0.1:.0f} lines/s each", f"{len(net.hosts)}, {gpus}, {gpus}"),
        ("from a cold start to the first step of every run", f"{up_s:.1f} s"),
        ("connections of the daemon", str(sockets(pid))),
        ("channels on the busiest host", str(sessions(net))),
        ("round trips a second and host (mean, most)", f"{sum(rate) / len(rate):.2f}, {max(rate):.2f}"),
        ("on the wire, all hosts, both ways", f"{(wire_bytes(net.bridge) - bytes_before) / usage.wall_s / 1000:.1f} kB/s"),
        ("the daemon", f"{100 * usage.cpu_share:.1f} % of a core, {usage.peak_mib:.0f} MiB"),
    ]
    for name, value in rows:
        print(f"{name:<56}{value}")
    verbs.cancel(lab, ids, who="cli", force=True)


def main() -> None:
    """Bring the hosts up, measure, take them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    why = sshrig.missing() or (None if rig.compiler() else "the NVML stand-in needs a C compiler")
    if why:
        print(f"skipped: {why}")
        return
    folder = Path(tempfile.mkdtemp(prefix="links-"))
    net = sshrig.Net(folder, rig.build_stub(folder))
    lab = None
    try:
        text = ""
        for _ in range(args.hosts):
            host = net.add()
            for letter in "ab":
                host.nvml.card(f"GPU-{host.number}{letter}", used=500, util=97, power=600000)
            text += (
                f'[[host]]\nname = "{host.name}"\nkind = "ssh"\naddress = "{host.address}"\nuser = "root"\nidentity = "{net.key}"\n'
                f'workdir = "{host.work}"\npython = "{sys.executable}"\n'
            )
        os.environ["OVERNIGHT_SSH_CONFIG"] = str(net.config)
        lab = make_lab(folder / "lab", policy="min_free_disk_mib = 1\ngrace_s = 1\nwall_extra_s = 7200", hosts=text, script=TINY)
        measure(net, lab, args.seconds, 2 * args.hosts)
    finally:
        if lab is not None:
            daemonctl.stop_daemon(lab)
            lab.close()
        net.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
