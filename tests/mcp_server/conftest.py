"""A lab with simulated hosts in its policy and no daemon, and the SDK's own client on the server, in both protocol eras."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.types import CallToolResult, TextContent

from mcp_server.desk import Desk
from mcp_server.server import build_server
from runner.lab import Lab
from tests.runner.labs import make_lab

HOSTS = '[[host]]\nname = "sim"\nkind = "fake"\ntypes = { "NVIDIA H100 80GB HBM3" = 4 }\nprice_per_hour = 2.5\n'


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    opened = make_lab(tmp_path, hosts=HOSTS)
    yield opened
    opened.close()


@pytest.fixture
def desk(lab: Lab) -> Iterator[Desk]:
    opened = Desk(lab.path, start_daemon=False)
    yield opened
    opened.close()


@dataclass
class Agent:
    """A client that returns what a model would see."""

    client: Client

    async def __call__(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """A call that must succeed: its structured content."""
        result = await self.raw(tool, **arguments)
        assert not result.is_error, text_of(result)
        assert result.structured_content is not None
        return dict(result.structured_content)

    async def fails(self, tool: str, **arguments: Any) -> str:
        """A call that must be refused: the text of the refusal."""
        result = await self.raw(tool, **arguments)
        assert result.is_error, text_of(result)
        return text_of(result)

    async def raw(self, tool: str, **arguments: Any) -> CallToolResult:
        """A call, whatever comes of it."""
        result = await self.client.call_tool(tool, arguments)
        assert isinstance(result, CallToolResult)
        return result


def text_of(result: CallToolResult) -> str:
    """The text block of a result; there is exactly one."""
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text


def rows_of(answer: dict[str, Any], table: str) -> list[dict[str, Any]]:
    """A table of an answer as one dict a row."""
    return [dict(zip(answer[table]["columns"], row, strict=True)) for row in answer[table]["rows"]]


def chars(result: CallToolResult) -> int:
    """Characters of the larger of the two forms a client may show to its model."""
    return max(len(text_of(result)), len(json.dumps(result.structured_content, ensure_ascii=False, separators=(",", ":"))))


@asynccontextmanager
async def connected(target: Any, mode: str = "auto", **options: Any) -> AsyncIterator[Agent]:
    """An agent on a server, a URL's transport or a command; opened and closed in one task of its own, as cancel scopes demand."""
    ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def hold() -> None:
        try:
            async with Client(target, mode=mode, **options) as client:
                ready.set_result(client)
                await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
                return
            raise

    holder = asyncio.create_task(hold())
    try:
        yield Agent(await ready)
    finally:
        stop.set()
        await holder


@pytest.fixture(params=["auto", "legacy"])
async def agent(desk: Desk, request: pytest.FixtureRequest) -> AsyncIterator[Agent]:
    async with connected(build_server(desk), request.param) as opened:
        yield opened
