"""One tool call: who asks, strict arguments, and errors an agent can act on.

The SDK ignores arguments it does not know (`learning_rate=0.1` would run with the default) and hides the text of exceptions; both would
cost GPU hours, so a `LabTool` forbids extras, names the nearest argument, and puts every refusal of ours into one sentence with the next
thing to try.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.tools import Tool
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import ValidationError

from mcp_server.answers import Answer, finish
from mcp_server.desk import Desk
from runner.errors import Duplicate, OvernightError, UnknownName
from runner.lab import Lab
from runner.text import one_line

log = logging.getLogger("overnight.mcp")


class Caller:
    """Who asks: the server's desk, the name for the audit trail, and how to report progress."""

    __slots__ = ("ctx", "desk", "who")

    def __init__(self, desk: Desk, ctx: Context[Any, Any]) -> None:
        self.desk = desk
        self.ctx = ctx
        self.who = f"mcp:{desk.agent or client_name(ctx)}"

    async def progress(self, done: float, total: float, message: str) -> None:
        """Tell the client how far a wait is; nothing when it did not ask."""
        await self.ctx.report_progress(done, total, message)


class Call(Caller):
    """A caller with an open lab, for the length of one tool call in a worker thread."""

    __slots__ = ("lab",)

    def __init__(self, caller: Caller, lab: Lab) -> None:
        super().__init__(caller.desk, caller.ctx)
        self.lab = lab


def client_name(ctx: Context[Any, Any]) -> str:
    """The client's own name from its handshake or envelope, in a form that is safe in a table; `unknown` when it gave none."""
    params = ctx.session.client_params
    name = params.client_info.name if params is not None else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:40] or "unknown"


class LabTool(Tool):
    """A tool of this server: unknown arguments refused by name, work done off the event loop, answers inside their budget."""

    @classmethod
    def make(
        cls,
        body: Callable[..., Any],
        *,
        title: str,
        writes: bool,
        destructive: bool = False,
        idempotent: bool = True,
        output: dict[str, Any] | None = None,
    ) -> LabTool:
        """The tool of a function `body(call, ...)`; its docstring is the description an agent reads.

        `output` is the schema of its structured content, for tools whose answers programs read; it costs every client tokens.
        """
        hints = ToolAnnotations(
            title=title, read_only_hint=not writes, destructive_hint=destructive, idempotent_hint=idempotent, open_world_hint=False
        )
        tool = cls.from_function(
            body,
            title=title,
            description=" ".join((body.__doc__ or "").split()),
            context_kwarg="call",
            annotations=hints,
            structured_output=False,
        )
        assert isinstance(tool, LabTool)
        model = tool.fn_metadata.arg_model
        model.model_config["extra"] = "forbid"
        model.model_rebuild(force=True)
        tool.fn_metadata.output_schema = output
        tool.parameters = slim(model.model_json_schema(by_alias=True))
        return tool

    async def run(self, arguments: dict[str, Any], context: Context[Any, Any], convert_result: bool = False) -> CallToolResult:
        """Validate, run and put into words; nothing a caller sends ends in a traceback."""
        desk = context.request_context.lifespan_context
        assert isinstance(desk, Desk)
        caller = Caller(desk, context)
        try:
            try:
                values = self.fn_metadata.validate_arguments(arguments)
            except ValidationError as exc:
                return await refused(caller, *argument_error(self, exc))
            if self.is_async:
                # a waiting tool ends in a function that makes its answer, so that all of the work on the lab is one visit to a thread
                report = await self.fn(call=caller, **values)
                return await desk.with_lab(lambda lab: success(caller, lab, report(lab)))
            return await desk.with_lab(lambda lab: self.answered(caller, lab, values))
        except OvernightError as exc:
            return await refused(caller, *own_error(exc))
        except Exception as exc:  # the top of a request: the agent gets a sentence, the log the traceback
            log.exception("tool %s failed", self.name)
            message = f"{self.name} failed inside Overnight ({type(exc).__name__}: {one_line(str(exc), 200)})."
            next_step = "Nothing is known to have changed; list_runs shows what is there. The server's log has the details."
            return await refused(caller, "internal", message, next_step)

    def answered(self, caller: Caller, lab: Lab, values: dict[str, Any]) -> CallToolResult:
        """The whole of a call that waits for nothing, in a worker thread."""
        caller.desk.heard_from(caller.who)
        return success(caller, lab, self.fn(call=Call(caller, lab), **values))


