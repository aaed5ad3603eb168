"""The short forms the screen uses: glyphs and styles of states, clocks, sizes. Pure functions; a state is never told by colour alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .lines import Span, safe

# NVML's clocks event reasons (nvml.h, nvmlClocksEventReason*): only those that cost speed.
THROTTLE_BITS = (
    (0x04, "power cap"),
    (0x08, "hw slowdown"),
    (0x20, "thermal"),
    (0x40, "hw thermal"),
    (0x80, "power brake"),
    (0x10, "sync boost"),
)
GPU_GLYPHS = {
    "free": ("○", "muted"),
    "busy": ("▶", "good"),
    "quarantined": ("!", "bad"),
    "foreign": ("◆", "warn"),
    "lost": ("✕", "bad"),
    "down": ("~", "bad"),
    "held": ("‖", "warn"),
}
PHASE_GLYPHS = {
    "proposed": ("?", "warn"),
    "queued": ("·", "muted"),
    "starting": ("▷", "accent"),
    "running": ("▶", "good"),
    "finishing": ("▶", "accent"),
    "unreachable": ("~", "warn"),
    "ended": ("■", ""),
}
OUTCOME_GLYPHS = {
    "completed": ("✓", "good"),
    "no_result": ("∅", "warn"),
    "crashed": ("✕", "bad"),
    "diverged": ("↯", "bad"),
    "timed_out": ("◷", "warn"),
    "cancelled": ("×", "muted"),
    "declined": ("×", "muted"),
    "pruned": ("✂", "muted"),
    "lost": ("✕", "bad"),
    "kill_failed": ("!", "bad"),
}
VERDICTS = {"keep": ("keep", "good"), "discard": ("drop", "muted")}
TRUST = {"verified": ("✓", "good"), "refuted": ("✕", "bad"), "claimed": ("·", "muted"), "unverifiable": ("?", "muted")}
STAGES = {"standby": "standby", "compiling": "compile", "training": "train", "evaluating": "eval"}


def clock(seconds: float | None) -> str:
    """A duration in at most six cells: `52s`, `3:20`, `1h05`, `2d03h`."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    s = max(0, int(seconds))
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}:{s % 60:02d}"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"


def age(seconds: float | None) -> str:
    """How old something is, in one unit below a day: `52s`, `9m`, `1h05`; an age that ticks every second is repainted every second."""
    if seconds is None or not math.isfinite(seconds) or not 60 <= seconds < 3600:
        return clock(seconds)
    return f"{int(seconds) // 60}m"


def number(value: Any, digits: int = 0, unit: str = "") -> str:
    """A finite number with its unit, else `-`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "-"
    text = f"{value:.{digits}f}"
    if float(text) == 0:
        text = text.lstrip("-")
    return text + unit


def gib(mib: Any) -> str:
    """MiB as GiB: `61.2`, or `-`."""
    return number(mib / 1024 if isinstance(mib, (int, float)) else None, 1)


def rate(tok_s: Any) -> str:
    """Tokens a second: `912`, `84.1k`, `1.21M`."""
    if isinstance(tok_s, bool) or not isinstance(tok_s, (int, float)) or not math.isfinite(tok_s):
        return "-"
    for size, unit, digits in ((1e6, "M", 2), (1e3, "k", 1)):
        if tok_s >= size:
            return f"{tok_s / size:.{digits}f}{unit}"
    return f"{tok_s:.0f}"


def throttled(mask: Any) -> str:
    """The reasons a GPU runs slower than it could; empty when none, `-` when not known."""
    if not isinstance(mask, int):
        return "-"
    return ", ".join(word for bit, word in THROTTLE_BITS if mask & bit)


def short_gpu(name: Any) -> str:
    """`NVIDIA H100 80GB HBM3` as `H100 80GB`: the maker's and the memory's name say nothing new."""
    words = [
        w
        for w in safe(name, 60).split()
        if w not in ("NVIDIA", "GeForce", "Tesla", "AMD", "HBM3", "HBM3e", "HBM2e", "PCIe", "SXM5", "SXM4")
    ]
    return " ".join(words) or "-"


def run_state(run: Mapping[str, Any]) -> Span:
    """One word and a glyph for where a run is, or how it ended."""
    if run.get("phase") == "ended":
        glyph, style = OUTCOME_GLYPHS.get(str(run.get("outcome")), ("■", ""))
        return (f"{glyph} {safe(run.get('outcome'), 12)}", style)
    glyph, style = PHASE_GLYPHS.get(str(run.get("phase")), ("·", ""))
    return (f"{glyph} {state_word(run)}", style)


def state_word(run: Mapping[str, Any]) -> str:
    """The state of a run object, short; what is out of reach with its age."""
    word = str(run.get("state") or run.get("phase"))
    if word == "unreachable":
        return f"no link {age(run.get('unreachable_s'))}"
    return STAGES.get(word, "") or safe(word, 12)


def value_text(value: Any) -> str:
    """A constant as a person writes it: powers of two as such when they are large."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int) and value >= 4096 and value & (value - 1) == 0:
        return f"2**{value.bit_length() - 1}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return safe(value, 40)
