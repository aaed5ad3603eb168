"""What the terminal shows already, so that nothing is sent twice: Textual paints a page that opens or comes back up to four times.

Works on what is written to the terminal: parts of rows, each behind the move to its place, made of texts that bring their colours. A text
that stands there is left out; what is not understood passes and makes everything forgotten, which costs bytes and is never wrong.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.cells import cell_len

MOVE = re.compile(r"\x1b\[(\d+);(\d+)H")
TEXT = re.compile(r"\x1b\[[\d;]+m([^\x00-\x1f\x7f-\x9f]*)\x1b\[0m|([^\x00-\x1f\x7f-\x9f]+)")
HARMLESS = re.compile(r"(?:\x1b\[[<>?]?[\d;]*(?:[hlmu]|\$p))*")  # modes and colours: the picture stays
OTHER_SCREEN = "?1049"  # but for the mode that exchanges it


@dataclass(frozen=True, slots=True)
class Piece:
    """A text with its colours, and the columns it covers."""

    start: int
    end: int
    text: str


class Picture:
    """The pieces that were written last, by row and first column."""

    def __init__(self) -> None:
        self._rows: dict[int, dict[int, Piece]] = {}
        self._cursor: tuple[int, int] | None = None

    def forget(self) -> None:
        """Nothing is known of the terminal any more: it was resized, or something else wrote to it."""
        self._rows, self._cursor = {}, None

    def news(self, data: str) -> str:
        """What of `data` the terminal does not show yet."""
        before, *rest = MOVE.split(data)
        if not HARMLESS.fullmatch(before) or OTHER_SCREEN in before:
            self.forget()
            return data
        out = [before]
        for row, column, text in zip(map(int, rest[::3]), map(int, rest[1::3]), rest[2::3], strict=True):
            out.append(self._row(row, column, text.rstrip("\n")))  # a line feed stands between rows; every row is moved to
            if out[-1]:
                self._cursor = None
        if rest and not rest[-1] and self._cursor != (at := (int(rest[-3]), int(rest[-2]))):
            out.append(f"\x1b[{at[0]};{at[1]}H")  # where the cursor is left: an input method opens there
            self._cursor = at
        return "".join(out)

    def _row(self, row: int, column: int, text: str) -> str:
        """What of a part of a row is new; it stands there from now on."""
        pieces = pieces_of(column, text)
        if pieces is None:
            self._rows.pop(row, None)
            return f"\x1b[{row};{column}H{text}"
        known, out, at = self._rows.setdefault(row, {}), [], None
        for piece in pieces:
            if known.get(piece.start) == piece:
                continue
            for old in [p for p in known.values() if p.start < piece.end and p.end > piece.start]:
                del known[old.start]
            known[piece.start] = piece
            out.append(piece.text if at == piece.start else f"\x1b[{row};{piece.start}H{piece.text}")
            at = piece.end
        return "".join(out)


def pieces_of(column: int, text: str) -> list[Piece] | None:
    """The texts of a part of a row; None where it holds anything but texts that bring their colours and take them away again."""
    pieces, at = [], 0
    while at < len(text):
        found = TEXT.match(text, at)
        if found is None:
            return None
        at = found.end()
        letters = found[1] or found[2] or ""
        width = cell_len(letters)
        if letters and not width:
            return None  # it changes the letter before
        if width:
            pieces.append(Piece(column, column + width, found[0]))
            column += width
    return pieces
