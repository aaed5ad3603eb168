"""The page of keys, made from the bindings themselves: all that a page has, what does not apply right now in a quieter colour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from textual.binding import Binding, BindingType

from .deeds import RUN_BINDINGS
from .lines import Line, fit, wrap_words

if TYPE_CHECKING:
    from .screens.page import Page

SIGNS = {
    "question_mark": "?", "colon": ":", "slash": "/", "plus": "+", "minus": "-", "equals_sign": "=", "left_square_bracket": "[",
    "right_square_bracket": "]", "vertical_line": "|", "left": "←", "right": "→", "up": "↑", "down": "↓", "enter": "⏎", "escape": "Esc",
    "space": "Space", "pagedown": "PgDn", "pageup": "PgUp", "home": "Home", "end": "End",
}  # fmt: skip
GRAMMAR = (
    ("words", "every word must be in the row"),
    ("gpu:h200 wave:w3", "field:text, a part of it; several with a comma, any, none"),
    ("val<0.99 age<2h", "field and number: < <= > >= = !="),
    ("DEPTH=12", "a constant of the script"),
    ("-wave:w3", "turned round by a minus"),
)
MOUSE = (
    ("click", "moves the cursor; on a heading, sorts"),
    ("double click", "opens"),
    ("Shift-drag", "selects text (your terminal's own; in some Alt or Option)"),
)
WIDE = 18


def sign(key: str) -> str:
    """How a key is written."""
    held, _, last = key.rpartition("+")
    return f"Ctrl-{SIGNS.get(last, last.upper())}" if held == "ctrl" else SIGNS.get(key, key)


def signs(binding: Binding) -> str:
    """All keys of a binding."""
    return " ".join(sign(key) for key in binding.key.split(","))


def own(bindings: Iterable[BindingType], *, without: Iterable[BindingType] = ()) -> list[Binding]:
    """The bindings of a class that have words."""
    left_out = list(without)
    return [b for b in bindings if isinstance(b, Binding) and b.description and b not in left_out]


def sections(page: Page) -> list[tuple[str, list[Binding]]]:
    """What a person may press here, nearest to the work first."""
    found = [("On this page", own(page.BINDINGS, without=RUN_BINDINGS))]
    if any(b in page.BINDINGS for b in RUN_BINDINGS):
        found.append(("Runs: those marked, or the one under the cursor", own(RUN_BINDINGS)))
    focused = page.focused
    if focused is not None:
        kinds = [c for c in type(focused).__mro__ if c.__module__.startswith(f"{__package__}.")]
        moves: dict[str, Binding] = {}
        for kind in kinds:
            for binding in own(vars(kind).get("BINDINGS", [])):
                moves.setdefault(binding.description, binding)
        found.append(("In this pane", list(moves.values())))
    return [*found, ("Everywhere", own(page.room.BINDINGS))]


def told(term: str, words: str, width: int, key: str = "key", style: str = "") -> list[Line]:
    """A key or term, and beside it what it means in as many rows as that takes."""
    rows = wrap_words(words, max(10, width - WIDE)) or [""]
    return [Line((fit("" if at else term, WIDE), key), (row, style)) for at, row in enumerate(rows)]


def key_lines(page: Page, width: int) -> list[Line]:
    """The page of keys: keys and what they do, then the mouse and the filter's grammar."""
    active: Mapping[str, object] = page.active_bindings
    out: list[Line] = []
    if page.room.readonly:
        out += [*(Line((row, "warn")) for row in wrap_words("Opened read-only: keys that change anything do nothing.", width)), Line()]
    for title, bindings in sections(page):
        out.append(Line((title, "title")))
        for binding in bindings:
            usable = any(key in active for key in binding.key.split(","))
            words = binding.tooltip or binding.description
            out += told(signs(binding), words, width, "key" if usable else "muted", "" if usable else "muted")
        out.append(Line())
    out[-1:] = [*told("Tab Shift-Tab", "the next pane, the pane before", width), Line()]
    for title, rows in (("Mouse", MOUSE), ("The / filter", GRAMMAR)):
        out.append(Line((title, "title")))
        out += [line for term, meaning in rows for line in told(term, meaning, width, style="muted")]
        out.append(Line())
    return out[:-1]
