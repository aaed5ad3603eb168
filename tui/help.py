"""The page of keys, made from the bindings in force: what is bound is listed, and nothing else can be."""

from __future__ import annotations

from typing import Any

from textual.binding import Binding
from textual.screen import Screen

from .lines import Line, fit

GRAMMAR = (
    ("words", "every word must be in the row"),
    ("gpu:h200 wave:w3", "field:text, a part of it; several with a comma, any, none"),
    ("val<0.99 age<2h", "field and number: < <= > >= = !="),
    ("DEPTH=12", "a constant of the script"),
    ("-wave:w3", "turned round by a minus"),
)


def key_lines(screen: Screen[Any]) -> list[Line]:
    """Two columns: keys and what they do, nearest first; the filter grammar last."""
    seen: dict[str, tuple[Binding, list[str]]] = {}
    for active in screen.active_bindings.values():
        binding = active.binding
        if not active.enabled or not binding.description or binding.key.startswith(("ctrl+c", "super+")):
            continue
        kept = seen.get(binding.action)
        if kept is None:
            kept = (binding, [])
            seen[binding.action] = kept
        display = screen.app.get_key_display(binding)
        if display not in kept[1]:
            kept[1].append(display)
    out = [Line((fit(" ".join(keys), 16), "key"), (binding.tooltip or binding.description, "")) for binding, keys in seen.values()]
    out += [Line(), Line(("The / filter", "title"))]
    return out + [Line((fit(term, 18), "key"), (meaning, "muted")) for term, meaning in GRAMMAR]
