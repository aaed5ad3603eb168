"""Bytes of a run's log and events, read to points and facts; resumable at byte offsets and without state of its own.

Each call gets the bytes from where the last one stopped and says how many it consumed; what is not yet whole (a line, a summary block)
is left for the next call. Upstream's output is read as it is: progress led by a carriage return, and the block after `---`.
Non-finite numbers stop here.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass, field
from typing import Any

from runner.endings import End, classify_end
from runner.records import Point
from runner.text import clean, finite

__all__ = ["End", "EventsDelta", "LogDelta", "classify_end", "parse_events", "parse_log"]

MAX_LINE = 64 << 10  # a line without an end is cut here, so that a flood cannot stall the reader
MAX_BLOCK = 16 << 10  # a summary block is ten lines
FEW_POINTS = 200  # a chunk with more keeps one point for each tenth of a percent of the budget
MAX_WHOLE = 2**53  # what a float holds exactly; also fits SQLite

_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf(?:inity)?"
_PROGRESS = re.compile(r"^\s*step\s+(\d+)\s*(?:\(\s*(?P<share>[\d.]+)\s*%\s*\))?\s*\|(?P<rest>.*)$")
_FIELD = re.compile(rf"(loss|dt|tok/sec|mfu|epoch|remaining)\s*:\s*({_NUMBER})", re.IGNORECASE)
_WHOLE_PROGRESS = re.compile(rb"step \d+ \([\d.]+%\) \|.*\| remaining: \d+s {4}\Z", re.DOTALL)
_FAIL = re.compile(r"^\s*(?:step\s+\d.*\s)?FAIL\s*$")
_SUMMARY = re.compile(rf"^([a-z_A-Z]+)\s*:\s+({_NUMBER}|-)\s*$", re.IGNORECASE)
_FLOPS = re.compile(rf"^\s*Estimated FLOPs per token\s*:\s*({_NUMBER})", re.IGNORECASE)
_CONFIG = re.compile(r"^\s*Model config\s*:\s*(\{.*\})\s*$")

# Key of the summary block -> column of runs, and whether it counts things.
_COLUMNS: dict[str, tuple[str, bool]] = {
    "val_bpb": ("val_bpb", False),
    "training_seconds": ("training_s", False),
    "total_seconds": ("total_s", False),
    "peak_vram_mb": ("peak_vram_mb", False),
    "mfu_percent": ("mfu_reported", False),
    "total_tokens_M": ("tokens_m", False),
    "num_steps": ("num_steps", True),
    "num_params_M": ("params_m", False),
    "depth": ("depth", True),
}
_LAST_KEY = "depth"


@dataclass(slots=True)
class LogDelta:
    """What a chunk of out.log said.

    `nonfinite_steps` counts the progress lines with a NaN or infinite loss since the last finite one; `finite_step_seen` says whether to
    start that count anew. `summary_seen` means a val_bpb in the block after `---`; a bare `val_bpb:` line elsewhere sets the fact alone.
    """

    consumed: int = 0
    points: list[Point] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    fail_seen: bool = False
    summary_seen: bool = False
    nonfinite_steps: int = 0
    finite_step_seen: bool = False


@dataclass(slots=True)
class EventsDelta:
    """What a chunk of events.jsonl said; `error` is (cause, text) of an `error` event."""

    consumed: int = 0
    points: list[Point] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    stage: str | None = None
    notes: list[str] = field(default_factory=list)
    error: tuple[str, str] | None = None
    summary_seen: bool = False
    nonfinite_steps: int = 0
    finite_step_seen: bool = False


def parse_log(chunk: bytes, final: bool) -> LogDelta:
    """Read log bytes from an offset; `final` says that no more will come, so an unfinished line counts too."""
    out = LogDelta()
    start = 0
    for match in re.finditer(rb"[\r\n]+", chunk):
        line, line_start, start = chunk[start : match.start()], start, match.end()
        if line.strip() == b"---":
            end = _block(chunk, match.end(), final, out)
            if end is None:  # not all of it is there: the next call begins at the dashes
                out.consumed = line_start
                return _thinned(out)
        elif line:
            _line(line, out)
    rest = chunk[start:]
    if rest and (final or len(rest) > MAX_LINE or _WHOLE_PROGRESS.search(rest)):
        _line(rest, out)
        start = len(chunk)
    out.consumed = start
    return _thinned(out)


def _block(chunk: bytes, start: int, final: bool, out: LogDelta) -> int | None:
    """Read the summary block from `start` on; its end, or None when more of it may still come (what is there counts already)."""
    found: dict[str, str] = {}
    at: int | None = start
    for match in re.finditer(rb"([^\r\n]*)([\r\n]+|\Z)", chunk[start : start + MAX_BLOCK]):
        line = _text(match[1]).strip()
        if not match[2] and not final:
            at = None
            break
        key = _SUMMARY.match(line)
        if key and key[1] in _COLUMNS:
            found[key[1]] = key[2]
            at = start + match.end()
            if key[1] == _LAST_KEY:
                break
        elif line:
            break
    if "val_bpb" in found:
        out.facts.update(_summary_facts(found))
        out.summary_seen = True
    return at


def _summary_facts(found: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for key, raw in found.items():
        if key in _COLUMNS:
            column, whole = _COLUMNS[key]
            facts[column] = _count(raw) if whole else _quantity(raw)
    return facts


def _line(raw: bytes, out: LogDelta) -> None:
    line = _text(raw[:MAX_LINE])
    progress = _PROGRESS.match(line)
    if progress:
        _progress(progress, out)
        out.fail_seen = out.fail_seen or bool(_FAIL.match(line))
        return
    if _FAIL.match(line):
        out.fail_seen = True
        return
    key = _SUMMARY.match(line)
    if key and key[1] == "val_bpb":
        out.facts["val_bpb"] = _quantity(key[2])
        return
    flops = _FLOPS.match(line)
    if flops:
        out.facts["flops_per_token"] = _quantity(flops[1])
        return
    config = _CONFIG.match(line)
    if config:
        parsed = _config(config[1])
        if parsed:
            out.facts["model_config"] = parsed


def _progress(match: re.Match[str], out: LogDelta) -> None:
    fields = {k.lower(): v for k, v in _FIELD.findall(match["rest"])}
    share_percent = _quantity(match["share"])
    loss = _quantity(fields.get("loss"))
    share = None if share_percent is None else min(share_percent / 100, 1.0)
    point = Point(
        step=min(int(match[1][:18]), MAX_WHOLE),
        t=None,
        share=share,
        loss=loss,
        tok_s=_quantity(fields.get("tok/sec")),
        dt_ms=_quantity(fields.get("dt")),
        mfu=_quantity(fields.get("mfu")),
    )
    if "loss" in fields:
        out.nonfinite_steps = out.nonfinite_steps + 1 if loss is None else 0
        out.finite_step_seen = out.finite_step_seen or loss is not None
    out.points.append(point)
    out.facts.update(
        step=point.step,
        share=point.share,
        loss=loss,
        tok_s=point.tok_s,
        dt_ms=point.dt_ms,
        epoch=_quantity(fields.get("epoch")),
        remaining_s=_quantity(fields.get("remaining")),
    )


def _thinned(out: LogDelta) -> LogDelta:
    if len(out.points) > FEW_POINTS:
        kept = [p for p, after in zip(out.points, out.points[1:], strict=False) if p.share is None or p.share != after.share]
        out.points = [*kept, out.points[-1]]
    return out


def _text(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace")
    return clean(text) if "\x1b" in text or not text.isprintable() else text


def _quantity(value: Any) -> float | None:
    """A finite number of a log or an event, or None; thousands separators are read."""
    if isinstance(value, str):
        try:
            value = float(value.replace(",", ""))
        except ValueError:
            return None
    return None if isinstance(value, int) and abs(value) > 1 << 1000 else finite(value)  # a float ends at 2**1024


def _count(value: Any) -> int | None:
    number = _quantity(value)
    return int(number) if number is not None and abs(number) <= MAX_WHOLE and number == int(number) else None


def _config(text: str) -> dict[str, Any] | None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return _plain_object(value)


def _plain_object(value: Any) -> dict[str, Any] | None:
    """A small JSON object of a run's own words, cleaned; None for anything else."""
    if not isinstance(value, dict) or not value or len(value) > 64:
        return None
    return {clean(str(k), keep_newlines=False)[:60]: _plain(v, 3) for k, v in value.items()}


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) <= MAX_WHOLE else None
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict) and depth:
        return {clean(str(k), keep_newlines=False)[:60]: _plain(v, depth - 1) for k, v in list(value.items())[:64]}
    if isinstance(value, (list, tuple)) and depth:
        return [_plain(v, depth - 1) for v in value[:64]]
    return clean(str(value), keep_newlines=False)[:200]


