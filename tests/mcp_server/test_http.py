"""Streamable HTTP in a process of its own: token, Host, Origin, body limit, two agents at once, both protocol eras."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp.client.streamable_http import streamable_http_client
from mcp.types import Implementation

from mcp_server.auth import read_token, token_path
from mcp_server.http import WITHOUT_TOKEN, parse_address
from runner.errors import BadValue
from runner.lab import Lab
from tests.mcp_server.conftest import HOSTS, connected, rows_of
from tests.runner.labs import finish, make_lab

pytestmark = pytest.mark.timeout(60)


@dataclass
class Served:
    """A server process: where it listens, and the lab's token."""

    url: str
    token: str
    lab: Lab

    @property
    def base(self) -> str:
        return self.url.removesuffix("/mcp")


def start(lab: Lab, *more: str, env: dict[str, str] | None = None) -> tuple[subprocess.Popen[str], str]:
    """A server on a free port; the process and the line it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mcp_server", "--lab", str(lab.path), "--http", "127.0.0.1:0", "--no-daemon", *more],
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(env or {})},
    )
    assert process.stderr is not None
    return process, process.stderr.readline()


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.communicate(timeout=20)


def refused(lab: Lab, address: str = "127.0.0.1:0", env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and words of a server that does not start."""
    arguments = [sys.executable, "-m", "mcp_server", "--lab", str(lab.path), "--http", address, "--no-daemon"]
    done = subprocess.run(
        arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, env={**os.environ, **(env or {})}
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    lab = make_lab(tmp_path_factory.mktemp("served"), hosts=HOSTS)
    process, line = start(lab)
    found = re.search(r"http://\S+/mcp", line)
    assert found, line
    yield Served(found[0], (lab.path / "mcp.token").read_text().strip(), lab)
    end(process)
    lab.close()


def transport(served: Served, http: httpx2.AsyncClient) -> Any:
    return streamable_http_client(served.url, http_client=http)


def bearer(served: Served) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(headers={"Authorization": f"Bearer {served.token}"}, timeout=60)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_sdks_client_works_with_the_token(served: Served, mode: str) -> None:
    async with bearer(served) as http, connected(transport(served, http), mode) as agent:
        answer = await agent("run_experiment", overrides={"DEPTH": 4 if mode == "auto" else 6})
        finish(served.lab, answer["id"], 1.0)
        told = await agent("wait_for_results", ids=[answer["id"]], timeout_s=5)
        assert told["new"] == 1
        waiting = await agent("run_experiment", overrides={"DEPTH": 24 if mode == "auto" else 26})
        seen: list[str | None] = []

        async def progress(done: float, total: float | None, message: str | None) -> None:
            seen.append(message)

        call = asyncio.create_task(
            agent.client.call_tool("wait_for_results", {"ids": [waiting["id"]], "timeout_s": 50}, progress_callback=progress)
        )
        deadline = time.monotonic() + 20
        while not seen and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert seen == ["0 new, 1 queued"]
        assert (await agent("list_gpus"))["lab"], "a cancelled wait holds nothing up"


async def test_two_agents_at_once_are_named_in_the_audit_trail(served: Served) -> None:
    async with bearer(served) as http:
        one = connected(transport(served, http), client_info=Implementation(name="claude-code", version="1"))
        two = connected(transport(served, http), "legacy", client_info=Implementation(name="codex [x]\n", version="1"))
        async with one as first, two as second:
            await asyncio.gather(first("run_experiment", overrides={"DEPTH": 14}), second("run_experiment", overrides={"DEPTH": 15}))
            assert len(rows_of(await first("list_runs", mine=True), "runs")) == 1
    assert sorted(event.who for event in served.lab.store.events(limit=2)) == ["mcp:claude-code", "mcp:codex-x"]


HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}
ACCEPT = {"Accept": "application/json, text/event-stream"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic {token}"}, 401),
        ({"Authorization": "Bearer {token}x"}, 401),
        ({"Authorization": "Bearer {token}"}, 200),
        ({"Authorization": "bearer {token}"}, 200),
        ({"Authorization": "Bearer {token}", "Host": "evil.example"}, 421),
        ({"Authorization": "Bearer {token}", "Host": "127.0.0.1.evil.example:80"}, 421),
        ({"Authorization": "Bearer {token}", "Host": "localhost:9999"}, 200),
        ({"Authorization": "Bearer {token}", "Origin": "http://evil.example"}, 403),
        ({"Authorization": "Bearer {token}", "Origin": "null"}, 403),
        ({"Authorization": "Bearer {token}", "Origin": "http://localhost.evil.example"}, 403),
        ({"Authorization": "Bearer {token}", "Origin": "http://localhost:3000"}, 200),
    ],
)
async def test_token_host_and_origin_are_checked(served: Served, headers: dict[str, str], status: int) -> None:
    given = {name: value.replace("{token}", served.token) for name, value in headers.items()}
    async with httpx2.AsyncClient(timeout=20) as http:
        answer = await http.post(served.url, json=HELLO, headers={**ACCEPT, **given})
    assert answer.status_code == status, answer.text
    if status == 401:
        assert "mcp.token" in answer.text and served.token not in answer.text
        assert answer.headers["www-authenticate"].startswith("Bearer")


async def test_health_needs_no_token_but_the_right_host_and_tells_nothing_of_the_lab(served: Served) -> None:
    async with httpx2.AsyncClient(timeout=20) as http:
        fine = await http.get(f"{served.base}/health")
        wrong = await http.get(f"{served.base}/health", headers={"Host": "evil.example"})
    assert fine.status_code == 200 and fine.json()["ok"] is True and str(served.lab.path) not in fine.text
    assert wrong.status_code == 421


async def test_a_body_over_the_limit_is_refused(served: Served) -> None:
    async with bearer(served) as http:
        answer = await http.post(served.url, content=b"x" * (5 << 20), headers={**ACCEPT, "Content-Type": "application/json"})
    assert answer.status_code == 413


def test_the_token_file_is_private_and_a_readable_one_is_refused(lab: Lab) -> None:
    read_token(lab)
    path = token_path(lab)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    code, told = refused(lab)
    assert code == 1 and "may be read by others" in told
    path.unlink()
    path.symlink_to("/etc/hostname")
    code, told = refused(lab)
    assert code == 1 and "cannot be read" in told


def test_the_test_switch_is_refused_for_real_hosts_and_said_out_loud(tmp_path: Path, lab: Lab) -> None:
    process, line = start(lab, env={WITHOUT_TOKEN: "1"})
    end(process)
    assert "WITHOUT a token" in line
    real = make_lab(tmp_path / "real", hosts='[[host]]\nname = "here"\n')
    code, told = refused(real, env={WITHOUT_TOKEN: "1"})
    real.close()
    assert code == 2 and "real hosts (here)" in told


def test_a_port_in_use_is_one_sentence(served: Served) -> None:
    code, told = refused(served.lab, served.url.split("//")[1].removesuffix("/mcp"))
    assert code == 2 and "Cannot listen" in told


@pytest.mark.parametrize(
    ("text", "found"),
    [("127.0.0.1:1", ("127.0.0.1", 1)), (":8765", ("127.0.0.1", 8765)), ("8765", ("127.0.0.1", 8765)), ("[::1]:80", ("::1", 80))],
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert parse_address(text) == found


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "host:99999", "::1:80", "host:-1"])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(BadValue):
        parse_address(text)
