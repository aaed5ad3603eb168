"""Streamable HTTP: one process for several agents, behind the gate of auth.py.

Default SSE sessions, because plain JSON responses lose progress and cancellation. `/health` says that it serves, and nothing about the lab.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence

import anyio
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mcp_server.auth import Gate, host_of, read_token, token_path
from mcp_server.desk import Desk
from runner.errors import BadValue, Refused
from runner.lab import Lab

log = logging.getLogger("overnight.mcp")

MAX_BODY_BYTES = 4 << 20
WITHOUT_TOKEN = "OVERNIGHT_MCP_TEST_WITHOUT_TOKEN"  # noqa: S105  the name of a switch for the conformance suite, which cannot send headers


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, `:PORT` or `PORT`; the host defaults to loopback.

    Raises BadValue for anything else.
    """
    host, _, port = text.strip().rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65536) or host.count(":") not in (
        0,
        host.count(":") if host.startswith("[") else 0,
    ):
        raise BadValue(f"--http {text!r} is not HOST:PORT.", next_step="For example --http 127.0.0.1:8765 or --http [::1]:8765.")
    return (host.strip("[]") or "127.0.0.1", int(port))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises BadValue when the address cannot be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(128)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise BadValue(
            f"Cannot listen on {host}:{port}: {error.strerror or error}.", next_step="Choose another port, or end what uses it."
        ) from error
    return bound


def needed_token(lab: Lab) -> str | None:
    """The token every request must carry; None only under the test switch.

    Raises Refused when the switch is set for a lab with real hosts.
    """
    if not os.environ.get(WITHOUT_TOKEN):
        return read_token(lab)
    real = [host.name for host in lab.policy().hosts if host.kind != "fake"]
    if real:
        raise Refused(
            f"{WITHOUT_TOKEN} is for tests on simulated GPUs; this lab has real hosts ({', '.join(real)}).",
            next_step="Unset it: the token is in the lab's folder.",
        )
    return None


def build_app(server: MCPServer[Desk], token: str | None, hosts: Sequence[str]) -> Gate:
    """The ASGI application: MCP under /mcp, /health, and the gate around both."""

    async def health(_: Request) -> Response:
        return JSONResponse({"ok": True, "server": "overnight", "version": server.version})

    server.custom_route("/health", methods=["GET"])(health)

    # The gate checks Host and Origin for every path and bind; the SDK's own check would know loopback only.
    app = server.streamable_http_app(
        max_request_body_size=MAX_BODY_BYTES, transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False)
    )
    return Gate(app, token, hosts)


def serve(server: MCPServer[Desk], desk: Desk, address: str, allow_hosts: Sequence[str] = ()) -> int:
    """Serve until interrupted; says on stderr where, and where the token is. Returns the exit code."""
    host, port = parse_address(address)
    token = needed_token(desk.watch)
    bound = listen(host, port)
    named = [] if host in ("0.0.0.0", "::", "") else [f"[{host}]" if ":" in host else host]  # noqa: S104  compared, not bound
    app = build_app(server, token, [*named, *allow_hosts])
    shown = f"[{host}]" if ":" in host else host
    where = f"the token is in {token_path(desk.watch)}" if token else "WITHOUT a token (test switch)"
    sys.stderr.write(f"overnight mcp: serving {desk.path} on http://{shown}:{bound.getsockname()[1]}/mcp; {where}\n")
    if host_of(shown) not in ("127.0.0.1", "localhost", "[::1]"):
        sys.stderr.write("overnight mcp: the token crosses the network in the clear; an ssh tunnel to a loopback address is safer\n")
    sys.stderr.flush()
    config = uvicorn.Config(
        app, log_level="warning", log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=2, lifespan="on"
    )
    with bound:
        anyio.run(uvicorn.Server(config).serve, [bound])
    return 0
