"""A daemon kept alive for clients that stay: a screen, an agent that waits, `--wait`. Whoever waits for runs would else wait for ever.

A daemon that a human stopped stays stopped until something is submitted or somebody starts it.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from runner.daemonlock import daemon_pid
from runner.errors import OvernightError
from runner.lab import Lab, open_lab

LOOK_S = 1.0
RETRY_S = 10.0
STARTING = "The daemon is being started; what was submitted begins in a moment."
STOPPED = "The daemon was stopped by hand, so nothing starts; `overnight daemon start` starts it again."
log = logging.getLogger("overnight.keeper")


class Keeper:
    """Watches one lab's daemon lock; `look` may be called as often as one likes and never waits for the daemon."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: str | None = None  # why the last start failed
        self._said: str | None = None
        self._looked_at = self._failed_at = float("-inf")
        self._lock = threading.Lock()
        self._starting: threading.Thread | None = None

    def look(self, lab: Lab, *, asked: bool = False) -> str | None:
        """Have a daemon started when none holds the lock; None when one does, else a sentence for whoever waits.

        `asked`: something was just submitted, so a daemon that was stopped by hand is wanted again and nothing is put off.
        """
        now = time.monotonic()
        with self._lock:
            if asked or now - self._looked_at >= LOOK_S:
                self._looked_at = now
                self._said = self._ensure(lab, now, asked)
            return self._said

    def _ensure(self, lab: Lab, now: float, asked: bool) -> str | None:
        if daemon_pid(self.path) is not None:
            self.trouble = None
            return None
        if self._starting is not None and self._starting.is_alive():
            return self.trouble or STARTING
        if not asked and lab.store.setting("daemon_stopped", False):
            return STOPPED
        if asked or now - self._failed_at >= RETRY_S:
            self._starting = threading.Thread(target=self._start, name="start-daemon", daemon=True)
            self._starting.start()
        return self.trouble or STARTING

    def _start(self) -> None:
        from runner.daemonctl import ensure_daemon  # costs its import only where a daemon is missing

        try:
            lab = open_lab(self.path)
            try:
                ensure_daemon(lab)
            finally:
                lab.close()
            self.trouble = None
        except OvernightError as error:
            self._failed_at = time.monotonic()
            self.trouble = f"The daemon did not start: {error}"
            log.warning("the daemon did not start: %s", error)
