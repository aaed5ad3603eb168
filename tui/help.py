"""The page of keys, made from the bindings in force: what is bound is listed, and nothing else can be."""

from __future__ import annotations

from collections.abc import Iterable
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


def markdown() -> str:
    """docs/keys.md: the same keys as a page, made from the same bindings (`python -m tui.help`)."""
    from .app import ControlRoom
    from .deeds import RUN_BINDINGS
    from .screens.dashboard import Dashboard
    from .screens.events import EventsPage
    from .screens.hosts import HostsPage
    from .screens.lineage import LineagePage
    from .screens.run import RunPage
    from .screens.runs import RunsPage
    from .screens.wave import WavePage
    from .screens.waves import WavesPage
    from .widgets.logpane import LogPane
    from .widgets.table import Table

    run_keys = {b.action for b in RUN_BINDINGS if isinstance(b, Binding)}
    parts = ["# Keys", "Made from the bindings by `python -m tui.help`; in the control room `?` shows those that work where you are."]
    parts += [
        _section("Everywhere", ControlRoom.BINDINGS),
        _section("On a run, or on the marked ones", RUN_BINDINGS),
        _section("In every table", Table.BINDINGS),
    ]
    for page in (Dashboard, RunsPage, RunPage, WavesPage, WavePage, HostsPage, EventsPage, LineagePage):
        own = [b for b in page.BINDINGS if isinstance(b, Binding) and b.action not in run_keys]
        parts.append(_section(f"Page: {page.NAME}", own))
    parts.append(_section("In a log", LogPane.BINDINGS))
    return "\n\n".join(parts) + "\n"


def _section(title: str, bindings: Iterable[Any]) -> str:
    names = {
        "question_mark": "?",
        "slash": "/",
        "colon": ":",
        "left_square_bracket": "[",
        "right_square_bracket": "]",
        "vertical_line": "\\|",
    }
    rows = []
    for binding in bindings:
        keys = " ".join(f"`{names.get(k, k)}`" for k in (binding.key_display or binding.key).replace("|", "\\|").split(","))
        rows.append(f"| {keys} | {binding.tooltip or binding.description} |")
    return f"## {title}\n\n| key | what |\n|---|---|\n" + "\n".join(rows)


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown())
