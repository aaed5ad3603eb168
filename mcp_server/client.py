"""A small agent over the real MCP client: starts the server over stdio as any coding agent does, calls tools, and waits by long polls.

Used by the demo (`python -m mcp_server.client --lab DIR --plan FILE`) and by tests. It decides nothing that a plan does not say.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters, stdio_client
from mcp.types import Implementation

from runner.text import clean, one_line

WAIT_S = 25


class ToolRefused(Exception):
    """Raised when a tool answers with an error; its text is the message."""


class Agent:
    """One connected agent; `say` gets a line for each call and each answer."""

    def __init__(self, client: Client, say: Callable[[str], None]) -> None:
        self.client = client
        self.say = say

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool; its structured answer. Raised: ToolRefused with the tool's own words."""
        self.say(f"agent → {tool}({', '.join(f'{k}={one_line(json.dumps(v), 60)}' for k, v in arguments.items())})")
        result = await self.client.call_tool(tool, arguments)
        text = "\n".join(block.text for block in result.content if block.type == "text")
        if result.is_error:
            raise ToolRefused(clean(text))
        return dict(result.structured_content or {"text": text})

    async def wait(self, **scope: Any) -> None:
        """Wait until all runs of a scope (ids or wave) have ended, however many polls that takes."""
        cursor: str | None = None
        while True:
            more = {"cursor": cursor} if cursor else {}
            answer = await self.call("wait_for_results", until="all", timeout_s=WAIT_S, **scope, **more)
            if not answer.get("pending"):
                return
            cursor = answer.get("cursor")


def our_environment() -> dict[str, str]:
    """What of the environment is meant for us (OVERNIGHT_*): the client library hands a server only the usual names, such as PATH."""
    return {name: value for name, value in os.environ.items() if name.startswith("OVERNIGHT_")}


@asynccontextmanager
async def connected(lab: Path, name: str, say: Callable[[str], None]) -> AsyncIterator[Agent]:
    """An agent connected to a server of its own, over stdio."""
    arguments = ["-I", "-m", "runner.cli", "--lab", str(lab), "mcp"]
    server = StdioServerParameters(command=sys.executable, args=arguments, env=our_environment())
    async with Client(stdio_client(server), client_info=Implementation(name=name, version="1")) as client:
        say(f"agent connected: {client.server_info.name if client.server_info else 'server'}, protocol {client.protocol_version}")
        yield Agent(client, say)


async def play(lab: Path, plan: dict[str, Any], say: Callable[[str], None]) -> None:
    """The plan's baseline, then its waves one after the other; last, what came out best is promoted where the plan says so."""
    async with connected(lab, "demo", say) as agent:
        baseline = await agent.call("run_experiment", **plan["baseline"])
        await agent.wait(**({"wave": baseline["wave"]} if "wave" in baseline else {"ids": [baseline["id"]]}))
        for wave in plan["waves"]:
            made = await agent.call("submit_wave", **wave)
            await agent.wait(wave=made["wave"])
        board = await agent.call("leaderboard")
        for promotion in plan.get("promote", []):
            best = [row[board["ranked"]["columns"].index("id")] for row in board["ranked"]["rows"][: promotion["top"]]]
            for run_id in best:
                await agent.call("decide", **{**promotion["decide"], "id": run_id, "request_id": f"{promotion['key']}-{run_id}"})
            await agent.wait()
        say("agent: all results are in")


def main() -> int:
    """Play a plan file against a lab; lines go to stdout."""
    parser = argparse.ArgumentParser(description="Play a scripted agent against a lab.")
    parser.add_argument("--lab", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    args = parser.parse_args()

    def say(line: str) -> None:
        sys.stdout.write(one_line(line, 400) + "\n")
        sys.stdout.flush()

    try:
        asyncio.run(play(args.lab, json.loads(args.plan.read_text(encoding="utf-8")), say))
    except ToolRefused as refused:
        say(f"agent stopped: {refused}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
