"""A log that follows its end until someone scrolls up, wraps long lines, and can be searched. Its text is never markup."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from ..lines import Line
from .view import Lines


def wrap(text: str, width: int) -> list[str]:
    """One line of text as rows of at most `width` characters."""
    text = text.expandtabs(8)
    return [text[i : i + width] for i in range(0, len(text), width)] or [""]


class LogPane(Lines):
    """The tail of a log."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "by(1)", "down", show=False),
        Binding("k,up", "by(-1)", "up", show=False),
        Binding("g,home", "by(-10000000)", "top", show=False),
        Binding("G,end", "follow", "follow the end", show=False),
        Binding("ctrl+d,pagedown", "leaf(1)", "page down", show=False),
        Binding("ctrl+u,pageup", "leaf(-1)", "page up", show=False),
        Binding("n", "match(1)", "next match", show=False, tooltip="The next line that matches the search"),
        Binding("b", "match(-1)", "match before", show=False, tooltip="The match before"),
    ]

    def __init__(self, *, id: str | None = None, title: str = "Log", empty: str = "no output yet") -> None:
        super().__init__(id=id, title=title)
        self.empty = empty
        self.text = ""
        self.needle = ""
        self.following = True
        self._wrapped: tuple[str, int, str, str] = ("", 0, "", "")

    def show_text(self, text: str) -> None:
        """Take the newest tail of the log."""
        width = max(10, self.scrollable_content_region.width - 1)
        self.text = text
        wanted = (text, width, self.needle, self.empty)
        if self._wrapped == wanted:
            return
        self._wrapped = wanted
        rows = [r for t in text.rstrip("\n").split("\n") for r in wrap(t, width)] if text.strip() else []
        low = self.needle.lower()
        self.show([Line((r, "mark" if low and low in r.lower() else "")) for r in rows] or [Line((self.empty, "muted"))])
        if self.following:
            self.scroll_end(animate=False)
        self._title()

    def _title(self) -> None:
        hits = sum(1 for line in self.lines if line.spans and line.spans[0][1] == "mark")
        right = f"{hits} matches, n b" if self.needle else ""
        self.caption("Log" + ("" if self.following else " (G follows the end)"), right)

    def search(self, needle: str) -> None:
        """Mark the rows that hold `needle`, and go to the last one."""
        self.needle = needle
        self.show_text(self.text)
        if needle:
            self.action_match(-1)

    def action_by(self, rows: int) -> None:
        """Scroll; going up stops following."""
        self.following = False
        self.scroll_to(y=round(self.scroll_y) + rows, animate=False)
        if round(self.scroll_y) >= self.max_scroll_y:
            self.following = True
        self._title()

    def action_leaf(self, by: int) -> None:
        """Scroll by a page."""
        self.action_by(by * max(1, self.rows_high - 1))

    def action_follow(self) -> None:
        """Go to the end and stay there."""
        self.following = True
        self.scroll_end(animate=False)
        self._title()

    def action_match(self, by: int) -> None:
        """Go to the next or the previous match."""
        at = round(self.scroll_y)
        hits = [i for i, line in enumerate(self.lines) if line.spans and line.spans[0][1] == "mark"]
        wanted = [i for i in hits if (i > at if by > 0 else i < at)]
        if hits:
            self.following = False
            self.scroll_to(y=(wanted[0] if by > 0 else wanted[-1]) if wanted else (hits[-1] if by < 0 else hits[0]), animate=False)
            self._title()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """The wheel stops following as well."""
        self.following = False
        self._title()

    def on_resize(self, event: events.Resize) -> None:
        """Wrap anew."""
        self.show_text(self.text)
