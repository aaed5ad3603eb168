"""What the server keeps between calls: open labs for its worker threads, one for watching, and whether a daemon serves the lab.

State that matters is in the lab's database, because clients open and close the pipe at will; here is only what may be lost.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from runner import compare, queries, submitting, verbs
from runner.errors import OvernightError
from runner.keeper import Keeper
from runner.lab import Lab, open_lab
from runner.records import Submission

log = logging.getLogger("overnight.mcp")

T = TypeVar("T")
THREADS = 6  # calls are short; more threads would only queue on the interpreter's lock
NOTE_S = 0.5
HEARD_EVERY_S = 5.0
LINE_AGE_S = 1.0


class Desk:
    """The server's hold on one lab. A worker thread borrows an open lab for one piece of work, so no call waits for another's
    transaction."""

    def __init__(self, lab_path: Path, *, agent: str | None = None, start_daemon: bool = True) -> None:
        self.path = lab_path
        self.agent = agent
        self.start_daemon = start_daemon
        self._keeper = Keeper(lab_path) if start_daemon else None
        self.watch: Lab = open_lab(lab_path, create=True)
        self._idle: queue.LifoQueue[Lab] = queue.LifoQueue()
        self._limiter: anyio.CapacityLimiter | None = None
        self._caller: tuple[str, float] | None = None  # who called last, and when, until it is noted
        self._noted_at = float("-inf")
        self._line: tuple[int | None, float, str] = (None, 0.0, "")
        self._closed = False

    def version(self) -> int:
        """Changes when anybody else has written to the lab. Microseconds, so it may be asked from the event loop; `watch` itself never
        writes."""
        return self.watch.store.data_version()

    def lab_line(self, lab: Lab, who: str) -> str:
        """The line every answer to an agent ends with. What is the same for all is taken again when anybody has written, and every second
        for the ages in it."""
        return self._line_of_all(lab) + "".join(f" · {part}" for part in queries.agent_parts(lab, who))

    def _line_of_all(self, lab: Lab) -> str:
        version, now = self.version(), time.monotonic()
        kept_version, kept_at, kept = self._line
        if version != kept_version or now - kept_at > LINE_AGE_S:
            kept = queries.lab_line(lab)
            self._line = (version, now, kept)
        return kept

    async def with_lab(self, work: Callable[[Lab], T]) -> T:
        """Run blocking work on a borrowed lab in a worker thread; a cancelled caller does not wait for it."""
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(THREADS)
        return await anyio.to_thread.run_sync(self.borrow, work, limiter=self._limiter, abandon_on_cancel=True)

    async def warm(self) -> None:
        """Read the trainer's script and rank the runs before anybody asks: the first call of each kind would take 50 ms longer."""

        def read(lab: Lab) -> None:
            self._line_of_all(lab)
            compare.relative_speeds(lab)
            submitting.prepare(lab, Submission())

        try:
            await self.with_lab(read)
        except OvernightError as exc:  # whoever calls is told
            log.warning("%s", exc)

    def borrow(self, work: Callable[[Lab], T]) -> T:
        """Run work on an idle open lab, or on a new one."""
        try:
            lab = self._idle.get_nowait()
        except queue.Empty:
            lab = open_lab(self.path)
            lab.memo = self.watch.memo  # the ranking of ten thousand runs is made once, not once a thread
        try:
            return work(lab)
        finally:
            if self._closed:
                lab.close()
            else:
                self._idle.put(lab)

    def close(self) -> None:
        """Close every lab that is not in use; one in use is closed by its borrower."""
        self._closed = True
        self.note_caller(self.watch)
        self.watch.close()
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return

    def heard_from(self, who: str) -> None:
        """Remember that an agent called. It is noted in the lab a moment later: no reading call waits for the write lock."""
        self._caller = (who, time.time())

    async def note_callers(self) -> None:
        """Note in the lab who called last, every few seconds while anybody calls; runs until cancelled."""
        while True:
            await anyio.sleep(NOTE_S)
            if self._caller is not None and time.monotonic() - self._noted_at >= HEARD_EVERY_S:
                await self.with_lab(self.note_caller)

    def note_caller(self, lab: Lab) -> None:
        """Note in the lab who called last, unless that is done."""
        caller, self._caller = self._caller, None
        if caller is None:
            return
        self._noted_at = time.monotonic()
        try:
            verbs.heard_from(lab, caller[0], at=caller[1])
        except OvernightError as exc:  # a full disk must not keep an agent from reading
            log.warning("the call was not noted: %s", exc)

    def wake_daemon(self, lab: Lab, *, asked: bool = True) -> str | None:
        """Have a daemon started when none holds the lab's lock, without waiting for it. None when one does; else what to tell the caller.

        Not `asked` (an answer, a wait): at most one look a second, and a daemon that a human stopped stays stopped.
        """
        return self._keeper.look(lab, asked=asked) if self._keeper else None
