"""Arguments from every tool's own schema, bent: whatever comes, the answer is a result or a refusal in words, and a refusal changes
nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp.types import Tool

from mcp_server.desk import Desk
from mcp_server.server import build_server
from mcp_server.tools import all_tools
from runner import verbs
from runner.records import WaveRequest
from tests.mcp_server.conftest import HOSTS, chars, connected, text_of
from tests.runner.labs import finish, make_lab

WRITES = ("run_experiment", "submit_wave", "decide", "cancel")
NAMES = st.sampled_from(
    ["r0001", "r0002", "r0003", "r9999", "w1", "w7", "DEPTH", "MATRIX_LR", "SEED", "H100", "sim", "train.py", "../x", "keep", ""]
)
TEXTS = st.one_of(NAMES, st.text(max_size=40), st.sampled_from(["\x1b[31m", "\ud800", "a\tb\nc", "[/bold]", "1-3", "after:2", "x" * 3000]))
NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([0, 1, 2, 50, 51, 0.5, -1, 1e9]))
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
ANYTHING = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=8)


def from_schema(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that mostly fit a property's schema, so that calls get past validation often."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([from_schema(branch) for branch in schema["anyOf"]])
    kind = schema.get("type")
    if kind == "integer":
        low = schema.get("minimum", 0)
        return st.integers(low, max(low, min(schema.get("maximum", 100), 40)))
    if kind == "number":
        low, high = schema.get("minimum", 0), schema.get("maximum", 1000)
        return st.floats(low, min(high, 1000), allow_nan=False) if schema.get("maximum", 51) != 50 else st.floats(0, 0.02)
    if kind == "boolean":
        return st.booleans()
    if kind == "array":
        return st.lists(from_schema(schema.get("items", {})), max_size=3)
    if kind == "object":
        return st.dictionaries(NAMES, from_schema(schema.get("additionalProperties", {})), max_size=3)
    return TEXTS


RUNS = st.sampled_from(["r0001", "r0002", "r0003"])
CELL = st.fixed_dictionaries({}, optional={"DEPTH": st.integers(1, 99), "MATRIX_LR": st.floats(0.001, 1), "NAME": st.text(max_size=9)})
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "id": RUNS,
    "ids": st.lists(RUNS, min_size=1, max_size=3),
    "wave": st.just("w1"),
    "base": RUNS,
    "parent": RUNS,
    "overrides": CELL,
    "cells": st.lists(CELL, min_size=1, max_size=3),
    "factors": st.dictionaries(
        st.sampled_from(["DEPTH", "TOTAL_BATCH_SIZE"]), st.lists(st.integers(1, 999), min_size=1, max_size=3), min_size=1
    ),
    "source": st.integers(0, 99).map(lambda n: f"DEPTH = {n}\n"),
    "path": st.just("train.py"),
    "host": st.just("sim"),
    "budget_s": st.floats(1, 500),
    "why": st.text(min_size=1, max_size=30),
    "cursor": st.sampled_from(["after:1", "mine:1-2", "w1:2", "ids:1", "2", ""]),
}


USUAL = {"submit_wave": ["factors"], "cancel": ["ids"], "decide": ["why"]}  # without them hardly a call succeeds


def arguments(tool: Any) -> st.SearchStrategy[dict[str, Any]]:
    """A tool's required and up to three other arguments: mostly such as work, some that only fit the schema, some bent, some unknown."""
    properties = {name: schema for name, schema in tool.parameters["properties"].items() if name != "timeout_s"}
    required = [*tool.parameters.get("required", []), *USUAL.get(tool.name, [])]

    def value(name: str) -> st.SearchStrategy[Any]:
        good = GOOD.get(name, from_schema(properties[name]))
        return st.one_of(good, good, good, good, from_schema(properties[name]), ANYTHING)

    @st.composite
    def chosen(draw: st.DrawFn) -> dict[str, Any]:
        names = draw(st.lists(st.sampled_from(list(properties)), max_size=3, unique=True))
        return {name: draw(value(name)) for name in dict.fromkeys([*required, *names])}

    bent = st.dictionaries(st.one_of(st.sampled_from(list(properties)), TEXTS), ANYTHING, max_size=4)
    known = chosen()
    given_arguments = st.one_of(known, known, known, known, bent)
    waits = "timeout_s" in tool.parameters["properties"]
    return given_arguments.map(lambda found: {**found, "timeout_s": 0}) if waits else given_arguments


def sendable(value: Any) -> bool:
    """Whether a client could put it on the wire as JSON."""
    try:
        json.dumps(value, allow_nan=False).encode()
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, UnicodeEncodeError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("tool", all_tools(), ids=lambda tool: tool.name)
def test_no_argument_breaks_a_tool(tool: Any, tmp_path: Path) -> None:
    lab = make_lab(tmp_path, hosts=HOSTS, policy="max_runs = 400")
    verbs.submit_wave(lab, WaveRequest(factors={"DEPTH": [4, 6, 10]}), who="mcp:mcp")
    finish(lab, "r0001", 1.0)
    finish(lab, "r0002", None)
    desk = Desk(lab.path, start_daemon=False)
    loop = asyncio.new_event_loop()
    session = connected(build_server(desk))
    agent = loop.run_until_complete(session.__aenter__())
    refused = []

    def state() -> tuple[Any, ...]:
        return (lab.store.tally("count(*), sum(wanted = 'cancel'), count(verdict)"), lab.store.tally("count(*)", table="events"))

    @settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(arguments(tool).filter(sendable), min_size=1, max_size=5))
    def check(calls: list[dict[str, Any]]) -> None:
        loop.run_until_complete(several(calls))

    async def several(calls: list[dict[str, Any]]) -> None:
        for given_arguments in calls:
            before = state()
            result = await agent.raw(tool.name, **given_arguments)
            told = text_of(result)
            refused.append(result.is_error)
            assert chars(result) <= 8000, f"{len(told)} characters"
            assert "Traceback" not in told and "internal" not in told.split("\n")[0], told
            assert "\x1b" not in told and told.strip()
            if result.is_error:
                assert told.startswith("error (") and state() == before, told
            elif tool.name not in WRITES:
                assert state() == before, "a reading tool wrote"

    try:
        check()
        assert True in refused and False in refused, "both outcomes were tried"
    finally:
        loop.run_until_complete(session.__aexit__(None, None, None))
        loop.close()
        desk.close()
        lab.close()


def test_the_schemas_stay_portable() -> None:
    """Every schema is an object of described, typed properties, as the strictest client wants it."""
    for tool in all_tools():
        wire = Tool(name=tool.name, input_schema=tool.parameters)
        assert wire.input_schema["type"] == "object"
        for name, schema in tool.parameters["properties"].items():
            assert "type" in schema or "anyOf" in schema, f"{tool.name}.{name}"
            assert "$ref" not in json.dumps(schema), f"{tool.name}.{name}"