def success(caller: Caller, lab: Lab, answer: Answer) -> CallToolResult:
    """The answer in both forms, closed by the lab's line. Every answer sees to it that a daemon serves the lab."""
    desk = caller.desk
    if (trouble := desk.wake_daemon(lab, asked=False)) and trouble not in answer.notes:
        answer.notes.insert(0, trouble)
    text, structured = finish(answer, desk.lab_line(lab, caller.who))
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=structured)


async def refused(caller: Caller, code: str, message: str, next_step: str) -> CallToolResult:
    """An error result: what was wrong, the next call to make, and the lab's line where the lab can be read."""
    error = {"code": code, "message": one_line(message, 1200), "next": one_line(next_step, 600)}
    lines = [f"error ({code}): {error['message']}", *([f"next: {error['next']}"] if next_step else [])]
    structured: dict[str, Any] = {"error": error}
    try:
        structured["lab"] = await caller.desk.with_lab(lambda lab: caller.desk.lab_line(lab, caller.who))
        lines.append(structured["lab"])
    except OvernightError as exc:
        log.warning("the lab cannot be read: %s", exc)
    return CallToolResult(content=[TextContent(type="text", text="\n".join(lines))], structured_content=structured, is_error=True)


# Which tool shows the names that exist, by what was not found.
WHERE_TO_LOOK = {
    "run": "list_runs shows the runs there are.",
    "wave": "list_runs shows the waves of runs.",
    "constant": "get_run(id=..., show='source') shows a script with its constants.",
    "host": "list_gpus shows the hosts.",
}


def own_error(exc: OvernightError) -> tuple[str, str, str]:
    """Code, message and next step of an error of ours, with the hint that only a caller of tools needs."""
    next_step = exc.next_step
    if isinstance(exc, Duplicate):
        twin = f"id='{exc.run_id}'"
        next_step = f"Read get_run({twin}), change something that matters, or measure noise with decide({twin}, action='repeat')."
    if isinstance(exc, UnknownName) and (not next_step or next_step.startswith("`overnight")):
        next_step = WHERE_TO_LOOK.get(exc.kind, "")
    return exc.code, exc.message, next_step


def argument_error(tool: LabTool, exc: ValidationError) -> tuple[str, str, str]:
    """One sentence per wrong argument, the nearest right name for each unknown one, and all names at the end."""
    known = tool.parameters.get("properties", {})
    sentences, hints = [], []
    wrong: dict[tuple[str, ...], list[Any]] = {}  # by the path of the value: a union complains once for each of its branches
    for error in exc.errors(include_url=False):
        wrong.setdefault(value_path(error), []).append(error)
    inner = {path: errors for path, errors in wrong.items() if not any(len(p) > len(path) and p[: len(path)] == path for p in wrong)}
    for path, errors in list(inner.items())[:5]:
        name, error = path[0] if path else "arguments", errors[0]
        if error["type"] == "extra_forbidden":
            sentences.append(f"{tool.name} has no argument {one_line(repr(name), 80)}.")
            hints.append(unknown_hint(name, list(known)))
        elif error["type"] == "missing":
            sentences.append(f"{tool.name} needs the argument {name!r}.")
        else:
            where = ".".join(one_line(part, 40) for part in path)
            got = one_line(repr(error["input"]), 80)
            kind = wanted(known.get(name, {}), path[1:])
            said = f"must be {kind}" if kind else f"does not fit: {one_line(error['msg'], 200)}"
            sentences.append(f"{tool.name}: {where} {said}; got {got}.")
    hints.append(f"Arguments of {tool.name}: {', '.join(known)}.")
    return "bad_arguments", " ".join(sentences), " ".join(h for h in hints if h)


