"""The columns of every table of runs, waves, hosts and events: which key of a row, how wide, what leaves first when the room is short."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from runner import states
from runner.records import Event, Flag
from runner.text import plural

from .lines import Span, safe
from .widgets.table import Column, Row
from .words import TRUST, VERDICTS, age, number, run_state, short_gpu, value_text

BADGES = {"clear": ("clear", "good"), "within noise": ("noise", "warn"), "unknown": ("?", "muted"), "baseline": ("base", "accent")}


def words(key: str, limit: int = 200, style: str = "") -> Any:
    """A cell of outside text."""
    return lambda row: (safe(row.get(key), limit), style)


def figures(key: str, digits: int = 0, unit: str = "", style: str = "") -> Any:
    """A cell of a number."""
    return lambda row: (number(row.get(key), digits, unit), style)


def order(key: str) -> Any:
    """Sort by a value that may be missing."""
    return lambda row: row.get(key)


def run_number(row: Row) -> int | None:
    """Runs sort by their number, not as text."""
    digits = "".join(c for c in str(row.get("id")) if c.isdigit())
    return int(digits) if digits else None


def what(row: Row) -> Span:
    """What a run is about: what it changes, then its hypothesis."""
    return (_what(row, str), "")


def what_short(row: Row) -> Span:
    """The same with the initials of the constants: their values are what tells the runs of a wave apart."""
    names = short_names(_changes(row))
    return (_what(row, lambda name: names[name]), "")


def _changes(row: Row) -> Mapping[str, Any]:
    return row.get("changes") or row.get("cell") or row.get("overrides") or {}


def _what(row: Row, name: Callable[[str], str]) -> str:
    changed = ", ".join(f"{name(k)}={value_text(v)}" for k, v in _changes(row).items())
    told = row.get("hypothesis")
    return safe(f"{changed} · {told}" if changed and told else changed or told or row.get("purpose"), 200)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """`TOTAL_BATCH_SIZE` as `TBS`: the first letters of each word, as many as keep the names apart; one word stays a word."""
    known = list(names)
    for letters in range(1, 9):
        found = {n: "".join(w[:letters] for w in n.split("_")) if "_" in n.strip("_") else n[: 4 + letters] for n in known}
        if len(set(found.values())) == len(known):
            return found
    return {n: n for n in known}


def verdict(row: Row) -> Span:
    """keep, drop or nothing."""
    return VERDICTS.get(str(row.get("verdict")), ("", ""))


def trust(row: Row) -> Span:
    """Whether the result was recomputed: ✓ verified, ✕ refuted, · claimed, ? cannot be; ! something speaks against it."""
    if row.get("doubt"):
        return ("!", "bad")
    return TRUST.get(str(row.get("trust")), (" ", ""))


def gain(row: Row) -> Span:
    """Gain over the baseline; positive is better, its colour only where it is clear of the noise."""
    value = row.get("gain")
    if not isinstance(value, (int, float)):
        return ("-", "muted")
    text = f"{value:+.4f}"
    if float(text) == 0:
        text = "0"
    return (text, ("good" if value > 0 else "bad") if row.get("badge") == "clear" else "")


def flags(row: Row) -> Span:
    """How many flags, and the worst."""
    found = row.get("flags") or []
    if not found:
        return ("", "")
    worst = "bad" if any(f.get("severity") == "bad" for f in found) else "warn"
    return (f"⚑{len(found)}", worst)


def place(row: Row) -> Span:
    """The place in the queue; `?` while it waits for approval."""
    return ("?", "warn") if row.get("phase") == "proposed" else (number(row.get("queue_position")), "muted")


QUEUE = [
    Column("place", "#", 3, place, "right"),
    Column("id", "run", 6, words("id", 12, "strong"), order=run_number),
    Column(
        "priority",
        "pri",
        4,
        lambda r: (number(r.get("priority"), 0) if r.get("priority") else "", ""),
        "right",
        order=order("priority"),
        drop=5,
    ),
    Column("gpu", "wants", 8, lambda r: (safe(r.get("gpu_type") or r.get("host") or "any", 30), "muted"), drop=4),
    Column("wave", "wave", 4, lambda r: (safe(r.get("wave") or "", 8), "muted"), drop=3),
    Column("what", "what", 24, what, flex=True, short=what_short),
    Column("age", "age", 5, lambda r: (age(r.get("age_s")), "muted"), "right", order=order("age_s"), drop=2),
]

BOARD = [
    Column("rank", "#", 3, figures("rank", style="muted"), "right", order=order("rank")),
    Column("id", "run", 6, words("id", 12, "strong"), order=run_number),
    Column("val", "val_bpb", 8, figures("val_bpb", 6), "right", order=order("val_bpb")),
    Column("trust", "", 1, trust),
    Column("gain", "gain", 7, gain, "right", order=order("gain"), drop=2),
    Column("se", "±", 6, lambda r: (number(r.get("gain_se"), 4), "muted"), "right", drop=5),
    Column("badge", "noise", 5, lambda r: BADGES.get(str(r.get("badge")), ("", "")), drop=3),
    Column("verdict", "", 4, verdict, drop=1),
    Column("seeds", "n", 2, figures("seed_n", style="muted"), "right", order=order("seed_n"), drop=4),
    Column("params", "params", 7, figures("params_m", 1, "M", "muted"), "right", order=order("params_m"), drop=8),
    Column("steps", "steps", 6, figures("num_steps", style="muted"), "right", order=order("num_steps"), drop=7),
    Column("wave", "wave", 4, lambda r: (safe(r.get("wave") or "", 8), "muted"), drop=6),
    Column("what", "what", 24, what, flex=True, short=what_short),
]

RUNS = [
    Column("id", "run", 6, words("id", 12, "strong"), order=run_number),
    Column("state", "state", 13, run_state, order=lambda r: str(r.get("outcome") or r.get("phase"))),
    Column("val", "val_bpb", 8, figures("val_bpb", 6), "right", order=order("val_bpb")),
    Column("trust", "", 1, trust),
    Column("verdict", "", 4, verdict, drop=2),
    Column("flags", "", 2, flags, drop=1),
    Column("budget", "budget", 6, figures("budget_s", 0, "s"), "right", order=order("budget_s"), drop=5),
    Column("mfu", "MFU", 6, figures("mfu_percent", 1, "%"), "right", order=order("mfu_percent"), drop=6),
    Column(
        "gpu",
        "GPU",
        10,
        lambda r: (short_gpu(r.get("gpu")) if r.get("gpu") else safe(r.get("gpu_type") or "-", 20), "muted"),
        order=lambda r: str(r.get("gpu")),
        drop=7,
    ),
    Column("host", "host", 8, words("host", 20, "muted"), order=lambda r: str(r.get("host")), drop=8),
    Column("wave", "wave", 4, lambda r: (safe(r.get("wave") or "", 8), "muted"), order=lambda r: str(r.get("wave")), drop=4),
    Column("agent", "by", 10, words("agent", 30, "muted"), order=lambda r: str(r.get("agent")), drop=9),
    Column("what", "what", 22, what, flex=True, short=what_short),
    Column("age", "age", 5, lambda r: (age(r.get("age_s")), "muted"), "right", order=order("age_s"), drop=3),
]

EVENTS = [
    Column("age", "ago", 5, lambda r: (age(r.get("age_s")), "muted"), "right", order=order("age_s")),
    Column("who", "who", 8, words("who", 40, "muted"), order=lambda r: str(r.get("who"))),
    Column("verb", "what", 12, lambda r: (safe(r.get("verb"), 30), str(r.get("style") or "")), order=lambda r: str(r.get("verb"))),
    Column("subject", "subject", 8, words("subject", 40, "strong"), order=lambda r: str(r.get("subject"))),
    Column("why", "why", 8, lambda r: (safe(r.get("why") or "", 300), ""), flex=True, drop=1),
]

WAVES = [
    Column("id", "wave", 5, words("id", 12, "strong"), order=run_number),
    Column("done", "done", 8, lambda r: (f"{number(r.get('ended'))}/{number(r.get('total'))}", ""), "right"),
    Column("running", "live", 4, figures("running"), "right", drop=2),
    Column("best", "best", 8, figures("best", 6, style="good"), "right", order=order("best")),
    Column("factors", "factors", 20, lambda r: (factor_text(r), ""), flex=True),
    Column("title", "title", 14, lambda r: (safe(r.get("title") or r.get("hypothesis") or "", 200), "muted"), flex=True, drop=1),
    Column("agent", "by", 10, words("agent", 30, "muted"), drop=4),
    Column("age", "age", 5, lambda r: (age(r.get("age_s")), "muted"), "right", drop=3),
]

HOSTS = [
    Column("name", "host", 14, words("name", 30, "strong"), order=lambda r: str(r.get("name"))),
    Column("kind", "kind", 5, words("kind", 10, "muted"), drop=3),
    Column("state", "state", 10, lambda r: host_state(r), order=lambda r: str(r.get("state"))),
    Column("since", "since", 6, lambda r: (age(r.get("since_s")), "muted"), "right", drop=2),
    Column("gpus", "GPUs", 5, lambda r: (f"{number(r.get('busy'))}/{number(r.get('gpus'))}", ""), "right"),
    Column("disk", "disk", 8, lambda r: (number((r.get("disk_free_mib") or 0) / 1024 or None, 0, " GiB"), ""), "right", drop=1),
    Column("checked", "checked", 8, lambda r: (age(r.get("checked_s")), "muted"), "right", drop=4),
    Column("error", "", 10, lambda r: (safe(r.get("error") or "", 300), "bad"), flex=True),
]


HOST_GLYPHS = {
    "up": ("●", "good"),
    "down": ("✕", "bad"),
    "unfit": ("!", "bad"),
    "new": ("·", "muted"),
    "paused": ("‖", "warn"),
    "draining": ("↓", "warn"),
    "removed": ("×", "muted"),
}


def factor_text(row: Mapping[str, Any]) -> str:
    """`DEPTH 4, 6, 8 × LR 0.02, 0.04`."""
    return " × ".join(
        f"{safe(k, 30)} {', '.join(value_text(v) for v in values)}" for k, values in (row.get("factors") or {}).items()
    ) or plural(int(row.get("repeats") or 1), "repeat")


def host_state(row: Row) -> Span:
    """The state of a host, and what a human told it."""
    state = safe(row.get("state"), 12)
    glyph, style = HOST_GLYPHS.get(state, ("·", ""))
    return (f"{glyph} {state}", style)


def event_rows(events: Iterable[Event], now: float) -> list[Row]:
    """Events as rows."""
    return [
        {"event": str(e.id), "age_s": now - e.at, "who": e.who, "verb": e.verb, "subject": e.subject, "why": states.event_words(e)}
        for e in events
    ]


def flag_rows(found: Iterable[Flag], now: float) -> list[Row]:
    """Flags that are up, in the form of events: worst first."""
    rank = {"bad": 0, "warn": 1, "info": 2}
    rows = sorted(found, key=lambda f: (rank.get(str(f.severity), 3), -f.raised_at))
    return [
        {
            "event": f"flag:{f.subject}:{f.kind}",
            "age_s": now - f.raised_at,
            "who": "flag",
            "verb": f.kind,
            "subject": f.subject,
            "why": f.evidence,
            "flags": [{"kind": f.kind}],
            "style": "bad" if f.severity == "bad" else "warn" if f.severity == "warn" else "",
        }
        for f in rows
    ]


def wave_columns(factors: Mapping[str, Sequence[Any]]) -> list[Column]:
    """The runs of one wave: a column for each factor instead of what all of them share."""
    names = short_names(factors)
    return [
        *[c for c in RUNS if c.key in ("id", "state", "val", "trust", "verdict", "flags")],
        *[_factor(name, names[name], values, at) for at, (name, values) in enumerate(factors.items())],
        Column("seed", "seed", 6, figures("seed", style="muted"), "right", order=order("seed"), drop=4),
        *[c for c in RUNS if c.key in ("mfu", "gpu", "host", "agent")],
        Column("why", "why", 10, words("hypothesis"), flex=True, drop=3),
        *[c for c in RUNS if c.key == "age"],
    ]


def _factor(name: str, short: str, values: Sequence[Any], at: int) -> Column:
    texts = [value_text(v) for v in values]
    wide = max([len(t) for t in texts] + [min(len(name), 12)])
    title = safe(name if len(name) <= wide else short, 20)

    def level(row: Row) -> Any:
        return (row.get("cell") or {}).get(name, (row.get("constants") or {}).get(name))

    def rank(row: Row) -> int | None:
        text = value_text(level(row))
        return texts.index(text) if text in texts else None

    return Column(f"factor{at}", title, min(wide, 20), lambda r: (value_text(level(r)), "accent"), "right", order=rank)
