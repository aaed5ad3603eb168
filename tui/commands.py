"""The palette (`:` or Ctrl-P): every key that works on the page, by name, made from the bindings; nothing is written twice."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from rich.text import Text
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.markup import escape


class BindingCommands(Provider):
    """Bindings of the focused pane, its page and the app, then the commands without a key."""

    def _entries(self) -> list[tuple[str, str, Callable[[], Any]]]:
        out: list[tuple[str, str, Callable[[], Any]]] = []
        seen: set[str] = set()
        near = {self.screen: 0, self.app: 1}  # what a page is for, then what works everywhere, then how to move in a pane
        for active in sorted(self.screen.active_bindings.values(), key=lambda a: near.get(a.node, 2)):
            if active.enabled and active.binding.action not in seen and self._told(active):
                seen.add(active.binding.action)
                key = self.app.get_key_display(active.binding)
                out.append((f"{active.binding.description}  [{key}]", active.binding.tooltip, partial(self._press, active)))
        out.extend((c.title, c.help, c.callback) for c in self.app.get_system_commands(self.screen))
        return out

    def _told(self, active: Any) -> bool:
        return bool(active.binding.tooltip) and active.binding.action not in ("command_palette",)

    def _press(self, active: Any) -> Awaitable[Any]:
        """Do what the key does, in the place the key belongs to."""
        return self.app.run_action(active.binding.action, default_namespace=active.node)

    async def discover(self) -> Hits:
        """Everything, before a letter is typed."""
        for title, help_text, run in self._entries():
            yield DiscoveryHit(Text(title), run, title, escape(help_text))

    async def search(self, query: str) -> Hits:
        """What matches. The palette reads plain strings as markup, and names of agents come from outside: so texts, and escapes."""
        matcher = self.matcher(query)
        for title, help_text, run in self._entries():
            score = max(matcher.match(title), 0.6 * matcher.match(help_text))
            if score > 0:
                yield Hit(score, Text(title), run, title, escape(help_text))