def value_path(error: Any) -> tuple[str, ...]:
    """Where the wrong value stands: an error's place without the names of the union's branches and of types."""
    path = [str(part) for part in error["loc"]]
    kinds = re.compile(r"bool|int|float|str|none|.*\[.*\]|function-.*|constrained-.*")
    return tuple(part for n, part in enumerate(path) if n == 0 or not kinds.fullmatch(part))


def unknown_hint(name: str, known: list[str]) -> str:
    """What the caller most likely meant by an argument that does not exist."""
    if "overrides" in known and re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
        return f"Constants of the script go into overrides: overrides={{{name!r}: ...}}."
    near = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.7)
    if near:
        return f"Did you mean {' or '.join(repr(n) for n in near)}?"
    upper = repr(name.upper()) if name.isidentifier() else "NAME"
    return f"A constant of the script goes into overrides by its own name: overrides={{{upper}: ...}}." if "overrides" in known else ""


WORDS = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false", "null": "null"}


def wanted(schema: dict[str, Any], path: Sequence[str]) -> str:
    """What a schema takes at a place inside a value, in words; empty where it says nothing."""
    for part in path:
        branches = [schema, *schema.get("anyOf", [])]
        inside: dict[str, Any] = next((b for b in branches if b.get("type") == ("array" if part.isdigit() else "object")), {})
        schema = inside.get("items" if part.isdigit() else "additionalProperties") or {}
        if not isinstance(schema, dict):
            return ""
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "anyOf" in schema:
        kinds = [wanted(branch, ()) for branch in schema["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind))
    kind = schema.get("type")
    if kind == "array":
        many = sized(schema, "minItems", "maxItems")
        return f"a list{many}{f' ({inner} each)' if (inner := wanted(schema.get('items', {}), ())) and len(inner) < 40 else ''}"
    if kind == "object":
        inner = wanted(schema.get("additionalProperties") or {}, ()) if isinstance(schema.get("additionalProperties"), dict) else ""
        return f"an object{f' of names to {inner}' if inner else ''}"
    if kind == "string":
        return f"text{sized(schema, 'minLength', 'maxLength', ' characters')}{' without spaces' if 'pattern' in schema else ''}"
    bounds = [
        f"{word} {schema[key]:g}"
        for key, word in (("exclusiveMinimum", "greater than"), ("minimum", "at least"), ("maximum", "at most"))
        if key in schema
    ]
    return f"{WORDS.get(str(kind), '')}{' ' if bounds else ''}{' and '.join(bounds)}".strip()


def sized(schema: dict[str, Any], low: str, high: str, unit: str = "") -> str:
    """The bounds of a length in words; empty without bounds."""
    least, most = schema.get(low), schema.get(high)
    if least is None and most is None:
        return ""
    return f" of {f'{least} to {most}' if least and most else f'at most {most}' if most else f'at least {least}'}{unit}"


def slim(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without what costs tokens and tells nothing: titles, and the null branch of optional arguments."""

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(n) for n in node]
        if not isinstance(node, dict):
            return node
        node = {
            k: (v if k in ("default", "enum", "const") else walk(v)) for k, v in node.items() if not (k == "title" and isinstance(v, str))
        }
        branches = [b for b in node.get("anyOf", []) if b != {"type": "null"}]
        if "anyOf" in node and len(branches) == 1:
            del node["anyOf"]
            if node.get("default", 0) is None:
                del node["default"]
            node = {**branches[0], **node}
        return node

    properties = {name: walk(value) for name, value in schema.get("properties", {}).items()}
    return {
        **walk({k: v for k, v in schema.items() if k not in ("properties", "title")}),
        "properties": properties,
        "additionalProperties": False,
    }
