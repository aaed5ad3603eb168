"""The screen for terminals whose font has no box, block or braille characters: every glyph as one ASCII character of the same width.

`--ascii` (or OVERNIGHT_ASCII=1) turns it on. It is applied where rows leave for the terminal, so that nothing else knows of it.
"""

from __future__ import annotations

from typing import ClassVar

from rich.cells import cell_len
from textual.scrollbar import ScrollBarRender

BRAILLE = 0x2800
UPPER, LOWER = 0x01 | 0x02 | 0x08 | 0x10, 0x04 | 0x40 | 0x20 | 0x80  # dots of the two upper and the two lower rows of a braille cell
SIGNS = {
    **dict.fromkeys("─━╌▔▁", "-"), **dict.fromkeys("│┃┤├", "|"), **dict.fromkeys("╭╮╰╯┌┐└┘┏┓┗┛", "+"),
    **dict(zip("▂▃▄▅▆▇█", ".:-=+*#", strict=True)), **dict.fromkeys("▏▎▍", " "), **dict.fromkeys("▌▋▊▉", "#"),
    "░": ".", "▒": ":", "▓": "+", "·": ".", "•": "*", "●": "*", "○": "o", "◆": "*", "▶": ">", "▷": ">", "■": "#", "▴": "^", "▾": "v",
    "▸": ">", "✓": "v", "✕": "x", "×": "x", "✂": "%", "∅": "0", "↯": "!", "◷": "@", "⚑": "!", "‖": "=", "↓": "v", "↑": "^", "→": ">",
    "↳": ">",    "←": "<", "⏎": "E", "…": "~", "±": "~", "°": " ", "–": "-",
}  # fmt: skip


def dots(char: str) -> str:
    """A braille cell as the half of the row its dots lie in."""
    bits = ord(char) - BRAILLE
    return " .':"[(1 if bits & LOWER else 0) + (2 if bits & UPPER else 0)]


def ascii_only(text: str) -> str:
    """The same text in as many cells, all ASCII; what has no likeness is a question mark a cell."""
    if text.isascii():
        return text
    out = []
    for char in text:
        if char.isascii():
            out.append(char)
        elif BRAILLE <= ord(char) < BRAILLE + 256:
            out.append(dots(char))
        else:
            out.append(SIGNS.get(char, "?" * cell_len(char)))
    return "".join(out)


class AsciiBars(ScrollBarRender):
    """Scroll bars whose ends are whole cells."""

    VERTICAL_BARS: ClassVar[list[str]] = [" "] * 8
    HORIZONTAL_BARS: ClassVar[list[str]] = [" "] * 8
