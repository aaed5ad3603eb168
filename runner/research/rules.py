"""The two-stage rule as hosts.toml states it: read once, and refused with the key and what it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from runner.errors import PolicyError


@dataclass(frozen=True, slots=True)
class Rule:
    """`promote` of the policy: `source` and `target` are parts of GPU names; `budget_s` None keeps the budget."""

    source: str | None
    target: str | None
    top: int
    seeds: int
    budget_s: float | None


def rule_of(table: dict[str, Any] | None) -> Rule | None:
    """The policy's rule, checked; None when there is none. Raised: PolicyError with the key and what it may be."""
    if not table:
        return None
    known = ("from", "to", "top", "seeds", "budget_s")
    where = "hosts.toml: [policy] promote"
    for key in table:
        if key not in known:
            raise PolicyError(f"{where} has an unknown key {key!r}.", next_step=f"Allowed: {', '.join(known)}.")
    source, target = (_text(table, key, where) for key in ("from", "to"))
    budget = table.get("budget_s")
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < math.inf):
        raise PolicyError(f"{where}: budget_s is {budget!r}.", next_step="Allowed: a number of seconds.")
    if target is None and budget is None:
        raise PolicyError(
            f"{where} names neither `to` nor `budget_s`.", next_step='Say where to promote: promote = {from = "H100", to = "H200"}.'
        )
    if budget is None and source is not None and str(target).lower() == source.lower():
        raise PolicyError(f"{where}: from and to are both {source!r}.", next_step="Name another type in `to`, or a longer budget_s.")
    top, seeds = _count(table, "top", 3, where), _count(table, "seeds", 1, where)
    return Rule(source, target, top, seeds, float(budget) if budget is not None else None)


def _text(table: dict[str, Any], key: str, where: str) -> str | None:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise PolicyError(f"{where}: {key} is {value!r}.", next_step='Allowed: a part of a GPU name, for example "H200".')
    return value


def _count(table: dict[str, Any], key: str, default: int, where: str) -> int:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 64:
        raise PolicyError(f"{where}: {key} is {value!r}.", next_step="Allowed: 1 to 64.")
    return value
