"""What an asker may say, checked and cleaned: names of runs, priorities, prose. Shared by the verbs."""

from __future__ import annotations

import math
from collections.abc import Iterable

from runner import submitting, text
from runner.errors import BadValue, UnknownName
from runner.lab import Lab
from runner.records import Run

MAX_WORDS = 2000


def runs_named(lab: Lab, name: str) -> list[Run]:
    if name[:1] == "w" and name[1:].isdigit():
        if lab.store.wave(name) is None:
            raise UnknownName("wave", name, [w.id for w in lab.store.waves(50)])
        return lab.store.runs("wave_id = ?", (name,))
    return [submitting.known_run(lab, name)]


def listed(ids: Iterable[str]) -> list[str]:
    names = [ids] if isinstance(ids, str) else list(ids)
    if not names:
        raise BadValue("No run was named.", next_step="Give an id such as r0001, or a wave such as w1.")
    return list(dict.fromkeys(names))


def priority(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or abs(value) > 1e6:
        raise BadValue(f"The priority is {value!r}.", next_step="Allowed: a number from -1e6 to 1e6; higher goes first.")
    return float(value)


def words(value: str | None) -> str | None:
    """Prose from outside: cleaned and cut, None when empty."""
    if value is None or not value.strip():
        return None
    return text.clean(value)[:MAX_WORDS]


def cell(values: dict[str, object]) -> str:
    """A cell of a wave as it is typed: NAME=VALUE, NAME=VALUE."""
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "the script as it is"