def parse_events(chunk: bytes, final: bool) -> EventsDelta:
    """Read events.jsonl bytes from an offset; a line that is not a JSON object with an `event` is passed over."""
    out = EventsDelta()
    end = len(chunk) if final else chunk.rfind(b"\n") + 1
    if not end and len(chunk) > 16 * MAX_LINE:
        end = len(chunk)
    for raw in chunk[:end].split(b"\n"):
        if raw.strip():
            try:
                event = json.loads(raw.decode("utf-8", "replace"), parse_constant=lambda _: None)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                _event(event, out)
    out.consumed = end
    return out


def _event(event: dict[str, Any], out: EventsDelta) -> None:
    kind = event.get("event")
    if kind == "start":
        out.facts.update(_start_facts(event))
    elif kind == "attributes":  # what the start announced turned out otherwise: the compiler failed, say
        attributes = _plain_object(event.get("attributes"))
        out.facts.update({"attributes": attributes} if attributes else {})
    elif kind == "stage" and event.get("stage") in ("compiling", "training", "evaluating"):
        out.stage = str(event["stage"])
    elif kind == "step":
        _step_event(event, out)
    elif kind == "summary":
        facts = _summary_facts(event)
        if "val_bpb" in facts:
            out.facts.update(facts)
            out.summary_seen = True
    elif kind == "note" and event.get("text"):
        out.notes.append(clean(str(event["text"]), keep_newlines=False)[:500])
    elif kind == "error":
        out.error = (
            re.sub(r"[^a-z_]", "", str(event.get("cause") or "exception").lower())[:40] or "exception",
            clean(str(event.get("text") or ""), keep_newlines=False)[:500],
        )


