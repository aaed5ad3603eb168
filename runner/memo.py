"""What was derived from a lab and is asked for again and again: kept until what it was derived from has changed.

One memo may serve several open labs of one database: threads that ask for the same thing at once wait for the first, and share its
answer. Callers do not change what they get.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

Value = TypeVar("Value")


class Memo:
    """Values by key, each with the stamp of what it was made of."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Hashable, Any]] = {}
        self._locks: defaultdict[Hashable, threading.RLock] = defaultdict(threading.RLock)
        self._lock = threading.Lock()

    def get(self, key: Hashable, stamp: Hashable, make: Callable[[], Value], *, keep: bool = True) -> Value:
        """The value of a key, made anew when its stamp differs. The stamp is read before the value is made, so a change in between is
        seen next time. Not `keep`: a value from inside a transaction, which may yet be rolled back."""
        found = self._kept.get(key)
        if found is not None and found[0] == stamp:
            return found[1]  # type: ignore[no-any-return]
        if not keep:
            return make()
        with self._lock:
            lock = self._locks[key]
        with lock:
            found = self._kept.get(key)
            if found is None or found[0] != stamp:
                found = self._kept[key] = (stamp, make())
        return found[1]
