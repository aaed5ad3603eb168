"""What is said of a GPU: pure functions from its object (with its run as `run_object`) to short texts; no Textual, for `--once` as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .lines import Span, crop, safe, spark
from .words import GPU_GLYPHS, age, clock, gib, number, state_word, throttled

Row = Mapping[str, Any]
STALE_S = 10.0


def label(gpu: Row, width: int = 24) -> str:
    """`host:index`, or the host alone for a CPU slot; where room is short the host gives way, never the index."""
    index = gpu.get("index")
    end = "" if index is None else f":{index}"
    return crop(safe(gpu.get("host"), 20), width - len(end)) + end


def stale(gpu: Row) -> bool:
    """Whether nothing has been heard of the GPU for so long that its figures must not look alive."""
    old_s = gpu.get("sample_age_s")
    return gpu.get("state") in ("lost", "down") or (isinstance(old_s, (int, float)) and old_s > STALE_S)


def mfu_text(gpu: Row) -> str:
    """MFU in percent; `?` when the card's peak is not known; suspect figures say so."""
    value = gpu.get("mfu_percent")
    if stale(gpu) or (gpu.get("run_object") or {}).get("phase") == "unreachable":
        return "-"
    if isinstance(value, (int, float)):
        return number(value, 1, "%") + ("!" if value > 100 else "")
    return "?" if gpu.get("tok_s") is not None and gpu.get("index") is not None else "-"


def sample_of(gpu: Row) -> Mapping[str, Any]:
    """The newest sample, empty once it is old: a figure that no longer moves must not look alive."""
    return {} if stale(gpu) else gpu.get("sample") or {}


def memory_text(gpu: Row) -> str:
    """Memory used and there, in GiB."""
    sample = sample_of(gpu)
    if sample.get("mem_used_mib") is None:
        return "-"
    return f"{gib(sample['mem_used_mib'])}/{number((sample.get('mem_total_mib') or 0) / 1024 or None)}G"


def power_text(gpu: Row) -> str:
    """Watts drawn and allowed: a capped card honestly reads low."""
    sample = sample_of(gpu)
    if sample.get("power_w") is None:
        return "-"
    return f"{number(sample['power_w'])}/{number(sample.get('power_limit_w'))}W"


def heat(gpu: Row) -> Span:
    """Temperature, warm at 80 and hot at 88 degrees."""
    value = sample_of(gpu).get("temp_c")
    style = "" if not isinstance(value, (int, float)) or value < 80 else "warn" if value < 88 else "bad"
    return (number(value, 0, "°C"), style)


def note(gpu: Row) -> Span:
    """What is wrong with the GPU or slows it; empty when nothing."""
    if gpu.get("state") in ("quarantined", "lost", "foreign", "down", "held"):
        return (safe(gpu.get("reason") or gpu.get("state"), 160), "warn" if gpu["state"] in ("foreign", "held") else "bad")
    if sample_of(gpu).get("error"):
        return (safe(sample_of(gpu)["error"], 80), "warn")
    old_s = gpu.get("sample_age_s")
    if isinstance(old_s, (int, float)) and old_s > STALE_S:
        return (f"no data for {age(old_s)}", "warn")
    slow = throttled(sample_of(gpu).get("throttle"))
    return (slow, "warn") if slow not in ("", "-") else ("", "")


def stage_text(gpu: Row) -> Span:
    """What the GPU is doing, in a word."""
    run = gpu.get("run_object") or {}
    if gpu.get("run"):
        if run.get("phase") == "unreachable":
            return ("no link", "warn")
        return (state_word(run) if run else "run", "")
    state = safe(gpu.get("state"), 12)
    return ({"free": "idle", "quarantined": "quarantine"}.get(state, state), GPU_GLYPHS.get(str(gpu.get("state")), ("", ""))[1])


def figure(run: Row) -> str:
    """The newest figure of a run: its result, else its loss."""
    if run.get("val_bpb") is not None:
        return f"val {number(run['val_bpb'], 4)}"
    return f"loss {number(run.get('loss'), 4)}"


def eta(run: Row) -> str:
    """Time left of the budget; of a run out of reach nobody knows it."""
    return "-" if run.get("phase") == "unreachable" else clock(run.get("remaining_s"))


def history(gpu: Row) -> list[float | None]:
    """The newest MFU figures, or utilisation where there is no MFU."""
    return list(gpu.get("history") or [])


def steady(values: list[float | None], width: int) -> str:
    """A history from 0 to a little above its highest: a steady rate looks steady, a dip shows."""
    high = max((v for v in values if v is not None and v == v and abs(v) != float("inf")), default=0.0)
    return spark(values, width, 0, high * 1.2 if high > 0 else 1.0)
