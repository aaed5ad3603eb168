"""The one filter grammar of every table: `/` on any screen, and the palette.

h200 warmdown          words: every one must be in the row's text
gpu:h200 wave:w3       field:text, a substring; several with a comma: outcome:crashed,diverged
val<0.99 budget=300    field and number: < <= > >= = !=
DEPTH=12 MATRIX_LR>0.03  a constant of the script
flag:any verdict:none  any = has one, none = has none
-wave:w3               a minus in front turns a term round
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runner.errors import BadValue

Row = Mapping[str, Any]
Test = Callable[[Row], bool]

# name -> keys of the row; the first is the one shown in messages
TEXT_FIELDS: dict[str, tuple[str, ...]] = {
    "id": ("id",),
    "gpu": ("gpu", "gpu_type", "name"),
    "host": ("host",),
    "wave": ("wave",),
    "agent": ("agent",),
    "phase": ("phase",),
    "stage": ("stage",),
    "outcome": ("outcome",),
    "cause": ("cause", "cause_text"),
    "verdict": ("verdict",),
    "trust": ("trust",),
    "purpose": ("purpose",),
    "class": ("class",),
    "source": ("source",),
    "parent": ("parent",),
    "flag": ("flags",),
    "why": ("why", "verdict_why"),
    "who": ("who",),
    "verb": ("verb",),
    "subject": ("subject",),
    "state": ("state", "phase"),
    "kind": ("kind",),
}
NUMBER_FIELDS: dict[str, str] = {
    "val": "val_bpb",
    "loss": "loss",
    "budget": "budget_s",
    "step": "step",
    "share": "share",
    "mfu": "mfu_percent",
    "seed": "seed",
    "priority": "priority",
    "age": "age_s",
    "params": "params_m",
    "steps": "num_steps",
    "tokens": "tokens_m",
    "depth": "depth",
    "vram": "peak_vram_mb",
    "wall": "wall_s",
    "gain": "gain",
}
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "%": 1.0, "k": 1e3, "M": 1e6}
_COMPARE = re.compile(r"^([A-Za-z_][A-Za-z_0-9]*)(<=|>=|!=|<|>|=)(.+)$")
_FIELD = re.compile(r"^([a-z]+):(.*)$")
_NUMBER = re.compile(r"^([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)([smhd%kM]?)$")


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed filter; calling it with a row says whether the row stays."""

    text: str
    tests: tuple[Test, ...]

    def __call__(self, row: Row) -> bool:
        return all(test(row) for test in self.tests)


def parse(text: str) -> Filter | None:
    """A filter, or None for an empty text.

    Raised: BadValue when a term cannot be understood; its sentence names the nearest field.
    """
    words = text.split()
    if not words:
        return None
    return Filter(" ".join(words), tuple(_term(w) for w in words))


def _term(word: str) -> Test:
    if len(word) > 1 and word[0] in "-!" and not _NUMBER.match(word):
        inner = _term(word[1:])
        return lambda row: not inner(row)
    compared = _COMPARE.match(word)
    if compared:
        return _comparison(*compared.groups())
    field = _FIELD.match(word)
    if field:
        return _text_field(*field.groups())
    needle = word.lower()
    return lambda row: needle in row_text(row)


def row_text(row: Row) -> str:
    """All a row says, in small letters: what a bare word is looked for in."""
    return " ".join(_flat(v) for v in row.values() if v is not None).lower()


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{k}={_flat(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(_flat(v) for v in value)
    return str(value)


def _text_field(name: str, wanted: str) -> Test:
    if name in NUMBER_FIELDS and name not in TEXT_FIELDS:
        return _comparison(name, "=", wanted)
    keys = TEXT_FIELDS.get(name)
    if keys is None:
        raise BadValue(f"There is no field {name!r} to filter by.", next_step=_near(name))
    options = [o for o in wanted.lower().split(",") if o]

    def test(row: Row) -> bool:
        found = " ".join(_flat(row[k]) for k in keys if row.get(k) not in (None, [], {}, "")).lower()
        if not options or options == ["any"]:
            return bool(found)
        if options == ["none"]:
            return not found
        return any(o in found for o in options)

    return test


def _comparison(name: str, op: str, wanted: str) -> Test:
    constant = name.isupper()
    if not constant and name not in NUMBER_FIELDS:
        if name in TEXT_FIELDS and op in ("=", "!="):
            inner = _text_field(name, wanted)
            return inner if op == "=" else lambda row: not inner(row)
        raise BadValue(f"There is no number {name!r} to compare.", next_step=_near(name))
    number = _NUMBER.match(wanted)
    if number is None:
        if constant and op in ("=", "!="):
            return lambda row: (str((row.get("constants") or {}).get(name)) == wanted) == (op == "=")
        raise BadValue(f"{wanted!r} in {name}{op}{wanted} is not a number.", next_step="Write for example val<0.99 or age<2h.")
    target = float(number.group(1)) * _UNITS.get(number.group(2), 1.0)
    key = name if constant else NUMBER_FIELDS[name]

    def test(row: Row) -> bool:
        value = (row.get("constants") or {}).get(key) if constant else row.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return _holds(float(value), op, target)

    return test


def _holds(value: float, op: str, target: float) -> bool:
    if op == "<":
        return value < target
    if op == "<=":
        return value <= target
    if op == ">":
        return value > target
    if op == ">=":
        return value >= target
    equal = abs(value - target) <= 1e-9 * max(abs(value), abs(target), 1e-12)
    return equal if op == "=" else not equal


def _near(name: str) -> str:
    known = [*TEXT_FIELDS, *NUMBER_FIELDS]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"Did you mean {' or '.join(near)}?" if near else f"Fields: {', '.join(sorted(known))}; constants in capitals."
