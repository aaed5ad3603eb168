"""The writing side of the screen: verbs carried out one after another in a daemon thread, so that a locked database never freezes a key.

Every deed comes back as a `Deed` with a sentence, for the message line and nothing else; the snapshot shows what it changed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import OvernightError
from runner.lab import Lab, open_lab

Verb = Callable[[Lab], Any]


@dataclass(frozen=True, slots=True)
class Deed:
    """What became of a verb: `sentence` for a person, `result` for the screen that asked."""

    label: str
    ok: bool
    sentence: str
    result: Any = None
    then: Callable[[Any], None] | None = None


class Hand:
    """Carries out verbs in order; `report` is called from the thread."""

    def __init__(self, path: Path, report: Callable[[Deed], None]) -> None:
        self.path = path
        self._report = report
        self._asked: queue.SimpleQueue[tuple[str, Verb, Callable[[Any], None] | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.busy = 0

    def do(self, label: str, verb: Verb, then: Callable[[Any], None] | None = None) -> None:
        """Ask for a verb; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="overnight-hand", daemon=True)
            self._thread.start()
        self.busy += 1
        self._asked.put((label, verb, then))

    def stop(self) -> None:
        """Take no more; what is under way ends by itself."""
        self._asked.put(None)

    def _run(self) -> None:
        lab: Lab | None = None
        while True:
            asked = self._asked.get()
            if asked is None:
                break
            label, verb, then = asked
            try:
                if lab is None:
                    lab = open_lab(self.path, create=True)
                result = verb(lab)
                deed = Deed(label, True, said(label, result), result, then)
            except OvernightError as error:
                deed = Deed(label, False, f"{label}: {error}")
                _close(lab)
                lab = None
            except Exception as error:  # noqa: BLE001 - the top of the thread: shown as a sentence, and the next verb is tried
                deed = Deed(label, False, f"{label}: {type(error).__name__}: {error}")
                _close(lab)
                lab = None
            self.busy -= 1
            self._report(deed)
        if lab is not None:
            lab.close()


def _close(lab: Lab | None) -> None:
    """After a failure the lab is opened anew: its database may have been replaced."""
    if lab is not None:
        lab.close()


def said(label: str, result: Any) -> str:
    """What a verb answered, in a sentence."""
    notes = result if isinstance(result, list) else getattr(result, "notes", None) or []
    ids = getattr(result, "run_ids", None) or []
    shown = f": {', '.join(ids[:4])}{' …' if len(ids) > 4 else ''}" if ids else ""
    return f"{label}{shown}" + "".join(f" · {n}" for n in notes if isinstance(n, str))
