"""An edited hosts.toml against the accepted one, part by part: what takes effect at once, and what waits for a human.

A part waits when it lets agents spend or do more, or decides what is executed and where: that is what an agent with a text editor could
wish for. Everything else (a host that goes, fewer GPUs, a lower limit, a disk floor, a label, a price) takes effect whatever else the same
edit holds.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from runner.policy import HostPolicy, Limits, Policy

# Which way a limit is looser; None is no limit at all.
LOOSER = {
    "max_budget_s": 1,
    "max_runs": 1,
    "max_gpu_hours": 1,
    "max_wall_hours": 1,
    "max_runs_per_agent": 1,
    "max_queue": 1,
    "retry_lost": 1,
    "handed_ahead": 1,
    "wall_factor": 1,
    "wall_extra_s": 1,
    "min_free_disk_mib": -1,
    "max_log_mib": 1,
}
EXECUTED = (
    "folder", "command", "editable", "source", "budget", "data_command", "torch_index", "shims", "metric", "lower_is_better", "holdout",
)  # fmt: skip
# Where a host is and what runs there.
REACHED = ("kind", "address", "port", "user", "identity", "jump", "workdir", "python", "env", "surface")


def merged(old: Policy, new: Policy) -> tuple[Policy, list[str]]:
    """The policy of `new` but for the parts that wait, which stay as in `old`; and a sentence for each of those."""
    waiting: list[str] = []
    limits = _limits(old.limits, new.limits, waiting)
    kept = {}
    for key in EXECUTED:
        a, b = getattr(old.trainer, key), getattr(new.trainer, key)
        if a != b:
            kept[key] = a
            waiting.append(f"[trainer] {key}: {a} → {b}")
    trainer = dataclasses.replace(new.trainer, **kept)
    hosts = []
    for host in new.hosts:
        before = old.host(host.name)
        if before is None:
            waiting.append(f"[[host]] {host.name} is new")
        else:
            hosts.append(_host(before, host, waiting))
    return dataclasses.replace(new, trainer=trainer, limits=limits, hosts=hosts), waiting


def _limits(old: Limits, new: Limits, waiting: list[str]) -> Limits:
    kept: dict[str, Any] = {}
    for key, direction in LOOSER.items():
        a, b = getattr(old, key), getattr(new, key)
        if a != b and (b is None or (a is not None and (b - a) * direction > 0)):
            kept[key] = a
            waiting.append(f"[policy] {key}: {'no limit' if a is None else a} → {'no limit' if b is None else b}")
    if old.approval == "ask" and new.approval == "auto":
        kept["approval"] = old.approval
        waiting.append("[policy] approval: ask → auto")
    gone = [kind for kind in old.kill_on_flags if kind not in new.kill_on_flags]
    if gone:
        kept["kill_on_flags"] = [*new.kill_on_flags, *gone]
        waiting.extend(f"[policy] kill_on_flags no longer names {kind}" for kind in gone)
    found = dataclasses.replace(new, **kept)
    low = min(found.min_budget_s, found.max_budget_s)  # a range that only the waiting part makes whole
    return dataclasses.replace(found, min_budget_s=low, budget_s=min(max(found.budget_s, low), found.max_budget_s))


def _host(old: HostPolicy, new: HostPolicy, waiting: list[str]) -> HostPolicy:
    """The host with what may change at once."""
    kept = {key: getattr(old, key) for key in REACHED if getattr(old, key) != getattr(new, key)}
    if _more_gpus(old.gpus, new.gpus):
        kept["gpus"] = [g for g in old.gpus if new.gpus == "all" or g in new.gpus] or old.gpus
    if old.max_runs is not None and (new.max_runs is None or new.max_runs > old.max_runs):
        kept["max_runs"] = old.max_runs
    if kept:
        waiting.append(f"[[host]] {new.name}: {', '.join(kept)} changed")
    return dataclasses.replace(new, **kept)


def _more_gpus(old: str | list[Any], new: str | list[Any]) -> bool:
    """Whether a host is to give cards that it did not give (an index and a UUID may be one card: not known here, so it counts)."""
    if old == "all":
        return False
    return new == "all" or any(g not in old for g in new)


def to_toml(policy: Policy) -> str:
    """The policy as a hosts.toml that says every key; paths are whole, so that it means the same wherever it lies."""
    lines = ["# hosts.toml as far as it is in force; what waits for a human is left out. Written by Overnight."]
    if not policy.hosts:
        lines.append("host = []")
    trainer = {**_fields(policy.trainer), "folder": str(policy.trainer.folder), "budget": policy.trainer.budget or ""}
    lines += _table("[trainer]", trainer) + _table("[policy]", _fields(policy.limits))
    defaults = _fields(HostPolicy("-"))
    for host in policy.hosts:
        lines += _table("[[host]]", {k: v for k, v in _fields(host).items() if k == "name" or v != defaults.get(k)})
    lines += _table("[peaks]", policy.peaks)
    return "\n".join(lines) + "\n"


def _fields(record: Any) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def _table(head: str, values: dict[str, Any]) -> list[str]:
    return ["", head, *(f"{_key(key)} = {_value(value)}" for key, value in values.items() if value is not None)]


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _text(name)


def _text(text: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, Path)):
        return _text(str(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_key(str(k))} = {_value(v)}' for k, v in value.items() if v is not None)}}}"
    return repr(value)
