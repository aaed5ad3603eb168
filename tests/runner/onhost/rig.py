"""Real supervisors in a temporary folder, and the drivable NVML stand-in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.onhost import files, locks, procs, rundirs

STUB = Path(__file__).parents[2] / "nvml" / "nvml_stub.c"
ENV = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}


def until(condition: Callable[[], Any], limit_s: float = 15.0, what: str = "") -> Any:
    """Wait for a state with a deadline; its truthy value."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not reached within {limit_s} s: {what or condition}")


class Rig:
    """Starts runs below a folder, and ends whatever is left when the test ends."""

    def __init__(self, base: Path) -> None:
        self.base, self.lock_dir, self.dirs = base, base / "locks", []

    def make(self, argv: list[str] | str, *, base: Path | None = None, run_id: str | None = None, **spec: Any) -> Path:
        """A run directory with its spec."""
        run_id = run_id or f"r{len(self.dirs) + 1}"
        run_dir = (base or self.base) / run_id
        (run_dir / "work").mkdir(parents=True)
        argv = ["/bin/sh", "-c", argv] if isinstance(argv, str) else argv
        whole = {"v": 1, "run_id": run_id, "lab_id": "lab", "argv": argv, "env": ENV, "lock_dir": str(self.lock_dir), "grace_s": 1, **spec}
        (run_dir / "spec.json").write_text(json.dumps(whole))
        self.dirs.append(run_dir)
        return run_dir

    def launch(self, run_dir: Path, *extra: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
        """Start the supervisor as an engine does; returns once it is on record."""
        command = [*rundirs.launch_command(sys.executable, "supervisor"), str(run_dir), *extra]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=15, env=env, check=False)

    def start(self, argv: list[str] | str, *, launch_env: dict[str, str] | None = None, **spec: Any) -> Path:
        """Make and launch; asserts that it is on record."""
        run_dir = self.make(argv, **spec)
        done = self.launch(run_dir, env=launch_env)
        assert done.returncode == 0, done.stderr
        return run_dir

    def status(self, run_dir: Path) -> dict[str, Any]:
        """The status as it is on disk."""
        try:
            return dict(json.loads((run_dir / "status.json").read_text()))
        except FileNotFoundError:
            return {}

    def wait(self, run_dir: Path, *phases: str, limit_s: float = 15.0) -> dict[str, Any]:
        """Wait for one of the phases (default: a final one); the status."""
        wanted = phases or rundirs.FINAL
        until(lambda: self.status(run_dir).get("phase") in wanted, limit_s, f"{run_dir.name} in {wanted}, is {self.status(run_dir)}")
        return self.status(run_dir)

    def log_has(self, run_dir: Path, text: str) -> None:
        """Wait until the run has printed a text."""
        until(lambda: (run_dir / "out.log").exists() and text in (run_dir / "out.log").read_text(), what=f"{text!r} in the log")

    def stop(self, run_dir: Path, reason: str = "cancelled", force: bool = False) -> None:
        """Ask for a stop as an engine does."""
        rundirs.stop(str(run_dir), reason, force)

    def left(self, run_dir: Path) -> list[int]:
        """Living processes of the run."""
        return procs.survivors(json.loads((run_dir / "spec.json").read_text())["run_id"], os.path.realpath(run_dir))

    def held(self, uuid: str) -> bool:
        """Whether somebody holds the GPU."""
        return locks.holder(str(self.lock_dir), uuid) is not None

    def run_lock_held(self, run_dir: Path) -> bool:
        """Whether a supervisor lives."""
        fd = files.open_dir(str(run_dir))
        try:
            return files.lock_held(fd)
        finally:
            os.close(fd)

    def clean(self) -> None:
        """End everything."""
        for run_dir in self.dirs:
            supervisor = self.status(run_dir).get("supervisor")
            if supervisor:
                procs.send(supervisor["pid"], supervisor["ticks"], 18)
                procs.send(supervisor["pid"], supervisor["ticks"], 9)
            procs.sweep(run_dir.name, os.path.realpath(run_dir))


class FakeNvml:
    """The stand-in library: `cards` is what the driver says, changed at will while others look."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "nvml_state"
        self.env = {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML_STATE": str(self.state)}
        self.cards: dict[str, dict[str, Any]] = {}

    def card(self, uuid: str, **words: Any) -> None:
        """Add or change a card; a word of None is taken away."""
        base = {"name": "NVIDIA_H100_80GB_HBM3", "util": 0, "memutil": 0, "used": 0, "total": 81559, "power": 70000, "limit": 700000}
        base |= {"default": 700000, "temp": 30, "sm": 345, "smmax": 1980, "memclk": 2619, "throttle": "1", "pstate": 0, "gen": 5}
        base |= {"genmax": 5, "width": 16, "widthmax": 16, "ecc": 0, "energy": 1000, "procs": ""}
        self.cards[uuid] = {**(self.cards.get(uuid) or base), **words}
        text = "".join(
            f"uuid={u} " + " ".join(f"{k}={v}" for k, v in card.items() if v is not None) + "\n" for u, card in self.cards.items()
        )
        tmp = self.state.with_suffix(".tmp")
        tmp.write_text(text)
        tmp.rename(self.state)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Runs in a temporary folder."""
    rig = Rig(tmp_path)
    yield rig
    rig.clean()


def compiler() -> str | None:
    """A C compiler of this machine."""
    return shutil.which("gcc") or shutil.which("cc")


def build_stub(folder: Path) -> Path:
    """Compile the stand-in into a folder; the folder."""
    target = str(folder / "libnvidia-ml.so.1")
    command = [str(compiler()), "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", target, str(STUB)]
    subprocess.run(command, check=True, timeout=60)
    return folder


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled stand-in."""
    if compiler() is None:
        pytest.skip("no C compiler: the NVML stand-in cannot be built (apt-get install gcc)")
    return build_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path) -> FakeNvml:
    """A fresh stand-in: add cards, then start processes with `nvml.env`."""
    fake = FakeNvml(nvml_library)
    fake.state = tmp_path / "nvml_state"
    fake.env["FAKE_NVML_STATE"] = str(fake.state)
    return fake


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True, timeout=10, check=False)
    if done.returncode:
        pytest.skip(f"mounting a small file system is not allowed here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], timeout=10, check=False)
