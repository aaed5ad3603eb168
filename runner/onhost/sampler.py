"""One JSON line per GPU and second on stdout (FORMAT.md section 4), through NVML or, without it, nvidia-smi.

    sampler.main(["--interval", "1.0", "--limit", "5.0"])        or, once: ["--once"]

NVML calls can block for ever, so they run in a child with a time limit: a hung driver gives lines with `error`, never silence. Ends
when its stdin closes.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import time
import traceback
from typing import Any, Dict, Iterator, List, Optional

from . import locks, smi
from .nvml import FIELDS, NoGpus, Nvml, Unreadable, driver_present

CPU_LOCK = "CPU"
LOCKS_EVERY_S = 2.0  # the CPU's lock, between two lines of a machine without cards


def open_reader() -> Any:
    """NVML, else nvidia-smi; raises NoGpus or Unreadable with the reason."""
    try:
        return Nvml()
    except Unreadable as problem:
        from_nvml = str(problem)
    if smi.available():
        return smi.Smi()
    if driver_present():
        raise Unreadable("%s, and nvidia-smi is not on the PATH" % from_nvml)
    raise NoGpus("no NVIDIA driver here")


def produce(out_fd: int, interval_s: float) -> None:
    """The child's whole life: read, write a batch of lines, wait for the next second."""
    reader: Any = None
    next_at = time.monotonic()
    while True:
        try:
            reader = reader or open_reader()
            lines = reader.sample()
        except NoGpus as problem:
            lines = [{"at": round(time.time(), 3), "fatal": str(problem), "absent": True}]
            reader = None
        except Unreadable as problem:
            lines = [{"at": round(time.time(), 3), "fatal": str(problem), "absent": False}]
            reader = None
        told = look_at_locks(lines)
        os.write(out_fd, (json.dumps(lines) + "\n").encode())
        pause_s = max(interval_s, getattr(reader, "min_interval_s", 0.0)) if reader else max(interval_s, 10.0)
        next_at = max(next_at + pause_s, time.monotonic())
        while time.monotonic() < next_at:
            time.sleep(min(max(interval_s, LOCKS_EVERY_S), max(0.0, next_at - time.monotonic())))
            held = locks.holder(locks.default_dir(), CPU_LOCK)
            if held != told:
                told = held
                os.write(out_fd, (json.dumps([{"at": round(time.time(), 3), "cpu_lock": held}]) + "\n").encode())


def look_at_locks(lines: List[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
    """Add to each card's line who holds its lock, and to the first line who holds the CPU's; the latter."""
    folder = locks.default_dir()
    for line in lines:
        if "uuid" in line:
            line["lock"] = locks.holder(folder, line["uuid"])
    held = locks.holder(folder, CPU_LOCK)
    lines[0]["cpu_lock"] = held
    return held


class Child:
    """A sampling child and its pipe."""

    def __init__(self, interval_s: float) -> None:
        self.out, theirs = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self.out)
                os.dup2(os.open(os.devnull, os.O_RDWR), 0)
                os.dup2(0, 1)  # hung in the driver, it must not keep our stdout open after we have gone
                produce(theirs, interval_s)
            except BrokenPipeError:
                pass  # the parent is gone
            except Exception:  # noqa: BLE001 - shown on stderr; the parent starts another
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(theirs)
        self.buffer = b""

    def end(self) -> bool:
        """Kill it; False when it hangs in the kernel and cannot even be collected."""
        os.close(self.out)
        os.kill(self.pid, signal.SIGKILL)
        for _ in range(50):
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                return True
            time.sleep(0.01)
        return False


def batches(interval_s: float, limit_s: float) -> Iterator[List[Dict[str, Any]]]:
    """Batches of lines for ever, whatever the driver does; ends when stdin closes."""
    child, stuck = Child(interval_s), 0
    known: Dict[str, Any] = {}
    deadline = time.monotonic() + limit_s + 5  # the first answer may load the driver
    while True:
        ready, _, _ = select.select([child.out, 0], [], [], max(0.0, deadline - time.monotonic()))
        if 0 in ready and not os.read(0, 4096):
            child.end()
            return
        if child.out in ready:
            data = os.read(child.out, 1 << 20)
            child.buffer += data
            while b"\n" in child.buffer:
                text, child.buffer = child.buffer.split(b"\n", 1)
                lines = json.loads(text.decode())
                known = {line["uuid"]: line for line in lines if "uuid" in line} or known
                deadline = time.monotonic() + limit_s + max(interval_s, 10.0 if "fatal" in lines[0] else 2.0)
                yield lines
            if data:
                continue
        elif time.monotonic() < deadline:
            continue
        why = "the sampling process ended" if child.out in ready else "the NVIDIA driver did not answer within %g s" % limit_s
        at = round(time.time(), 3)
        yield [dict(dict.fromkeys(FIELDS), at=at, uuid=u, index=k["index"], name=k["name"], error=why) for u, k in known.items()] or [
            {"at": at, "fatal": why, "absent": False}
        ]
        stuck = 0 if child.end() else stuck + 1
        time.sleep(min(60.0, 1.0 + 10.0 * stuck))  # children stuck in the kernel must not pile up
        child = Child(interval_s)
        deadline = time.monotonic() + limit_s + 5


def main(argv: Optional[List[str]] = None) -> int:
    """Print lines until stdin closes, or one batch with --once."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--limit", type=float, default=5.0)
    parser.add_argument("--once", action="store_true")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for lines in batches(args.interval, args.limit):
        sys.stdout.write("".join(json.dumps(line) + "\n" for line in lines))
        sys.stdout.flush()
        if args.once:
            return 0
    return 0
