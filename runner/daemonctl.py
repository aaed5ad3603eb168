"""Starting, stopping and asking after a lab's daemon from any client.

The daemon is a detached process of its own: it inherits no terminal and no pipe, and its module path is isolated (`python -I` with our
own root), so a `runner.py` or `torch.py` in the folder somebody stands in is never imported by it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import site
import subprocess
import sys
import time
from pathlib import Path

import runner
from runner import daemonlock
from runner.errors import DaemonError, LabError, OvernightError
from runner.lab import Lab
from runner.records import DaemonRow

START_S = 10.0
STOP_S = 15.0
CODE = "import sys; sys.path[:0] = {roots!r}; from runner.daemon import main; sys.exit(main(sys.argv[1:]))"


def daemon_pid(lab: Lab) -> int | None:
    """The pid of the daemon that holds the lab's lock, None when none does, 0 when it has not said."""
    return daemonlock.daemon_pid(lab.path)


def daemon_status(lab: Lab) -> DaemonRow | None:
    """The row of the daemon that serves the lab now; None when none holds its lock, or when it has written nothing yet."""
    pid = daemon_pid(lab)
    row = lab.store.daemon() if pid else None
    return row if row is not None and row.pid == pid else None


def ensure_daemon(lab: Lab) -> DaemonRow:
    """Start the lab's daemon when none holds the lock, and wait until it beats.

    Raised: DaemonError when it does not come up within ten seconds; the message has the last line of its log.
    """
    began = time.time()
    row = daemon_status(lab)
    if row is not None and began - row.beat_at < START_S:
        return row
    deadline = time.monotonic() + START_S
    started = daemon_pid(lab) is not None or _spawn(lab.path, deadline)
    while started and time.monotonic() < deadline:
        row = daemon_status(lab)
        if row is not None and row.beat_at >= began - 2.0:
            return row
        time.sleep(0.03)
    pid = daemon_pid(lab)
    if row is not None and pid == row.pid:
        raise DaemonError(
            f"The daemon of {lab.path} (pid {pid}) lives, but has written nothing to the lab for {time.time() - row.beat_at:.0f} s.",
            next_step=f"Look at the free disk space and at {lab.path}/daemon.log.",
        )
    last = _last_line(lab.path / "daemon.log")
    raise DaemonError(
        f"{last + ' ' if last else ''}The daemon of {lab.path} did not come up.",
        next_step=f"Run `overnight --lab {lab.path} daemon run` to see why.",
    )


def stop_daemon(lab: Lab) -> bool:
    """End the lab's daemon; runs go on. False when none was running. Raised: DaemonError when it does not end."""
    pid = daemon_pid(lab)
    if pid is None:
        return False
    if not pid:
        raise DaemonError(f"{lab.path}/runner.lock is held, but does not say by whom.", next_step="See `fuser` on that file.")
    with contextlib.suppress(OvernightError):  # a full disk: then clients that wait may start it again
        lab.store.set_setting("daemon_stopped", True)
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while daemon_pid(lab) is not None:
        if time.monotonic() > deadline:
            raise DaemonError(f"The daemon (pid {pid}) did not end within {STOP_S:.0f} s.", next_step=f"kill -9 {pid} is safe: runs go on.")
        time.sleep(0.03)
    return True


def daemon_command(lab_path: Path) -> list[str]:
    """The command line of a detached daemon."""
    roots = [str(Path(runner.__file__).resolve().parent.parent)]
    code = CODE.format(roots=roots)
    user_site = site.getusersitepackages() if site.ENABLE_USER_SITE else None
    if user_site and user_site in sys.path:
        code = f"import sys; sys.path.append({user_site!r}); " + code
    return [sys.executable, "-I", "-c", code, "--detached", "--lab", str(lab_path)]


def _spawn(lab_path: Path, deadline: float) -> bool:
    """Start it detached: own session, no terminal, standing in the lab's folder. False when it refused to start."""
    try:
        log = os.open(lab_path / "daemon.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise LabError(
            f"{lab_path}/daemon.log cannot be written: {error.strerror}.", next_step="Free some disk space or check the folder."
        ) from error
    try:
        child = subprocess.Popen(
            daemon_command(lab_path), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log, cwd=lab_path, start_new_session=True
        )
        return child.wait(max(deadline - time.monotonic(), 0.1)) == 0 or daemonlock.daemon_pid(lab_path) is not None
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return False
    finally:
        os.close(log)


def _last_line(path: Path) -> str:
    try:
        with open(path, "rb") as f:
            f.seek(max(os.fstat(f.fileno()).st_size - 2000, 0))
            lines = f.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][:300] if lines else ""
