"""docs/keys.md, made from the bindings that are in force: python -m tests.keys_page writes it, a test compares it."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from textual.binding import Binding
from textual.dom import DOMNode

import tui
from tui.deeds import RUN_BINDINGS
from tui.help import sign

PAGE = Path(__file__).parents[1] / "docs" / "keys.md"
TITLES = {
    "ControlRoom": "Everywhere",
    "Dashboard": "Dashboard",
    "RunsPage": "Runs",
    "RunPage": "A run",
    "WavesPage": "Waves",
    "WavePage": "A wave",
    "HostsPage": "Hosts",
    "EventsPage": "Events",
    "LineagePage": "Lineage",
    "Table": "Tables",
    "GpuWall": "GPU panels",
    "LogPane": "Logs",
    "View": "Texts",
    "Confirm": "Questions",
}


def owners() -> dict[str, type[DOMNode]]:
    """Every class of the screen that binds keys, by name."""
    return {
        name: value
        for module in pkgutil.walk_packages(tui.__path__, "tui.")
        for name, value in vars(importlib.import_module(module.name)).items()
        if isinstance(value, type) and issubclass(value, DOMNode) and value.__module__ == module.name and vars(value).get("BINDINGS")
    }


def bindings_of(owner: type[DOMNode]) -> list[Binding]:
    """The bindings a class adds, the keys about runs left out (they have a section of their own)."""
    return [b for b in owner.BINDINGS if isinstance(b, Binding) and b not in RUN_BINDINGS]


def rows(bindings: list[Binding]) -> list[str]:
    """One row of Markdown a binding."""
    out = []
    for binding in bindings:
        keys = " ".join(f"`{sign(key)}`" for key in binding.key.split(","))
        words = binding.tooltip or binding.description
        out.append("| {} | {} |".format(*(text.replace("|", r"\|") for text in (keys, words))))  # in code as well, a bar ends the cell
    return out


def page() -> str:
    """The whole page."""
    lines = ["# Keys", "", "Made from the bindings themselves (`python -m tests.keys_page`); `?` shows those of the page you are on.", ""]
    sections = [("Runs, wherever one is marked or under the cursor", [b for b in RUN_BINDINGS if isinstance(b, Binding)])]
    known = owners()
    sections += [(title, bindings_of(known[name])) for name, title in TITLES.items() if name in known]
    everywhere = sections.pop(1)
    for title, bindings in [everywhere, *sections]:
        if bindings:
            lines += [f"## {title}", "| key | |", "|---|---|", *rows(bindings), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