def _start_facts(event: dict[str, Any]) -> dict[str, Any]:
    """Columns an announcement may fill. Not the GPU nor the evaluator: they make the class, which is not the script's to say."""
    facts: dict[str, Any] = {
        "flops_per_token": _quantity(event.get("flops_per_token")),
        "attributes": _plain_object(event.get("attributes")),
        "model_config": _plain_object(event.get("model_config")),
    }
    params = _quantity(event.get("num_params"))
    facts["params_m"] = None if params is None else params / 1e6
    for key, column in (("torch", "torch"), ("data", "data_hash")):
        value = event.get(key)
        facts[column] = clean(str(value), keep_newlines=False)[:120] if isinstance(value, (str, int, float)) and str(value) else None
    return {k: v for k, v in facts.items() if v is not None}


def _step_event(event: dict[str, Any], out: EventsDelta) -> None:
    step = _count(event.get("step"))
    if step is None or step < 0:
        return
    loss, share = _quantity(event.get("loss")), _quantity(event.get("share"))
    if "loss" in event:
        out.nonfinite_steps = out.nonfinite_steps + 1 if loss is None else 0
        out.finite_step_seen = out.finite_step_seen or loss is not None
    point = Point(
        step=step,
        t=_quantity(event.get("t")),
        share=None if share is None else min(max(share, 0.0), 1.0),
        loss=loss,
        tok_s=_quantity(event.get("tok_s")),
        dt_ms=_quantity(event.get("dt_ms")),
        mfu=_quantity(event.get("mfu_percent")),
    )
    out.points.append(point)
    out.facts.update(
        step=step,
        share=point.share,
        loss=loss,
        tok_s=point.tok_s,
        dt_ms=point.dt_ms,
        epoch=_quantity(event.get("epoch")),
        remaining_s=_quantity(event.get("remaining_s")),
    )
