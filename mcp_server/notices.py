"""Update notifications: says which resources changed, to clients that listen.

A task looks at the lab once a second while anybody listens, and compares marks of what each resource is made of. Nobody listening costs
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import anyio
import anyio.lowlevel
from mcp.shared.subscriptions import ResourceUpdated, ServerEvent

from mcp_server.desk import Desk
from runner import news
from runner.errors import OvernightError

log = logging.getLogger("overnight.mcp")
EVERY_S = 1.0


class Bus:
    """Fan-out of change events to listening clients; knows whether there are any."""

    def __init__(self) -> None:
        self._listeners: dict[object, Callable[[ServerEvent], None]] = {}

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    async def publish(self, event: ServerEvent) -> None:
        """Hand an event to every listener; one that fails is logged and does not stop the others."""
        for listener in list(self._listeners.values()):
            try:
                listener(event)
            except Exception:  # one client's stream must not silence the others'
                log.exception("a listener failed")
        await anyio.lowlevel.checkpoint()

    def subscribe(self, listener: Callable[[ServerEvent], None]) -> Callable[[], None]:
        """Add a listener; the returned function removes it, and may be called twice."""
        key = object()
        self._listeners[key] = listener

        def unsubscribe() -> None:
            self._listeners.pop(key, None)

        return unsubscribe


async def watch(desk: Desk, bus: Bus) -> None:
    """Publish an event for each resource whose mark changed; runs until cancelled."""
    marks: dict[str, object] = {}
    version: int | None = None
    while True:
        await anyio.sleep(EVERY_S)
        if not bus.heard:
            marks = {}
            version = None
            continue
        try:
            if (newest := desk.version()) == version:
                continue
            version = newest
            now = await desk.with_lab(partial(news.marks, known=frozenset(marks)))
        except OvernightError as exc:
            log.warning("cannot look for changes: %s", exc)
            continue
        for uri, mark in now.items():
            if uri in marks and marks[uri] != mark:
                await bus.publish(ResourceUpdated(uri=uri))
        marks = now
