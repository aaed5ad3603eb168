"""What every command shares: opening the lab, printing tables and JSON, waiting for the daemon's answer.

Text from outside goes through `text.clean` here, once, on its way to the terminal; JSON is ASCII, so no escape sequence survives there
either.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from runner import sources, verbs
from runner.daemonctl import daemon_pid, ensure_daemon
from runner.errors import ERROR_CODES, BadValue, DaemonError, OvernightError
from runner.keeper import Keeper
from runner.lab import Lab, open_lab
from runner.records import Request
from runner.text import ago, clean, one_line
from runner.textfile import read_text

WHO = "cli"
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object (FORMAT.md, section 5).")]
ANSWER_DEADLINE_S = 900.0
LAST_LINES = "The last lines:\n"  # in a next step: what follows is a piece of a log


def version() -> str:
    """The installed version."""
    try:
        return importlib.metadata.version("overnight")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def debug() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get("OVERNIGHT_DEBUG", "") not in ("", "0")


def wants_json(args: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, decided before it is parsed."""
    return "--json" in (args[: args.index("--")] if "--" in args else args)


def lab_of(context: typer.Context, *, create: bool = False, readonly: bool = False) -> Lab:
    """The lab of this command line, closed when the command ends."""
    lab = open_lab(context.find_root().obj, create=create, readonly=readonly)
    context.call_on_close(lab.close)
    return lab


def say_unwatched(lab: Lab) -> None:
    """Below a table of what is now: that it is not now, because no daemon looks."""
    row = lab.store.daemon()
    if row is not None and daemon_pid(lab) is None:
        since = f"it is as it was {ago(time.time() - row.beat_at)} ago"
        say(f"! No daemon runs, so nobody watches: {since}. `overnight daemon start` starts it.")


def finite_only(value: Any) -> Any:
    """The value with NaN and infinities replaced by None, for strict JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite_only(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_only(v) for v in value]
    return value


def print_json(value: dict[str, Any]) -> None:
    """One JSON object: a line for programs, indented on a terminal."""
    print(json.dumps(finite_only(value), indent=2 if sys.stdout.isatty() else None, allow_nan=False, default=str))


def emit(lab: Lab, value: dict[str, Any]) -> None:
    """The object of a reading command."""
    print_json({"v": 1, "lab": str(lab.path), **value})


def print_error(error: dict[str, str], *, as_json: bool) -> None:
    """One sentence (and the next thing to try) on stderr, or the error object on stdout."""
    if as_json:
        print_json({"v": 1, "error": error})
    else:
        said, mark, log = str(error["next"]).partition(LAST_LINES)
        print(clean(f"overnight: {error['message']} {said}{mark}", keep_newlines=False).strip(), file=sys.stderr)
        for line in clean(log).splitlines():  # what a program printed, each line its own and none at the margin
            print(f"  {one_line(line, 500)}", file=sys.stderr)


def say(text: str) -> None:
    """A line for a person, made safe."""
    print(clean(text))


def note(text: str) -> None:
    """A line beside the result, on stderr."""
    print(one_line(text, 400), file=sys.stderr)


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], *, right: str = "", last_width: int | None = None) -> None:
    """Print a plain table; `right` names the columns set flush right; the last column is cut at the terminal's width."""
    cells = [[one_line("-" if value is None else str(value), 500) for value in row] for row in rows]
    widths = [max(len(h), *(len(r[i]) for r in cells)) if cells else len(h) for i, h in enumerate(headers)]
    flush = set(right.split())
    total = last_width or (shutil.get_terminal_size((160, 24)).columns if sys.stdout.isatty() else 200)
    room = max(total - sum(widths[:-1]) - 2 * (len(widths) - 1), 16)
    for row in [list(headers), *cells]:
        parts = [v.rjust(w) if h in flush else v.ljust(w) for v, w, h in zip(row[:-1], widths[:-1], headers[:-1], strict=True)]
        last = row[-1].rjust(widths[-1]) if headers[-1] in flush else row[-1]
        print("  ".join([*parts, one_line(last, room) if headers[-1] not in flush else last]).rstrip())


def wait_for_answer(lab: Lab, request_id: int, *, deadline_s: float = ANSWER_DEADLINE_S) -> dict[str, Any]:
    """Wait until the daemon has answered a request; its progress goes to stderr.

    Raised: the request's own error, or DaemonError when nothing answers.
    """
    ensure_daemon(lab)
    keeper, shown = Keeper(lab.path), None
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        request: Request = verbs.answer(lab, request_id)
        told = keeper.look(lab) or request.progress
        if told and told != shown:
            shown = told
            note(shown)
        if request.state == "done":
            return request.result or {}
        if request.state == "failed":
            raise request_error(request)
        time.sleep(0.1)
    raise DaemonError(
        f"The daemon has not answered {request.verb} within {deadline_s:.0f} s.", next_step=f"Look at {lab.path / 'daemon.log'}."
    )


def request_error(request: Request) -> OvernightError:
    """The error a request failed with, as it was raised in the daemon."""
    told = request.error or {}
    kind = ERROR_CODES.get(str(told.get("code")), OvernightError)
    error = OvernightError(str(told.get("message") or f"{request.verb} failed."), next_step=str(told.get("next") or ""))
    error.code, error.exit_code = kind.code, kind.exit_code
    return error


def parsed(text: str) -> Any:
    """A value as typed on the command line: a Python literal or simple arithmetic where it is one, else text."""
    if "\n" in text:
        return text
    try:
        return sources.constants(f"VALUE = {text}\n").get("VALUE", text)
    except (OvernightError, SyntaxError, ValueError):
        return text


def assignment(word: str, option: str) -> tuple[str, str]:
    """NAME and text of `NAME=value`. Raised: BadValue."""
    name, equals, value = word.partition("=")
    if not equals or not name.strip().isidentifier() or not value.strip():
        raise BadValue(f"{option} takes NAME=VALUE, not {one_line(word, 60)!r}.", next_step=f"For example: {option} TOTAL_BATCH_SIZE=1024")
    return name.strip(), value.strip()


def split_values(text: str) -> list[str]:
    """`1, (0.8, 0.95), "a,b"` split at its outer commas."""
    parts, depth, quote, start = [], 0, "", 0
    for position, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    return [p for p in [*parts, text[start:].strip()] if p]


def read_script(path: Path) -> str:
    """The text of a script the user named. Raised: BadValue."""
    if not path.name:
        raise BadValue("The name of the script is empty.", next_step="Name the script to run, or leave it out to run the trainer's own.")
    try:
        return read_text(path, "The file")
    except FileNotFoundError:
        raise BadValue(f"There is no file {path}.", next_step="Name the script to run, or leave it out to run the trainer's own.") from None
