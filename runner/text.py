"""Text from outside made safe to show, and numbers made readable: one owner for every face.

Names, paths, logs and hypotheses come from other programs. They are never markup, and never carry a control character to a terminal or a
tool result.
"""

from __future__ import annotations

import math
import re

# CSI, OSC (ended by BEL or ST), DCS/SOS/PM/APC strings, two-byte escapes; an unfinished sequence is cut at the end of its line.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[PX^_][^\x1b\n]*(?:\x1b\\)?|\x1b[ -/]*[0-~]?|\x9b[0-?]*[ -/]*[@-~]"
)
# C0 but tab, newline and carriage return; DEL; C1; bidi controls, zero-width marks, line separators and the byte-order mark; lone
# surrogates.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


ABSURD = 1e5  # no difference or bits per byte of this field is so large; more digits would only push a table apart


def clean(text: str, *, keep_newlines: bool = True) -> str:
    """Text without escape sequences, control, bidi and invisible characters; a carriage return becomes a new line."""
    text = _CONTROLS.sub("", _ESCAPES.sub("", text)).replace("\r\n", "\n").replace("\r", "\n")
    if keep_newlines:
        return text
    return " ".join(text.split())


def one_line(text: str | None, limit: int = 120) -> str:
    """Cleaned text on one line of at most `limit` characters; `-` when there is none."""
    if text is None:
        return "-"
    flat = clean(text, keep_newlines=False)
    return flat if len(flat) <= limit else flat[: max(limit - 1, 0)] + "…"


def finite(value: object) -> float | None:
    """A finite float, or None for anything else (NaN, infinities, text, absent, bool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def plural(count: int, word: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def bpb(value: float | None) -> str:
    """val_bpb as upstream prints it, six decimals; an absurd claim keeps to the width of a column."""
    if value is None:
        return "-"
    return f"{value:.6f}" if abs(value) < ABSURD else f"{value:.2e}"


def signed(value: float | None, digits: int = 6) -> str:
    """A difference with its sign; a value that rounds to nothing prints as 0, never as -0."""
    if value is None:
        return "-"
    if abs(value) >= ABSURD:
        return f"{value:+.2e}"
    text = f"{value:+.{digits}f}"
    return "0" if float(text) == 0 else text


def percent(value: float | None, digits: int = 1) -> str:
    """A percentage already in percent."""
    return "-" if value is None else f"{value:.{digits}f}%"


def significant(value: float | None, digits: int = 4) -> str:
    """A number with `digits` significant digits and without an exponent where that is readable."""
    if value is None:
        return "-"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        decimals = max(digits - 1 - (math.floor(math.log10(abs(value))) if value else 0), 0)
        return f"{value:.{decimals}f}"
    return f"{value:.{digits - 1}e}"


def thousands(value: float | None) -> str:
    """1,234,567; `-` when absent."""
    return "-" if value is None else f"{value:,.0f}"


def ago(seconds: float | None) -> str:
    """A duration in its two largest units: `8 s`, `3 min 20 s`, `5 h 02 min`, `2 d 3 h`."""
    if seconds is None:
        return "-"
    s = int(max(seconds, 0))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60:02d} s"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60:02d} min"
    return f"{s // 86400} d {s % 86400 // 3600} h"


def tsv_cell(text: object) -> str:
    """A cell of a TSV table: cleaned, without tabs and new lines."""
    return "" if text is None else clean(str(text), keep_newlines=False)


def markdown_cell(text: object) -> str:
    """A cell of a Markdown table: cleaned, one line, with every character Markdown or HTML would read escaped."""
    flat = tsv_cell(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)
