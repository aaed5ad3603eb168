"""A source of snapshots that stands still: the screen's own reader over a real lab, read at one moment when poked."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

from runner.lab import Lab
from tests.tui.rows import NOW
from tui.snapshot import Deliver, Loader, Reader, Snapshot


def snapshot_of(lab: Lab, views: dict[str, Loader] | None = None, at: float = NOW) -> Snapshot:
    """The lab as the screen's reader sees it at the moment `at`."""
    reader = Reader(lab.path)
    for name, load in (views or {}).items():
        reader.watch(name, load)
    with mock.patch("time.time", lambda: at):
        snapshot = reader.take()
    reader._close()
    return snapshot


class Still:
    """A source that shows one lab at one moment: it reads when poked, at NOW, in the caller's thread."""

    def __init__(self, lab: Lab, at: float = NOW) -> None:
        self.at = at
        self._reader = Reader(lab.path)
        self._deliver: Deliver | None = None

    def start(self, deliver: Deliver) -> None:
        """Deliver the first snapshot."""
        self._deliver = deliver
        self.poke()

    def stop(self) -> None:
        """Close the lab."""
        self._deliver = None
        self._reader._close()

    def poke(self) -> None:
        """Read again."""
        if self._deliver is not None:
            self._reader._version = None
            with mock.patch("time.time", lambda: self.at):
                snapshot = self._reader.take()
            for uuid, past in self._reader._history.items():
                if len(past) < 2:  # a screen that just opened has no history; pictures show one
                    past.extendleft(_past(uuid, past[-1] if past else None))
            self._deliver(replace(snapshot, history={u: tuple(p) for u, p in self._reader._history.items()}))

    def watch(self, name: str, load: Loader) -> None:
        """Read it as well."""
        self._reader._views[name] = load
        self.poke()

    def unwatch(self, name: str) -> None:
        """No longer."""
        self._reader._views.pop(name, None)

    def choose(self, class_key: str | None, budget_s: float | None) -> None:
        """Rank another class."""
        self._reader.class_key, self._reader.budget_s = class_key, budget_s
        self.poke()


def _past(uuid: str, last: float | None) -> list[float | None]:
    rng = random.Random(uuid)
    return [None if last is None or last == 0 else last * (1 - 0.08 * rng.random()) for _ in range(60)]


def clock(at: float = NOW) -> Callable[[], float]:
    """A clock that stands still."""
    return lambda: at
