"""Who may talk to the HTTP server: the lab's token on every request, and Host and Origin checks on every bind.

Loopback is no exception: whoever reaches the tools can run code as you, and any user of the machine (or any web page, by DNS rebinding)
reaches loopback.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from runner.errors import LabError
from runner.lab import Lab, write_private

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
OPEN_PATHS = ("/health",)


def token_path(lab: Lab) -> Path:
    """The file of the lab's token."""
    return lab.path / "mcp.token"


def read_token(lab: Lab) -> str:
    """The lab's bearer token, made on first use (256 bits, file mode 0600).

    Raises LabError when the file is a link, may be read by others, or holds no usable token.
    """
    path = token_path(lab)
    write_private(path, secrets.token_urlsafe(32).encode() + b"\n")
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(4096).decode("ascii", "replace").strip()
    except OSError as error:
        raise LabError(f"{path} cannot be read: {error.strerror}.", next_step="Remove it; a new token is made.") from error
    if not stat.S_ISREG(mode) or stat.S_IMODE(mode) & 0o077:
        raise LabError(f"{path} may be read by others (mode {stat.S_IMODE(mode):04o}).", next_step="Remove it; a new token is made.")
    if len(token) < 20 or not token.isprintable() or " " in token:
        raise LabError(f"{path} holds no usable token.", next_step="Remove it; a new token is made.")
    return token


def host_of(value: str) -> str:
    """The host of `host:port`, lower case; an IPv6 address keeps its brackets."""
    value = value.strip().lower()
    if value.startswith("["):
        return value.partition("]")[0] + "]"
    return value.partition(":")[0]


class Gate:
    """ASGI middleware before everything else. Host: 421, Origin: 403, token: 401; a refused request's body is never read."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: Iterable[str] = ()) -> None:
        self.app = app
        self.token = token
        self.hosts = {*LOOPBACK, *(host_of(h) for h in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it here."""
        if scope["type"] == "http" and (refused := self.refusal(scope)) is not None:
            await refused(scope, receive, send)
            return
        if scope["type"] == "websocket":
            return
        await self.app(scope, receive, send)

    def refusal(self, scope: Scope) -> PlainTextResponse | JSONResponse | None:
        """The answer to a request that may not pass, or None."""
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        hosts = headers.get("host", [])
        if len(hosts) != 1 or host_of(hosts[0]) not in self.hosts:
            return PlainTextResponse("This server does not go by that Host name; start it with --allow-host NAME to add one.\n", 421)
        for origin in headers.get("origin", []):
            scheme, found, rest = origin.partition("://")
            if not found or scheme not in ("http", "https") or host_of(rest) not in self.hosts:
                return PlainTextResponse("Requests from pages of other origins are refused.\n", 403)
        if self.token is None or scope["path"] in OPEN_PATHS:
            return None
        given = headers.get("authorization", [])
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self.token.encode()):
            return None
        message = "This server needs the lab's token: Authorization: Bearer TOKEN, from the file mcp.token in the lab's folder."
        return JSONResponse({"error": message}, 401, headers={"WWW-Authenticate": 'Bearer realm="overnight"'})
