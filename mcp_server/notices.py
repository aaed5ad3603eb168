"""Update notifications: says which resources changed, to clients that listen (2026-07-28) or have subscribed (before).

A task looks at the lab once a second while anybody listens, and compares marks of what each resource is made of. Nobody listening costs
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
from mcp.server.connection import Connection
from mcp.server.context import ServerRequestContext
from mcp.server.mcpserver import MCPServer
from mcp.server.session import ServerSession
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import ResourceUpdated, ServerEvent
from mcp.types import INVALID_PARAMS, EmptyResult, SubscribeRequestParams, UnsubscribeRequestParams

from mcp_server.desk import Desk
from runner import news
from runner.errors import OvernightError
from runner.text import one_line

log = logging.getLogger("overnight.mcp")
EVERY_S = 1.0
SEND_S = 2.0


class Follower:
    """A connection of the older era and the resources it has subscribed to."""

    def __init__(self, session: ServerSession) -> None:
        self.session = session
        self.uris: set[str] = set()


class Bus:
    """Fan-out of change events to listening clients; knows whether there are any."""

    def __init__(self) -> None:
        self._listeners: dict[object, Callable[[ServerEvent], None]] = {}
        self._followers: dict[Connection, Follower] = {}

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners or self._followers)

    def follow(self, session: ServerSession, uri: str) -> None:
        """Subscribe a connection to a resource, until it unsubscribes or ends."""
        connection = session._connection  # the SDK offers no other way to a connection's end; test_resources guards it
        if connection not in self._followers:
            self._followers[connection] = Follower(session)
            connection.exit_stack.callback(self._followers.pop, connection, None)
        self._followers[connection].uris.add(uri)

    def unfollow(self, session: ServerSession, uri: str) -> None:
        """End a subscription; nothing happens when there is none."""
        connection = session._connection
        follower = self._followers.get(connection)
        if follower is not None:
            follower.uris.discard(uri)
            if not follower.uris:
                del self._followers[connection]

    async def publish(self, event: ServerEvent) -> None:
        """Hand an event to every listener; one that fails is logged and does not stop the others."""
        if isinstance(event, ResourceUpdated):
            for connection, follower in list(self._followers.items()):
                if str(event.uri) in follower.uris:
                    await self._tell(connection, follower, str(event.uri))
        for listener in list(self._listeners.values()):
            try:
                listener(event)
            except Exception:  # one client's stream must not silence the others'
                log.exception("a listener failed")
        await anyio.lowlevel.checkpoint()

    async def _tell(self, connection: Connection, follower: Follower, uri: str) -> None:
        """Notify one subscriber; one that does not take it is dropped."""
        try:
            with anyio.fail_after(SEND_S):
                await follower.session.send_resource_updated(uri)
        except Exception:  # a broken pipe has many names, and must not silence the others
            log.exception("a subscriber is gone")
            self._followers.pop(connection, None)

    def subscribe(self, listener: Callable[[ServerEvent], None]) -> Callable[[], None]:
        """Add a listener; the returned function removes it, and may be called twice."""
        key = object()
        self._listeners[key] = listener

        def unsubscribe() -> None:
            self._listeners.pop(key, None)

        return unsubscribe


def serve_subscriptions(server: MCPServer[Desk], bus: Bus) -> None:
    """Answer `resources/subscribe` and `unsubscribe`, which MCPServer leaves out, for clients from before 2026-07-28."""

    async def subscribe(ctx: ServerRequestContext[Any, Any], params: SubscribeRequestParams) -> EmptyResult:
        if not str(params.uri).startswith("lab://"):
            raise MCPError(INVALID_PARAMS, f"There is no resource {one_line(str(params.uri), 80)!r}; this server's begin with lab://.")
        bus.follow(ctx.session, str(params.uri))
        return EmptyResult()

    async def unsubscribe(ctx: ServerRequestContext[Any, Any], params: UnsubscribeRequestParams) -> EmptyResult:
        bus.unfollow(ctx.session, str(params.uri))
        return EmptyResult()

    served = server._lowlevel_server  # its add_request_handler is the documented way to a method of the protocol's own
    served.add_request_handler("resources/subscribe", SubscribeRequestParams, subscribe)
    served.add_request_handler("resources/unsubscribe", UnsubscribeRequestParams, unsubscribe)


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
